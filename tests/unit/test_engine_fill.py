"""Where a replica has weights pulled to: what it asks of a model's tensors, and of `mx.pull`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mx
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.run import LOADED, PROCESSED, RankRun
from mx.engines.replica.tensors import slots_of
from mx.errors import NotAllowedError


class _Pulled(Exception):
    pass


class _Filling(RankRun):
    """A run up to its pull."""

    lends = PROCESSED

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def pull(self, **how: Any) -> Any:
        self.asked = how
        raise _Pulled


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += 1
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_made_of_those_of_a_model_in_host_memory() -> None:
    slots, run = slots_of(torch.nn.Linear(2, 2), non_persistent=True), _Filling()
    counted = _Operations()  # type: ignore[no-untyped-call]
    with counted as operations, pytest.raises(_Pulled):
        run.fill(slots)
    assert run.asked == {"hold": False, "device": "cpu"}
    assert operations.made == 0


class _Empty:
    """A pull that has ended."""

    def wait_manifest(self) -> Any:
        raise _Pulled


class _Refused(_Filling):
    """One that may pull, and may not serve."""

    lends = LOADED

    def __init__(self) -> None:
        super().__init__()
        self.name, self._sampler, self._pull, self.choice = "m", None, None, Choice()
        self._log = logging.getLogger(__name__)

    def pull(self, **how: Any) -> Any:
        self.asked = how
        if how["hold"]:
            raise NotAllowedError("it may not serve 'm'")
        return _Empty()


def test_an_engine_that_may_not_lend_is_filled_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = _Refused()
    with pytest.raises(_Pulled):
        run.fill(slots_of(torch.nn.Linear(2, 2), non_persistent=True))
    assert run.asked == {"hold": False, "device": "cpu"} and run.lends == ""
    (said,) = caplog.messages
    assert said.startswith("engine.not_lent ") and "it may not serve 'm'" in said


class _Unreadable(_Refused):
    """One that may not pull either."""

    def pull(self, **how: Any) -> Any:
        self.asked = how
        raise NotAllowedError("it may not pull 'm'")


def test_an_engine_that_may_not_pull_says_nothing_of_lending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = _Unreadable()
    with pytest.raises(NotAllowedError):
        run.fill(slots_of(torch.nn.Linear(2, 2), non_persistent=True))
    assert run.asked["hold"] is False and run.lends == LOADED
    assert not caplog.records


def test_an_engine_attaches_to_no_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to its tensors, and what is attached there is the source's own."""
    asked: list[dict[str, Any]] = []

    def pull(model: str, **how: Any) -> None:
        asked.append({name: how.get(name) for name in ("device", "attach", "into")})
        raise _Pulled

    monkeypatch.setattr(mx, "pull", pull)
    run: Any = object.__new__(RankRun)
    run.name, run.pin, run.keys = "m", "ab" * 32, {}
    run.choice, run.options = Choice(CHECKPOINT), LoaderOptions()
    into = {"a": torch.ones(1)}
    for how in ({}, {"device": "cuda:1"}, {"into": into}):
        with pytest.raises(_Pulled):
            RankRun.pull(run, hold=False, **how)
    assert asked == [
        {"device": "cpu", "attach": True, "into": None},
        {"device": "cuda:1", "attach": False, "into": None},
        {"device": None, "attach": None, "into": into},
    ]
