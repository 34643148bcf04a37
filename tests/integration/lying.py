"""A source with false records or bytes, in this process: for what honest code never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from mx import api, config, plugins, runtime
from mx.core import manifest as manifests
from mx.core.digest import chunk_digest
from mx.core.types import ChunkGrid, Chunking, ModelKey, Packaging
from mx.memory.arena import MemfdArena
from mx.source.model import HeldModel
from mx.transport import host_view
from mx.units import MIB

LAYERS = 12
LAYER_NBYTES = 2 * MIB


def held_model(name: str, *, corrupt: Callable[[memoryview], None] | None = None) -> HeldModel:
    """12 layers of 2 MiB with right digests; `corrupt` changes the bytes after hashing."""
    specs = [
        manifests.TensorSpec(f"model.layers.{index}.mlp.weight", "U8", (LAYER_NBYTES,))
        for index in range(LAYERS)
    ]
    layout = manifests.plan_layout(specs)
    arena = MemfdArena(layout.arena_nbytes, name=name)
    arena.view[:] = np.random.default_rng(7).bytes(layout.arena_nbytes)
    grid = ChunkGrid(layout, MIB)
    digests = b""
    for chunk in grid:
        segments = grid.segments(chunk)
        digests += chunk_digest(
            segments, [arena.view[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
        )
    tensors = {
        tensor.name: manifests_digest(
            arena.view[layout.layers[tensor.layer].arena_offset + tensor.offset :][: tensor.nbytes]
        )
        for tensor in layout.tensors
    }
    if corrupt is not None:
        corrupt(arena.view)
    arena.seal()
    manifest = manifests.encode(layout, Chunking(MIB, digests), Packaging(), tensors)
    return HeldModel(ModelKey(name), manifest, arena)


def manifests_digest(view: memoryview) -> bytes:
    from blake3 import blake3

    return blake3(view).digest()


def with_honest_chunks(held: HeldModel) -> HeldModel:
    """The same bytes with chunk digests made to fit them: only the identity shows it."""
    grid = held.manifest.grid
    view = host_view(held.arena.view)
    digests = b""
    for chunk in grid:
        segments = grid.segments(chunk)
        digests += chunk_digest(
            segments, [view[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
        )
    manifest = manifests.encode(
        held.manifest.layout, Chunking(MIB, digests), Packaging(), held.manifest.tensor_digests
    )
    return replace(held, manifest=manifest)


@contextmanager
def offering(held: HeldModel, coordinator: str) -> Iterator[str]:
    """Serve it; yields the endpoint."""
    loop = runtime.acquire()
    try:
        options = api.source_options(config.load(environ={"HOME": "/nonexistent"}))
        server = loop.run(api.start_source(options, plugins.transports()))
        try:
            loop.run(api.offer(server, held, coordinator))
            yield server.endpoint
        finally:
            loop.run(server.close())
    finally:
        runtime.release(loop)
