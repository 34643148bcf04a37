"""The state comes back older, from a backup, or empty: names stay with those who had them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from mx import api
from mx.core.types import SourceRecord
from tests.support.commands import Command, Run, serve, start_coordinator
from tests.support.redis_server import needs_redis, redis_server

pytestmark = pytest.mark.integration

#: `back_up` and `lose` are called while no coordinator runs.
Kept = tuple[str, Callable[[], None], Callable[[], None]]


@pytest.fixture(
    params=["sqlite restored", pytest.param("redis emptied", marks=[needs_redis, pytest.mark.long])]
)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    """The state's name, and what backs it up and loses what came after that."""
    if request.param == "sqlite restored":
        file = tmp_path / "state.db"
        contents: list[bytes] = []

        def restore() -> None:
            for left in tmp_path.glob("state.db*"):
                left.unlink()
            file.write_bytes(contents[0])
            file.chmod(0o600)

        yield f"sqlite:{file}", lambda: contents.append(file.read_bytes()), restore
        return
    with redis_server() as server:
        yield server.url, lambda: None, lambda: print(server.ask("FLUSHALL"))


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for size, path in zip((256, 512), found, strict=True):
        write_checkpoint(path, {"layers.0.weight": (size, 256)})
    return found


def names(address: str) -> dict[str, bool]:
    """Whether the sources are found by their pins only, by their endpoints."""
    found: list[SourceRecord] = [s.record for s in api.list_sources(coordinator=address)]
    return {each.endpoint: each.pin_only for each in found}


def test_a_name_stays_with_who_had_it_when_the_state_came_back(
    run: Run, kept: Kept, weights: tuple[Path, Path], tmp_path: Path
) -> None:
    state, back_up, lose = kept
    key = ("--receipt-key", str(tmp_path / "receipt.key"), "--lease-s", "12")
    address, daemon = start_coordinator(run, "--state", state, *key)
    port = int(address.rpartition(":")[2])

    def stop() -> None:
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.err

    def start() -> Command:
        return start_coordinator(run, "--state", state, *key, port=port)[1]

    def source(which: int, name: str, owner: str) -> tuple[Command, str]:
        name_key = ("--name-key", str(tmp_path / owner))
        command = serve(run, weights[which], name, address, *name_key)
        return command, command.json()["endpoint"]

    for owner in ("alice", "bob", "witness"):
        assert run("keygen", str(tmp_path / owner)).wait() == 0
    witness, _ = source(0, "other", "witness")
    stop()
    back_up()
    daemon = start()
    witness.until(lambda: witness.err.count("reregistered") >= 1, "heartbeats")
    honest, at = source(0, "m", "alice")
    # The witness is told of what the state will lose. Who had the name is away at first.
    lease_left_s = [api.list_sources("other", coordinator=address)[0].lease_left_s]

    def renewed() -> bool:
        lease_left_s.append(api.list_sources("other", coordinator=address)[0].lease_left_s)
        return lease_left_s[-1] > lease_left_s[-2]

    witness.until(renewed, "another heartbeat")
    told = witness.err.count("reregistered")
    stop()
    honest.signal(signal.SIGSTOP)
    lose()
    daemon = start()
    witness.until(lambda: witness.err.count("reregistered") > told, "heartbeats")
    daemon.until(lambda: "coordinator.doubt" in daemon.err, "doubt")
    _, stranger = source(1, "m", "bob")
    assert names(address)[stranger], "it has the name before who had it is back"
    honest.signal(signal.SIGCONT)
    daemon.until(lambda: names(address).get(at) is False, "the name")
    assert names(address)[stranger]
    bound = {
        m.model.name: m.sources for m in api.list_models(coordinator=address) if not m.pin_only
    }
    assert bound["m"] == 1
    assert daemon.err.count("coordinator.doubt") == 1


def test_a_mark_that_is_forged_or_foreign_does_nothing(
    run: Run, weights: tuple[Path, Path], tmp_path: Path
) -> None:
    """A source comes from another coordinator, whose state had come further."""

    def coordinator(name: str) -> tuple[str, Command]:
        state, key = f"sqlite:{tmp_path / name}", ("--receipt-key", str(tmp_path / f"{name}.key"))
        return start_coordinator(run, "--state", state, *key, "--lease-s", "15")

    (first, one), (second, two) = coordinator("one"), coordinator("two")
    source = serve(run, weights[0], "m", f"{first},{second}")
    for number in range(3):
        serve(run, weights[0], f"m{number}", first)
    source.until(lambda: len(names(first)) == 4, "marks")
    one.signal(signal.SIGKILL)
    source.until(lambda: len(names(second)) == 1, "the other coordinator")
    two.until(lambda: "coordinator.mark" in two.err, "a line in the log")
    assert "coordinator.doubt" not in two.err
    assert len(names(second)) == 1
