"""Reads a whole model from a store: by request, or because no source has described it."""

from __future__ import annotations

from collections.abc import Callable

from mx.core.types import Layout, ManifestRef
from mx.errors import CheckpointError
from mx.memory.live import Memory
from mx.memory.subset import SubsetMemory
from mx.storage.load import Loaded, load_opened
from mx.storage.safetensors import Checkpoint
from mx.storage.staging import Staging
from mx.storage.stores import OBJECTS, Opening, Store
from mx.target.options import PullOptions


def load(
    store: Store,
    options: PullOptions,
    opening: Opening,
    *,
    expected: ManifestRef | None = None,
    opened: Callable[[Checkpoint], None],
    began: Callable[[], None],
    progress: Callable[[int, int], None],
    early: Callable[[Layout, Memory], Callable[[int], None]] | None = None,
) -> Loaded[Memory | SubsetMemory]:
    """Read the checkpoint in a store into an arena, which the caller owns. Blocks.

    With a selection it is read and hashed whole all the same, through bounded buffers: its identity
    is that of all its bytes.

    Args:
        store: The store.
        options: The pull's options. `out` is checked before anything is read.
        opening: What the store needs; its `cancelled` stops the read.
        expected: What the coordinator says that the name means; None: nothing.
        opened: Called with the checkpoint before its weights are read. Until they are, a pin proves
            nothing of it.
        began: Called once the memory is there, before anything is written to it.
        progress: Called with (bytes so far, bytes in total), from reader threads.
        early: Called with the layout and the memory; returns what is called with each layer that
            is complete, before anything says that the checkpoint is. None: no caller may see
            a layer before, since a pin, `out` or another step has to wait for the whole.

    Raises:
        CheckpointError: The checkpoint is malformed, or not the pinned or expected one.
        MxError: As `Store.open` and `load_opened`, and for `out` as `Staging`.
    """
    if options.out is not None:
        Staging(options.out).leave()

    def arena_of(layout: Layout) -> Memory | SubsetMemory:
        if options.selection is None:
            arena = options.new_arena(layout)
            began()
            if early is not None:
                announce.append(early(layout, arena))
            return arena
        subset = options.selection.of(layout)
        arena = options.new_arena(subset.layout)
        began()
        return SubsetMemory(subset, arena)

    announce: list[Callable[[int], None]] = []

    def on_layer(layer: int) -> None:
        for each in announce:
            each(layer)

    checkpoint = store.open(opening)
    opened(checkpoint)
    loaded: Loaded[Memory | SubsetMemory] = load_opened(
        checkpoint,
        arena_of,
        chunk_nbytes=options.chunk_nbytes,
        threads=store.threads,
        in_layer_order=store.step == OBJECTS,
        on_layer=on_layer,
        progress=progress,
        cancelled=opening.cancelled,
    )
    ref = loaded.manifest.ref
    held = f"{store.place} holds {ref.identity.hex()} ({ref.pin.hex()} with its files)"
    if not ref.pinned_by(options.pin):
        loaded.arena.release()
        raise CheckpointError(f"{held}, not {options.pin} as requested")
    if expected is not None and expected.identity != ref.identity:
        loaded.arena.release()
        name = options.key
        raise CheckpointError(
            f"{held}, not {expected.identity.hex()} as the coordinator lists for {name}",
            hint="NAME@PIN insists on the weights of one or the other",
        )
    return loaded
