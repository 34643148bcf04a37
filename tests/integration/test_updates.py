"""Updates of what is served: real readers, in processes of their own, see one generation each."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mx import api, config, runtime
from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.errors import (
    BindingError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    NoSourceError,
    StaleGenerationError,
)
from mx.fetching.pages import PageFetcher
from mx.units import MIB
from mx.wire.channel import dial
from mx.wire.lease import Lease
from tests.support import forkserver
from tests.support.commands import Run, environment, free_port, serve, start_coordinator
from tests.support.leftovers import Holdings
from tests.support.outcomes import error_of

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torch_is_forked")]

LAYERS = 24

#: Pulls, stops in the middle until its standard input is closed, and prints the versions that its
#: tensors are of, or the error. "endless": without stopping, again and again, until its standard
#: input is closed; "alone": into memory of its own, which makes it no part of a swarm.
READER = """
import json, sys, threading
from mx import api
from mx.errors import MxError
coordinator, endless = sys.argv[1], sys.argv[2] == "endless"
into = None if sys.argv[2] == "swarm" else memoryview(bytearray(64 << 20))
go_on = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), go_on.set()), daemon=True).start()
def stop(event):
    print(json.dumps({"layer": event.name}), flush=True)
    go_on.wait()  # on the only thread that reads
while True:
    found, last = {}, not endless or go_on.is_set()
    with api.pull("m", coordinator=coordinator, transport="tcp", into=into) as pull:
        if not endless:
            pull.on_layer(stop)
        try:
            found["model"] = pull.wait(60).model
            versions = {int(v) for t in pull.state_dict().values() for v in t.unique()}
            found["versions"] = sorted(versions)
        except MxError as error:
            found = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(found), flush=True)
    if last:
        break
"""


def weights(version: int, *, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Every byte says which version it is of."""
    return {
        f"model.layers.{layer}.mlp.weight": torch.full((2 * MIB,), version, dtype=torch.uint8)
        for layer in range(layers)
    }


def versions_of(tensors: dict[str, torch.Tensor]) -> set[int]:
    return {int(value) for tensor in tensors.values() for value in torch.unique(tensor)}


def memfds(holdings: Holdings) -> int:
    return sum("/memfd:mx:" in what for _, what in holdings.descriptors)


class Reader:
    def __init__(self, coordinator: str, how: str) -> None:
        env = environment(MX_PEER_STREAMS="1")
        self.process = forkserver.python(READER, coordinator, how, env=env, imported="torch")

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def begin(self) -> None:
        """Wait until the first layer is there."""
        assert "layer" in next(self.lines()), "it ended before it began"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def outcome(self) -> dict[str, Any]:
        """Let it go on, and return what it printed last."""
        self.go_on()
        return [line for line in self.lines() if "layer" not in line][-1]

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def reader(coordinator: str) -> Iterator[Callable[..., Reader]]:
    started: list[Reader] = []

    def start(how: str = "alone") -> Reader:
        started.append(Reader(coordinator, how))
        return started[-1]

    yield start
    for each in started:
        each.close()


def one_generation(found: dict[str, Any]) -> None:
    """Whole and of one version, or a typed error."""
    if "error" in found:
        assert found["error"] in ("IncompleteError", "NoSourceError", "SupersededError"), found
    else:
        (version,) = found["versions"]
        assert found["model"] == ("m" if version == 1 else f"m:main.{version}")


def test_readers_finish_within_the_grace_and_attached_tensors_stay(
    coordinator: str, reader: Callable[..., Reader]
) -> None:
    with api.serve(weights(1), model="m", coordinator=coordinator) as source:
        with api.pull("m", coordinator=coordinator) as attached:
            tensors = attached.state_dict()
        readers = [reader("swarm") for _ in range(3)]
        for each in readers:
            each.begin()
        updating = threading.Thread(target=source.update, args=(weights(2),))
        updating.start()
        while source.model.revision == "main":
            updating.join(0.02)
        assert source.stats().readers >= 3
        for each in readers:
            each.go_on()
        updating.join()
        assert str(source.model) == "m:main.2"
        assert source.stats().readers == 0
        for each in readers:
            assert each.outcome() == {"model": "m", "versions": [1]}
        assert versions_of(tensors) == {1}
        with api.pull("m", coordinator=coordinator) as pull:
            assert pull.wait(30).model == "m:main.2"
            assert versions_of(pull.state_dict()) == {2}
        with api.pull("m", peer=source.endpoint, coordinator=coordinator) as pull:
            assert versions_of(pull.state_dict()) == {2}
    assert versions_of(tensors) == {1}


