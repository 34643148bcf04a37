"""Sources of the same weights in other layouts and chunk sizes take over those that are listed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mx import api
from mx.core import manifest as manifests
from mx.core.layout import build_layout
from mx.core.pages import Pages
from mx.core.types import Layout, ModelKey, Packaging
from mx.memory.arena import MemfdArena
from mx.memory.tensors import state_dict
from mx.source.model import HeldModel
from mx.units import MIB
from tests.integration.lying import offering
from tests.support.checkpoints import content
from tests.support.hashing import pages_of, roots_of

SHAPES = {
    "model.embed_tokens.weight": (300_000,),
    "model.layers.0.mlp.weight": (2 * MIB + 5,),
    "model.layers.0.norm.weight": (77,),
    "model.layers.1.mlp.weight": (3 * MIB - 1,),
    "model.layers.1.norm.weight": (0,),
    "lm_head.weight": (MIB,),
}


def usual() -> Layout:
    return manifests.plan_layout([manifests.TensorSpec(n, "U8", s) for n, s in SHAPES.items()])


def turned_round() -> Layout:
    """The layout of a source that has the layers, and the tensors in them, the other way round."""
    layers = usual()
    names = [tensor.name for tensor in reversed(layers.tensors)]
    order = [(layer.name, len(layer.extents)) for layer in reversed(layers.layers)]
    kinds = sorted({("U8", shape, ()) for shape in SHAPES.values()})
    kind = [kinds.index(("U8", SHAPES[name], ())) for name in names]
    return build_layout(order, names, kinds, kind, ())


def held(layout: Layout, chunk_nbytes: int = MIB) -> HeldModel:
    """Weights that depend on the tensors' names alone, in this layout."""
    arena = MemfdArena(layout.arena_nbytes, name="adoption")
    for tensor in layout.tensors:
        at = layout.layers[tensor.layer].arena_offset + tensor.offset
        seed = sorted(SHAPES).index(tensor.name)
        arena.view[at : at + tensor.nbytes] = np.random.default_rng(seed).bytes(tensor.nbytes)
    manifest = manifests.encode(
        layout, Packaging(), roots_of(layout, arena.view), chunk_nbytes=chunk_nbytes
    )
    pages = Pages.whole(manifest, pages_of(layout, arena.view))
    arena.seal()
    return HeldModel(ModelKey("m"), manifest, arena, pages)


@pytest.fixture
def expected() -> dict[str, bytes]:
    model = held(usual())
    found = content(memoryview(model.arena.view), model.manifest.layout)  # type: ignore[arg-type]
    model.arena.release()
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    "other", [lambda: held(turned_round()), lambda: held(usual(), 3 * MIB)], ids=["layout", "chunk"]
)
def test_a_source_that_has_adopted_a_layout_is_read_alone(
    coordinator: str, transport: str, other: Callable[[], HeldModel], expected: dict[str, bytes]
) -> None:
    first, second = held(usual()), other()
    assert second.manifest.ref.identity == first.manifest.ref.identity
    assert not second.manifest.ref.same_chunks(first.manifest.ref)
    with offering(first, coordinator) as endpoint, offering(second, coordinator) as adopting:
        listed = api.list_sources("m", coordinator=coordinator)
        assert {each.record.endpoint for each in listed} == {endpoint, adopting}
        assert len({each.record.ref for each in listed}) == 1
        sources = {each.record.endpoint: each.record for each in listed}
        with api.pull("m", peer=adopting, transport=transport, attach=False) as pull:
            report = pull.wait(60)
            got = state_dict(pull.buffer(), first.manifest.layout)
            assert {n: t.numpy().tobytes() for n, t in got.items()} == expected
    assert [path.source for path in report.paths] == [adopting]
    assert report.manifest == sources[endpoint].ref.identity.hex()


def test_memory_that_is_laid_out_otherwise_is_copied_and_never_attached(
    coordinator: str, expected: dict[str, bytes]
) -> None:
    first, second = held(usual()), held(turned_round())
    with offering(first, coordinator), offering(second, coordinator) as adopting:
        with api.pull("m", peer=adopting) as pull:
            report = pull.wait(60)
            got = state_dict(pull.buffer(), first.manifest.layout)
            assert {n: t.numpy().tobytes() for n, t in got.items()} == expected
        assert not any(path.attached for path in report.paths)


def test_a_pull_reads_from_both_at_once(coordinator: str, expected: dict[str, bytes]) -> None:
    first, second = held(usual()), held(turned_round())
    with (
        offering(first, coordinator),
        offering(second, coordinator),
        api.pull("m", coordinator=coordinator, transport="tcp") as pull,
    ):
        pull.wait(60)
        got = state_dict(pull.buffer(), first.manifest.layout)
        assert {n: t.numpy().tobytes() for n, t in got.items()} == expected
