"""Pulls that report to one of several coordinators of one real Redis are seen at each of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mx import api
from mx.coordinator.daemon import Coordinator
from mx.core.progress_board import ProgressBoard
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.redis_state import pulls as redis_pulls
from mx.redis_state.pulls import ENTRY_BYTES, MAX_ENTRIES
from mx.redis_state.store import RedisStore
from mx.transport import TlsFiles
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind, WatchUpdate
from mx.wire.principals import Access
from mx.wire.progress import pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.certificates import Authority
from tests.support.clients import client_of
from tests.support.commands import Run, free_port, serve, start_coordinator
from tests.support.redis_server import RedisServer, needs_redis, patience, redis_server

pytestmark = [pytest.mark.integration, needs_redis]

PATIENCE_S = 60.0
LAYERS = 4
READER = "subjectAltName=URI:spiffe://mx.test/reader"
WATCHERS = {
    "watcher": "subjectAltName=URI:spiffe://mx.test/watcher",
    "everyone": "subjectAltName=URI:spiffe://mx.test/everyone",
}
POLICY = """
[[allow]]
principal = "spiffe://mx.test/reader"
may = "pull"
models = "*"
[[allow]]
principal = "spiffe://mx.test/watcher"
may = "observe"
models = "open-*"
[[allow]]
principal = "spiffe://mx.test/everyone"
may = "observe"
models = "*"
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running, patience():
        yield running


def pull(number: int = 1, *, name: str = "llama", ready: int = 0, layers: int = LAYERS) -> Any:
    return PullStatus(
        pull_id=str(uuid.UUID(int=number)),
        model=ModelKey(name, "main", "checkpoint"),
        host="host-1",
        pid=7,
        phase=PullPhase.RUNNING,
        layers=layers,
        ready=(1 << ready) - 1,
        nbytes=100 * layers,
        done_bytes=100 * ready,
        seconds=1.0,
    )


async def until(asks: Callable[[], Awaitable[object]]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not await asks():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.02)


async def pulls_of(client: CoordinatorClient, name: str = "") -> tuple[PullStatus, ...]:
    return (await client.overview(name)).pulls


@asynccontextmanager
async def coordinators(
    server: RedisServer, tls: TlsFiles | None = None, policy: str = ""
) -> AsyncIterator[list[Coordinator]]:
    """Two coordinators."""
    async with AsyncExitStack() as stack:
        made = [Coordinator(state=server.url, access=Access(policy, tls)) for _ in range(2)]
        for each in made:
            stack.push_async_callback(each.stop)
            await each.start("127.0.0.1:0", tls=tls)
        yield made


