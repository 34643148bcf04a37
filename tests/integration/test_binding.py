"""Which weights a name stands for, whichever source was first: contested names, files, rows.

A stranger's sources are records in the coordinator's state, whose endpoint does not answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx import api, config, plugins, runtime
from mx.coordinator.daemon import Coordinator
from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState
from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.reference import pinned_name
from mx.core.types import ModelKey
from mx.errors import (
    EXIT_INTEGRITY,
    ManifestError,
    NoSourceError,
    UnknownModelError,
)
from mx.memory.arrays import arrays_of
from mx.memory.describe import describe_arrays
from mx.namekey import NameKey
from mx.source.model import SourceModel, lend_tensors
from mx.source.server import SourceServer
from mx.transport import host_view
from mx.wire.documents import DocumentsServicer
from mx.wire.server import Service, listen
from mx.wire.v1 import common_pb2, coordinator_pb2
from tests.support.checkpoints import write_mixed
from tests.support.commands import free_port
from tests.support.hashing import pages_of
from tests.support.lying import held_model
from tests.support.outcomes import error_of, until
from tests.support.owners import owned
from tests.support.records import by_digest, make_documents, make_record, registration

pytestmark = pytest.mark.integration

SECRET = b"s" * 32
KEY = NameKey(b"k" * 32)
SETTINGS = config.load(environ={"HOME": "/nonexistent"})


def run(work: Any) -> Any:
    """Run a coroutine on the loop of mx."""
    loop = runtime.acquire()
    try:
        return loop.run(work)
    finally:
        runtime.release(loop)


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """Keep the loop, on which servers of the test live."""
    held = runtime.acquire()
    yield
    runtime.release(held)


@contextmanager
def coordinating(
    state: CoordinatorState | None = None, address: str = "127.0.0.1:0"
) -> Iterator[str]:
    """A coordinator in this process; yields its address."""
    coordinator = Coordinator(state=state or CoordinatorState())
    yield_address = run(coordinator.start(address))
    try:
        yield yield_address
    finally:
        run(coordinator.stop())


@contextmanager
def serving(held: SourceModel, coordinator: str) -> Iterator[SourceServer]:
    options = api.source_options(SETTINGS, name_key=KEY)
    server = run(api.start_source(options, plugins.transports()))
    try:
        run(api.offer(server, held, coordinator))
        yield server
    finally:
        run(server.close())


def lent(name: str) -> SourceModel:
    """The weights of `held_model`, lent where they are: in no layout's order."""
    held = held_model(name)
    memory = tensors(held.manifest, host_view(held.arena.view))
    arrays = {each: np.frombuffer(data, np.uint8) for each, data in reversed(memory.items())}
    described = arrays_of(arrays)
    held.arena.release()
    return lend_tensors(describe_arrays(described), described, lambda: arrays, ModelKey(name))


def tensors(manifest: Any, arena: memoryview) -> dict[str, bytes]:
    return {
        t.name: bytes(arena[at : at + t.nbytes])
        for t in manifest.layout.tensors
        for at in [manifest.layout.layers[t.layer].arena_offset + t.offset]
    }


def expect_right(name: str, coordinator: str, held: SourceModel, **options: Any) -> api.PullReport:
    """Pull, and compare every tensor."""
    expected = tensors(held.manifest, host_view(held.arena.view))
    with api.pull(name, coordinator=coordinator, settings=SETTINGS, **options) as pull:
        report = pull.wait(60)
        assert tensors(pull.manifest, pull.buffer()) == expected
        assert report.pin == held.manifest.ref.pin.hex()
        return report


# -- rows -----------------------------------------------------------------------------------------


def sources(address: str) -> list[Any]:
    return api.list_sources(coordinator=address, settings=SETTINGS)


