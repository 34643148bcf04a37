"""What a worker of vLLM lends around its calls: a stand-in has the same ones, and real weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mx
from mx import config
from mx.engines.replica.lender import Lender
from mx.engines.replica.loading import RankLoading
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import slots_of
from mx.engines.vllm import worker as watching
from tests.support.daemon import daemon

KEY = mx.ProcessingKey(engine="test", dtype="fp32", state="processed")


class Model(torch.nn.Module):
    """Two tensors, and the method by which engines fill a model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64, bias=False)
        self.second = torch.nn.Linear(64, 64, bias=False)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights.items():
            parameters[name].data.copy_(tensor)


class Worker:
    """The calls of vLLM's worker, which are wrapped once for the class."""

    def __init__(self, model: Model, vllm_config: Any) -> None:
        self.model, self.vllm_config, self.fails = model, vllm_config, False

    def sleep(self, level: int = 1) -> None:
        if level >= 2:
            self.write(0.0)
        if self.fails:
            raise AssertionError("Memory usage increased after sleeping.")

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            self.write(0.0)

    def reload_weights(self, value: float) -> None:
        self.model.load_weights(filled(value))

    def start_weight_update(self) -> None: ...

    def update_weights(self, value: float) -> None:
        self.model.load_weights(filled(value))

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...

    def write(self, value: float) -> None:
        """Write below every call that could be wrapped."""
        for parameter in self.model.parameters():
            parameter.data.fill_(value)


def filled(value: float, *names: str) -> dict[str, torch.Tensor]:
    names = names or ("first.weight", "second.weight")
    return {name: torch.full((64, 64), value) for name in names}


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


@pytest.fixture
def lent(coordinator: str, request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Lender]]:
    """A worker whose weights are lent under the test's name."""
    model, name = Model(), request.node.name.translate({91: "-", 93: None})
    where = SimpleNamespace(worker_cls=f"{__name__}.Worker")
    worker = Worker(model, SimpleNamespace(parallel_config=where))
    loading = RankLoading(name)
    watching.watch(loading, worker.vllm_config)
    options = LoaderOptions(settings=config.load({"coordinator": coordinator}))
    lender = loading.lender = Lender(slots_of(model, non_persistent=True), name, KEY, options)
    lender.watch(model)
    until_s = time.monotonic() + 60
    while lender.state == "starting" and time.monotonic() < until_s:
        time.sleep(0.01)
    assert lender.state == "lending", lender.why
    yield worker, lender
    worker.shutdown()


def listed(lender: Lender, coordinator: str) -> list[str]:
    """The revisions that are listed under the name of what is lent."""
    assert lender.source is not None
    found = mx.list_sources(lender.source.model.name, coordinator=coordinator)
    return [each.record.model.revision for each in found]


@pytest.mark.parametrize("how", ["load_weights", "below"])
def test_what_is_written_in_sleep_is_not_lent_on_waking(
    lent: tuple[Worker, Lender], coordinator: str, how: str
) -> None:
    """Sleep leaves the weights as they were. What something else has written meanwhile may be half
    of a model, and is given to no reader."""
    worker, lender = lent
    worker.sleep(1)
    if how == "below":
        worker.write(1.0)
    else:
        worker.model.load_weights(filled(1.0, "first.weight"))
    worker.wake_up()
    assert not listed(lender, coordinator)
    assert lender.state == "withdrawn" and "outside of an update" in lender.why
    worker.reload_weights(3.0)
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.2"])


def test_a_sleep_that_fails_may_have_unmapped_the_weights(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    """Nothing reads them before they are awake."""
    worker, lender = lent
    worker.fails = True
    with pytest.raises(AssertionError, match="Memory usage"):
        worker.sleep(1)
    assert lender.state == "changing" and "sleep has not ended" in lender.why
    assert not listed(lender, coordinator)
    worker.wake_up()
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main"])


def test_an_update_in_sleep_is_lent_on_waking(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    worker, lender = lent
    worker.sleep(1)
    worker.reload_weights(3.0)
    assert not listed(lender, coordinator)
    worker.wake_up()
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.2"])


def test_an_extension_writes_what_a_deep_sleep_has_discarded(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    """As RL frameworks update weights: they sleep deeply, wake the weights, and write them."""
    worker, lender = lent
    worker.sleep(2)
    with watching.changing(worker):
        pass  # it is not awake: nothing can have been written
    worker.wake_up(["weights"])
    assert not listed(lender, coordinator) and "discarded" in lender.why
    with watching.changing(worker):
        worker.model.load_weights(filled(2.0))
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.2"])


def test_discarding_the_cache_of_keys_and_values_leaves_the_weights_lent(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    worker, lender = lent
    worker.discard(("kv_cache",))
    worker.wake_up(["kv_cache"])
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main"])
    worker.discard(("weights", "kv_cache"))
    worker.wake_up()
    assert not listed(lender, coordinator)
    worker.reload_weights(3.0)
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.2"])


def test_a_change_in_a_change_lends_nothing_before_the_outer_one_ends(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    worker, lender = lent
    with watching.changing(worker):
        worker.model.load_weights(filled(1.0, "first.weight"))
        with watching.changing(worker):
            worker.model.load_weights(filled(1.0, "second.weight"))
        assert not listed(lender, coordinator)
        worker.reload_weights(2.0)
        assert not listed(lender, coordinator)
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.2"])
    worker.start_weight_update()
    worker.update_weights(3.0)
    worker.reload_weights(4.0)
    assert not listed(lender, coordinator)
    worker.finish_weight_update()
    assert (lender.state, listed(lender, coordinator)) == ("lending", ["main.3"])


def test_a_copy_of_the_model_is_filled_itself(lent: tuple[Worker, Lender]) -> None:
    worker, lender = lent
    before = worker.model.first.weight.detach().clone()
    other = copy.deepcopy(worker.model)
    other.load_weights(filled(5.0))
    assert bool((other.first.weight == 5).all())
    assert torch.equal(worker.model.first.weight, before) and lender.state == "lending"


def test_a_model_that_is_loaded_anew_ends_what_the_first_one_lends(
    lent: tuple[Worker, Lender], coordinator: str
) -> None:
    worker, lender = lent
    name = lender.source and lender.source.model.name
    assert name
    watching.watch(RankLoading(name), worker.vllm_config)
    assert not mx.list_sources(name, coordinator=coordinator)