class Board(ProgressBoard):
    """The board of a coordinator, at its time."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.store = RedisStore(url, lease_s=15.0, doubt_s=15.0)
        self.store.share_pulls(self)

    def takes(self, status: PullStatus, principal: str = "10.0.0.7") -> None:
        # Its stream is known by its id.
        self.report(self.store.clock(), status.pull_id, status, principal)

    async def shows(self, name: str) -> bool:
        return bool(self.pulls(self.store.clock(), name))


@asynccontextmanager
async def boards(server: RedisServer) -> AsyncIterator[list[Board]]:
    """The boards of two coordinators."""
    async with AsyncExitStack() as stack:
        made = [Board(server.url) for _ in range(2)]
        for each in made:
            stack.push_async_callback(each.store.close)
            await each.store.open()
        yield made


async def test_a_pull_is_seen_at_the_other_coordinator_and_ends_there(server: RedisServer) -> None:
    async with (
        coordinators(server) as (here, there),
        client_of(here.address) as reports,
        client_of(there.address) as looks,
    ):
        seen: list[list[int]] = []
        begun = asyncio.Event()

        async def watch() -> None:
            async for news in looks.watch("llama", pulls=True):
                begun.set()
                if news.pull is not None:
                    seen.append([news.pull.layers_ready])
                elif news.pull_id:
                    seen.append([])

        watching = asyncio.create_task(watch())
        await begun.wait()
        async with reports.reporting() as report:
            for ready in range(LAYERS):

                async def filled(ready: int = ready) -> bool:
                    await report(pull(ready=ready))
                    found = await pulls_of(looks, "llama")
                    return [each.layers_ready for each in found] == [ready]

                await until(filled)
            await report(pull(ready=LAYERS)._replace(phase=PullPhase.COMPLETE))

        async def ended() -> bool:
            return not await pulls_of(looks)

        async def told() -> bool:
            return seen[-1:] == [[]]

        await until(ended)
        await until(told)
        watching.cancel()
        await asyncio.wait((watching,))
        assert seen == [*sorted(seen[:-1]), []], "layers fill up"
        assert seen[0] == [0] and seen[-2] == [LAYERS]
        assert not await pulls_of(reports)


async def test_a_policy_holds_for_pulls_that_report_elsewhere(
    server: RedisServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ca")
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    tls = authority.certificate("coordinator", "subjectAltName=IP:127.0.0.1")
    async with coordinators(server, tls, str(policy)) as (here, there), AsyncExitStack() as stack:

        async def client(address: str, name: str, said: str) -> CoordinatorClient:
            files = authority.certificate(name, said)
            return await stack.enter_async_context(client_of(address, tls=files))

        reader = await client(here.address, "reader", READER)
        watcher, everyone = [
            await client(there.address, who, said) for who, said in WATCHERS.items()
        ]
        reported: list[Callable[[], Awaitable[None]]] = []
        for number, name in enumerate(("closed-1", "open-1"), 1):
            report = await stack.enter_async_context(reader.reporting())
            reported.append(partial(report, pull(number, name=name)))

        async def known() -> bool:
            for report in reported:
                await report()
            return len(await pulls_of(everyone)) == 2

        await until(known)
        assert [each.model.name for each in await pulls_of(watcher)] == ["open-1"]
        told = watcher.watch(pulls=True)
        shown = [await anext(told) for _ in range(2)]
        assert shown[0].pull is not None and shown[0].pull.model.name == "open-1"
        assert shown[1].kind is WatchKind.SNAPSHOT_END
        await told.aclose()


async def test_what_is_told_is_bounded_and_principals_take_turns(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_pulls, "PERIOD_S", 0.01)
    async with boards(server) as (here, there):
        link = here.store._link
        key, client = link.key("pulls"), link.client
        # Of one principal, more than fits into all entries that are kept.
        small = pull(9999, name="small")
        large, most = pull(layers=1 << 16, ready=1 << 16), 0
        many = [large._replace(pull_id=str(uuid.UUID(int=number))) for number in range(1, 1501)]

        def report_all() -> None:
            for each in many:
                here.takes(each, "hog")

        report_all()

        async def small_is_heard() -> bool:
            here.takes(small, "other")
            return await there.shows("small")

        await until(small_is_heard)
        (first, *_) = await client.xrange(key)
        assert len(pb.Pulls.FromString(first[1][b"pulls"]).pulls) < 100
        while (await client.xlen(key)) < MAX_ENTRIES:
            report_all()
            await asyncio.sleep(0.02)
        looks = 0
        while looks < 10:
            report_all()
            entries, left_ms = await client.xrange(key), await client.pttl(key)
            assert len(entries) <= MAX_ENTRIES
            assert left_ms != -1 and left_ms <= 5000, "it ends with the last pull"
            if entries and left_ms != -2:  # it has not ended while other programs had the CPU
                most = max(most, *(sum(map(len, fields.values())) for _, fields in entries))
                looks += 1
            await asyncio.sleep(0.02)
        assert ENTRY_BYTES < most < ENTRY_BYTES + (32 << 10)


async def test_a_bad_entry_spoils_no_other(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with boards(server) as (here, there):
        link = there.store._link

        async def add(about: object, pulls: bytes, who: str = "x") -> None:
            said = about if isinstance(about, str) else json.dumps(about)
            entry = {"who": who, "about": said, "pulls": pulls}
            await link.client.xadd(link.key("pulls"), entry)

        good, bad = pull_to_wire(pull(1, name="good")), pull_to_wire(pull(2, name="bad"))
        bad.done_bytes = bad.nbytes + 1
        row = ["10.0.0.7", 1, 0.0, 5.0]
        message = pb.Pulls
        await add("{", b"")
        await add("[" * 100_000, b"")
        await add([row], message(pulls=[bad, bad]).SerializeToString())
        await add([row], b"\xff")
        await add("x" * (2 * ENTRY_BYTES + 1), b"")
        for wrong in (7, [], [1, *row[1:]], ["x", "y", 0.0, 5.0], ["x", 1, "y", 5.0],
                      ["x", 1, 0.0, float("nan")], ["x" * 5000, *row[1:]]):  # fmt: skip
            pulls = message(pulls=[pull_to_wire(pull(3, name="bad"))]).SerializeToString()
            await add([wrong], pulls)

        async def good_is_heard() -> bool:
            await add([row, row], message(pulls=[bad, good]).SerializeToString())
            return await here.shows("good") and await there.shows("good")

        await until(good_is_heard)
        assert not await here.shows("bad") and not await there.shows("bad")
        said = caplog.text.count("pulls of other coordinators cannot be shown")
        assert 2 <= said < 8, "and not for each"


async def test_a_stopped_redis_hides_no_pull_from_its_coordinator(server: RedisServer) -> None:
    """Nor do watches that are open stand still, here and elsewhere."""
    told: dict[str, list[WatchUpdate]] = {"here": [], "there": []}

    async def watch(client: CoordinatorClient, where: str) -> None:
        async for update in client.watch(pulls=True):
            told[where].append(update)

    async with (
        coordinators(server) as (here, there),
        client_of(here.address) as reports,
        client_of(there.address) as looks,
        reports.reporting() as report,
        asyncio.TaskGroup() as watches,
    ):
        await report(pull(ready=0))
        await until(partial(pulls_of, looks))
        open_ones = [
            watches.create_task(watch(client, where))
            for client, where in ((reports, "here"), (looks, "there"))
        ]

        async def both_began() -> bool:
            kinds = [{each.kind for each in found} for found in told.values()]
            return all(WatchKind.SNAPSHOT_END in each for each in kinds)

        await until(both_began)
        server.signal(signal.SIGSTOP)
        try:

            async def watches_go_on() -> bool:
                await report(pull(ready=1))
                shown = [each.pull.layers_ready for each in told["here"] if each.pull]
                await asyncio.sleep(0.1)
                return shown[-1:] == [1] and told["there"][-1].kind is WatchKind.PULL_GONE

            await until(watches_go_on)

            async def goes_on() -> bool:
                """It is seen here while what is known of it elsewhere ends."""
                await report(pull(ready=2))
                (seen,) = await pulls_of(reports)
                await asyncio.sleep(0.1)
                return seen.layers_ready == 2 and not await pulls_of(looks)

            await until(goes_on)
        finally:
            server.signal(signal.SIGCONT)

        async def is_back() -> bool:
            await report(pull(ready=3))
            return [each.layers_ready for each in await pulls_of(looks)] == [3]

        await until(is_back)
        for each in open_ones:
            each.cancel()


def page_says(address: str, text: str) -> None:
    """Read what the page of `mx web` reads, until it has this."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        give_up_s = time.monotonic() + PATIENCE_S
        while text not in answer.readline().decode():
            assert time.monotonic() < give_up_s
    finally:
        connection.close()


