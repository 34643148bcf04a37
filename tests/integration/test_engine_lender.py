"""What an engine's loader lends, around the engine's changes; and tensors put into models."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import mx
from mx import config
from mx.engines.replica.lender import ASLEEP, Lender
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import check, copy_into, replace, slots_of
from mx.errors import ConfigError
from tests.support.daemon import daemon

KEY = mx.ProcessingKey(engine="test", dtype="fp32")


class Tied(torch.nn.Module):
    """A model with tied weights, and a buffer that its state dict leaves out."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


def options_of(coordinator: str) -> LoaderOptions:
    return LoaderOptions(settings=config.load({"coordinator": coordinator}))


def lend(
    model: torch.nn.Module, name: str, coordinator: str, *, before_processing: bool = False
) -> Lender:
    slots = slots_of(model, non_persistent=True)
    lender = Lender(slots, name, KEY, options_of(coordinator), before_processing=before_processing)
    until_s = time.monotonic() + 60
    while lender.state == "starting" and time.monotonic() < until_s:
        time.sleep(0.01)
    return lender


def loaded(name: str, coordinator: str) -> dict[str, torch.Tensor]:
    return mx.load(name, coordinator=coordinator)


def test_changes_are_revisions_and_sleep_is_none(coordinator: str) -> None:
    model = Tied()
    lender = lend(model, "changes", coordinator)
    try:
        assert lender.state == "lending"
        assert torch.equal(loaded("changes", coordinator)["head.weight"], model.head.weight)
        lender.withdraw(ASLEEP)
        assert lender.state == "changing"
        assert not mx.list_sources("changes", coordinator=coordinator)
        with lender.changing("an update"):
            model.embed.weight.data.add_(1)
        assert lender.state == "changing"  # it still sleeps
        lender.restore(ASLEEP)
        assert lender.state == "lending" and lender.source is not None
        assert lender.source.model.revision == "main.2"
        assert torch.equal(loaded("changes", coordinator)["embed.weight"], model.embed.weight)
    finally:
        lender.close()
    assert not mx.list_sources("changes", coordinator=coordinator)


def test_change_that_fails_half_way_is_lent_by_none(coordinator: str) -> None:
    model = Tied()
    lender = lend(model, "fails", coordinator)
    try:
        with pytest.raises(RuntimeError), lender.changing("an update"):
            model.embed.weight.data[0].add_(1)
            raise RuntimeError("the engine's")
        assert lender.state == "withdrawn"
        with lender.changing(ASLEEP):
            pass
        assert lender.state == "withdrawn", "sleep does not make it whole"
        with lender.changing("an update"):
            model.embed.weight.data.zero_()
        assert lender.state == "lending"
    finally:
        lender.close()


def test_tensor_that_the_engine_replaces(coordinator: str) -> None:
    model = Tied()
    lender = lend(model, "replaced", coordinator)
    try:
        with lender.changing("an update"):
            model.embed.weight = model.head.weight = torch.nn.Parameter(torch.ones(8, 4))
        assert torch.equal(loaded("replaced", coordinator)["head.weight"], torch.ones(8, 4))
    finally:
        lender.close()


def test_state_before_processing_is_a_copy_and_ends_with_the_first_change(
    coordinator: str,
) -> None:
    model = Tied()
    before = model.embed.weight.detach().clone()
    lender = lend(model, "copied", coordinator, before_processing=True)
    try:
        model.embed.weight.data.zero_()  # the engine processes it
        assert torch.equal(loaded("copied", coordinator)["embed.weight"], before)
        lender.withdraw("an update")
        lender.restore("an update")
        assert lender.state == "withdrawn" and "an update has changed it" in lender.why
        assert not mx.list_sources("copied", coordinator=coordinator)
    finally:
        lender.close()


def test_lender_of_a_pull_gives_its_memory(coordinator: str) -> None:
    first = lend(Tied(), "held", coordinator)
    pull = mx.pull("held", hold=True, coordinator=coordinator)
    pull.wait()
    second = Lender.of_pull(pull, KEY, options_of(coordinator))
    try:
        first.close()
        assert second.state == "lending"
        assert loaded("held", coordinator).keys() == {"embed.weight", "head.weight", "table"}
    finally:
        second.close()


def test_name_of_others_and_no_coordinator_stop_no_engine(
    coordinator: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = lend(Tied(), "taken", coordinator)
    other = lend(Tied(), "taken", coordinator)
    alone = lend(Tied(), "alone", "127.0.0.1:1")
    try:
        assert (one.state, other.state, alone.state) == ("lending", "withdrawn", "withdrawn")
        assert "is bound to" in other.why and "no coordinator answers" in alone.why
        assert caplog.text.count("lends nothing to other replicas") == 2
        for each in (other, alone):
            with each.changing("an update"):
                pass
    finally:
        for each in (one, other, alone):
            each.close()


def test_models_are_filled_or_built_from_what_was_lent(coordinator: str) -> None:
    model = Tied()
    lender = lend(model, "built", coordinator)
    try:
        with torch.device("meta"):
            empty = Tied()
        filled, smaller = Tied(), torch.nn.Embedding(4, 4)
        with mx.pull("built", coordinator=coordinator) as pull:
            manifest, tensors = pull.wait_manifest(), pull.state_dict()
        slots = slots_of(filled, non_persistent=True)
        check(manifest, slots)
        copy_into(slots, tensors.items())
        replace(empty, tensors, torch.device("cpu"))
        for made in (filled, empty):
            assert made.head.weight is made.embed.weight
            assert torch.equal(made.head.weight, model.head.weight)
            assert torch.equal(made.table, model.table)
        assert not empty.table.is_meta
        with pytest.raises(ConfigError, match="not in this model: embed.weight"):
            check(manifest, slots_of(smaller, non_persistent=True))
        with pytest.raises(ConfigError, match="no module for"):
            replace(smaller, tensors, torch.device("cpu"))
        filled.embed.weight = filled.head.weight = torch.nn.Parameter(torch.zeros(8, 5).half())
        with pytest.raises(ConfigError, match=r"embed.weight: \[8, 4\] there"):
            check(manifest, slots_of(filled, non_persistent=True))
    finally:
        lender.close()
