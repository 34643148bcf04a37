"""Where a replica fills a model: in host memory it asks nothing more of each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mx.engines.replica.run import PROCESSED, Run
from mx.engines.replica.tensors import slots_of


class _Pulled(Exception):
    pass


class _Filling(Run):
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
    assert run.asked == {"hold": False}
    assert operations.made == 0
