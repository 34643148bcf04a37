"""What is told where the driver can make no memory."""

from __future__ import annotations

import pytest

from mx.cuda.bindings import Driver
from mx.cuda.errors import CudaUnavailableError
from mx.memory.pinned import PinnedArena


def test_a_host_without_a_driver_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Driver:
        raise CudaUnavailableError("there is no driver here")

    monkeypatch.setattr("mx.memory.pinned.load", absent)
    with pytest.raises(CudaUnavailableError, match="no driver") as caught:
        PinnedArena(1)
    assert caught.value.hint == "serve without `pinned`"
