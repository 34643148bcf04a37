"""Reads a model from this machine's disk, by request or as a fallback."""

from __future__ import annotations

from collections.abc import Callable

from mx.core.types import Manifest
from mx.errors import CheckpointError
from mx.memory.arena import Arena
from mx.storage.load import load_checkpoint
from mx.storage.staging import Staging
from mx.target.options import PullOptions


def load(
    options: PullOptions,
    *,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> tuple[Manifest, Arena]:
    """Read the checkpoint at `options.disk` into an arena, which the caller owns. Blocks. Raises
    errors of `load_checkpoint`, of `Staging` for `out`, which is checked first, and CheckpointError
    if the identity is not the pinned one."""
    assert options.disk is not None
    if options.out is not None:
        Staging(options.out).leave()
    manifest, arena = load_checkpoint(
        options.disk,
        options.new_arena,
        chunk_nbytes=options.chunk_nbytes,
        threads=2,
        progress=progress,
        cancelled=cancelled,
    )
    pin = options.name.partition("@")[2]
    if options.fall_back_to_disk and not manifest.ref.pinned_by(pin):
        arena.release()
        held = f"{manifest.ref.identity.hex()} ({manifest.ref.pin.hex()} with its files)"
        raise CheckpointError(f"{options.disk} holds {held}, not {pin} as requested")
    return manifest, arena
