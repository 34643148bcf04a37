"""What a user reads of a source that is not read from is what happened to it, with real
processes. tests/unit/test_reasons.py has the reasons of plans."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from mx import api
from mx.core.reasons import PathReason, Why
from mx.discovery import here
from mx.errors import EXIT_OK, PeerBusyError
from mx.wire.channel import dial
from mx.wire.lease import Lease
from tests.support.commands import Run, environment, serve
from tests.support.outcomes import until

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB, long enough at 6 MB/s for a source to end meanwhile."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_checkpoint(path, {f"model.layers.{n}.w": (1024, 1024) for n in range(12)})
    return path


@pytest.fixture
def observer(coordinator: str) -> Iterator[api.Observer]:
    with api.Observer(coordinator=coordinator) as made:
        yield made


def test_a_full_source_and_one_that_takes_an_idle_place_back_say_which(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    serve(run, weights, "m", coordinator, "--max-readers", "1")
    record = until(lambda: observer.look().sources, "source")[0].record

    async def reasons() -> list[object]:
        channels = [dial(record.endpoint) for _ in range(2)]
        idle, next_one = (Lease(channel, record, lambda: None) for channel in channels)
        said: list[object] = []
        try:
            await idle.open(here(), ["tcp"], 20.0)
            while True:  # until the place of the first has been idle for long enough
                try:
                    await next_one.open(here(), ["tcp"], 20.0)
                    break
                except PeerBusyError as busy:
                    said.append(busy.message)
                await asyncio.sleep(0.3)
                next_one = Lease(channels[1], record, lambda: None)
            async with asyncio.timeout(40):
                while (error := idle.check()) is None:
                    await asyncio.sleep(0.05)
            said.append(error.message)
        finally:
            await asyncio.gather(idle.close(), next_one.close())
            await asyncio.gather(*(channel.close(None) for channel in channels))
        return said

    *refused, ended = asyncio.run(reasons())
    assert refused and isinstance(ended, PathReason) and ended.why is Why.IDLE
    assert {each.why for each in refused if isinstance(each, PathReason)} == {Why.FULL}
    assert set(refused) == {f"{record.endpoint} has as many readers as it admits"}
    assert ended == Why.IDLE(record.endpoint) and "as it admits" not in ended


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, Why.GONE), (signal.SIGSTOP, Why.STOPPED)]
)
def test_a_source_that_ends_and_one_that_stops_are_told_apart(
    run: Run,
    coordinator: str,
    weights: Path,
    observer: api.Observer,
    number: signal.Signals,
    why: Why,
) -> None:
    commands = {}
    for _ in range(2):
        command = serve(run, weights, "m", coordinator, "--max-bandwidth", "6MB/s")
        commands[command.json()["endpoint"]] = command
    at = ("--coordinator", coordinator, "--transport", "tcp", "--stall-timeout-s", "1", "--json")
    pull = run("pull", "m", *at)
    read = until(lambda: [s for s in observer.look().sources if s.readers], "reader")[0]
    endpoint = read.record.endpoint
    commands[endpoint].signal(number)
    report = pull.json()
    assert pull.wait() == EXIT_OK, pull.err
    (left,) = [each for each in report["left"] if each["source"] == endpoint]
    assert left["why"] == why.name.lower()
    assert {path["source"] for path in report["paths"]} == set(commands)


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_says_whether_other_pulls_change_it(
    run: Run, coordinator: str, weights: Path, shared: bool
) -> None:
    serve(run, weights, "m", coordinator)
    env = environment(**({"MX_PEER_COORDINATED_READING": "always"} if shared else {}))
    plan = ("plan", "m", "--coordinator", coordinator, "--transport", "tcp")
    assert run(*plan, "--json", env=env).json()["coordinated"] is shared
    shown = run(*plan, env=env)
    assert shown.wait() == EXIT_OK
    assert ("chunks are exchanged" in shown.out) is shared
    assert ("is on this machine" in shown.out) is not shared
