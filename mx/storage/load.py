"""Loads a checkpoint from disk into an arena: layout, one hashed read, manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from mx.contexts import Undo
from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.types import Companion, Layout, Manifest
from mx.errors import CheckpointError, ClosedError
from mx.memory.device import DeviceArena
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.storage.disk_file import Stamp
from mx.storage.landing import ArenaDigests
from mx.storage.reader import fill, hash_in_place
from mx.storage.safetensors import Checkpoint
from mx.storage.stages import Stages
from mx.threads import Threads
from mx.units import MIB
from mx.views import DeviceView, HostView, ScatteredView

#: The longest read into a GPU's memory.
_DEVICE_READ_BYTES = 64 * MIB

A = TypeVar("A", bound="Memory | SubsetMemory")


@dataclass(frozen=True)
class HostDestination:
    """Host memory to fill an arena through: `view`, which maps `memfd` if there is one.

    `on_layer`, if there is one, is to be called with the index of each complete layer. `copy`, if
    there is one, takes blocks and their places in place of `view`.
    """

    view: HostView
    memfd: int | None = None
    on_layer: Callable[[int], None] | None = None
    copy: Callable[[int, memoryview], None] | None = None


@dataclass(frozen=True)
class LoadedCheckpoint(Generic[A]):
    """A checkpoint in memory: its manifest, the digests of all blocks, and the arena.

    `shortcuts` and `stamps` are as in `mx.storage.landing.ArenaDigests`.
    """

    manifest: Manifest
    pages: Pages
    shortcuts: bytes
    arena: A
    stamps: tuple[Stamp, ...] = ()


@contextlib.contextmanager
def destination(arena: Memory | SubsetMemory, layout: Layout) -> Iterator[HostDestination]:
    """Give the host memory to fill an arena through, for the length of the block.

    For host memory it is the arena itself. For GPU memory it is a window, whose `on_layer` copies
    a layer to the GPU.
    """
    if isinstance(arena, SubsetMemory):
        yield HostDestination(arena.view, copy=arena.write)
        return
    on_gpu = isinstance(arena, LiveMemory) and arena.device != "cpu"
    if not isinstance(arena, DeviceArena) and not on_gpu:
        view = arena.view
        assert not isinstance(view, DeviceView)
        yield HostDestination(view, arena.memfd)
        return
    assert isinstance(arena, DeviceArena | LiveMemory)
    with arena.filling() as window:

        def layer_done(index: int) -> None:
            layer = layout.layers[index]
            window.layer_done(layer.arena_offset, layer.nbytes)

        yield HostDestination(window.view, on_layer=layer_done)


def load_opened(
    checkpoint: Checkpoint,
    arena_of: Callable[[Layout], A],
    *,
    layout_version: int | None = None,
    shortcuts: bool = False,
    threads: int,
    in_layer_order: bool = False,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] | None = None,
    read_companion: Callable[[str, Checkpoint], Manifest] | None = None,
    stages: Stages | None = None,
) -> LoadedCheckpoint[A]:
    """Read a checkpoint, whose headers were read, once into a new arena, hashing it on the way.

    Args:
        checkpoint: A checkpoint that was opened.
        arena_of: Makes the arena, given the layout.
        layout_version: As for `plan_layout`.
        shortcuts: Whether to compute the shortcut digests too.
        threads: How many threads read.
        in_layer_order: As for `fill`.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        cancelled: Called while reading; returning True stops it.
        on_layer: Called on reader threads with each layer that is complete, where the arena is host
            memory.
        read_companion: Called with the path of each companion, and the companion; returns its
            manifest. None: it is hashed, and not kept.
        stages: As for `fill`.

    Returns:
        The manifest, the digests, and the arena, which the caller owns.

    Raises:
        CheckpointError: The checkpoint is malformed.
        ConfigError: This user may not read it.
        CapacityError: There is too little memory; raised before any is allocated.
        LocalError: The disk fails.
        ClosedError: `cancelled` returned True.
    """
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases, layout_version)
    total = layout.payload_nbytes
    arena = arena_of(layout)
    with Undo(arena.release):
        count = None if progress is None else (lambda done: progress(done, total))
        if isinstance(arena, DeviceArena) and checkpoint.reads_devices:
            filled = _fill_device(checkpoint, layout, arena, threads, count, cancelled)
        else:
            with destination(arena, layout) as there:
                filled = fill(
                    checkpoint,
                    layout,
                    there.view,
                    memfd=there.memfd,
                    copy=there.copy,
                    shortcuts=shortcuts,
                    threads=threads,
                    in_layer_order=in_layer_order,
                    progress=count,
                    cancelled=cancelled,
                    on_layer=there.on_layer or on_layer,
                    stages=stages,
                    uploads=there.on_layer is not None,
                )
        manifest = manifest_of_digests(
            checkpoint, layout, filled, read_companion or hashing(threads, cancelled)
        )
    pages = Pages.whole(manifest, filled.pages)
    return LoadedCheckpoint(manifest, pages, filled.shortcuts, arena, filled.stamps)


def _fill_device(
    checkpoint: Checkpoint,
    layout: Layout,
    arena: DeviceArena,
    threads: int,
    progress: Callable[[int], None] | None,
    cancelled: Callable[[], bool],
) -> ArenaDigests:
    """Have a store write to a GPU's memory by itself, and hash there."""
    left = {tensor.name: tensor for tensor in layout.tensors}
    reads: list[tuple[Any, int, DeviceView]] = []
    for file in checkpoint.files:
        opened = file.open()
        for tensor in file.tensors:
            there = left.pop(tensor.spec.name, None)
            if there is not None:  # else an earlier file holds it, too
                place = layout.layers[there.layer].arena_offset + there.offset
                view = arena.view[place : place + there.nbytes]
                reads += [
                    (opened, tensor.begin + at, view[at : at + _DEVICE_READ_BYTES])
                    for at in range(0, there.nbytes, _DEVICE_READ_BYTES)
                ]

    def read(opened: Any, position: int, view: DeviceView) -> int:
        if cancelled():
            raise ClosedError("reading was cancelled")
        opened.read_exactly(view, position, len(view))
        return len(view)

    done_nbytes = 0
    with Threads(threads, "mx-read") as pool:
        for nbytes in pool.map(read, *zip(*reads, strict=True)):
            done_nbytes += nbytes
            if progress is not None:
                progress(done_nbytes)
    return hash_in_place(layout, arena.view, arena.hasher, cancelled=cancelled)


