"""Serves a huge model in a sealed sparse memfd, to measure attaching at that size.

Everything but the bytes is real: manifest, coordinator, leases, transports. The chunk digests are
not used, since attaching trusts the seal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mx import api, config, plugins, runtime
from mx.core import manifest as manifests
from mx.core.types import CHUNK_BYTES, ChunkGrid, Chunking, ModelKey, Packaging
from mx.memory.arena import MemfdArena
from mx.source.model import HeldModel

from .checkpoints import llama_shapes


class SparseArena(MemfdArena):
    """A `MemfdArena` that does not check for free memory, since none is touched."""

    require_memory = False


def _held(nbytes: int, name: str) -> HeldModel:
    layers = 80
    hidden = 8192
    intermediate = int((nbytes / 2 / layers - 4 * hidden * hidden) / (3 * hidden))
    shapes = llama_shapes(layers, hidden, intermediate, 1024)
    layout = manifests.plan_layout(
        [manifests.TensorSpec(tensor, "BF16", shape) for tensor, shape in shapes.items()]
    )
    arena = SparseArena(layout.arena_nbytes, name=name)
    arena.seal()
    chunks = len(ChunkGrid(layout, CHUNK_BYTES))
    manifest = manifests.encode(
        layout,
        Chunking(CHUNK_BYTES, os.urandom(16) * chunks),
        Packaging(),
        {tensor: os.urandom(32) for tensor in shapes},
    )
    return HeldModel(ModelKey(name), manifest, arena)


@contextmanager
def sparse_source(nbytes: int, coordinator: str, name: str) -> Iterator[None]:
    loop = runtime.acquire()
    try:
        options = api.source_options(config.load())
        server = loop.run(api.start_source(options, plugins.transports()))
        try:
            loop.run(api.offer(server, _held(nbytes, name), coordinator))
            yield
        finally:
            loop.run(server.close())
    finally:
        runtime.release(loop)