@pytest.mark.long
def test_top_and_the_page_show_what_reports_to_another_coordinator(
    run: Run, server: RedisServer, checkpoint: Path, tmp_path: Path
) -> None:
    """That one is killed, and the pull goes on: it is one pull all the time."""
    state = ("--state", server.url, "--receipt-key", str(tmp_path / "key"), "--lease-s", "15")
    first, one = start_coordinator(run, *state)
    second, _ = start_coordinator(run, *state)
    both = f"{first},{second}"
    serve(run, checkpoint, "m", both, "--max-bandwidth", "16Mbit/s")
    page = f"127.0.0.1:{free_port()}"
    run("web", "--coordinator", second, "--listen", page, "--json").json()
    out = ("--out", str(tmp_path / "out"), "--transport", "tcp", "--json")
    target = run("pull", "m", "--coordinator", both, *out)
    with api.Observer(coordinator=second) as observer:
        target.until(lambda: bool(observer.look("m").pulls), "the pull at the other one")
        (shown,) = run("top", "--coordinator", second, "--json").json()["pulls"]
        with api.Observer(coordinator=first) as other:
            (known,) = other.look("m").pulls
        assert shown["pull_id"] == known.pull_id and shown["phase"] == "running"
        page_says(page, known.pull_id)
        one.signal(signal.SIGKILL)
        seen: list[list[str]] = []

        def ended() -> bool:
            pulls = observer.look("m").pulls
            assert {each.pull_id for each in pulls} <= {known.pull_id}
            seen.append([each.phase.value for each in pulls])
            return target.process.poll() is not None

        target.until(ended, "the pull's end")
        assert target.wait() == 0
    assert max(map(len, seen)) == 1 and ["failed"] not in seen, "seen once, and never as failed"
    assert [] not in seen, "it is seen all the time"
