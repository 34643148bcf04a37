"""Checks of bytes that are already in memory: chunk digests, and identity for `strong`."""

from __future__ import annotations

from blake3 import blake3

from mx.core.digest import chunk_digest
from mx.core.types import Manifest
from mx.errors import DigestError
from mx.memory.device import HostReader
from mx.transport import Span


def check_chunks(manifest: Manifest, arena: Span, layer: int, reader: HostReader) -> None:
    """Hash a layer's chunks again, on the host. Raises DigestError for the first chunk that
    differs."""
    grid = manifest.grid
    for index in grid.of_layer(layer):
        segments = grid.segments(grid[index])
        views = [reader.whole(arena[s.arena_offset : s.arena_offset + s.nbytes]) for s in segments]
        if chunk_digest(segments, views) != manifest.chunking.digest(index):
            name = manifest.layout.layers[layer].name
            raise DigestError(f"chunk {index} of layer {name} does not match its digest")


def tensors_of_layers(manifest: Manifest) -> list[list[tuple[str, int, int]]]:
    """Return the tensors of each layer, as (name, arena offset, nbytes)."""
    found: list[list[tuple[str, int, int]]] = [[] for _ in manifest.layout.layers]
    for tensor in manifest.layout.tensors:
        base = manifest.layout.layers[tensor.layer].arena_offset
        found[tensor.layer].append((tensor.name, base + tensor.offset, tensor.nbytes))
    return found


def check_identity(
    manifest: Manifest, arena: Span, tensors: list[tuple[str, int, int]], reader: HostReader
) -> None:
    """Compare tensors with the blake3 digests that make up the identity.

    Args:
        manifest: The model's manifest.
        arena: The memory of the whole model.
        tensors: The tensors to compare, as (name, arena offset, nbytes).
        reader: Reads `arena`, on the host or a GPU.

    Raises:
        DigestError: A tensor differs, so the chunk digests were wrong too. It names the first one.
    """
    for name, offset, nbytes in tensors:
        state = blake3()
        for piece in reader.pieces(arena[offset : offset + nbytes]):
            state.update(piece)
        if state.digest() != manifest.tensor_digests[name]:
            raise DigestError(
                f"tensor {name} does not match the model's identity",
                hint="the source gave wrong digests for the model; do not use it",
            )
