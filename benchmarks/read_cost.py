"""Measures what a read costs in the target beyond its bytes (state machine, sink, bookkeeping), as
a row of the table.

A session that completes every read at once, over layers of 256 bytes, leaves only the control work
to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mx.core import manifest as manifests
from mx.core.digest import block_digest
from mx.core.pages import Pages
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.core.types import (
    AddressTable,
    Manifest,
    ManifestRef,
    ModelKey,
    Packaging,
    SourceRecord,
)
from mx.errors import MxError
from mx.fetching.reads import Connection, ReadLease
from mx.fetching.report import VerifiedBy
from mx.fetching.transfer import Transfer
from mx.transport import Read, View

from . import harness
from .roots import root_of

READS = 4000


class _AtOnce:
    """A session whose reads are done before `read` returns; the bytes are right already."""

    depth = 4

    def __init__(self) -> None:
        self._queue: list[Read] = []
        self._busy = False

    def read(self, reads: Sequence[Read]) -> None:
        self._queue.extend(reads)
        if self._busy:
            return  # called from `done`: the loop below goes on
        self._busy = True
        while self._queue:
            read = self._queue.pop(0)
            read.sink.landed(read.nbytes)
            read.sink.done()
        self._busy = False

    def adopt(self, arena: View) -> None:
        pass

    def attach(self, region: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def join(self, timeout_s: float | None = None) -> bool:
        return True


class _Lease:
    coordinated = False
    answers = False
    lease_s = 10.0

    def check(self) -> MxError | None:
        return None

    def ask(self, chunk: int, right: Callable[[], None]) -> None:
        raise NotImplementedError

    def end(self, *, lost: bool = False) -> None: ...


def no_lease() -> ReadLease:
    """Return a lease that holds for ever."""
    return _Lease()


def path_for(transport: str) -> SourcePath:
    """Return a path of no use but to name its transport."""
    ref = ManifestRef(bytes(32), bytes(32), b"", (0, 0, 0))
    table = AddressTable(layout_digest=bytes(32), regions=(), held=())
    key = ModelKey("none", "main", "checkpoint")
    source = SourceRecord("none", key, ref, "none:1", Place(), 1, table, ("none",))
    return SourcePath(source, transport, 0.0, False, "")


class _Listener:
    def __init__(self) -> None:
        self.layers = 0
        self.error: Sequence[MxError] = ()

    def layer_ready(self, layer: int, arena: View, by: VerifiedBy) -> None:
        self.layers += 1

    def connection_lost(self, connection: int, error: MxError) -> None: ...

    def failed(self, causes: Sequence[MxError]) -> None:
        self.error = causes

    def broken(self, error: MxError) -> None:
        self.error = (error,)


def _manifest() -> Manifest:
    specs = [
        manifests.TensorSpec(f"model.layers.{index}.mlp.weight", "U8", (256,))
        for index in range(READS)
    ]
    layout = manifests.plan_layout(specs)
    return manifests.encode(
        layout, Packaging(), dict.fromkeys((spec.name for spec in specs), root_of(bytes(256)))
    )


def microseconds_per_read() -> float:
    """Return the processor time that a read takes."""
    manifest = _manifest()
    arena = memoryview(bytearray(manifest.layout.arena_nbytes))
    listener = _Listener()
    pages = Pages.whole(manifest, [block_digest(bytes(256))] * READS)
    transfer = Transfer(manifest, pages, arena, listener)
    transfer.start()
    start_s = time.process_time()
    transfer.add_connection(Connection(path_for("none"), no_lease(), _AtOnce()))
    spent_s = time.process_time() - start_s
    if listener.layers != READS or listener.error:
        raise RuntimeError(f"{listener.layers} of {READS} layers: {listener.error}")
    return spent_s / READS * 1e6


def rows(rounds: int) -> list[harness.Row]:
    """Return the row."""
    samples = harness.interleave({"mx": microseconds_per_read}, rounds)
    value = harness.median(samples, "mx")
    return [harness.at_most("control cost in the target, per read", value, "us", 50, "", samples)]
