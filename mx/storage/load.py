"""Loads a checkpoint from disk into an arena: layout, one hashed read, manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.types import Layout, Manifest
from mx.memory.device import DeviceArena
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.records import record
from mx.storage.disk_file import Stamp
from mx.storage.reader import fill
from mx.storage.safetensors import Checkpoint, open_checkpoint
from mx.views import DeviceView, HostView

A = TypeVar("A", bound="Memory | SubsetMemory")


@record(frozen=True)
class HostDestination:
    """Host memory to fill an arena through: `view`, which maps `memfd` if there is one.

    `on_layer`, if there is one, is to be called with the index of each complete layer. `copy`, if
    there is one, takes blocks and their places in place of `view`.
    """

    view: HostView
    memfd: int | None = None
    on_layer: Callable[[int], None] | None = None
    copy: Callable[[int, memoryview], None] | None = None


@record(frozen=True)
class LoadedCheckpoint(Generic[A]):
    """A checkpoint in memory: its manifest, the digests of all blocks, and the arena.

    `shortcuts` and `stamps` are as in `mx.storage.landing.Filled`.
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


def load_checkpoint(
    path: Path,
    arena_of: Callable[[Layout], A],
    *,
    layout_version: int | None = None,
    shortcuts: bool = False,
    threads: int,
    follow: Collection[Path] = (),
    opened: Callable[[Checkpoint], None] = lambda checkpoint: None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LoadedCheckpoint[A]:
    """Read a checkpoint once into a new arena, hashing it on the way.

    Args:
        path: A safetensors file, or a folder.
        arena_of: Makes the arena, given the layout.
        layout_version: As for `plan_layout`.
        shortcuts: Whether to compute the shortcut digests too.
        threads: How many threads read.
        follow: Folders that links of side files may lead to.
        opened: Called with the checkpoint, whose side files are read, before its tensors are.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        cancelled: Called while reading; returning True stops it.

    Returns:
        The manifest, the digests, and the arena, which the caller owns.

    Raises:
        CheckpointError: The checkpoint is malformed.
        ConfigError: There is no checkpoint at `path`, or this user may not read it.
        CapacityError: There is too little memory; raised before any is allocated.
        LocalError: The disk fails.
        ClosedError: `cancelled` returned True.
    """
    checkpoint = open_checkpoint(path, follow)
    opened(checkpoint)
    return load_opened(
        checkpoint,
        arena_of,
        layout_version=layout_version,
        shortcuts=shortcuts,
        threads=threads,
        progress=progress,
        cancelled=cancelled,
    )


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
) -> LoadedCheckpoint[A]:
    """Read a checkpoint whose headers were read, as `load_checkpoint` does.

    `in_layer_order` is as for `fill`. `on_layer` is called on reader threads with each layer that
    is complete, where the arena is host memory.
    """
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases, layout_version)
    total = layout.payload_nbytes
    arena = arena_of(layout)
    try:
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
                progress=None if progress is None else (lambda done: progress(done, total)),
                cancelled=cancelled,
                on_layer=there.on_layer or on_layer,
            )
        manifest = manifests.encode(
            layout,
            checkpoint.packaging,
            filled.roots,
            checkpoint.side_documents,
        )
        manifest = replace(manifest, notes=checkpoint.notes)
    except BaseException:
        arena.release()
        raise
    pages = Pages.whole(manifest, filled.pages)
    return LoadedCheckpoint(manifest, pages, filled.shortcuts, arena, filled.stamps)
