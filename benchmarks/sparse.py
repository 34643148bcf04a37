"""Serves a huge model in a sealed sparse memfd, to measure attaching and control work at that size.

Everything is real: manifest, block digests, coordinator, leases, transports; all bytes are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mx import api, config, plugins, runtime
from mx.core import manifest as manifests
from mx.core.digest import block_digest, tensor_root
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages
from mx.core.types import ModelKey, Packaging
from mx.memory.arena import MemfdArena
from mx.source.model import SourceModel

from .checkpoints import llama_shapes


class SparseArena(MemfdArena):
    """A `MemfdArena` that does not check for free memory, since none is touched."""

    require_memory = False


@functools.cache
def _digests(nbytes: int) -> bytes:
    """Return the digests of the blocks of a tensor of zeros."""
    whole, rest = divmod(nbytes, BLOCK_BYTES)
    last = block_digest(bytes(rest)) if rest else b""
    return block_digest(bytes(BLOCK_BYTES)) * whole + last


def shapes_of(count: int, nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model of so many tensors and about so many bytes in bfloat16: a
    Llama of 80 layers, or for more tensors a mixture of experts."""
    if count <= 723:
        hidden, layers = 8192, 80
        intermediate = int((nbytes / 2 / layers - 4 * hidden * hidden) / (3 * hidden))
        return llama_shapes(layers, hidden, intermediate, 1024)
    shape = (nbytes // 2 // count // 1024, 1024)
    return {
        f"model.layers.{index // 768}.mlp.experts.{index // 3 % 256}.w{index % 3}.weight": shape
        for index in range(count)
    }


def _held(shapes: Mapping[str, tuple[int, ...]], name: str) -> SourceModel:
    layout = manifests.plan_layout(
        [manifests.TensorSpec(tensor, "BF16", shape) for tensor, shape in shapes.items()]
    )
    arena = SparseArena(layout.arena_nbytes, name=name)
    arena.seal()
    roots = {each.name: tensor_root(each.nbytes, _digests(each.nbytes)) for each in layout.tensors}
    manifest = manifests.encode(layout, Packaging(), roots)
    pages = [b"".join([_digests(nbytes) for _, nbytes in layer.extents]) for layer in layout.layers]
    return SourceModel(ModelKey(name), manifest, arena, Pages.whole(manifest, pages))


@contextmanager
def sparse_source(
    shapes: Mapping[str, tuple[int, ...]],
    coordinator: str,
    name: str,
    settings: config.Settings | None = None,
) -> Iterator[None]:
    """Serve a model of these tensors, all zero, while the block runs."""
    loop = runtime.acquire()
    try:
        options = api.source_options(settings or config.load())
        server = loop.run(api.start_source(options, plugins.transports()))
        try:
            loop.run(api.offer(server, _held(shapes, name), coordinator))
            yield
        finally:
            loop.run(server.close())
    finally:
        runtime.release(loop)
