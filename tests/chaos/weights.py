"""The model of the chaos rounds, and the digests of its tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from benchmarks.checkpoints import llama_shapes, write_checkpoint

#: About 16 MB in 10 layers; 18 chunks of 1 MiB.
SHAPES = llama_shapes(8, 256, 768, 2048)


def write(path: Path) -> None:
    write_checkpoint(path, SHAPES)


def digests(path: Path) -> dict[str, str]:
    """Return the blake3 of each tensor of a safetensors file, read without mx's code."""
    return {name: blake3(data).hexdigest() for name, data in _tensors(path)}


def _tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[8 + length + begin : 8 + length + end]


def wrong(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the tensors that differ, are missing or do not belong there."""
    return sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
