"""The owning objects and the driver's behaviour that the rest of the CUDA code relies on."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mx.cuda import driver as drivers
from mx.cuda.bindings import Driver
from mx.cuda.device import (
    CudaEvent,
    CudaStream,
    Device,
    DeviceMemory,
    IpcMemory,
    PinnedMemory,
    PinnedRegion,
)
from mx.cuda.errors import CudaError, CudaMemoryError
from mx.cuda.vmm import VmmMemory
from mx.errors import CapacityError, ClosedError, ConfigError, LocalError
from mx.testing import spans
from mx.transport import DeviceView, Viable
from mx.units import MIB
from tests.gpu.rig import Child, Spy


def put(memory: DeviceMemory | VmmMemory | IpcMemory, data: bytes, at: int = 0) -> None:
    spans.poke(DeviceView(memory.device.key, memory.address + at, len(data), memory), data)


def get(memory: DeviceMemory | VmmMemory | IpcMemory, nbytes: int, at: int = 0) -> bytes:
    return spans.peek(DeviceView(memory.device.key, memory.address + at, nbytes, memory))


def opened(gpu: Device, descriptors: Sequence[int], sizes: Sequence[int]) -> VmmMemory:
    with gpu.current():
        handles = [gpu.driver.vmm_import_fd(descriptor) for descriptor in descriptors]
    return VmmMemory(gpu, handles, sizes)


def exported(device: Device, address: int) -> int:
    """A descriptor of the allocation that is mapped at `address`; the caller closes it."""
    with device.current():
        handle = device.driver.vmm_retain(address)
        try:
            return device.driver.vmm_export_fd(handle)
        finally:
            device.driver.vmm_release(handle)


def test_devices_are_found_by_number_and_by_uuid(driver: Driver) -> None:
    last = driver.device_count() - 1
    uuid = driver.device_uuid(last)
    for name in (f"cuda:{last}", uuid, f"cuda:{uuid}"):
        with Device.open(driver, name) as found:
            assert (found.ordinal, found.key) == (last, f"cuda:{uuid}")
    with Device.open(driver, "cuda") as found:
        assert found.ordinal == 0


@pytest.mark.parametrize("name", ["cuda:99", "cuda:-1", "cuda:", "cuda:GPU-1", "cpu", "cuda:²"])
def test_no_such_device_names_those_there_are(driver: Driver, name: str) -> None:
    with pytest.raises(ConfigError, match=driver.device_uuid(0)):
        Device.open(driver, name)


def test_a_stream_waits_for_another_s_event(gpu: Device) -> None:
    driver = gpu.driver
    with (
        DeviceMemory(gpu, 8) as there,
        CudaStream(gpu) as first,
        CudaStream(gpu) as second,
        CudaEvent(gpu) as event,
    ):
        with gpu.current():
            driver.memset(there.address, 1, 8, first.handle)
        event.record(first)
        second.wait(event)
        with gpu.current():
            driver.memset(there.address, 2, 4, second.handle)
        second.synchronize()
        assert get(there, 8) == b"\2" * 4 + b"\1" * 4
        assert event.done()


def test_everything_is_given_back_in_any_order(driver: Driver, spy: Spy) -> None:
    device = Device(driver, 0)
    stream, event = CudaStream(device), CudaEvent(device)
    memory, host = DeviceMemory(device, 100), PinnedMemory(device, 100)
    device.close()
    device.close()
    with pytest.raises(ClosedError):
        CudaStream(device)
    for owned in (host, event, memory, stream):
        assert not spy.calls["cuDevicePrimaryCtxRelease"]
        owned.close()
        owned.close()
        assert owned.closed
    assert spy.calls["cuDevicePrimaryCtxRelease"] == 1


def test_what_is_dropped_is_given_back(driver: Driver, spy: Spy) -> None:
    device = Device(driver, 0)
    view = PinnedMemory(device, 100).view()
    del device
    gc.collect()
    assert not spy.calls["cuMemFreeHost"]  # the view keeps it
    view[0] = 1
    del view
    gc.collect()
    assert spy.calls["cuMemFreeHost"] == spy.calls["cuDevicePrimaryCtxRelease"] == 1


@pytest.mark.parametrize("dropped", [False, True])
def test_what_the_driver_does_not_take_back_is_logged(
    gpu: Device, spy: Spy, caplog: pytest.LogCaptureFixture, dropped: bool
) -> None:
    event, freed = CudaEvent(gpu), spy.calls["cuEventDestroy"]
    refused = gpu.driver._d.CUresult.CUDA_ERROR_INVALID_HANDLE

    def refuse(real: Any, handle: Any) -> Any:
        real(handle)
        return (refused,)

    spy.replace("cuEventDestroy", refuse)
    if dropped:
        del event
        gc.collect()
    else:
        event.close()
    assert spy.calls["cuEventDestroy"] == freed + 1
    assert "not given back: cuEventDestroy failed" in caplog.text


def test_errors_name_the_call_and_the_code(gpu: Device, spy: Spy) -> None:
    with pytest.raises(CudaMemoryError, match=r"cuMemAlloc.*OUT_OF_MEMORY.*free memory") as caught:
        DeviceMemory(gpu, 1 << 40)
    assert isinstance(caught.value, CapacityError) and isinstance(caught.value, LocalError)
    spy.fail("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
    with CudaStream(gpu) as stream, CudaEvent(gpu) as event:
        with pytest.raises(CudaError) as failed:
            event.record(stream)
        assert failed.value.code == "CUDA_ERROR_INVALID_HANDLE"
        event.record(stream)


def test_a_call_without_a_context_is_refused(driver: Driver) -> None:
    found: list[CudaError] = []

    def call() -> None:
        with pytest.raises(CudaError, match="INVALID_CONTEXT") as caught:
            driver.mem_alloc(10)
        found.append(caught.value.with_traceback(None))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found


def test_host_memory_is_pinned_once(gpu: Device) -> None:
    buffer = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(buffer)
    with PinnedRegion(gpu, address, 4096), pytest.raises(CudaError, match="pinned already"):
        PinnedRegion(gpu, address, 10)
    PinnedRegion(gpu, address, 10).close()


class TestVmm:
    def test_rounds_up(self, gpu: Device) -> None:
        granularity = gpu.driver.vmm_granularity(0)
        with VmmMemory.allocate(gpu, granularity + 1) as memory:
            assert memory.nbytes == 2 * granularity
            with gpu.current():
                found = gpu.driver.pointer(memory.address + 5)
            assert (found.base, found.nbytes) == (memory.address, memory.nbytes)
            assert found.fd_capable and not found.ipc_capable

    def test_exported_and_outliving_its_maker(self, gpu: Device) -> None:
        memory = VmmMemory.allocate(gpu, 10)
        descriptor = exported(gpu, memory.address)
        put(memory, b"shared")
        there = opened(gpu, [descriptor], [memory.nbytes])
        os.close(descriptor)
        memory.close()
        assert get(there, 6) == b"shared"
        there.close()

    def test_several_allocations_in_one_range(self, gpu: Device) -> None:
        parts = [VmmMemory.allocate(gpu, 1) for _ in range(3)]
        descriptors, sizes = [], []
        for index, part in enumerate(parts):
            put(part, bytes([index]) * part.nbytes)
            with gpu.current():
                found = gpu.driver.pointer(part.address + 100)
            assert (found.base, found.nbytes) == (part.address, part.nbytes)
            descriptors.append(exported(gpu, part.address + 100))
            sizes.append(found.nbytes)
        with opened(gpu, descriptors, sizes) as whole:
            assert whole.nbytes == sum(sizes)
            for index, size in enumerate(sizes):
                assert get(whole, size, index * size) == bytes([index]) * size
        for owned in parts:
            owned.close()
        for descriptor in descriptors:
            os.close(descriptor)

    @pytest.mark.parametrize(
        "call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemCreate"]
    )
    def test_a_failure_on_the_way_leaves_nothing(self, gpu: Device, spy: Spy, call: str) -> None:
        spy.fail(call, "CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(CudaMemoryError):
            VmmMemory.allocate(gpu, 10)

    def test_a_descriptor_of_something_else_is_refused(self, gpu: Device) -> None:
        with open("/dev/null") as file, pytest.raises(CudaError):
            opened(gpu, [file.fileno()], [gpu.driver.vmm_granularity(0)])


#: Opens a handle twice; prints what it reads, writes, closes one and reads through the other. A
#: line of its input ends it, and it tries the handle again.
_IMPORTER = """
from mx.cuda import driver as drivers
from mx.cuda.device import Device, IpcMemory
from mx.cuda.errors import CudaError
from mx.testing import spans
from mx.transport import DeviceView
handle = bytes.fromhex(sys.argv[1])
with Device(drivers.load(), 0) as device:
    first, second = IpcMemory(device, handle), IpcMemory(device, handle)
    assert first.address == second.address
    view = DeviceView(device.key, first.address, 4, first)
    print(spans.peek(view).decode(), flush=True)
    spans.poke(view, b"back")
    first.close()
    print(spans.peek(view).decode(), flush=True)
    second.close()
    print("closed", flush=True)
    sys.stdin.readline()
    try:
        IpcMemory(device, handle).close()
    except CudaError as error:
        print(error.code, flush=True)
"""


class TestIpc:
    def test_not_in_the_process_that_exported_it(self, gpu: Device) -> None:
        with DeviceMemory(gpu, 100) as memory:
            with gpu.current():
                handle = gpu.driver.ipc_handle(memory.address + 50)
            with pytest.raises(CudaError, match="INVALID_CONTEXT"):
                IpcMemory(gpu, handle)

    def test_between_processes(self, gpu: Device) -> None:
        with DeviceMemory(gpu, 4 * MIB) as memory:
            put(memory, b"sent")
            with gpu.current():
                handle = gpu.driver.ipc_handle(memory.address)
            with Child(_IMPORTER, handle.hex()) as child:
                assert child.receive_line() == "sent"
                assert child.receive_line() == "back"
                assert child.receive_line() == "closed"
                assert get(memory, 4) == b"back"
                memory.close()
                child.send_line("it is freed")
                assert child.receive_line().startswith("CUDA_ERROR_")


def test_probe_reports_the_gpus(driver: Driver) -> None:
    found = drivers.probe()
    assert isinstance(found, Viable) and driver.device_name(0) in found.detail
    assert found.detail.startswith("CUDA 1")
