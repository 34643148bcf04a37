"""Two coordinators on one state, of which one is killed, stopped or cut off; real processes."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import mx
from benchmarks.hosts import Hosts
from mx import api
from mx.core.replicas import EventKind, FleetEvent
from mx.errors import CoordinatorError
from mx.testing.faultproxy import FaultProxy
from mx.wire import coordinators
from mx.wire.client import CoordinatorClient
from tests.support.clients import client_of
from tests.support.commands import Command, Run, RunIn, free_port, serve, start_coordinator
from tests.support.daemon import daemon
from tests.support.redis_server import RedisServer, needs_redis, redis_server

pytestmark = pytest.mark.integration
DEADLINE_S = 60.0
T = TypeVar("T")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_coordinator_has_been_asked() -> Iterator[None]:
    before = dict(coordinators._asked)
    coordinators._asked.clear()
    yield
    coordinators._asked.clear()
    coordinators._asked.update(before)


def two_coordinators(run: Run, redis: RedisServer, tmp_path: Path) -> list[tuple[str, Command]]:
    state = (
        "--state",
        redis.url,
        "--receipt-key",
        str(tmp_path / "receipt.key"),
        "--lease-s",
        "15",
    )
    return [start_coordinator(run, *state) for _ in range(2)]


class Events:
    """The events of a watch, on a thread."""

    def __init__(self, watch: mx.fleet.router_watch.Watch) -> None:
        self.seen: list[FleetEvent] = []
        self._watch = watch
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        self.seen.extend(event for event in iter(self._watch.next, None))

    def until(self, kind: EventKind, count: int = 1) -> None:
        until(lambda: self.count(kind) >= count, f"{count} x {kind}: {self.seen}")

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in list(self._taken()))

    def _taken(self) -> list[FleetEvent]:
        return list(self.seen)

    def close(self) -> None:
        self._watch.close()
        self._thread.join()


def until(found: object, what: str) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not found():  # type: ignore[operator]
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


async def in_the_end(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until there is an answer: gRPC pauses between attempts to connect."""
    give_up_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await ask()
        except CoordinatorError:
            assert time.monotonic() < give_up_s
            await asyncio.sleep(0.1)


def listening(command: Command) -> None:
    command.until(lambda: "listens" in command.err, "listening")


def lease_left_s(address: str) -> float:
    (status,) = api.list_sources("m", coordinator=address)
    return status.lease_left_s


def renewed_at(address: str) -> None:
    """Wait until the source's lease is renewed there; it never ends."""
    time.sleep(1.0)  # what the other one has heard last is there by now
    least_s = lease_left_s(address)

    def renewed() -> bool:
        nonlocal least_s
        left_s = lease_left_s(address)
        least_s = min(least_s, left_s)
        return left_s > least_s + 0.5

    until(renewed, f"no heartbeat came to {address}")


@needs_redis
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.long),
    ],
)
def test_sources_and_watches_go_on_at_the_next_coordinator(
    run: Run, redis: RedisServer, checkpoint: Path, tmp_path: Path, how: signal.Signals
) -> None:
    (first, one), (second, two) = two_coordinators(run, redis, tmp_path)
    both = f"{first},{second}"
    source = serve(run, checkpoint, "m", both)
    with mx.Router(both) as router:
        events = Events(router.watch("m"))
        try:
            events.until(EventKind.SYNCED)
            one.signal(how)
            renewed_at(second)
            assert [each.record.endpoint for each in router.sources("m")] == [
                source.json()["endpoint"]
            ]
            events.until(EventKind.SYNCED, 2)
            assert events.count(EventKind.SOURCE_UP) == 1
            serve(run, checkpoint, "m", both)  # it finds the coordinator that answers
            events.until(EventKind.SOURCE_UP, 2)
            lost = (EventKind.SOURCE_DOWN, EventKind.LOST)
            assert not any(map(events.count, lost)), events.seen
        finally:
            events.close()
    assert "source.unregistered" not in source.err
    assert source.err.count("source.registered") == 1, "its lease went on"
    assert "coordinator.doubt" not in one.err + two.err, "nothing was lost"
    assert f'"address": "{first}", "next": "{second}"' in source.err


@needs_redis
@pytest.mark.long
def test_a_pull_goes_on_and_reports_to_the_next_coordinator(
    run: Run, redis: RedisServer, checkpoint: Path, tmp_path: Path
) -> None:
    (first, one), (second, _) = two_coordinators(run, redis, tmp_path)
    both = f"{first},{second}"
    serve(run, checkpoint, "m", both, "--max-bandwidth", "48Mbit/s")
    out = ("--out", str(tmp_path / "out"), "--transport", "tcp", "--json")
    target = run("pull", "m", "--coordinator", both, *out)
    with api.Observer(coordinator=first) as observer:
        target.until(lambda: bool(observer.look("m").pulls), "progress at the first")
    one.signal(signal.SIGKILL)
    with api.Observer(coordinator=both) as observer:
        target.until(lambda: bool(observer.look("m").pulls), "progress at the second")
    assert target.json(DEADLINE_S)["left"] == []
    assert target.wait() == 0


