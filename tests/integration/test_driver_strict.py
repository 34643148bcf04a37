"""The stricter modes of the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver.programs import each_major, passes

pytestmark = each_major


def test_the_nth_call_fails(major: int) -> None:
    code = """
use()
print([attempt("cuMemAlloc", 8) for _ in range(3)], attempt("cuStreamCreate", 1))
print(attempt("cuMemAlloc", 8))
"""
    lines = passes(major, code, FAIL="cuMemAlloc:2:CUDA_ERROR_OUT_OF_MEMORY,cuStreamCreate:1:801")
    assert lines == ["['', 'OUT_OF_MEMORY', ''] NOT_SUPPORTED", ""]
    lines = passes(major, code, FAIL="cuMemAlloc:3:CUDA_ERROR_ILLEGAL_ADDRESS")
    assert lines == ["['', '', 'ILLEGAL_ADDRESS'] ILLEGAL_ADDRESS", "ILLEGAL_ADDRESS"]


def test_the_nth_operation_of_a_stream_fails(major: int) -> None:
    code = """
use()
address, s, event = alloc(8), stream(), call("cuEventCreate", 2)
for _ in range(3):
    call("cuMemsetD8Async", address, 1, 8, s)
    time.sleep(0)
"""
    ends = """
print(attempt("cuStreamSynchronize", s), attempt("cuEventSynchronize", event))
"""
    lines = passes(major, code + ends, FAIL="work:3:CUDA_ERROR_ECC_UNCORRECTABLE")
    assert lines == ["ECC_UNCORRECTABLE ECC_UNCORRECTABLE"]


def test_out_of_memory(major: int) -> None:
    code = """
use()
print(attempt("cuMemAlloc", 4 * MIB + 1), attempt("cuMemAlloc", 4 * MIB), attempt("cuMemAlloc", 1))
use(1)
print(attempt("cuMemAlloc", 4 * MIB))
"""
    assert passes(major, code, MEMORY_BYTES=4 << 20) == ["OUT_OF_MEMORY  OUT_OF_MEMORY", ""]


def test_work_is_late(major: int) -> None:
    code = """
use()
address, host, s = alloc(8), pinned(8), stream()
call("cuMemcpyDtoHAsync", host, address, 8, s)
print(attempt("cuStreamQuery", s))
call("cuStreamSynchronize", s)
print(attempt("cuStreamQuery", s))
"""
    assert passes(major, code, LATE_US=200_000) == ["NOT_READY", ""]


#: Work behind a word that is not there yet, on another stream.
_BEHIND = """
import ctypes
use()
address, word = alloc(8), pinned(4)
ctypes.memset(word, 0, 4)
first, second = stream(), stream()
call("cuStreamWaitValue32", first, word, driver.cuuint32_t(1), 0)
"""


def test_one_hardware_queue(major: int) -> None:
    code = (
        _BEHIND
        + """
call("cuMemsetD8Async", address, 1, 8, second)
alone = threading.Thread(target=lambda: (
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0)),
    call("cuStreamSynchronize", second)), daemon=True)
alone.start()
alone.join(1)
print(alone.is_alive())
ctypes.memset(word, 1, 4)
alone.join()
"""
    )
    assert passes(major, code) == ["False"]
    assert passes(major, code, ONE_QUEUE=True) == ["True"]


def test_a_module_load_that_synchronises(major: int) -> None:
    code = (
        _BEHIND
        + """
loader = threading.Thread(target=lambda: (
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0)),
    attempt("cuModuleLoadData", b"image")), daemon=True)
loader.start()
loader.join(1)
print(loader.is_alive())
ctypes.memset(word, 1, 4)
loader.join()
"""
    )
    assert passes(major, code) == ["False"]
    assert passes(major, code, LOAD_SYNCS=True) == ["True"]


def test_a_capture_in_another_thread(major: int, tmp_path: Path) -> None:
    code = """
use()
modes = driver.CUstreamCaptureMode
before = call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
print(before == modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
address, s, event = alloc(8), stream(), call("cuEventCreate", 2)
def unsafe():
    return [attempt("cuMemAlloc", 8), attempt("cuEventQuery", event),
            attempt("cuStreamSynchronize", s)]
print(unsafe())
call("cuThreadExchangeStreamCaptureMode", before)
print(unsafe(), attempt("cuMemsetD8Async", address, 1, 8, s), attempt("cuEventRecord", event, s))
call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
print(unsafe())
"""
    good, bad = str([""] * 3), str(["STREAM_CAPTURE_UNSUPPORTED"] * 3)
    lines = passes(major, code, CAPTURE="global", LOG=tmp_path)
    assert lines == ["True", good, f"{bad}  ", good]
    (log,) = tmp_path.iterdir()
    assert log.read_text().count("# the capture is invalidated\n") == 1
    lines = passes(major, code, CAPTURE="thread_local")
    assert lines == ["True", good, f"{good}  ", good]


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_a_capture_of_the_programs_own(major: int, mode: str) -> None:
    code = f"""
use()
s, other = stream(), stream()
modes = driver.CUstreamCaptureMode
call("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_{mode})
print(int(call("cuStreamIsCapturing", s)), int(call("cuStreamIsCapturing", other)))
print(attempt("cuStreamQuery", s), attempt("cuStreamQuery", other))
threads = []
def elsewhere():
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    print(attempt("cuStreamQuery", other), attempt("cuStreamEndCapture", s))
"""
    own = code + 'print(attempt("cuStreamEndCapture", s))'
    broken = mode != "RELAXED"
    unsafe = "STREAM_CAPTURE_UNSUPPORTED"
    lines = passes(major, own)
    assert lines == [
        "1 0",
        f"{unsafe} {unsafe if broken else ''}",
        "STREAM_CAPTURE_INVALIDATED" if broken else "",
    ]
    other = code + "t = threading.Thread(target=elsewhere)\nt.start()\nt.join()"
    wrong = "STREAM_CAPTURE_WRONG_THREAD" if broken else ""
    assert passes(major, other)[2] == f"{unsafe if mode == 'GLOBAL' else ''} {wrong}"
