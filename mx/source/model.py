"""A model held warm: its bytes in a sealed arena, its manifest, and who it is."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mx.core import manifest as manifests
from mx.core.topology import Place
from mx.core.types import (
    AddressTable,
    Alias,
    Chunking,
    Manifest,
    ModelKey,
    Packaging,
    Region,
    SourceRecord,
    SourceRole,
    SourceState,
)
from mx.memory.arena import Arena, MemfdArena
from mx.memory.device import DeviceArena
from mx.storage.load import destination, load_checkpoint
from mx.storage.reader import fill_from_tensors
from mx.transport import DeviceView, ExposedRegion


@dataclass
class HeldModel:
    """What a source serves. The arena is sealed; its server releases it when no exposure is left,
    unless it is `borrowed` from someone who will."""

    key: ModelKey
    manifest: Manifest
    arena: Arena
    role: SourceRole = SourceRole.ORIGIN
    borrowed: bool = False
    generation: int = 1
    source_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: Half-open ranges of layers that are there and verified; None: all.
    layers: Sequence[tuple[int, int]] | None = None
    #: Is the arena being filled? Then nobody may attach to it.
    growing: bool = False

    @property
    def device(self) -> str:
        """Where the bytes are: "cpu", or "cuda:UUID"."""
        view = self.arena.view
        return view.device if isinstance(view, DeviceView) else "cpu"

    def regions(self) -> list[ExposedRegion]:
        arena, view = self.arena, self.arena.view
        if isinstance(view, memoryview):
            view = view.toreadonly()
        memfd = None if self.growing else arena.memfd
        return [ExposedRegion(0, view, arena.address, self.device, memfd)]

    def record(
        self, endpoint: str, place: Place, transports: Sequence[str], state: SourceState
    ) -> SourceRecord:
        layers = len(self.manifest.layout.layers)
        return SourceRecord(
            source_id=self.source_id,
            model=self.key,
            ref=self.manifest.ref,
            endpoint=endpoint,
            place=replace(place, device=self.device),
            generation=self.generation,
            table=AddressTable(
                layout_digest=self.manifest.ref.layout,
                regions=(
                    Region(0, self.device, self.arena.address, len(self.arena.view), (0, layers)),
                ),
                held=((0, layers),) if self.layers is None else tuple(self.layers),
            ),
            transports=tuple(transports),
            role=self.role,
            state=state,
        )


def _new_arena(nbytes: int, key: ModelKey, device: str) -> MemfdArena | DeviceArena:
    if device == "cpu":
        return MemfdArena(nbytes, name=str(key))
    return DeviceArena(nbytes, device)


def hold_checkpoint(
    path: Path,
    key: ModelKey,
    *,
    device: str = "cpu",
    chunk_nbytes: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> HeldModel:
    """Read a checkpoint into a sealed arena on `device`. Errors are those of `load_checkpoint`,
    and of `DeviceArena`."""
    manifest, arena = load_checkpoint(
        path,
        lambda nbytes: _new_arena(nbytes, key, device),
        chunk_nbytes=chunk_nbytes,
        threads=threads,
        progress=progress,
        cancelled=cancelled,
    )
    try:
        arena.seal()
    except BaseException:
        arena.release()
        raise
    return HeldModel(key, manifest, arena)


def hold_tensors(
    specs: Sequence[manifests.TensorSpec],
    aliases: Sequence[Alias],
    tensors: Mapping[str, memoryview],
    key: ModelKey,
    *,
    device: str = "cpu",
    chunk_nbytes: int,
) -> HeldModel:
    """Copy tensors that are in memory into a sealed arena on `device`: a snapshot, which later
    changes of the originals do not reach."""
    layout = manifests.plan_layout(specs, aliases)
    arena = _new_arena(layout.arena_nbytes, key, device)
    try:
        with destination(arena, layout) as (view, on_layer):
            filled = fill_from_tensors(
                tensors, layout, view, chunk_nbytes=chunk_nbytes, on_layer=on_layer
            )
        arena.seal()
        manifest = manifests.encode(
            layout,
            Chunking(chunk_nbytes, filled.chunk_digests),
            Packaging(),
            filled.tensor_digests,
        )
    except BaseException:
        arena.release()
        raise
    return HeldModel(key, manifest, arena)
