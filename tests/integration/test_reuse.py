"""What is held in this process is not moved: the revision before, a base and its fine-tune."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from mx import api, config
from mx.api.reuse import held_by
from mx.core import reuse
from mx.core.pages import Pages
from mx.core.types import ModelKey
from mx.errors import ConfigError
from mx.source.model import SourceModel, hold_tensors
from mx.transport import host_view
from mx.units import MIB
from tests.support.described import describe
from tests.support.manifests import in_chunks
from tests.support.outcomes import error_of
from tests.support.tensors import same

pytestmark = pytest.mark.integration

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    """A tied embedding, six layers of two tensors (with padding between them), a norm; 25 MB."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = {"model.embed_tokens.weight": some(1000, 512)}
    for layer in range(6):
        found[f"model.layers.{layer}.mlp.weight"] = some(1000, 1023)
        found[f"model.layers.{layer}.norm.weight"] = some(33)
    found["model.norm.weight"] = some(512)
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def tuned(base: Weights, *names: str) -> Weights:
    return {name: tensor + 1 if name in names else tensor for name, tensor in base.items()}


def moved(pull: api.Pull) -> dict[str, int]:
    """Bytes by way."""
    paths = pull.wait(30).paths
    for path in paths:
        assert path.transport != "reuse" or path.source == "local"
    return {path.transport: path.bytes for path in paths}


@pytest.mark.parametrize(
    ("hold", "transport", "verify"),
    [(True, None, "chunks"), (False, "tcp", "chunks"), (False, None, "strong")],
)
def test_only_what_changed_is_moved(
    coordinator: str,
    settings: config.Settings,
    hold: bool,
    transport: str | None,
    verify: str,
) -> None:
    old = weights()
    new = tuned(old, "model.layers.2.norm.weight")
    with (
        api.serve(old, model="m", coordinator=coordinator, settings=settings) as source,
        api.pull("m", coordinator=coordinator, hold=True) as first,
        first.hold(),
    ):
        source.update(new)
        with api.pull(
            "m",
            coordinator=coordinator,
            reuse=first,
            attach=False,
            hold=hold,
            transport=transport,
            verify=verify,
        ) as pull:
            by = moved(pull)
            assert same(pull.state_dict(), new)
        assert same(first.state_dict(), old)
        total = sum(tensor.nbytes for tensor in new.values()) - new["lm_head.weight"].nbytes
        assert sum(by.values()) == total
        # The norm is in the last chunk of its layer, which is less than a chunk.
        assert 0 < sum(by.values()) - by["reuse"] < MIB


def test_a_base_and_its_fine_tune_share_what_they_share(coordinator: str) -> None:
    base = weights()
    fine = tuned(base, "model.layers.0.mlp.weight", "model.norm.weight")
    with (
        api.serve(base, model="base", coordinator=coordinator) as first,
        api.serve(fine, model="fine", coordinator=coordinator),
        api.pull(
            "fine", coordinator=coordinator, reuse=[first], transport="tcp", attach=False
        ) as pull,
    ):
        by = moved(pull)
        assert same(pull.state_dict(), fine)
        assert by["tcp"] == sum(
            fine[name].nbytes
            for name in (
                "model.layers.0.mlp.weight",
                "model.layers.0.norm.weight",
                "model.norm.weight",
            )
        )


def test_what_is_all_there_is_not_moved_at_all(coordinator: str) -> None:
    base = weights()
    with (
        api.serve(base, model="base", coordinator=coordinator) as first,
        api.serve(base, model="copy", coordinator=coordinator),
        api.pull("copy", coordinator=coordinator, reuse=first, attach=False) as pull,
    ):
        assert moved(pull).keys() == {"reuse"}
        assert same(pull.state_dict(), base)


def test_held_memory_that_was_written_to_is_not_believed(coordinator: str) -> None:
    base = weights()
    name = "model.layers.3.mlp.weight"
    with (
        api.serve(base, model="m", coordinator=coordinator),
        api.pull("m", coordinator=coordinator, attach=False) as first,
    ):
        first.state_dict()[name].add_(1)
        with api.pull("m", coordinator=coordinator, attach=False, reuse=first) as pull:
            by = moved(pull)
            assert same(pull.state_dict(), base)
            assert sum(by.values()) - by["reuse"] >= base[name].nbytes


def test_the_pull_keeps_no_memory_of_what_it_reused(coordinator: str) -> None:
    base = weights()
    with api.serve(base, model="m", coordinator=coordinator):
        first = api.pull("m", coordinator=coordinator, attach=False)
        mapping = _weakly(first.buffer)
        for attach in (False, True):
            with api.pull("m", coordinator=coordinator, attach=attach, reuse=first) as pull:
                pull.wait(30)
                if attach:
                    first.close()
                    assert mapping() is None


def _weakly(buffer: Callable[[], memoryview]) -> Callable[[], object]:
    return weakref.ref(buffer().obj)


def test_layers_are_the_same_however_they_are_cut_and_named() -> None:
    base = weights()
    renamed = {name.replace("mlp", "ffn"): tensor for name, tensor in base.items()}
    large, small = _held(base), _held(renamed)
    in_chunks(large.manifest, 16 * MIB)
    try:
        held = reuse.ReusableWeights(large.manifest, large.pages, host_view(large.arena.view))
        copies = reuse.same_chunks(small.manifest, small.pages, [held])
        assert copies.keys() == set(range(len(small.manifest.grid)))
        unknown = held._replace(pages=Pages(large.manifest))
        assert reuse.same_chunks(small.manifest, small.pages, [unknown]) == {}
        assert reuse.same_chunks(small.manifest, Pages(small.manifest), [held]) == {}
    finally:
        large.arena.release()
        small.arena.release()


def _held(tensors: Weights) -> SourceModel:
    return hold_tensors(*describe(tensors), ModelKey("m"))


def test_what_holds_nothing_is_refused(coordinator: str) -> None:
    with api.pull("absent", coordinator=coordinator) as failing:
        error = error_of(failing)
        with pytest.raises(type(error)):
            api.pull("m", coordinator=coordinator, reuse=failing)


def test_what_is_reused_has_weights() -> None:
    class Holder:
        manifest = None
        pages = None

        def memory(self) -> memoryview:
            return memoryview(b"")

    with pytest.raises(ConfigError, match="no weights"):
        held_by(Holder())
    assert held_by(()) == []