def test_readers_are_cut_after_the_grace_and_never_get_a_mixture(
    coordinator: str, reader: Callable[..., Reader], settings: config.Settings
) -> None:
    # The source would wait an hour for a reader that does not report that it has stopped.
    patient = replace(settings, reader_lease_s=3600.0)
    with api.serve(weights(1), model="m", coordinator=coordinator, settings=patient) as source:
        readers = [reader() for _ in range(3)]
        for each in readers:
            each.begin()
        source.update(weights(2), grace_s=0)
        for each in readers:
            found = each.outcome()
            assert found["error"] == "SupersededError", found
            # The source says so, or the coordinator does, if it is heard first.
            told = "was updated" in found["text"], "m means m:main.2 now" in found["text"]
            assert any(told) and found["text"].count("means m:main.2 now") < 2, found
        with api.pull("m", coordinator=coordinator) as pull:
            assert versions_of(pull.state_dict()) == {2}


def test_an_update_cuts_a_pull_whose_caller_is_told_of_a_layer(
    coordinator: str, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the layer is ready by its digests, which have come after all bytes: those of the
    others, in the same message, are used once the caller has been told."""
    patient = replace(settings, reader_lease_s=3600.0)
    put, entered, go_on = PageFetcher._put, threading.Event(), threading.Event()

    def late(fetcher: PageFetcher, pages: Sequence[tuple[int, bytes]]) -> None:
        while fetcher._transfer.landed_nbytes() < 2 * MIB * LAYERS and not go_on.is_set():
            time.sleep(0.01)
        put(fetcher, pages)

    def told(_: object) -> None:
        entered.set()
        assert go_on.wait(120)

    monkeypatch.setattr(PageFetcher, "_put", late)
    with api.serve(weights(1), model="m", coordinator=coordinator, settings=patient) as source:
        into = memoryview(bytearray(64 << 20))
        with api.pull("m", coordinator=coordinator, transport="tcp", into=into) as pull:
            pull.on_layer(told)
            assert entered.wait(60)
            update = threading.Thread(target=lambda: source.update(weights(2), grace_s=0))
            update.start()
            update.join(60)
            waits = update.is_alive()
            go_on.set()
            assert not waits
            update.join()
            assert "was updated" in str(error_of(pull, 60))


def test_pulls_among_updates_are_of_one_generation_each(
    coordinator: str, reader: Callable[..., Reader]
) -> None:
    with api.serve(weights(1), model="m", coordinator=coordinator) as source:
        readers = [reader("endless") for _ in range(2)]
        firsts = [next(each.lines()) for each in readers]
        for version in range(2, 7):
            assert source.update(weights(version), grace_s=0.05).revision == f"main.{version}"
        seen = []
        for each in readers:
            each.go_on()
            seen.append(list(each.lines()))
        for found in (*firsts, *(line for lines in seen for line in lines)):
            one_generation(found)
        # A pull that began after the last update has got that.
        assert [lines[-1].get("versions") for lines in seen] == [[6], [6]]


def test_a_reader_that_dies_or_stops_is_waited_out(
    coordinator: str, reader: Callable[..., Reader], settings: config.Settings
) -> None:
    hasty = replace(settings, reader_lease_s=1.0)
    with api.serve(weights(1), model="m", coordinator=coordinator, settings=hasty) as source:
        dead, stopped = reader(), reader()
        for each in (dead, stopped):
            each.begin()
        dead.process.kill()
        stopped.process.send_signal(signal.SIGSTOP)
        before = len(Holdings.now().mappings)
        source.update(weights(2), grace_s=0)
        assert len(Holdings.now().mappings) == before  # the old arena is gone
        stopped.process.send_signal(signal.SIGCONT)
        found = stopped.outcome()
        assert "error" in found or found["versions"] == [1], found


def settled(most_descriptors: int | None = None) -> Holdings:
    """What is held once nothing is being opened or closed in the background any more, and no more
    than `most_descriptors` are open."""
    found, deadline_s = Holdings.now(), time.monotonic() + 15
    while time.monotonic() < deadline_s:
        time.sleep(0.5)
        last, found = found, Holdings.now()
        count = len(found.descriptors)
        if count == len(last.descriptors) and count <= (most_descriptors or count):
            break
    return found


def test_updates_leak_nothing(coordinator: str) -> None:
    with api.serve(weights(1), model="m", coordinator=coordinator) as source:
        source.update(weights(2))
        with api.pull("m", coordinator=coordinator, attach=False) as pull:
            pull.wait(30)
        before = settled()
        for version in range(3, 8):
            with api.pull("m", coordinator=coordinator, attach=False) as pull:
                assert versions_of(pull.state_dict()) == {version - 1}
            source.update(weights(version))
        most = len(before.descriptors) + 4  # not one for each update
        after = settled(most)
        assert len(after.mappings) == len(before.mappings)
        assert memfds(after) == memfds(before)
        assert len(after.descriptors) <= most
        (listed,) = api.list_sources("m", coordinator=coordinator)
        assert listed.record.generation == 7
        # What was there before is known for a while yet, and means what it did.
        revisions = {m.model.revision: m.sources for m in api.list_models(coordinator=coordinator)}
        assert revisions.pop("main.7") == 1
        assert set(revisions.values()) == {0}
        with api.pull("m", revision="main.3", coordinator=coordinator) as pull:
            assert isinstance(error_of(pull), NoSourceError)


def test_the_same_weights_are_no_update(coordinator: str) -> None:
    with api.serve(weights(1), model="m", coordinator=coordinator) as source:
        assert str(source.update(weights(1))) == "m"
        assert source.update(weights(2)).revision == "main.2"
        assert source.update(weights(2)).revision == "main.2"
        assert source.update(weights(1)).revision == "main.3"  # as they once were


def test_only_the_owner_updates(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    changed = tmp_path / "changed.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(checkpoint).items()}, changed)
    stranger = config.load({"name_key": str(tmp_path / "another.key")})
    with api.serve(checkpoint, model="m", coordinator=coordinator, settings=stranger) as other:
        with pytest.raises(BindingError, match="another name key"):
            other.update(changed)
        assert str(other.model) == "m"
        assert len(api.list_sources("m", coordinator=coordinator)) == 2
        with pytest.raises(BindingError, match="another name key"):
            api.serve(changed, model="m", coordinator=coordinator, settings=stranger, update=True)
        with api.pull("m", peer=other.endpoint, coordinator=coordinator) as pull:
            assert pull.wait(30).identity == other.identity_hex
    for revision in ("main", "main.2"):
        with api.serve(
            changed, model="m", revision=revision, coordinator=coordinator, settings=stranger
        ) as other:
            assert other.stats().pin_only
            with api.pull("m", coordinator=coordinator) as pull:
                assert pull.wait(30).identity != other.identity_hex
            with api.pull(other.pinned, coordinator=coordinator) as pull:
                assert pull.wait(30).identity == other.identity_hex
    assert [str(m.model) for m in api.list_models(coordinator=coordinator)] == ["m"]
    with (
        api.pull("m", coordinator=coordinator, hold=True) as pull,
        pytest.raises(ConfigError, match="was pulled"),
    ):
        pull.hold().update(changed)


def test_without_a_coordinator_the_old_weights_are_served_on(run: Run) -> None:
    port = free_port()
    address, first = start_coordinator(run, port=port)
    with api.serve(weights(1), model="m", coordinator=address) as source:
        first.signal(signal.SIGKILL)
        first.wait()
        before = Holdings.now()
        with pytest.raises(CoordinatorError):
            source.update(weights(2))
        after = Holdings.now()
        assert len(after.mappings) == len(before.mappings)
        assert str(source.model) == "m"
        with api.pull("m", peer=source.endpoint, coordinator=address) as pull:
            assert versions_of(pull.state_dict()) == {1}
        _, second = start_coordinator(run, port=port)
        second.until(lambda: bool(api.list_sources("m", coordinator=address)), "source again")
        assert source.update(weights(2)).revision == "main.2"
        second.signal(signal.SIGKILL)
        second.wait()
        _, third = start_coordinator(run, port=port)
        third.until(lambda: bool(api.list_sources("m", coordinator=address)), "source again")
        # It lists main.2, and not main.
        assert source.update(weights(3)).revision == "main.3"
        with api.pull("m", coordinator=address) as pull:
            assert versions_of(pull.state_dict()) == {3}
    with pytest.raises(ClosedError):
        source.update(weights(4))


def test_closing_hurries_an_update(
    coordinator: str, reader: Callable[..., Reader], settings: config.Settings
) -> None:
    hasty = replace(settings, reader_lease_s=1.0)
    source = api.serve(weights(1), model="m", coordinator=coordinator, settings=hasty)
    try:
        each = reader()
        each.begin()
        updating = threading.Thread(
            target=source.update, args=(weights(2),), kwargs={"grace_s": 3600}
        )
        updating.start()
        while source.model.revision == "main":
            updating.join(0.02)
    finally:
        source.close()
    updating.join(30)
    assert not updating.is_alive()
    one_generation(each.outcome())


def test_a_grant_of_what_was_replaced_is_refused_by_name(coordinator: str) -> None:
    """A pull that planned on the old generation, and comes too late."""
    with api.serve(weights(1, layers=2), model="m", coordinator=coordinator) as source:
        (old,) = api.list_sources("m", coordinator=coordinator)
        source.update(weights(2, layers=2))
        assert isinstance(_open(old.record), StaleGenerationError)
        again = replace(old.record, generation=7)
        assert isinstance(_open(again), StaleGenerationError)


def _open(record: SourceRecord) -> BaseException | None:
    async def ask() -> BaseException | None:
        channel = dial(record.endpoint, tls=None, insecure=False)
        lease = Lease(channel, record, lambda: None)
        try:
            await lease.open(Place(), ["tcp"], 5.0)
        except StaleGenerationError as error:
            return error
        finally:
            await lease.close()
            await channel.close(None)
        return None

    # On the source's own loop: one that ended at once would miss what gRPC still reports.
    loop = runtime.acquire()
    try:
        return loop.run(ask())
    finally:
        runtime.release(loop)
