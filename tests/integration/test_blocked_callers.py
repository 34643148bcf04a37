"""A caller of a pull that takes long when it is told of a layer holds up no source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mx import api, config
from mx.errors import MxError
from mx.units import MIB
from tests.support.outcomes import until

pytestmark = pytest.mark.integration

LAYERS = 8
#: A source would wait an hour for a reader that does not report that it has stopped.
PATIENT = config.load({"reader_lease_s": 3600.0, "stall_timeout_s": 0.5})


def tensors(value: int) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.mlp.weight": torch.full((2 * MIB,), value, dtype=torch.uint8)
        for layer in range(LAYERS)
    }


class Caller:
    """Blocks in its first call, until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.entered.set()
        assert self.go_on.wait(240)


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.go_on.set()


def ends(work: Callable[[], object], before: Callable[[], None] = lambda: None) -> None:
    """The work ends; `before` is called first where it does not."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    hangs = thread.is_alive()
    if hangs:
        before()
        thread.join()
    assert not hangs


WAYS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp", "attach": False},
    "shm": {"transport": "shm", "attach": False},
    "into": {"transport": "tcp", "into": memoryview(bytearray(32 * MIB))},
    "attached": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("closing", [False, True])
def test_an_update_waits_for_no_caller(
    coordinator: str, caller: Caller, way: str, closing: bool
) -> None:
    with api.serve(tensors(1), model="m", coordinator=coordinator, settings=PATIENT) as source:
        pull = api.pull("m", coordinator=coordinator, settings=PATIENT, **WAYS[way])
        pull.on_layer(caller)
        assert caller.entered.wait(60)
        closer = threading.Thread(target=pull.close)
        if closing:  # it waits for the caller, and the source does not
            closer.start()
            until(lambda: source.stats().readers == 0, "end of the lease")
        ends(lambda: source.update(tensors(2), grace_s=0), caller.go_on.set)
        caller.go_on.set()
        pull.close()
        if closing:
            closer.join()


def test_an_update_waits_for_no_caller_who_is_told_of_what_is_reused(
    coordinator: str, caller: Caller
) -> None:
    own = tensors(1)
    with (
        api.serve(own, model="m", coordinator=coordinator, settings=PATIENT) as source,
        api.serve(own, model="other", coordinator=coordinator, settings=PATIENT) as other,
        api.pull(
            "m", coordinator=coordinator, settings=PATIENT, reuse=[other], attach=False
        ) as pull,
    ):
        pull.on_layer(caller)
        assert caller.entered.wait(60)
        ends(lambda: source.update(tensors(2), grace_s=0), caller.go_on.set)
        caller.go_on.set()


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_may_update_the_source_that_it_reads_from(coordinator: str, way: str) -> None:
    done = threading.Event()
    with api.serve(tensors(1), model="m", coordinator=coordinator, settings=PATIENT) as source:

        def update(_: object) -> None:
            if not done.is_set():
                done.set()
                source.update(tensors(2), grace_s=0)

        with api.pull("m", coordinator=coordinator, settings=PATIENT, **WAYS[way]) as pull:
            pull.on_layer(update)
            try:
                pull.wait(60)
            except MxError as error:
                assert "was updated" in str(error)
        assert done.is_set() and str(source.model) == "m:main.2"
