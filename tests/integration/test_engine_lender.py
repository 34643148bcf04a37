"""What an engine's loader lends, around the engine's changes; and tensors put into models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

import mx
from mx import config
from mx.engines.replica import lent_tensors
from mx.engines.replica.lender import ASLEEP, DISCARDED, Lender
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import check, copy_into, replace, slots_of
from mx.errors import ClosedError, ConfigError, LocalError
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
    until_lent(lender)
    return lender


@contextlib.contextmanager
def changing(lender: Lender, reason: str) -> Iterator[None]:
    """Change what is lent, as an engine does."""
    lender.withdraw(reason)
    failed = True
    try:
        yield
        failed = False
    finally:
        lender.restore(reason, failed=failed)


def until_lent(lender: Lender) -> None:
    until_s = time.monotonic() + 60
    while lender.state == "starting" and time.monotonic() < until_s:
        time.sleep(0.01)


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
        with changing(lender, "an update"):
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
        with pytest.raises(RuntimeError), changing(lender, "an update"):
            model.embed.weight.data[0].add_(1)
            raise RuntimeError("the engine's")
        assert lender.state == "withdrawn"
        with changing(lender, ASLEEP):
            pass
        assert lender.state == "withdrawn", "sleep does not make it whole"
        with changing(lender, "an update"):
            model.embed.weight.data.zero_()
        assert lender.state == "lending"
    finally:
        lender.close()


def test_tensor_that_the_engine_replaces(coordinator: str) -> None:
    model = Tied()
    lender = lend(model, "replaced", coordinator)
    try:
        with changing(lender, "an update"):
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


@pytest.mark.parametrize("keeps", [True, False])
def test_state_before_processing_that_is_lent_where_it_is_outlasts_a_sleep_that_keeps_it(
    coordinator: str, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(lent_tensors, "common_device", lambda _: "cuda:0")  # as on a GPU
    model, name = Tied(), f"place-{keeps}"
    lender = lend(model, name, coordinator, before_processing=True)
    lender.processed()
    try:
        until_lent(lender)
        lent = lender.source
        lender.withdraw(ASLEEP)
        assert not mx.list_sources(name, coordinator=coordinator)
        with torch.no_grad():
            model.embed.weight.mul_(1.0 if keeps else 0.5)
        lender.restore(ASLEEP)
        if keeps:
            assert lender.state == "lending" and lender.source is lent is not None
            assert lent.model.revision == "main"
            lender.withdraw(ASLEEP)
            lender.withdraw(DISCARDED)
        assert lender.state == "withdrawn" and "sleep has changed it" in lender.why
        lender.restore(ASLEEP)
        lender.restore(DISCARDED)
        assert not mx.list_sources(name, coordinator=coordinator)
    finally:
        lender.close()


def test_what_sleep_discards_is_taken_from_a_peer_again(coordinator: str) -> None:
    peer, model = Tied(), Tied()
    copy_into(slots_of(model, non_persistent=True), peer.state_dict().items())
    other = lend(peer, "deep", coordinator)
    calls: list[bool] = []

    def finish() -> None:
        calls.append(torch.equal(model.embed.weight, peer.embed.weight))

    lender = lend(model, "deep", coordinator)
    try:
        lender.refill(finish)
        assert not calls, "nothing was discarded"
        discard(lender, model)
        assert lender.state == "changing" and "discarded" in lender.why
        lender.refill(finish)
        assert (calls, lender.state, lender.why) == ([True], "lending", "")
        assert lender.source is not None and lender.source.model.revision == "main"
        assert torch.equal(model.table, peer.table)

        other.close()
        discard(lender, model)
        for _ in range(2):  # nothing that is not whole is lent, whatever the engine does next
            with pytest.raises(LocalError, match="not taken from a peer"):
                lender.refill(finish)
            assert (lender.state, len(calls)) == ("withdrawn", 1)
            assert "waking has not taken what sleep has discarded from a peer" in lender.why
            assert not mx.list_sources("deep", coordinator=coordinator)
            lender.withdraw(ASLEEP)
            lender.restore(ASLEEP)
            assert lender.state == "withdrawn"
        other = lend(peer, "deep", coordinator)
        lender.refill(finish)
        assert (lender.state, calls) == ("lending", [True, True])

        other.close()
        discard(lender, model)
        with pytest.raises(LocalError):
            lender.refill(finish)
        with changing(lender, "an update"):
            model.embed.weight.data.fill_(7)
        assert lender.state == "lending" and lender.source.model.revision == "main.2"
        lender.refill(finish)  # what was discarded is written: it is not fetched back
        assert len(calls) == 2 and float(model.embed.weight.detach().min()) == 7
    finally:
        other.close()
        lender.close()


@pytest.mark.parametrize("how", ["written", "updated", "failed"])
def test_weights_that_were_not_listed_are_not_taken_back(coordinator: str, how: str) -> None:
    """They were written to without a word, or in sleep: what a peer has is older."""
    model, name = Tied(), f"torn-{how}"
    lender = lend(model, name, coordinator)
    try:
        if how == "written":
            lender.written("a test")
        else:
            lender.withdraw(ASLEEP)
            lender.withdraw("an update")
            model.embed.weight.data.fill_(1)
            lender.restore("an update", failed=how == "failed")
        discard(lender, model)
        with pytest.raises(LocalError, match="nothing says which weights"):
            lender.refill(lambda: None)
        assert lender.state == "withdrawn"
        assert not mx.list_sources(name, coordinator=coordinator)
    finally:
        lender.close()


def discard(lender: Lender, model: Tied) -> None:
    """Sleep, lose the weights, and wake up."""
    lender.withdraw(ASLEEP)
    lender.withdraw(DISCARDED)
    model.embed.weight.data.fill_(float("nan"))
    model.table.fill_(float("nan"))
    lender.restore(ASLEEP)


def test_lender_of_a_pull_gives_its_memory(coordinator: str) -> None:
    first = lend(Tied(), "held", coordinator)
    pull = mx.pull("held", hold=True, coordinator=coordinator)
    pull.wait()
    slots = slots_of(Tied(), non_persistent=True)
    second = Lender(slots, "held", KEY, options_of(coordinator), before_processing=True, pull=pull)
    try:
        first.close()
        assert second.state == "lending"
        assert loaded("held", coordinator).keys() == {"embed.weight", "head.weight", "table"}
    finally:
        second.close()


def test_an_interruption_of_lending_closes_the_pull(
    coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lend(Tied(), "broken", coordinator)
    pull = mx.pull("broken", hold=True, coordinator=coordinator)
    pull.wait()
    hold = pull.hold

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "hold", interrupted)
    slots, options = slots_of(Tied(), non_persistent=True), options_of(coordinator)
    with pytest.raises(KeyboardInterrupt):
        Lender(slots, "broken", KEY, options, before_processing=True, pull=pull)
    first.close()
    with pytest.raises(ClosedError):
        hold()


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
            with changing(each, "an update"):
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
