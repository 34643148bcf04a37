"""The stand-in driver under the real cuda-bindings: devices, memory, streams, events."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.driver.logs import calls
from tests.support.driver.programs import each_major, finish, passes

pytestmark = each_major


def test_shows_its_devices(major: int) -> None:
    lines = passes(
        major,
        """
call("cuInit", 0)
print(call("cuDriverGetVersion") // 1000, call("cuDeviceGetCount"))
uuids = {bytes(call("cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2")
                    else "cuDeviceGetUuid", call("cuDeviceGet", n)).bytes) for n in range(3)}
print(len(uuids))
print(attempt("cuDeviceGet", 3), call("cuDeviceCanAccessPeer", 0, 1),
      call("cuDeviceCanAccessPeer", 0, 2), call("cuDeviceCanAccessPeer", 0, 0))
names = driver.CUdevice_attribute
print(call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0))
""",
        DEVICES=3,
        PEERS="0-1",
        COMPUTE_CAPABILITY=100,
    )
    assert lines == [f"{major} 3", "3", "INVALID_DEVICE 1 0 0", "10"]


@pytest.mark.parametrize(
    "visible, count", [("1", 1), ("1,0", 2), ("0,7,1", 1), ("", 0), ("GPU-6d78", 1)]
)
def test_sees_what_cuda_visible_devices_names(major: int, visible: str, count: int) -> None:
    code = f"""
os.environ["CUDA_VISIBLE_DEVICES"] = {visible!r}
print(attempt("cuInit", 0), *driver.cuDeviceGetCount()[1:])
"""
    assert passes(major, code) == [f"{'' if count else 'NO_DEVICE'} {count}"]


def test_an_old_version_and_no_device(major: int) -> None:
    code = 'print(attempt("cuInit", 0), call("cuDriverGetVersion"))'
    assert passes(major, code, VERSION=11080, DEVICES=0) == ["NO_DEVICE 11080"]


def test_nothing_works_before_cuinit_or_without_a_context(major: int) -> None:
    lines = passes(
        major,
        """
print(attempt("cuDeviceGetCount"))
call("cuInit", 0)
print(attempt("cuMemAlloc", 1), attempt("cuCtxPopCurrent"))
""",
    )
    assert lines == ["NOT_INITIALIZED", "INVALID_CONTEXT INVALID_CONTEXT"]


def test_a_forked_child_is_not_initialised(major: int) -> None:
    code = """
use()
if not os.fork():
    os._exit(attempt("cuInit", 0) != "NOT_INITIALIZED")
print(os.wait()[1])
"""
    assert passes(major, code) == ["0"]


def test_fresh_memory_is_garbage_and_copies_arrive(major: int) -> None:
    passes(
        major,
        """
use()
address, host, s = alloc(3 * MIB + 5), pinned(3 * MIB + 5), stream()
assert set(fetch(address, 3 * MIB + 5)) == {GARBAGE}
import ctypes
assert set(ctypes.string_at(host, 3 * MIB + 5)) == {GARBAGE}
data = os.urandom(3 * MIB + 5)
ctypes.memmove(host, data, len(data))
call("cuMemcpyHtoDAsync", address, host, len(data), s)
other = alloc(len(data))
call("cuMemcpyDtoDAsync", other + 1, address, len(data) - 1, s)
call("cuStreamSynchronize", s)
assert fetch(address, len(data)) == data
assert fetch(other, len(data)) == bytes([GARBAGE]) + data[:-1]
call("cuMemcpyHtoD", other, data[:10], 10)
assert fetch(other, 10) == data[:10]
""",
    )


def test_a_stray_host_access_faults(major: int) -> None:
    code = "import ctypes\nuse()\naddress = alloc(4096)\nprint(ctypes.string_at(address, 1)[0])"
    assert finish(major, code).returncode == -signal.SIGSEGV
    assert passes(major, code, HOST_ACCESS=True) == [str(0xA5)]
    code = "import ctypes\nuse()\nv = Vmm()\nv.allow()\nprint(ctypes.string_at(v.address, 1)[0])"
    assert finish(major, code).returncode == -signal.SIGSEGV
    assert passes(major, code, HOST_ACCESS=True) == [str(0xA5)]


def test_a_freed_address_faults_and_is_not_used_again(major: int) -> None:
    code = """
