"""Loads a checkpoint from disk into an arena: layout, one hashed read, manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from mx.core import manifest as manifests
from mx.core.types import Chunking, Layout, Manifest
from mx.memory.device import DeviceArena
from mx.storage.reader import fill
from mx.storage.safetensors import open_checkpoint
from mx.transport import Span, host_view


class FillableArena(Protocol):
    """An arena of `mx.memory`: host memory, or GPU memory that can be filled from the host."""

    @property
    def view(self) -> Span: ...
    def release(self) -> None: ...


A = TypeVar("A", bound=FillableArena)


@contextlib.contextmanager
def destination(
    arena: FillableArena, layout: Layout
) -> Iterator[tuple[memoryview, Callable[[int], None] | None]]:
    """Give the host memory to fill an arena through, for the length of the block.

    For host memory it is the arena itself, and None. For GPU memory it is a window, and a function
    to call with the index of each complete layer, which copies that layer to the GPU.
    """
    if not isinstance(arena, DeviceArena):
        yield host_view(arena.view), None
        return
    with arena.filling() as window:

        def layer_done(index: int) -> None:
            layer = layout.layers[index]
            window.layer_done(layer.arena_offset, layer.nbytes)

        yield window.view, layer_done


def load_checkpoint(
    path: Path,
    arena_of: Callable[[int], A],
    *,
    chunk_nbytes: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Manifest, A]:
    """Read a checkpoint once into a new arena, hashing it on the way.

    Args:
        path: A safetensors file, or a folder.
        arena_of: Makes the arena, given its length in bytes.
        chunk_nbytes: The chunk size of the manifest.
        threads: How many threads read.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        cancelled: Called while reading; returning True stops it.

    Returns:
        The manifest and the arena, which the caller owns.

    Raises:
        CheckpointError: The checkpoint is malformed.
        ConfigError: There is no checkpoint at `path`, or this user may not read it.
        CapacityError: There is too little memory; raised before any is allocated.
        LocalError: The disk fails.
        ClosedError: `cancelled` returned True.
    """
    checkpoint = open_checkpoint(path)
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases)
    total = layout.payload_nbytes
    arena = arena_of(layout.arena_nbytes)
    try:
        with destination(arena, layout) as (view, on_layer):
            filled = fill(
                checkpoint,
                layout,
                view,
                chunk_nbytes=chunk_nbytes,
                threads=threads,
                progress=None if progress is None else (lambda done: progress(done, total)),
                cancelled=cancelled,
                on_layer=on_layer,
            )
        manifest = manifests.encode(
            layout,
            Chunking(chunk_nbytes, filled.chunk_digests),
            checkpoint.packaging,
            filled.tensor_digests,
            checkpoint.side_documents,
        )
    except BaseException:
        arena.release()
        raise
    return manifest, arena
