"""Ranks in processes of their own: they serve, update in step, and die; readers ask by name."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch

import mx
from mx import api
from mx.core.types import ModelKey
from mx.errors import BundleIncompleteError, ConfigError, CoordinatorError, MxError
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind
from tests.support import forkserver
from tests.support.commands import Run, environment, free_port

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torch_is_forked")]

KEYS = [mx.ProcessingKey(engine="vllm", tp=(i, 2), dtype="bf16") for i in range(2)]
BUNDLE = "engine=vllm,tp=*/2,dtype=bf16"

#: Serves a rank. Each line of its standard input is a version to update to, or "same" for an update
#: that changes none of its weights. Prints the revision after each.
RANK = """
import sys, torch
import mx
coordinator, variant = sys.argv[1:]
def weights(version):
    return {"model.layers.0.w": torch.full((1 << 20,), version, dtype=torch.uint8)}
now = 1
with mx.serve(weights(now), model="m", variant=variant, coordinator=coordinator) as source:
    print(source.model.revision, flush=True)
    for line in sys.stdin:
        now = now if line.strip() == "same" else int(line)
        print(source.update(weights(now), grace_s=0).revision, flush=True)
"""


class RankProcess:
    def __init__(self, coordinator: str, key: mx.ProcessingKey) -> None:
        given = (coordinator, str(key))
        self.process = forkserver.python(RANK, *given, env=environment(), imported="torch")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.revision() == "main"

    def revision(self) -> str:
        return self.stdout.readline().strip()

    def update(self, version: int | str) -> str:
        self.stdin.write(f"{version}\n")
        self.stdin.flush()
        return self.revision()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


StartRank = Callable[[int], RankProcess]


@pytest.fixture
def start_rank(coordinator: str) -> Iterator[StartRank]:
    started: list[RankProcess] = []

    def start(i: int) -> RankProcess:
        started.append(RankProcess(coordinator, KEYS[i]))
        return started[-1]

    yield start
    for each in started:
        each.kill()


class Observed:
    """Asks without a pause what the name means for both ranks, and follows a watch of it."""

    def __init__(self, coordinator: str) -> None:
        self.coordinator = coordinator
        self.answers: list[tuple[str, bool, bool]] = []  # revision, complete, both resolved to it
        self.named: list[str] = []  # by the watch
        self.unready: list[str] = []  # named before a source of each rank was seen
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._observe()))

    def __enter__(self) -> Observed:
        self._thread.start()
        self.until(lambda: bool(self.answers and self.named))
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def until(self, found: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 60
        while not found():
            assert time.monotonic() < until_s, (self.answers[-1:], self.named)
            time.sleep(0.01)

    async def _observe(self) -> None:
        client = CoordinatorClient(self.coordinator)
        watching = asyncio.create_task(self._watch(client))
        try:
            while not self._ended.is_set():
                await self._ask(client)
                await asyncio.sleep(0.002)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()

    async def _ask(self, client: CoordinatorClient) -> None:
        before = await self._bundle(client)
        found = [await client.resolve("m", "", str(key)) for key in KEYS]
        after = await self._bundle(client)
        if before.revision == after.revision:  # nothing came between the questions
            same = all(each.model.revision == before.revision for each in found)
            self.answers.append((before.revision, before.complete, same))

    async def _bundle(self, client: CoordinatorClient) -> api.BundleStatus:
        (found,) = [each for each in await client.list_bundles("m") if each.named]
        assert found.variant == BUNDLE
        return found

    async def _watch(self, client: CoordinatorClient) -> None:
        sources: dict[str, ModelKey] = {}
        async with aclosing(client.watch("m")) as updates:
            async for update in updates:
                if update.kind is WatchKind.NAMED:
                    assert update.named is not None
                    self.named.append(update.named.revision)
                    there = {key for key in sources.values()}
                    wanted = {ModelKey("m", self.named[-1], str(key)) for key in KEYS}
                    if not wanted <= there:
                        self.unready.append(self.named[-1])
                elif update.record is not None:
                    if update.kind is WatchKind.GONE:
                        sources.pop(update.record.source_id, None)
                    else:
                        sources[update.record.source_id] = update.record.model


def value_of(coordinator: str, i: int, revision: str = "") -> int:
    tensors = mx.load("m", variant=KEYS[i], revision=revision, coordinator=coordinator)
    (value,) = {int(v) for v in torch.unique(tensors["model.layers.0.w"])}
    return value


def test_the_name_means_an_update_of_two_ranks_once_both_have_registered_it(
    coordinator: str, start_rank: StartRank
) -> None:
    zero, one = start_rank(0), start_rank(1)
    assert mx.wait_for_bundle("m", coordinator=coordinator, timeout_s=30).revision == "main"
    with Observed(coordinator) as observed:
        assert zero.update(2) == "main.2"
        # The first one goes on serving what the name still means.
        asked = len(observed.answers)
        observed.until(lambda: len(observed.answers) > asked + 20)
        assert value_of(coordinator, 0) == value_of(coordinator, 1) == 1
        assert value_of(coordinator, 0, "main.2") == 2
        assert observed.named == ["main"]
        assert one.update(2) == "main.2"
        observed.until(lambda: observed.named[-1] == "main.2")
        assert value_of(coordinator, 0) == value_of(coordinator, 1) == 2
        # In the other order, and with weights that stay the same in one rank.
        assert one.update("same") == "main.3"
        assert zero.update(3) == "main.3"
        observed.until(lambda: observed.named[-1] == "main.3")
        assert (value_of(coordinator, 0), value_of(coordinator, 1)) == (3, 2)
    # Each answer was for both ranks, and of a revision that both served.
    assert all(same for _, _, same in observed.answers)
    assert all(complete for _, complete, _ in observed.answers)
    assert list(dict.fromkeys(revision for revision, _, _ in observed.answers)) == observed.named
    assert observed.named == ["main", "main.2", "main.3"]
    assert observed.unready == []
    # What was replaced is given up.
    until_s = time.monotonic() + 30
    while len(mx.list_sources("m", coordinator=coordinator)) > 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    found = mx.list_sources("m", coordinator=coordinator)
    assert {each.record.model.revision for each in found} == {"main.3"}


def test_a_rank_that_dies_changes_no_meaning(coordinator: str, start_rank: StartRank) -> None:
    zero, one = start_rank(0), start_rank(1)
    zero.update(2)
    one.kill()  # before it has registered the update
    with pytest.raises(BundleIncompleteError) as caught:
        mx.wait_for_bundle("m", revision="main.2", coordinator=coordinator, timeout_s=0.2)
    assert caught.value.missing == (str(KEYS[1]),)
    assert value_of(coordinator, 0) == 1
    assert {b.revision: b.named for b in mx.list_bundles("m", coordinator=coordinator)} == {
        "main": True,
        "main.2": False,
    }


def test_waits_for_a_bundle_end_when_its_last_rank_comes(
    coordinator: str, start_rank: StartRank
) -> None:
    start_rank(0)
    with pytest.raises(BundleIncompleteError, match="lacks 1 of its 2 ranks: .*tp=1/2") as caught:
        mx.wait_for_bundle("m", variant=KEYS[0], coordinator=coordinator, timeout_s=0.2)
    assert caught.value.missing == (str(KEYS[1]),)
    assert caught.value.exit_code == 3

    async def both() -> tuple[Any, ...]:
        return await asyncio.gather(
            mx.wait_for_bundle_async("m", coordinator=coordinator, timeout_s=60),
            mx.wait_for_bundle_async("m", variant=BUNDLE, coordinator=coordinator),
            asyncio.to_thread(start_rank, 1),
        )

    first, second, _ = asyncio.run(both())
    assert first == second == mx.list_bundles("m", coordinator=coordinator)[0]
    assert (first.revision, first.complete, first.ranks) == ("main", True, 2)
    assert first.variants == tuple(map(str, KEYS))


def test_a_wait_that_is_cancelled_leaves_nothing_behind(coordinator: str) -> None:
    async def cancelled() -> None:
        waiting = asyncio.create_task(mx.wait_for_bundle_async("m", coordinator=coordinator))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())


def test_what_a_wait_refuses(coordinator: str) -> None:
    for wrong, why in (
        ({"model": ""}, "empty"),
        ({"model": "m@" + "0" * 64}, "pins the weights of one rank"),
        ({"model": "m", "variant": "tp=2/2"}, "not a rank and a size"),
        ({"model": "m", "variant": 5}, "variant"),
        ({"model": "m", "timeout_s": "1m"}, "timeout_s"),
    ):
        arguments: dict[str, Any] = {"coordinator": coordinator, "timeout_s": 0.0, **wrong}
        with pytest.raises(ConfigError, match=why):
            mx.wait_for_bundle(**arguments)
    with pytest.raises(BundleIncompleteError, match="m is not listed") as caught:
        mx.wait_for_bundle("m", coordinator=coordinator, timeout_s=0.0)
    assert caught.value.missing == ()
    with pytest.raises(BundleIncompleteError, match="not listed") as caught:
        mx.wait_for_bundle("m", variant="tp=0/3", coordinator=coordinator, timeout_s=0.0)
    assert caught.value.missing == ("tp=0/3", "tp=1/3", "tp=2/3")
    with pytest.raises(CoordinatorError) as unanswered:
        mx.wait_for_bundle("m", coordinator=f"127.0.0.1:{free_port()}", timeout_s=0.2)
    assert type(unanswered.value) is CoordinatorError


def test_a_key_that_names_no_rank_is_refused_before_weights_are_read(coordinator: str) -> None:
    with pytest.raises(ConfigError, match="names all ranks"):
        mx.serve("/nonexistent", model="m", variant="tp=*/2", coordinator=coordinator)
    with pytest.raises(ConfigError, match="`variant=5`"):
        mx.serve("/nonexistent", model="m", variant=5, coordinator=coordinator)  # type: ignore[arg-type]


def test_the_commands_take_and_show_processing_keys(
    coordinator: str, start_rank: StartRank, run: Run
) -> None:
    start_rank(0)
    at = ("--coordinator", coordinator)
    listed = run("models", *at, "--json").json()
    assert [each["variant"] for each in listed["models"]] == [str(KEYS[0])]
    assert listed["bundles"] == [
        {
            "model": "m",
            "revision": "main",
            "variant": BUNDLE,
            "ranks": 2,
            "complete": False,
            "missing": [str(KEYS[1])],
            "missing_count": 1,
            "named": True,
        }
    ]
    tables = run("models", *at)
    assert tables.wait() == 0
    assert "1 of 2" in tables.out
    assert "missing tp=1/2" in tables.out
    sources = run("sources", *at)
    assert sources.wait() == 0
    assert "m[engine=vllm, tp=0/2, dtype=bf16]" in sources.out
    # In another order, in another spelling; and as it is printed.
    for how in (("m", "--variant", "tp=0/2,dtype=bfloat16,engine=vllm"), (f"m[{KEYS[0]}]",)):
        assert run("pull", *how, *at, "--json").json()["model"] == f"m[{KEYS[0]}]"
        assert run("plan", *how, *at, "--json").json()["model"] == f"m[{KEYS[0]}]"
    wrong = run("pull", "m", "--variant", "engine=vllm,tp=0/2,dtype=fp16", *at)
    assert wrong.wait() == 3
    assert "m[engine=vllm,tp=0/2,dtype=bf16] is the nearest that is listed" in wrong.err
    assert "dtype: bf16 listed, fp16 asked for" in wrong.err
    malformed = run("serve", "/nonexistent", "--model", "m", "--variant", "tp=2/2", *at)
    assert malformed.wait() == 2


def test_ranks_of_one_process_update_one_after_the_other_and_close_at_any_time(
    coordinator: str,
) -> None:
    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((1 << 16,), version, dtype=torch.uint8)}

    ranks = [mx.serve(weights(1), model="m", variant=k, coordinator=coordinator) for k in KEYS]
    with ranks[0], ranks[1]:
        for version in (2, 3):
            found = [rank.update(weights(version), grace_s=0).revision for rank in ranks]
            assert found == [f"main.{version}"] * 2
        # One is ahead by more than one: what lies between is served no longer, what is named is.
        ranks[0].update(weights(4), grace_s=0)
        ranks[0].update(weights(5), grace_s=0)
        served = {
            (each.record.model.variant, each.record.model.revision)
            for each in mx.list_sources("m", coordinator=coordinator)
        }
        assert served == {
            (str(KEYS[0]), "main.3"),
            (str(KEYS[0]), "main.5"),
            (str(KEYS[1]), "main.3"),
        }
    assert mx.list_sources("m", coordinator=coordinator) == []


def test_a_rank_is_pulled_from_a_peer_by_its_only_variant(
    coordinator: str, start_rank: StartRank
) -> None:
    start_rank(0)
    (source,) = mx.list_sources("m", coordinator=coordinator)
    with mx.pull("m", peer=source.record.endpoint) as pull:
        pull.wait(30)
        assert pull.model == ModelKey("m", "main", str(KEYS[0]))
    with mx.pull("m", variant=KEYS[1], peer=source.record.endpoint) as pull, pytest.raises(MxError):
        pull.wait(30)
