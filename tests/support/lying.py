"""A source with false records or bytes, in this process: for what honest code never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from mx import api, config, plugins, runtime
from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.types import ModelKey, Packaging
from mx.memory.arena import MemfdArena
from mx.source.doubts import Doubts
from mx.source.model import SourceModel
from mx.transport import host_view
from mx.units import MIB
from tests.support.hashing import pages_of, roots_of, shortcuts_of
from tests.support.lies import insist, lie

LAYERS = 12
LAYER_NBYTES = 2 * MIB


def held_model(name: str, *, corrupt: Callable[[memoryview], None] | None = None) -> SourceModel:
    """12 layers of 2 MiB with right digests; `corrupt` changes the bytes after hashing."""
    specs = [
        manifests.TensorSpec(f"model.layers.{index}.mlp.weight", "U8", (LAYER_NBYTES,))
        for index in range(LAYERS)
    ]
    layout = manifests.plan_layout(specs)
    arena = MemfdArena(layout.arena_nbytes, name=name)
    arena.view[:] = np.random.default_rng(7).bytes(layout.arena_nbytes)
    manifest = manifests.encode(layout, Packaging(), roots_of(layout, arena.view))
    pages = Pages.whole(manifest, pages_of(layout, arena.view))
    shortcuts = shortcuts_of(layout, arena.view)
    if corrupt is not None:
        corrupt(arena.view)
    arena.seal()
    return SourceModel(ModelKey(name), manifest, arena, pages, shortcuts=shortcuts)


def with_pages_to_match(held: SourceModel) -> SourceModel:
    """The same bytes with block digests made to fit them: only the identity shows it."""
    layout, view = held.manifest.layout, host_view(held.arena.view)
    pages = Pages.whole(held.manifest, pages_of(layout, view))
    return replace(held, pages=pages, shortcuts=shortcuts_of(layout, view))


@contextmanager
def offering(held: SourceModel, coordinator: str) -> Iterator[str]:
    """Serve it, and insist that it is right when readers ask; yields the endpoint."""
    honest, loop = Doubts.add, runtime.acquire()
    try:
        insist()
        options = api.source_options(config.load(environ={"HOME": "/nonexistent"}))
        server = loop.run(api.start_source(options, plugins.transports()))
        try:
            loop.run(api.offer(server, held, coordinator))
            yield server.endpoint
        finally:
            loop.run(server.close())
    finally:
        lie(Doubts, "add", honest)
        runtime.release(loop)
