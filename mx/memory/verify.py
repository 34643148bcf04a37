"""Checks of bytes that are already in memory: chunk digests, and identity for `strong`."""

from __future__ import annotations

from blake3 import blake3

from mx.core.digest import chunk_digest
from mx.core.types import Manifest
from mx.errors import DigestError
from mx.memory.device import HostReader
from mx.transport import Span


def check_chunks(manifest: Manifest, arena: Span, layer: int, reader: HostReader) -> None:
    """Hash a layer's chunks again, on the host. Raises DigestError naming the first that
    differs."""
    grid = manifest.grid
    for index in grid.of_layer(layer):
        segments = grid.segments(grid[index])
        views = [reader.whole(arena[s.arena_offset : s.arena_offset + s.nbytes]) for s in segments]
        if chunk_digest(segments, views) != manifest.chunking.digest(index):
            name = manifest.layout.layers[layer].name
            raise DigestError(f"chunk {index} of layer {name} does not match its digest")


def tensors_of_layers(manifest: Manifest) -> list[list[tuple[str, int, int]]]:
    """(name, arena offset, nbytes) of each layer's tensors."""
    found: list[list[tuple[str, int, int]]] = [[] for _ in manifest.layout.layers]
    for tensor in manifest.layout.tensors:
        base = manifest.layout.layers[tensor.layer].arena_offset
        found[tensor.layer].append((tensor.name, base + tensor.offset, tensor.nbytes))
    return found


def check_identity(
    manifest: Manifest, arena: Span, tensors: list[tuple[str, int, int]], reader: HostReader
) -> None:
    """Compare tensors with the blake3 digests that the identity is made of.

    Raises DigestError naming the first that differs: then the chunk digests were a lie.
    """
    for name, offset, nbytes in tensors:
        state = blake3()
        for piece in reader.pieces(arena[offset : offset + nbytes]):
            state.update(piece)
        if state.digest() != manifest.tensor_digests[name]:
            raise DigestError(
                f"tensor {name} is not the one that the model's identity names",
                hint="the source lied about the model; do not use it",
            )
