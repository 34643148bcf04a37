"""Which weights a name stands for, whichever source was first: layouts, contested names, files.

A stranger's sources are records in the coordinator's state, whose endpoint does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mx import api, config, plugins, runtime
from mx.coordinator.daemon import Coordinator
from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import MemoryState
from mx.core import manifest as manifests
from mx.core.layout import build_layout
from mx.core.pages import Pages
from mx.core.reference import pinned_name
from mx.core.topology import Place
from mx.core.types import Layout
from mx.errors import (
    EXIT_INTEGRITY,
    ManifestError,
    MxError,
    NoSourceError,
    UnknownModelError,
)
from mx.memory.arena import MemfdArena
from mx.namekey import NameKey
from mx.source.model import HeldModel
from mx.source.server import SourceServer
from mx.transport import host_view
from mx.units import MIB
from mx.wire.channel import Remote, Role, dial
from mx.wire.documents import DocumentsServicer
from mx.wire.lease import Lease
from mx.wire.rows import fetch_table
from mx.wire.server import Service, listen
from mx.wire.v1 import common_pb2, coordinator_pb2
from tests.integration.conftest import error_of, free_port
from tests.integration.lying import held_model
from tests.support.checkpoints import write_mixed
from tests.support.hashing import pages_of, shortcuts_of
from tests.support.owners import owned
from tests.support.records import by_digest, make_documents, make_record

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
def coordinating(state: MemoryState | None = None, address: str = "127.0.0.1:0") -> Iterator[str]:
    """A coordinator in this process; yields its address."""
    coordinator = Coordinator(state=state or MemoryState())
    yield_address = run(coordinator.start(address))
    try:
        yield yield_address
    finally:
        run(coordinator.stop())


@contextmanager
def serving(held: HeldModel, coordinator: str) -> Iterator[SourceServer]:
    options = api.source_options(SETTINGS, name_key=KEY)
    server = run(api.start_source(options, plugins.transports()))
    try:
        run(api.offer(server, held, coordinator))
        yield server
    finally:
        run(server.close())


def reversed_layout(layout: Layout) -> Layout:
    """The same tensors in two layers, the last one first."""
    tensors = layout.tensors[::-1]
    kinds = sorted({(t.dtype, t.shape, t.stride) for t in tensors})
    kind = [kinds.index((t.dtype, t.shape, t.stride)) for t in tensors]
    counts = [("one", 1), ("rest", len(tensors) - 1)]
    return build_layout(counts, [t.name for t in tensors], kinds, kind, ())


def relaid(held: HeldModel) -> HeldModel:
    """The same weights as another process may have laid them out."""
    before, source = held.manifest, bytes(host_view(held.arena.view))
    layout = reversed_layout(before.layout)
    arena = MemfdArena(layout.arena_nbytes, name="relaid")
    places = {t.name: t for t in before.layout.tensors}
    for t in layout.tensors:
        was = places[t.name]
        begin = before.layout.layers[was.layer].arena_offset + was.offset
        to = layout.layers[t.layer].arena_offset + t.offset
        arena.view[to : to + t.nbytes] = source[begin : begin + t.nbytes]
    roots = {t.name: root for t, root in zip(before.layout.tensors, before.roots, strict=True)}
    manifest = manifests.encode(layout, before.packaging, roots, chunk_nbytes=2 * MIB)
    assert manifest.ref.identity == before.ref.identity
    pages = Pages.whole(manifest, pages_of(layout, arena.view))
    shortcuts = shortcuts_of(layout, arena.view)
    arena.seal()
    return HeldModel(held.key, manifest, arena, pages, shortcuts=shortcuts)


def tensors(manifest: Any, arena: memoryview) -> dict[str, bytes]:
    return {
        t.name: bytes(arena[at : at + t.nbytes])
        for t in manifest.layout.tensors
        for at in [manifest.layout.layers[t.layer].arena_offset + t.offset]
    }


def expect_right(name: str, coordinator: str, held: HeldModel, **options: Any) -> api.PullReport:
    """Pull, and compare every tensor."""
    own = held.laid_out
    expected = tensors(own.manifest, host_view(own.arena.view))
    with api.pull(name, coordinator=coordinator, settings=SETTINGS, **options) as pull:
        report = pull.wait(60)
        assert tensors(pull.manifest, pull.buffer()) == expected
        assert report.pin == own.manifest.ref.pin.hex()
        return report


def until(done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def strange(state: MemoryState, held: HeldModel, *, chunk_nbytes: int, layout: bytes) -> Any:
    """Register a stranger's source of honest weights, which can not be read from."""
    identity = held.manifest.documents[held.manifest.ref.identity]
    layout = layout or held.manifest.documents[held.manifest.ref.layout]
    record = make_record(
        [identity, layout],
        name=held.key.name,
        endpoint=f"127.0.0.1:{free_port()}",
        chunk_nbytes=chunk_nbytes,
    )
    run(state.register(record, by_digest([identity, layout]), SECRET))
    return record