import ctypes
use()
before = set()
for _ in range(5):
    address = alloc(MIB)
    call("cuMemFree", address)
    before.add(address)
print(len(before), attempt("cuMemFree", address))
sys.stdout.flush()
{}
"""
    assert passes(major, code.format("")) == ["5 INVALID_VALUE"]
    assert passes(major, code.format(""), REUSE_ADDRESSES=True) == ["1 INVALID_VALUE"]
    ended = finish(major, code.format("ctypes.memset(address, 0, 1)"))
    assert ended.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    "bad",
    [
        'call("cuMemsetD8Async", address + MIB - 1, 1, 2, s)',
        'call("cuMemcpyDtoDAsync", address, address + 3 * MIB, 1, s)',
        'call("cuMemFree", address); call("cuMemcpyHtoDAsync", address, pinned(8), 8, s)',
        'call("cuStreamWaitValue32", s, address + 3 * MIB, driver.cuuint32_t(1), 0)',
    ],
)
def test_a_bad_address_breaks_the_context_for_good(major: int, bad: str) -> None:
    lines = passes(
        major,
        f"""
use()
address, s = alloc(MIB), stream()
{bad}
print(attempt("cuStreamSynchronize", s))
print(attempt("cuMemAlloc", 1), attempt("cuCtxSynchronize"), attempt("cuStreamCreate", 1))
call("cuCtxPopCurrent")
call("cuDevicePrimaryCtxRelease", 0)
use()
print(attempt("cuMemAlloc", 1))
use(1)
print(alloc(1) > 0)
""",
    )
    assert lines == [
        "ILLEGAL_ADDRESS",
        " ".join(["ILLEGAL_ADDRESS"] * 3),
        "ILLEGAL_ADDRESS",
        "True",
    ]


def test_memory_of_a_peer_needs_access(major: int) -> None:
    code = """
there = use(1)
theirs = alloc(MIB)
fill(theirs, 9, MIB)
use(0)
mine = alloc(MIB)
{}
call("cuMemcpyDtoDAsync", mine, theirs, MIB, 0)
print(attempt("cuStreamSynchronize", 0))
"""
    enable = 'call("cuCtxEnablePeerAccess", there, 0)\n'
    assert passes(major, code.format("")) == ["ILLEGAL_ADDRESS"]
    again = 'print(attempt("cuCtxEnablePeerAccess", there, 0))'
    lines = passes(major, code.format(enable + again))
    assert lines == ["PEER_ACCESS_ALREADY_ENABLED", ""]
    lines = passes(major, code.format(again), PEERS="none")
    assert lines == ["PEER_ACCESS_UNSUPPORTED", "ILLEGAL_ADDRESS"]


def test_pointer_attributes(major: int) -> None:
    passes(
        major,
        """
