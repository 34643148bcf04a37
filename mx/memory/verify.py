"""Checks of bytes that are already in memory against the roots of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from mx.core.digest import block_digest, tensor_root
from mx.core.grid import BLOCK_BYTES
from mx.core.types import Manifest
from mx.errors import ConfigError, DigestError
from mx.memory.device import HostReader
from mx.text import listed
from mx.transport import View, contiguous


def wrong_tensors(manifest: Manifest, layer: int, space: View, reader: HostReader) -> Iterator[int]:
    """Hash a layer's tensors, on the host, and yield those that differ from their roots.

    Args:
        manifest: The model's manifest.
        layer: The layer's index.
        space: The layer's space.
        reader: Reads `space`, on the host or a GPU.

    Returns:
        The numbers of the tensors, counted in the layer, ascending.

    Raises:
        CudaError: The bytes can't be read.
    """
    place = manifest.layout.layers[layer]
    for number, (offset, nbytes) in enumerate(place.extents):
        digests = [
            block_digest(piece[at : at + BLOCK_BYTES])
            for piece in reader.pieces(contiguous(space[offset : offset + nbytes]))
            for at in range(0, len(piece), BLOCK_BYTES)
        ]
        if tensor_root(nbytes, b"".join(digests)) != manifest.roots[place.first_tensor + number]:
            yield number


def check_layer(manifest: Manifest, arena: View, layer: int, reader: HostReader) -> None:
    """Hash every block of a layer, on the host, and compare its tensors with the identity.

    Args:
        manifest: The model's manifest.
        arena: The memory of the whole model.
        layer: The layer's index.
        reader: Reads `arena`, on the host or a GPU.

    Raises:
        DigestError: A tensor differs. It names the first one.
        CudaError: The bytes can't be read.
    """
    place = manifest.layout.layers[layer]
    space = arena[place.arena_offset : place.arena_offset + place.nbytes]
    for number in wrong_tensors(manifest, layer, space, reader):
        name = manifest.layout.tensors[place.first_tensor + number].name
        raise DigestError(
            f"tensor {name} does not match the model's identity",
            hint="the source's memory is damaged; do not use it",
        )


def check_overlapping(manifest: Manifest, arena: View, layers: Iterable[int]) -> None:
    """Hash layers whose tensors share memory, after all of them were filled: each write to one
    tensor was one to another. Blocks.

    Args:
        manifest: The model's manifest.
        arena: The memory of the whole model, on the host or a GPU.
        layers: The layers.

    Raises:
        ConfigError: In the model they do not hold the same bytes where they share memory here.
    """
    wrong = []
    with contextlib.closing(HostReader()) as reader:
        for layer in sorted(layers):
            place = manifest.layout.layers[layer]
            space = arena[place.arena_offset : place.arena_offset + place.nbytes]
            for number in wrong_tensors(manifest, layer, space, reader):
                wrong.append(manifest.layout.tensors[place.first_tensor + number].name)
    if wrong:
        raise ConfigError(
            f"{listed(wrong)}: shares memory with another tensor of `into`, and in the model the "
            "two hold different bytes",
            hint="give each of them memory of its own",
        )
