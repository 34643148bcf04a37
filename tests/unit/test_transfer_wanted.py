"""The pull machine and the transfer, where only some blocks are wanted, and some read aside."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.selection import Selection
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    LayerReady,
)
from mx.core.types import Packaging
from mx.core.wanted import BlockRange, WantedBlocks
from mx.errors import ClosedError, DigestError, PeerLostError, PeerProtocolError
from mx.fetching.transfer import Transfer
from mx.memory.arena import HostArena
from mx.memory.subset import SubsetMemory
from mx.units import MIB
from tests.support.hashing import pages_of, roots_of, shortcuts_of
from tests.support.held_sessions import HeldSession, Lease, Listener, connection_of
from tests.support.transfer_machine import Known, grid_of, land
from tests.support.wanted_machine import Driver, wanted_at_random


@given(
    layers=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    depths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chunk_mib=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_every_wanted_block_lands_once_whatever_happens(
    layers: list[int], depths: list[int], chunk_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    grid = grid_of(layers, chunk_mib)
    known = Known(grid, at_once=rng.random() < 0.5)
    wanted = wanted_at_random(known, rng)
    machine = TransferMachine(grid, known.get, wanted=wanted)
    driver = Driver(machine, wanted, known)
    driver.take(machine.start())
    empty = {layer for layer in range(len(layers)) if not wanted.layer_nbytes[layer]}
    assert set(driver.ready) == empty
    for number, depth in enumerate(depths):
        rate = rng.choice((0.0, 1e6, 1e9, 1e11))
        driver.take(
            machine.add_connection(number, depth, 0.0, source=f"s{number}", bytes_per_s=rate)
        )
    driver.take(machine.no_more_connections())
    unknown = [layer for layer in range(len(layers)) if layer not in known.layers]
    while driver.in_flight or driver.copying or unknown:
        driver.now_s += rng.random() * 0.01
        if unknown and (rng.random() < 0.1 or not (driver.in_flight or driver.copying)):
            known.layers.add(layer := unknown.pop(rng.randrange(len(unknown))))
            driver.take(machine.page_known(layer, driver.now_s))
            continue
        if driver.copying and (rng.random() < 0.5 or not driver.in_flight):
            driver.copied(rng.choice(driver.copying))
            continue
        part = rng.choice(sorted(driver.in_flight, key=lambda part: (part.chunk, part.begin)))
        connection, event = driver.in_flight[part], rng.random()
        if event < 0.5 or connection == 0:  # the first is never lost, and never lies
            driver.landed(part)
        elif connection in driver.lost:
            driver.take(
                machine.failed(
                    driver.in_flight.pop(part), [part], ClosedError("closed"), driver.now_s
                )
            )
        elif event < 0.65:
            driver.landed(part, right=False)
        elif event < 0.8:
            driver.take(
                machine.failed(
                    driver.in_flight.pop(part), [part], PeerProtocolError("no"), driver.now_s
                )
            )
        else:
            driver.lost.add(connection)
            driver.take(machine.connection_lost(connection, PeerLostError("gone"), driver.now_s))
    assert driver.failure is None
    assert machine.holdings.whole and machine.ended
    assert machine.holdings.bits == wanted.bits
    assert sorted(driver.ready) == list(range(len(layers)))
    assert machine.landed_nbytes() == wanted.layer_nbytes


def test_what_is_read_aside_waits_for_its_page_and_the_rest_does_not() -> None:
    grid = grid_of([1, 1])
    known = Known(grid, at_once=False)
    wanted = WantedBlocks(grid, {0: [BlockRange(0, 1, True)], 1: [BlockRange(0, 1, False)]})
    machine = TransferMachine(grid, known.get, wanted=wanted)
    machine.start()
    assert machine.add_connection(0, 4, 0.0) == [Assign(0, (Part(1, 0, 1),))]
    machine.no_more_connections()
    assert land(machine, 0, Part(1, 0, 1)) == []  # not hopeless: the page may come
    known.layers |= {0, 1}
    assert LayerReady(1) in machine.page_known(1, 0.0)
    assert machine.load(0).in_flight.keys() == {Part(0, 0, 1)}


# -- the transfer, with memory ---------------------------------------------------------------------

WIDE = np.random.default_rng(3).integers(0, 256, (3000, 1500), dtype=np.uint8)


class Setting:
    """One tensor of 3000 rows and 1500 columns, of which columns 700 to 800 are wanted, and half
    of another one by rows."""

    def __init__(self, *, page: bool = True, shortcut: bool = False) -> None:
        specs = [
            manifests.TensorSpec("model.layers.0.columns", "U8", WIDE.shape),
            manifests.TensorSpec("model.layers.0.rows", "U8", WIDE.shape),
        ]
        layout = manifests.plan_layout(specs)
        self.model = bytearray(layout.arena_nbytes)
        for tensor in layout.tensors:
            self.model[tensor.offset : tensor.offset + tensor.nbytes] = WIDE.tobytes()
        roots = roots_of(layout, memoryview(self.model))
        manifest = manifests.encode(layout, Packaging(), roots)
        self.pages = pages_of(layout, memoryview(self.model))
        self.shortcuts = shortcuts_of(layout, memoryview(self.model))
        slices = {"*columns": (1, 700, 800), "*rows": (0, 1500, 3000)}
        subset = Selection(None, slices).of(layout)
        self.arena = HostArena(subset.layout.arena_nbytes)
        memory = SubsetMemory(subset, self.arena)
        wanted = subset.wanted(manifest.grid)
        self.places = {t.name.rpartition(".")[2]: t for t in subset.layout.tensors}
        self.listener = Listener()
        self.transfer = Transfer(
            manifest,
            Pages.whole(manifest, self.pages) if page else Pages(manifest, wanted.layers),
            memory.view,
            self.listener,
            shortcut=shortcut,
            subset=(memory, wanted),
        )
        self.transfer.start()

    def connection(self, lease: Lease | None = None, vouched: bytes | None = None) -> HeldSession:
        session = HeldSession()
        self.transfer.add_connection(connection_of(session, lease, vouched))
        return session

    def found(self, name: str) -> np.ndarray:
        tensor = self.places[name]
        data = bytes(self.arena.view[tensor.offset : tensor.offset + tensor.nbytes])
        return np.frombuffer(data, np.uint8).reshape(tensor.shape)

    def check(self) -> None:
        assert self.listener.ready == [0]
        assert np.array_equal(self.found("columns"), WIDE[:, 700:800])
        assert np.array_equal(self.found("rows"), WIDE[1500:])

    def land_all(self, *sessions: HeldSession) -> None:
        while any(session.reads for session in sessions):
            for session in sessions:
                if session.reads:
                    session.land(bytes(self.model))


def test_slices_come_together_and_nothing_holds_on_to_memory() -> None:
    setting = Setting()
    setting.land_all(setting.connection(), setting.connection())
    setting.check()
    # All blocks of the columns; of the rows those from the one with row 1500 on.
    own, first = WIDE.size, 1500 * 1500 // MIB * MIB
    assert setting.transfer.progress()[0] == own + own - first
    # No more buffers than reads that were in flight at a time.
    assert 0 < len(setting.transfer._destination._free) <= 2 * HeldSession.depth
    setting.transfer.close()
    assert setting.transfer.join(30)
    assert not setting.transfer._destination._free


def test_before_the_page_only_what_lies_whole_is_read() -> None:
    setting = Setting(page=False)
    session = setting.connection()
    assert [read.tag for read in session.reads] == ["chunk 8", "chunk 9"]
    setting.transfer.put_page(0, setting.pages[0])
    assert any(read.tag == "chunk 0" for read in session.reads)
    setting.land_all(session)
    setting.check()


def test_a_liar_writes_nothing_where_blocks_are_read_aside() -> None:
    setting = Setting()
    liar = setting.connection()
    setting.transfer.no_more_connections()
    lies = bytes(b ^ 0xFF for b in setting.model[: 2 * MIB]) + bytes(setting.model[2 * MIB :])
    liar.land(lies)
    assert not setting.found("columns").any()
    honest = setting.connection()
    liar.land(lies)
    assert setting.listener.lost == [0]
    assert not setting.found("columns").any()
    assert setting.listener.broke is None
    while liar.reads:
        liar.fail(ClosedError("closed"))
    setting.land_all(honest)
    setting.check()
    assert setting.transfer.retries >= 2


def test_a_lying_only_source_leaves_the_destination_as_it_was() -> None:
    setting = Setting()
    liar = setting.connection()
    setting.transfer.no_more_connections()
    lies = bytes(len(setting.model))
    while not setting.listener.lost:
        liar.land(b"\xff" * len(lies))
    while liar.reads:
        liar.fail(ClosedError("closed"))
    assert any(isinstance(cause, DigestError) for cause in setting.listener.causes)
    assert not setting.found("columns").any()
    assert setting.listener.ready == []


def test_a_part_whose_lease_is_lost_is_not_copied() -> None:
    setting, lease = Setting(), Lease()
    session = setting.connection(lease)
    lease.error = PeerLostError("the lease ended")
    session.land(bytes(setting.model))
    assert not setting.found("columns").any()
    while session.reads:
        session.fail(ClosedError("closed"))
    setting.land_all(setting.connection())
    setting.check()


@pytest.mark.parametrize("right", [True, False])
def test_the_shortcut_serves_parts_read_aside_too(right: bool) -> None:
    setting = Setting(shortcut=True)
    vouched = setting.shortcuts if right else bytes(len(setting.shortcuts))
    setting.land_all(setting.connection(vouched=vouched))
    setting.check()
    assert setting.listener.verified_by[0].value == ("xxh3" if right else "digest")


@settings(max_examples=25, deadline=None)
@given(
    dim=st.integers(0, 2),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 500)),
    dtype=st.sampled_from(["U8", "F32"]),
    data=st.data(),
)
def test_any_slice_by_any_blocks(
    dim: int, shape: tuple[int, int, int], dtype: str, data: st.DataObject
) -> None:
    """Blocks in place and aside, each written once, make the slice and nothing else."""
    begin = data.draw(st.integers(0, shape[dim] - 1))
    end = data.draw(st.integers(begin + 1, shape[dim]))
    specs = [manifests.TensorSpec("model.t", dtype, shape)]
    layout = manifests.plan_layout(specs)
    (tensor,) = layout.tensors
    content = np.random.default_rng(1).bytes(tensor.nbytes)
    whole = np.frombuffer(content, {"U8": np.uint8, "F32": np.uint32}[dtype]).reshape(shape)
    subset = Selection(None, {"model.t": (dim, begin, end)}).of(layout)
    arena = HostArena(max(1, subset.layout.arena_nbytes))
    memory = SubsetMemory(subset, arena)
    for _, cut in subset.members:
        for low, high, aside in cut.block_ranges():
            for number in range(low, high):
                at, stop = number * MIB, min((number + 1) * MIB, tensor.nbytes)
                if aside:
                    memory.write(at, memoryview(content)[at:stop])
                else:
                    (span,) = [memory.view[at:stop]]
                    assert isinstance(span, memoryview)
                    span[:] = content[at:stop]
    expected = np.take(whole, range(begin, end), axis=dim).tobytes()
    assert bytes(arena.view[: len(expected)]) == expected
    assert not any(arena.view[len(expected) :])