use(1)
address = alloc(1000)
assert [int(v) for v in call("cuMemGetAddressRange", address + 999)] == [address, 1000]
assert attribute("DEVICE_ORDINAL", address) == 1
assert attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address) and not attribute("IS_MANAGED", address)
assert attribute("ALLOWED_HANDLE_TYPES", address) == 0
v = Vmm()
assert [int(x) for x in call("cuMemGetAddressRange", v.address + 5)] == [v.address, v.nbytes]
assert attribute("ALLOWED_HANDLE_TYPES", v.address) == 1
assert not attribute("IS_LEGACY_CUDA_IPC_CAPABLE", v.address)
assert attribute("DEVICE_ORDINAL", v.address) == 0
assert attribute("BUFFER_ID", address) != attribute("BUFFER_ID", v.address)
host = pinned(64)
assert int(attribute("MEMORY_TYPE", host)) == 1 and int(attribute("MEMORY_TYPE", address)) == 2
assert attempt("cuMemGetAddressRange", host) == "NOT_FOUND"
assert int(call("cuMemHostGetDevicePointer", host, 0)) == host
call("cuMemFree", address)
names = driver.CUpointer_attribute
assert attempt("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_BUFFER_ID, address)
""",
    )


def test_registered_memory(major: int) -> None:
    passes(
        major,
        """
import ctypes, mmap
use()
memory = mmap.mmap(-1, MIB)
host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
call("cuMemHostRegister", host, MIB, PORTABLE)
assert attempt("cuMemHostRegister", host, 10, PORTABLE) == "HOST_MEMORY_ALREADY_REGISTERED"
address = alloc(MIB)
call("cuMemcpyDtoHAsync", host, address, MIB, 0)
call("cuStreamSynchronize", 0)
assert set(memory[:]) == {GARBAGE}
call("cuMemHostUnregister", host)
assert attempt("cuMemHostUnregister", host) == "HOST_MEMORY_NOT_REGISTERED"
assert attempt("cuMemHostGetDevicePointer", host, 0) == "INVALID_VALUE"
assert attempt("cuMemHostRegister", 4096, 10, PORTABLE) == "INVALID_VALUE"
""",
    )


def test_streams_and_events_keep_order(major: int) -> None:
    passes(
        major,
        """
import ctypes
use()
word, address = pinned(8), alloc(MIB)
ctypes.memset(word, 0, 8)
first, second = stream(), stream()
event = call("cuEventCreate", 2)
assert not attempt("cuEventQuery", event) and not attempt("cuEventSynchronize", event)
call("cuStreamWaitValue32", first, word, driver.cuuint32_t(5), 0)
call("cuMemsetD8Async", address, 1, MIB, first)
call("cuEventRecord", event, first)
call("cuStreamWaitEvent", second, event, 0)
call("cuMemsetD8Async", address, 2, 8, second)
assert attempt("cuEventQuery", event) == attempt("cuStreamQuery", second) == "NOT_READY"
call("cuEventDestroy", event)
call("cuStreamDestroy", first)
ctypes.c_uint32.from_address(word).value = 6
call("cuStreamSynchronize", second)
assert not attempt("cuStreamQuery", second)
assert fetch(address, 9) == bytes([2] * 8 + [1])
assert attempt("cuStreamSynchronize", first) == attempt("cuEventQuery", event) == "INVALID_HANDLE"
""",
    )


def test_the_default_stream_waits_for_blocking_streams_only(major: int) -> None:
    passes(
        major,
        """
import ctypes
use()
word, address = pinned(4), alloc(16)
ctypes.memset(word, 0, 4)
blocking, free = call("cuStreamCreate", 0), stream()
call("cuStreamWaitValue32", free, word, driver.cuuint32_t(1), 0)
fill(address, 1, 16)
call("cuStreamWaitValue32", blocking, word, driver.cuuint32_t(1), 0)
call("cuMemsetD8Async", address, 2, 16, 0)
assert attempt("cuStreamQuery", 0) == "NOT_READY"
ctypes.memset(word, 1, 4)
call("cuCtxSynchronize")
assert set(fetch(address, 16)) == {2}
""",
    )


def test_limits_and_the_end_of_a_context(major: int) -> None:
    passes(
        major,
        """
use()
limit = driver.CUlimit.CU_LIMIT_STACK_SIZE
call("cuCtxSetLimit", limit, 4096)
assert call("cuCtxGetLimit", limit) == 4096
free, total = call("cuMemGetInfo")
assert free == total == 16 * MIB
address = alloc(10 * MIB)
assert call("cuMemGetInfo")[0] == 6 * MIB
assert attempt("cuMemAlloc", 6 * MIB + 1) == "OUT_OF_MEMORY"
call("cuDevicePrimaryCtxRelease", 0)
assert attempt("cuMemGetInfo") == "CONTEXT_IS_DESTROYED"
use()
assert call("cuMemGetInfo")[0] == 16 * MIB
""",
        MEMORY_BYTES=16 << 20,
    )


def test_virtual_memory(major: int) -> None:
    passes(
        major,
        """
use()
v = Vmm(4 * MIB)
assert attempt("cuMemMap", v.address, 2 * MIB, 0, v.handle, 0) == "INVALID_VALUE"
assert attempt("cuMemAddressFree", v.address, 4 * MIB) == "INVALID_VALUE"
assert attempt("cuMemUnmap", v.address, 2 * MIB) == "INVALID_VALUE"
v.allow()
fill(v.address + 1, 3, 3 * MIB)
again = call("cuMemRetainAllocationHandle", v.address)
v.close()
other = int(call("cuMemAddressReserve", 4 * MIB, 0, 0, 0))
call("cuMemMap", other, 4 * MIB, 0, again, 0)
call("cuMemRelease", again)
v.address = other
v.allow()
assert fetch(other, 2) == bytes([GARBAGE, 3])
call("cuMemUnmap", other, 4 * MIB)
assert attempt("cuMemRelease", again) == "INVALID_VALUE"
free, total = call("cuMemGetInfo")
assert free == total
""",
    )


@pytest.mark.parametrize("access", ["", 'v.allow(flags="READ")', "v.allow(1)"])
def test_virtual_memory_needs_access(major: int, access: str) -> None:
    code = f"""
use()
v = Vmm()
{access}
call("cuMemsetD8Async", v.address, 3, 10, 0)
print(attempt("cuStreamSynchronize", 0))
"""
    assert passes(major, code) == ["ILLEGAL_ADDRESS"]


def test_unmapping_while_work_is_queued_breaks_the_context(major: int) -> None:
    code = """
import ctypes
use()
v, word, s = Vmm(), pinned(4), stream()
v.allow()
ctypes.memset(word, 0, 4)
call("cuStreamWaitValue32", s, word, driver.cuuint32_t(1), 0)
call("cuMemsetD8Async", v.address, 3, 10, s)
v.unmap()
ctypes.memset(word, 1, 4)
print(attempt("cuStreamSynchronize", s))
"""
    assert passes(major, code) == ["ILLEGAL_ADDRESS"]


def test_without_virtual_memory(major: int) -> None:
    code = """
use()
names = driver.CUdevice_attribute
print(call("cuDeviceGetAttribute",
           names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0),
      attempt("cuMemAddressReserve", 2 * MIB, 0, 0, 0))
"""
    assert passes(major, code, NO_VMM=True) == ["0 NOT_SUPPORTED"]


def test_kernels_do_not_load(major: int) -> None:
    code = 'use()\nprint(attempt("cuModuleLoadData", b"image"))'
    assert passes(major, code) == ["NO_BINARY_FOR_GPU"]


def test_the_log_has_every_call(major: int, tmp_path: Path) -> None:
    code = 'use()\nattempt("cuMemAlloc", 0)\nalloc(4)\nprint(os.getpid())'
    (process,) = passes(major, code, LOG=tmp_path)
    assert calls(tmp_path, int(process)) == [
        ("cuInit", "CUDA_SUCCESS"),
        ("cuDeviceGet", "CUDA_SUCCESS"),
        ("cuDevicePrimaryCtxRetain", "CUDA_SUCCESS"),
        ("cuCtxPushCurrent", "CUDA_SUCCESS"),
        ("cuMemAlloc", "CUDA_ERROR_INVALID_VALUE"),
        ("cuMemAlloc", "CUDA_SUCCESS"),
    ]


def test_a_forked_child_has_a_log_of_its_own(major: int, tmp_path: Path) -> None:
    code = """
use()
child = os.fork()
if not child:
    attempt("cuMemAlloc", 8)
    os._exit(0)
os.waitpid(child, 0)
print(child)
"""
    (child,) = passes(major, code, LOG=tmp_path)
    assert calls(tmp_path, int(child)) == [("cuMemAlloc", "CUDA_ERROR_NOT_INITIALIZED")]


def test_threads_and_streams_at_the_same_time(major: int) -> None:
    passes(
        major,
        """
from concurrent.futures import ThreadPoolExecutor
use()
rounds, size = 40, 300_000
def work(number):
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    s, event = stream(), call("cuEventCreate", 2)
    for turn in range(rounds):
        first, second, value = alloc(size), alloc(size), (number * rounds + turn) % 256
        call("cuMemsetD8Async", first, value, size, s)
        call("cuMemcpyDtoDAsync", second, first, size, s)
        call("cuEventRecord", event, s)
        call("cuEventSynchronize", event)
        assert fetch(second, size) == bytes([value]) * size
        call("cuMemFree", first)
        call("cuMemFree", second)
    call("cuStreamDestroy", s)
with ThreadPoolExecutor(4) as threads:
    assert len(list(threads.map(work, range(4)))) == 4
free, total = call("cuMemGetInfo")
assert free == total, total - free
""",
    )