# -- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"transport": "tcp"}, {"transport": "shm"}, {}])
def test_a_source_in_another_layout_is_read_in_the_listed_one(options: dict[str, str]) -> None:
    first = held_model("m")
    second = relaid(first)
    with coordinating() as address, serving(second, address) as other:
        before = second.source_id
        with serving(first, address):
            # The first one's own layout gives way to that of the source that was there.
            assert first.manifest.ref == second.manifest.ref
            assert first.extents is not None and second.extents is None
            assert second.source_id == before
            expect_right("m", address, first, **options)
            run(other.drain(0.0))
            # Now only the one is left whose memory is laid out otherwise.
            until(lambda: any(s.record.state.value == "draining" for s in sources(address)))
            report = expect_right("m", address, first, **options)
            assert [path.attached for path in report.paths] == [False]
            expect_right("m", address, first, verify="strong", **options)


def sources(address: str) -> list[Any]:
    return api.list_sources(coordinator=address, settings=SETTINGS)


def test_rows_come_from_the_source_itself() -> None:
    first = held_model("m")
    with coordinating() as address, serving(first, address):
        second = relaid(first)
        with serving(second, address) as server:
            assert second.extents is not None
            listed = {s.record.source_id: s.record for s in sources(address)}
            record = listed[second.source_id]
            assert record.table.scattered and record.table.rows == ()
            assert not listed[first.source_id].table.scattered

            async def ask(**changes: Any) -> Any:
                async with dial(server.endpoint) as channel:
                    remote = Remote(Role.SOURCE, server.endpoint)
                    asked = replace(record, **changes)
                    return await fetch_table(channel, asked, most_rows=12, who=remote)

            assert run(ask()).rows == second.extents.rows
            with pytest.raises(MxError, match="no such source"):
                run(ask(source_id=first.source_id))


def test_a_source_with_other_chunks_takes_over_the_listed_size() -> None:
    first = held_model("m")
    second = held_model("m")
    layout = second.manifest.layout
    roots = dict(zip([t.name for t in layout.tensors], second.manifest.roots, strict=True))
    larger = manifests.encode(layout, second.manifest.packaging, roots, chunk_nbytes=4 * MIB)
    second = replace(second, manifest=larger)
    with coordinating() as address, serving(first, address), serving(second, address) as server:
        assert second.manifest.ref == first.manifest.ref and second.extents is None
        assert second.laid_out.manifest.ref == larger.ref
        assert len(sources(address)) == 2
        with api.pull("m", peer=server.endpoint, settings=SETTINGS) as pull:
            assert pull.wait(30).paths[0].attached  # its memory is what a reader's would be


@pytest.mark.parametrize("garbage", [b"garbage", b"{}\0", b"[" * 100])
def test_a_forged_layout_keeps_no_pull_from_the_honest_source(garbage: bytes) -> None:
    """A stranger has registered the honest weights first, with a layout that is not theirs."""
    held, state = held_model("m"), MemoryState()
    forged = strange(state, held, chunk_nbytes=MIB, layout=garbage)
    with coordinating(state) as address, serving(held, address) as server:
        assert held.manifest.ref.layout != forged.ref.layout and held.extents is None
        assert len(sources(address)) == 2
        for name in ("m", f"m@{held.manifest.ref.identity.hex()}"):
            expect_right(name, address, held, transport="tcp")
        assert api.plan("m", coordinator=address, settings=SETTINGS).plan.chosen
        # A second honest source joins the first, whatever its own layout.
        second = relaid(held)
        with serving(second, address):
            assert second.manifest.ref.same_chunks(held.manifest.ref)
            run(server.drain(0.0))
            expect_right("m", address, second, transport="tcp")


