"""Reads a model from this machine's disk, by request or as a fallback."""

from __future__ import annotations

from collections.abc import Callable

from mx.core.types import Layout
from mx.errors import CheckpointError
from mx.memory.live import Memory
from mx.memory.subset import SubsetMemory
from mx.storage.load import Loaded, load_checkpoint
from mx.storage.safetensors import Checkpoint
from mx.storage.staging import Staging
from mx.target.options import PullOptions


def load(
    options: PullOptions,
    *,
    opened: Callable[[Checkpoint], None],
    began: Callable[[], None],
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> Loaded[Memory | SubsetMemory]:
    """Read the checkpoint at `options.disk` into an arena, which the caller owns. Blocks.

    With a selection it is read and hashed whole all the same, through bounded buffers: its identity
    is that of all its bytes.

    Args:
        options: The pull's options. `out` is checked before anything is read.
        opened: Called with the checkpoint before its weights are read. Until they are, a pin proves
            nothing of it.
        began: Called once the memory is there, before anything is written to it.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        cancelled: Called while reading; returning True stops it.

    Raises:
        CheckpointError: The checkpoint is malformed, or not the pinned one.
        MxError: As `load_checkpoint`, and for `out` as `Staging`.
    """
    assert options.disk is not None
    if options.out is not None:
        Staging(options.out).leave()

    def arena_of(layout: Layout) -> Memory | SubsetMemory:
        if options.selection is None:
            arena = options.new_arena(layout)
            began()
            return arena
        subset = options.selection.of(layout)
        arena = options.new_arena(subset.layout)
        began()
        return SubsetMemory(subset, arena)

    loaded: Loaded[Memory | SubsetMemory] = load_checkpoint(
        options.disk,
        arena_of,
        chunk_nbytes=options.chunk_nbytes,
        threads=2,
        opened=opened,
        progress=progress,
        cancelled=cancelled,
    )
    ref, pin = loaded.manifest.ref, options.name.partition("@")[2]
    if not ref.pinned_by(pin):
        loaded.arena.release()
        held = f"{ref.identity.hex()} ({ref.pin.hex()} with its files)"
        raise CheckpointError(f"{options.disk} holds {held}, not {pin} as requested")
    return loaded