class HashedCheckpoint(NamedTuple):
    """What a checkpoint holds; `stamps` are as in `mx.storage.landing.ArenaDigests`."""

    manifest: Manifest
    pages: Pages
    stamps: tuple[Stamp, ...]


def hash_opened(
    checkpoint: Checkpoint,
    *,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> HashedCheckpoint:
    """Read a checkpoint whose headers were read, and keep nothing.

    Args:
        checkpoint: The checkpoint.
        threads: As for `load_opened`, and so are the others.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        cancelled: Called while reading; returning True stops it.

    Raises:
        MxError: As `load_opened`, but for memory.
    """
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases)
    filled = fill(
        checkpoint,
        layout,
        ScatteredView.over((), (), layout.arena_nbytes),
        copy=lambda place, data: None,
        threads=threads,
        progress=progress and (lambda done: progress(done, layout.payload_nbytes)),
        cancelled=cancelled,
    )
    manifest = manifest_of_digests(checkpoint, layout, filled, hashing(threads, cancelled))
    return HashedCheckpoint(manifest, Pages.whole(manifest, filled.pages), filled.stamps)


def hashing(threads: int, cancelled: Callable[[], bool]) -> Callable[[str, Checkpoint], Manifest]:
    """Return what hashes a companion, and keeps nothing of it."""
    return lambda path, opened: hash_opened(opened, threads=threads, cancelled=cancelled).manifest


def manifest_of_digests(
    checkpoint: Checkpoint,
    layout: Layout,
    filled: ArenaDigests,
    read_companion: Callable[[str, Checkpoint], Manifest],
) -> Manifest:
    """Return the manifest of a checkpoint whose blocks were hashed."""
    companions = []
    for path, _ in checkpoint.companions:
        manifest = read_companion(path, checkpoint.companion(path))
        nbytes, ref = manifest.layout.payload_nbytes, manifest.ref
        companions.append(Companion(path, nbytes, ref.identity, ref.packaging))
    packaging = checkpoint.packaging._replace(companions=tuple(companions))
    manifest = manifests.encode(layout, packaging, filled.roots, checkpoint.side_documents)
    if checkpoint.identity not in (b"", manifest.ref.identity):
        held = f"{checkpoint.root} holds {manifest.ref.identity.hex()}"
        raise CheckpointError(
            f"{held}, not {checkpoint.identity.hex()} as was written", hint="write it again"
        )
    return replace(manifest, notes=checkpoint.notes)
