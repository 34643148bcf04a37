"""What is said where there is no CUDA, and of codes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mx import api
from mx.cuda import driver as drivers
from mx.cuda.errors import CudaUnavailableError, cuda_error
from mx.errors import EXIT_NO_SOURCE, EXIT_OTHER, ConfigError, LocalError, PathError
from mx_transports.toolkit.cuda.remote import path_error


def test_load_raises_a_fresh_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver", CudaUnavailableError("no libcuda", hint="get one"))
    errors = []
    for _ in range(2):
        with pytest.raises(CudaUnavailableError, match="no libcuda") as caught:
            drivers.load()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_codes_without_a_hint_still_say_what_failed() -> None:
    error = cuda_error("cuCtxSynchronize", "CUDA_ERROR_UNKNOWN", "unknown error")
    assert str(error) == "cuCtxSynchronize failed: CUDA_ERROR_UNKNOWN, unknown error"


@pytest.mark.parametrize(
    ("call", "code", "own"),
    [
        ("cuIpcOpenMemHandle", "INVALID_VALUE", False),
        ("cuMemcpyDtoDAsync", "NOT_PERMITTED", False),
        ("cuMemMap", "OUT_OF_MEMORY", True),
        ("cuEventSynchronize", "ILLEGAL_ADDRESS", True),
        ("cuStreamCreate", "INVALID_VALUE", True),
    ],
)
def test_who_is_at_fault_while_a_peer_is_read(call: str, code: str, own: bool) -> None:
    error = path_error(cuda_error(call, f"CUDA_ERROR_{code}"), "cuda_ipc", "there:1")
    assert isinstance(error, PathError) and isinstance(error, LocalError) is own
    assert error.exit_code == (EXIT_OTHER if own else EXIT_NO_SOURCE)
    assert error.peer == "there:1" and f"there:1 by cuda_ipc: {call} failed" in error.message


def test_no_cuda_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver", CudaUnavailableError("no libcuda", hint="get one"))
    with pytest.raises(ConfigError, match="get one; or use `device=cpu`"):
        api.pull("m", device="cuda:0")


def test_a_process_looks_for_cuda_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver", None)
    opened: list[Any] = []
    counts = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:  # which stays for good
        if counts and event == "ctypes.dlopen":
            opened.append(arguments)

    sys.addaudithook(hook)
    answers = [drivers.presence() for _ in range(3)]
    counts = False
    assert answers[0] == answers[1] == answers[2]
    assert len(opened) <= 1
