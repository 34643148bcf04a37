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


def test_a_gpu_is_lost(major: int) -> None:
    code = """
use()
address, s = alloc(8), stream()
print(attempt("cuMemAlloc", 8), attempt("cuMemcpyDtoDAsync", address, address, 8, s))
print(attempt("cuStreamSynchronize", s), attempt("cuDeviceGetCount"), attempt("cuMemFree", address))
"""
    lost = "OPERATING_SYSTEM"
    lines = passes(major, code, FAIL=f"*:-8:CUDA_ERROR_{lost}")
    assert lines == [f" {lost}", f"{lost} {lost} {lost}"]


def test_the_nth_operation_of_a_stream_fails(major: int) -> None:
    code = """
use()
address, s, event = alloc(8), stream(), call("cuEventCreate", 2)
for _ in range(3):
    call("cuMemsetD8Async", address, 1, 8, s)
print(attempt("cuStreamSynchronize", s), attempt("cuEventSynchronize", event))
"""
    lines = passes(major, code, FAIL="work:3:CUDA_ERROR_ECC_UNCORRECTABLE")
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
"""
    query = 'print(attempt("cuStreamQuery", s))'
    assert passes(major, code + query, LATE_US=3600 * 10**6) == ["NOT_READY"]
    assert passes(major, code + 'call("cuStreamSynchronize", s)\n' + query, LATE_US=10) == [""]


#: A stream that waits for a word, and what sets the word; functions that streams call say so.
_BEHIND = """
import ctypes
use()
word, order = pinned(4), []
ctypes.memset(word, 0, 4)
def release():
    ctypes.memset(word, 1, 4)
functions = []
def note(stream, text):
    functions.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: order.append(text)))
    address = ctypes.cast(functions[-1], ctypes.c_void_p).value
    call("cuLaunchHostFunc", stream, driver.CUhostFn(address), 0)
first, second = stream(), stream()
call("cuStreamWaitValue32", first, word, driver.cuuint32_t(1), 0)
note(first, "first")
"""


def test_one_hardware_queue(major: int) -> None:
    code = _BEHIND + 'note(second, "second")\n'
    ends = 'release()\ncall("cuCtxSynchronize")\nprint(*order)'
    lines = passes(major, code + 'call("cuStreamSynchronize", second)\n' + ends)
    assert lines == ["second first"]
    assert passes(major, code + ends, ONE_QUEUE=True) == ["first second"]


def test_a_module_load_that_synchronises(major: int) -> None:
    code = _BEHIND + 'print(attempt("cuModuleLoadData", b"image"), attempt("cuStreamQuery", first))'
    assert passes(major, code) == ["NO_BINARY_FOR_GPU NOT_READY"]
    code = (
        _BEHIND
        + """
begun = threading.Event()
def load():
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    begun.set()
    print(attempt("cuModuleLoadData", b"image"), attempt("cuStreamQuery", first), *order)
loader = threading.Thread(target=load)
loader.start()
begun.wait()
release()
loader.join()
"""
    )
    assert passes(major, code, LOAD_SYNCS=True) == ["NO_BINARY_FOR_GPU  first"]


def test_a_capture_in_another_thread(major: int, tmp_path: Path) -> None:
    code = """
use()
modes = driver.CUstreamCaptureMode
before = call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
print(before == modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
address, s, event = alloc(8), stream(), call("cuEventCreate", 2)
def unsafe():
    return [attempt("cuMemAlloc", 8), attempt("cuStreamSynchronize", s),
            attempt("cuEventQuery", event)]
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
def elsewhere():
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    print(attempt("cuStreamQuery", other), attempt("cuStreamEndCapture", s))
"""
    own = code + 'print(attempt("cuStreamEndCapture", s))'
    broken = mode != "RELAXED"
    unsafe = "STREAM_CAPTURE_UNSUPPORTED"
    lines = passes(major, own)
    # A stream that is captured may not be asked in any mode.
    assert lines == [
        "1 0",
        f"{unsafe} {unsafe if broken else ''}",
        "STREAM_CAPTURE_INVALIDATED",
    ]
    other = code + "t = threading.Thread(target=elsewhere)\nt.start()\nt.join()"
    wrong = "STREAM_CAPTURE_WRONG_THREAD" if broken else "STREAM_CAPTURE_INVALIDATED"
    assert passes(major, other)[2] == f"{unsafe if mode == 'GLOBAL' else ''} {wrong}"