@pytest.mark.parametrize("kept", [True, False], ids=["the coordinator", "the source"])
def test_rows_come_from(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator keeps them; where it does not, the source has them."""
    first, second = held_model("m"), lent("m")
    state = CoordinatorState()
    with coordinating(state) as address, serving(first, address), serving(second, address):
        listed = {s.record.source_id: s.record for s in sources(address)}
        record = listed[second.source_id]
        assert record.table.scattered and record.table.row_count == 12
        assert not listed[first.source_id].table.scattered
        rows, document = record.table.rows_digest, state.document
        assert document(rows) is not None
        if not kept:
            monkeypatch.setattr(state, "document", lambda d: None if d == rows else document(d))
        tables = {t.record.source_id: t for t in api.list_tables("m", coordinator=address)}
        assert not any(each.error for each in tables.values())
        right = tensors(first.manifest, host_view(first.arena.view))
        for each in tables.values():
            assert {t.name: ctypes.string_at(t.address, t.nbytes) for t in each.tensors} == right
            assert {(t.region, t.device) for t in each.tensors} == {(0, "cpu")}


# -- a coordinator that has forgotten everything --------------------------------------------------


class Restarting:
    """A coordinator whose next life begins with what strangers have registered."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.state = CoordinatorState()
        self._life = ExitStack()
        self._life.enter_context(coordinating(self.state, self.address))

    def restart(self, state: CoordinatorState) -> None:
        self._life.close()
        self.state = state
        self._life.enter_context(coordinating(state, self.address))

    def close(self) -> None:
        self._life.close()


@pytest.fixture
def restarting() -> Iterator[Restarting]:
    made = Restarting()
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.timeout(240)  # the name is free after a minute
def test_a_name_that_was_taken_leaves_the_pin(
    restarting: Restarting, caplog: pytest.LogCaptureFixture
) -> None:
    held, address = held_model("m"), restarting.address
    pinned = pinned_name(held.key, held.manifest.ref)
    with serving(held, address) as server:
        expect_right("m", address, held)
        others = make_documents("others")
        usurper = make_record(others, name="m", endpoint=f"127.0.0.1:{free_port()}")
        usurper = owned(usurper, b"usurper")
        state = CoordinatorState()
        run(state.register(registration(usurper, SECRET), by_digest(others)))
        restarting.restart(state)
        until(lambda: server.stats().pin_only, "pins")
        assert f"{pinned} only" in caplog.text
        listed = {m.ref.identity: m.pin_only for m in api.list_models(coordinator=address)}
        assert listed == {usurper.ref.identity: False, held.manifest.ref.identity: True}
        expect_right(pinned, address, held, transport="tcp")
        # A pull of it, that stays, is listed beside it.
        with api.pull(pinned, coordinator=address, hold=True, settings=SETTINGS) as pull:
            pull.wait(30)
            kept = pull.hold()
            until(lambda: len(sources(address)) == 3, "three sources")
            assert kept.stats().pin_only
            assert [s.record.pin_only for s in sources(address)] == [False, True, True]
        with api.pull("m", coordinator=address, settings=SETTINGS) as pull:
            assert not isinstance(error_of(pull), UnknownModelError)
        # So is what comes new with another key than the name's owner.
        with serving(other_weights("m"), address) as another:
            assert another.stats().pin_only
        run(state.event(lambda registry, now: registry.deregister(now, usurper.source_id, SECRET)))
        # Once the usurper has not come back for a minute.
        until(lambda: not server.stats().pin_only, "names", 120.0)
        expect_right("m", address, held)


def other_weights(name: str) -> SourceModel:
    def change(view: memoryview) -> None:
        view[0] ^= 1

    held = held_model(name, corrupt=change)
    layout, view = held.manifest.layout, host_view(held.arena.view)
    from tests.support.hashing import roots_of

    manifest = manifests.encode(layout, held.manifest.packaging, roots_of(layout, view))
    return replace(held, manifest=manifest, pages=Pages.whole(manifest, pages_of(layout, view)))


# -- files ----------------------------------------------------------------------------------------


def test_files_come_from_a_source_with_the_pinned_ones(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        write_mixed(folder)
        (folder / "config.json").write_text(f'{{"of": "{folder.name}"}}')
    with coordinating() as address, ExitStack() as stack:
        opened = [
            stack.enter_context(
                api.serve(folder, model="m", coordinator=address, settings=SETTINGS)
            )
            for folder in folders
        ]
        first, second = (source.manifest.ref for source in opened)
        assert first.identity == second.identity and first.packaging != second.packaging

        def pull(name: str, out: str) -> str:
            with api.pull(
                name, coordinator=address, out=tmp_path / out, settings=SETTINGS
            ) as running:
                report = running.wait(30)
            text = (tmp_path / out / "config.json").read_text()
            assert report.pin_covers_files
            assert report.pin == (first if "first" in text else second).pin.hex()
            return text

        for name, expected in (
            ("m", "first"),
            (f"m@{first.identity.hex()}", "first"),
            (opened[0].pinned, "first"),
            (opened[1].pinned, "second"),
        ):
            assert expected in pull(name, name[-12:])
        opened[0].close()
        # The bound files stay bound; they are nowhere to be had now, but the weights are.
        with api.pull(
            "m", coordinator=address, out=tmp_path / "none", settings=SETTINGS
        ) as failing:
            error = error_of(failing)
        assert isinstance(error, NoSourceError) and second.pin.hex() in error.hint
        with api.pull("m", coordinator=address, settings=SETTINGS) as weights:
            weights.wait(30)
        assert "second" in pull(opened[1].pinned, "again")


def test_weights_without_files_are_pinned_by_their_identity() -> None:
    held = held_model("m")
    with coordinating() as address, serving(held, address):
        report = expect_right("m", address, held)
        assert report.pin == held.manifest.ref.identity.hex() and not report.pin_covers_files
        assert report.to_json()["pin_covers_files"] is False


# -- a coordinator that lies ----------------------------------------------------------------------


class Liar(CoordinatorServicer):
    """Answers for the name alone, whatever the pin."""

    async def Resolve(self, request: Any, context: Any) -> Any:
        request.name = request.name.partition("@")[0]
        return await super().Resolve(request, context)


class Hider(CoordinatorServicer):
    """Says of every source that its memory is what a reader's would be."""

    async def Resolve(self, request: Any, context: Any) -> Any:
        answer = await super().Resolve(request, context)
        for source in answer.sources:
            source.table.rows, source.table.rows_digest = 0, b""
            source.table.regions[0].layers.begin = 0
            source.table.regions[0].layers.end = source.table.held[-1].end
        return answer


@contextmanager
def lying(kind: type[CoordinatorServicer]) -> Iterator[str]:
    state = CoordinatorState()
    services = [
        Service(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], kind(state)),
        Service(
            common_pb2.DESCRIPTOR.services_by_name["Documents"],
            DocumentsServicer(lambda context, digests: state.document),
        ),
    ]
    listening = run(listen("127.0.0.1:0", services))
    try:
        yield listening.address
    finally:
        run(listening.stop())


def test_a_coordinator_that_names_other_weights_than_the_pin_is_not_believed() -> None:
    held, other = held_model("m"), "0" * 64
    with lying(Liar) as address, serving(held, address):
        expect_right(pinned_name(held.key, held.manifest.ref), address, held)
        with api.pull(f"m@{other}", coordinator=address, wait_s=60, settings=SETTINGS) as pull:
            error = error_of(pull)
        assert type(error) is ManifestError and error.exit_code == EXIT_INTEGRITY
        assert address in error.message and other in error.message
        assert held.manifest.ref.pin.hex() in error.message


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_coordinator_that_hides_rows_causes_no_wrong_bytes(transport: str) -> None:
    with lying(Hider) as address, serving(lent("m"), address):
        if transport == "tcp":  # rows are for people: the source finds the bytes by its own map
            right = held_model("m")
            expect_right("m", address, right, transport=transport)
            right.release()
            return
        with api.pull("m", coordinator=address, transport=transport, settings=SETTINGS) as pull:
            assert "other weights" in error_of(pull).message  # it would attach