# -- a coordinator that has forgotten everything --------------------------------------------------


class Restarting:
    """A coordinator whose next life begins with what strangers have registered."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.state = MemoryState()
        self._life = ExitStack()
        self._life.enter_context(coordinating(self.state, self.address))

    def restart(self, state: MemoryState) -> None:
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
        state = MemoryState()
        run(state.register(usurper, by_digest(others), SECRET))
        restarting.restart(state)
        until(lambda: server.stats().pin_only)
        assert f"{pinned} only" in caplog.text
        listed = {m.ref.identity: m.pin_only for m in api.list_models(coordinator=address)}
        assert listed == {usurper.ref.identity: False, held.manifest.ref.identity: True}
        expect_right(pinned, address, held, transport="tcp")
        # A pull of it, that stays, is listed beside it.
        with api.pull(pinned, coordinator=address, hold=True, settings=SETTINGS) as pull:
            pull.wait(30)
            kept = pull.hold()
            until(lambda: len(sources(address)) == 3)
            assert kept.stats().pin_only
            assert [s.record.pin_only for s in sources(address)] == [False, True, True]
        with api.pull("m", coordinator=address, settings=SETTINGS) as pull:
            assert not isinstance(error_of(pull), UnknownModelError)
        # So is what comes new with another key than the name's owner.
        with serving(other_weights("m"), address) as another:
            assert another.stats().pin_only
        run(state.deregister(usurper.source_id, SECRET))
        # Once the usurper has not come back for a minute.
        until(lambda: not server.stats().pin_only, 120.0)
        expect_right("m", address, held)


def other_weights(name: str) -> HeldModel:
    def change(view: memoryview) -> None:
        view[0] ^= 1

    held = held_model(name, corrupt=change)
    layout, view = held.manifest.layout, host_view(held.arena.view)
    from tests.support.hashing import roots_of

    manifest = manifests.encode(layout, held.manifest.packaging, roots_of(layout, view))
    return replace(held, manifest=manifest, pages=Pages.whole(manifest, pages_of(layout, view)))


def test_a_source_that_is_read_adopts_other_chunks_beside_its_readers(
    restarting: Restarting,
) -> None:
    """Else a stranger's chunk size would divide it from all readers to come."""
    held, address = held_model("m"), restarting.address
    with serving(held, address) as server:
        was = server.record(held)

        async def read() -> tuple[Any, Lease]:
            channel = dial(server.endpoint)
            lease = Lease(channel, was, lambda: None)
            await lease.open(Place(), ["tcp"], 10.0)
            return channel, lease

        channel, lease = run(read())
        state = MemoryState()
        strange(state, held, chunk_nbytes=8 * MIB, layout=b"")
        restarting.restart(state)
        until(lambda: held.source_id != was.source_id and len(sources(address)) == 2)
        assert held.manifest.ref.chunk_nbytes == 8 * MIB
        assert held.generation == was.generation + 1
        name = f"m@{was.ref.identity.hex()}"
        expect_right(name, address, held, transport="tcp")
        assert lease.check() is None  # what it read, and reads, is right

        async def end() -> None:
            await lease.close()
            await channel.close()

        run(end())
        until(lambda: len(server._servicer.models) == 1)
        expect_right(name, address, held)


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
            source.table.rows = 0
            source.table.regions[0].layers.begin = 0
            source.table.regions[0].layers.end = source.table.held[-1].end
        return answer


@contextmanager
def lying(kind: type[CoordinatorServicer]) -> Iterator[str]:
    state = MemoryState()
    services = [
        Service(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"], kind(state)),
        Service(
            common_pb2.DESCRIPTOR.services_by_name["Documents"], DocumentsServicer(state.document)
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
    held = held_model("m")
    with (
        lying(Hider) as address,
        serving(relaid(held), address) as first,
        serving(held, address),
    ):
        assert held.extents is not None
        run(first.drain(0.0))
        until(lambda: any(s.record.state.value == "draining" for s in sources(address)))
        if transport == "tcp":  # rows are for people: the source finds the bytes by its own map
            expect_right("m", address, held, transport=transport)
            return
        with api.pull("m", coordinator=address, transport=transport, settings=SETTINGS) as pull:
            assert "other weights" in error_of(pull).message  # it would attach
