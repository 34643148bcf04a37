"""A checkpoint from disk into an arena: layout, one hashed read, manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from mx.core import manifest as manifests
from mx.core.types import Chunking, Manifest
from mx.storage.reader import fill
from mx.storage.safetensors import open_checkpoint


class WritableArena(Protocol):
    view: memoryview

    def release(self) -> None: ...


A = TypeVar("A", bound=WritableArena)


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
        filled = fill(
            checkpoint,
            layout,
            arena.view,
            chunk_nbytes=chunk_nbytes,
            threads=threads,
            progress=None if progress is None else (lambda done: progress(done, total)),
            cancelled=cancelled,
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