@needs_redis
@pytest.mark.long
def test_a_coordinator_that_is_cut_off_is_left(
    hosts: Hosts, run_in: RunIn, checkpoint: Path
) -> None:
    """The state is with the second, and the first has lost its way to both."""
    to_first, to_second = hosts.link("source", "first"), hosts.link("source", "second")
    first, second = f"{to_first.address('first')}:7600", f"{to_second.address('second')}:7600"
    base = ("--coordinator", f"{first},{second}", "--insecure", "--json")
    for host, address in (("first", first), ("second", second)):
        command = run_in(host, "--listen", address, "--insecure", "--lease-s", "15", daemon=True)
        listening(command)
    at = f"{to_second.address('source')}:0"
    source = run_in("source", "serve", str(checkpoint), "--model", "m", "--listen", at, *base)
    source.json()
    hosts.cut(to_first)
    source.until(lambda: source.err.count("source.registered") == 2, "the next coordinator")
    found = run_in("second", "sources", "--coordinator", second, "--insecure", "--json").json()
    assert len(found["sources"]) == 1
    # A process that starts now does not hang at the first.
    assert len(run_in("source", "sources", *base).json()["sources"]) == 1


@needs_redis
@pytest.mark.long
def test_a_coordinator_that_does_not_reach_the_state_is_left(
    run: Run, redis: RedisServer, checkpoint: Path, tmp_path: Path
) -> None:
    key = ("--receipt-key", str(tmp_path / "receipt.key"), "--lease-s", "15")
    with FaultProxy(("127.0.0.1", redis.port)) as proxy:
        way = f"redis://127.0.0.1:{proxy.address[1]}/0"
        first, one = start_coordinator(run, "--state", way, *key)
        second, two = start_coordinator(run, "--state", redis.url, *key)
        source = serve(run, checkpoint, "m", f"{first},{second}")
        proxy.up.stall()
        renewed_at(second)
        serve(run, checkpoint, "other", f"{first},{second}")
        proxy.up.resume()
        one.until(lambda: len(api.list_sources(coordinator=first)) == 2, "both sources again")
        assert source.err.count("source.registered") == 1, "its lease went on"
        assert "does not reach its state" in source.err
        assert "coordinator.doubt" not in one.err + two.err, "nothing was lost"


async def test_errors_name_the_addresses_that_were_tried() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    async with client_of(",".join(addresses)) as client:
        with pytest.raises(CoordinatorError) as caught:
            await client.list_models()
    for address in addresses:
        assert f"no coordinator answers at {address}: " in caught.value.message
    assert caught.value.hint.count("mx-coordinator") == 1


async def test_the_coordinator_that_answers_is_remembered_in_the_process() -> None:
    """The first accepts connections, as a stopped process does, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, daemon() as (process, second):
        both = f"127.0.0.1:{silent.getsockname()[1]},{second}"
        async with client_of(both) as client:
            assert await client.list_models() == []
        async with client_of(both) as client:
            assert client.link.remote.address == second
            watch = client.watch()
            assert (await anext(watch)).kind.name == "SNAPSHOT_END"
            await watch.aclose()
            process.kill()
            process.wait()
            with pytest.raises(CoordinatorError):
                await client.list_models()
            # The first is asked again, and is not preferred for ever.
            port = silent.getsockname()[1]
            silent.close()
            with daemon(f"127.0.0.1:{port}"):
                assert await in_the_end(client.list_models) == []
                assert client.link.remote.address.endswith(f":{port}")


async def test_a_stream_that_has_begun_ends_with_an_error_and_begins_again_elsewhere() -> None:
    with daemon() as (process, first), daemon() as (_, second):
        async with client_of(f"{first},{second}") as client:
            watch = client.watch()
            assert (await anext(watch)).kind.name == "SNAPSHOT_END"
            process.kill()
            with pytest.raises(CoordinatorError, match="no coordinator answers"):
                await anext(watch)
            again = client.watch()
            assert (await anext(again)).kind.name == "SNAPSHOT_END"
            await again.aclose()


async def test_one_address_or_none_that_can_be_dialled_is_as_ever() -> None:
    with pytest.raises(mx.errors.ConfigError, match="17 addresses"):
        CoordinatorClient(",".join(f"127.0.0.1:{port}" for port in range(1, 18)))
    with pytest.raises(mx.errors.ConfigError, match="is not an address"):
        CoordinatorClient("127.0.0.1:7600,nowhere")
    with pytest.raises(mx.errors.ConfigError, match="without TLS"):
        CoordinatorClient("127.0.0.1:7600,10.0.0.1:7600")
    async with client_of(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(CoordinatorError, match="no coordinator answers at"):
            await client.list_models()
