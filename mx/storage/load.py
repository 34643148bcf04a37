"""A checkpoint from disk into an arena: layout, one hashed read, manifest."""

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
    """What `mx.memory` makes: host memory, or a GPU's with a way to fill it."""

    @property
    def view(self) -> Span: ...
    def release(self) -> None: ...


A = TypeVar("A", bound=FillableArena)


@contextlib.contextmanager
def destination(
    arena: FillableArena, layout: Layout
) -> Iterator[tuple[memoryview, Callable[[int], None] | None]]:
    """Host memory to fill `arena` through, and what wants to hear of complete layers: the arena
    itself and nobody, or a window whose layers go to the GPU one by one."""
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
    """Read `path` once into the arena that `arena_of(nbytes)` makes, hashing on the way.

    `progress` is told (bytes so far, bytes in all) from reader threads. The caller owns the
    arena. Raises CheckpointError for what is malformed, CapacityError before anything is
    allocated where memory is short, LocalError where the disk fails.
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
