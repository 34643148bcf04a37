"""The fake driver's and the owning objects' behaviour: what the rest of the CUDA code relies on."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.cuda import driver as drivers
from mx.cuda.device import (
    Device,
    DeviceMemory,
    Event,
    IpcMemory,
    PinnedMemory,
    PinnedRegion,
    Stream,
)
from mx.cuda.errors import CudaError, CudaMemoryError, CudaUnavailableError, cuda_error
from mx.cuda.vmm import VmmMemory
from mx.errors import CapacityError, ClosedError, ConfigError, LocalError
from mx.transport import Unavailable, Viable
from mx.units import MIB
from tests.support.fake_cuda import GRANULARITY_BYTES, FakeDriver, fake_uuid


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    yield driver
    gc.collect()
    assert driver.live() == []


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(fake, 0) as found:
        yield found


def put(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def get(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def exported(device: Device, address: int) -> int:
    """A descriptor of the allocation that is mapped at `address`; the caller closes it."""
    with device.current():
        handle = device.driver.vmm_retain(address)
        try:
            return device.driver.vmm_export_fd(handle)
        finally:
            device.driver.vmm_release(handle)


def test_devices_are_found_by_number_and_by_uuid(fake: FakeDriver) -> None:
    for name in ("cuda:1", fake_uuid(1), f"cuda:{fake_uuid(1)}"):
        with Device.open(fake, name) as found:
            assert (found.ordinal, found.key) == (1, f"cuda:{fake_uuid(1)}")
    with Device.open(fake, "cuda") as found:
        assert found.ordinal == 0


@pytest.mark.parametrize("name", ["cuda:2", "cuda:-1", "cuda:", "cuda:GPU-1", "cpu", "cuda:²"])
def test_no_such_device_names_those_there_are(fake: FakeDriver, name: str) -> None:
    with pytest.raises(ConfigError, match=fake_uuid(1)):
        Device.open(fake, name)


def test_copies_are_done_when_waited_for(device: Device) -> None:
    with PinnedMemory(device, 64) as host, DeviceMemory(device, 64) as there:
        stream = Stream(device)
        host.view()[:] = bytes(range(64))
        with device.current():
            device.driver.copy_htod(there.address, host.address, 64, stream.handle)
        host.view()[:] = bytes(64)  # too early: the copy has not run
        stream.synchronize()
        assert get(there.address, 64) == bytes(64)
        stream.close()


def test_pageable_memory_is_copied_at_once(device: Device) -> None:
    host = ctypes.create_string_buffer(b"x" * 64, 64)
    with DeviceMemory(device, 64) as there, Stream(device) as stream, device.current():
        device.driver.copy_htod(there.address, ctypes.addressof(host), 64, stream.handle)
        assert get(there.address, 64) == b"x" * 64


def test_a_stream_waits_for_another_s_event(device: Device) -> None:
    driver = device.driver
    with (
        DeviceMemory(device, 8) as there,
        Stream(device) as first,
        Stream(device) as second,
        Event(device) as event,
    ):
        with device.current():
            driver.memset(there.address, 1, 8, first.handle)
        event.record(first)
        second.wait(event)
        with device.current():
            driver.memset(there.address, 2, 4, second.handle)
        assert not event.done() or get(there.address, 1) == b"\1"
        second.synchronize()
        assert get(there.address, 8) == b"\2" * 4 + b"\1" * 4
        assert event.done()


def test_a_stream_waits_for_a_word(device: Device) -> None:
    driver = device.driver
    with PinnedMemory(device, 4) as word, DeviceMemory(device, 8) as there:
        word.view()[:] = bytes(4)
        with Stream(device) as stream:
            with device.current():
                driver.stream_wait_value(stream.handle, word.device_address, 5)
                driver.memset(there.address, 7, 8, stream.handle)
            assert not stream.done()
            word.view()[:] = (4).to_bytes(4, "little")
            assert not stream.done()
            assert get(there.address, 8) != b"\7" * 8
            word.view()[:] = (6).to_bytes(4, "little")
            stream.synchronize()
        assert get(there.address, 8) == b"\7" * 8


def test_everything_is_given_back_in_any_order(fake: FakeDriver) -> None:
    device = Device(fake, 0)
    stream, event = Stream(device), Event(device)
    memory, host = DeviceMemory(device, 100), PinnedMemory(device, 100)
    device.close()
    device.close()
    with pytest.raises(ClosedError):
        Stream(device)
    for owned in (host, event, memory, stream):
        owned.close()
        owned.close()
        assert owned.closed
    assert fake.live() == []


def test_what_is_dropped_is_given_back(fake: FakeDriver) -> None:
    device = Device(fake, 0)
    view = PinnedMemory(device, 100).view()
    del device
    gc.collect()
    assert "1 host" in fake.live()  # the view keeps it
    view[0] = 1
    del view
    gc.collect()
    assert fake.live() == []


def test_errors_name_the_call_and_the_code(fake: FakeDriver, device: Device) -> None:
    with pytest.raises(CudaMemoryError, match=r"cuMemAlloc.*OUT_OF_MEMORY.*free memory") as caught:
        DeviceMemory(device, 1 << 40)
    assert isinstance(caught.value, CapacityError) and isinstance(caught.value, LocalError)
    fake.fail("event_record", "CUDA_ERROR_INVALID_HANDLE")
    with Stream(device) as stream, Event(device) as event:
        with pytest.raises(CudaError) as failed:
            event.record(stream)
        assert failed.value.code == "CUDA_ERROR_INVALID_HANDLE"
        event.record(stream)


def test_a_call_without_a_context_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        fake.mem_alloc(10)


def test_a_broken_device_fails_all_and_closes_quietly() -> None:
    driver = FakeDriver()
    device = Device(driver, 0)
    memory, stream = DeviceMemory(device, 16), Stream(device)
    driver.break_device(stream.handle)
    with pytest.raises(CudaError, match="start the process again"):
        stream.synchronize()
    with pytest.raises(CudaError, match="LAUNCH_FAILED"):
        DeviceMemory(device, 16)
    stream.close()
    memory.close()
    device.close()
    driver.end()


def test_freed_memory_breaks_the_device(fake: FakeDriver) -> None:
    driver = FakeDriver()
    device = Device(driver, 0)
    stream = Stream(device)
    memory, other = DeviceMemory(device, 16), DeviceMemory(device, 16)
    address = memory.address
    memory.close()
    with device.current():
        driver.copy_dtod(other.address, address, 16, stream.handle)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        stream.synchronize()
    driver.end()


def test_another_gpu_s_memory_needs_peer_access(fake: FakeDriver) -> None:
    with (
        Device(fake, 0) as here,
        Device(fake, 1) as there,
        DeviceMemory(here, 16) as target,
        DeviceMemory(there, 16) as source,
    ):
        put(source.address, b"y" * 16)
        with Stream(here) as stream, here.current():
            fake.enable_peer_access(there.context)
            fake.copy_dtod(target.address, source.address, 16, stream.handle)
        assert get(target.address, 16) == b"y" * 16


def test_host_memory_is_pinned_once(device: Device) -> None:
    buffer = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(buffer)
    with PinnedRegion(device, address, 4096), pytest.raises(CudaError, match="pinned already"):
        PinnedRegion(device, address, 10)
    PinnedRegion(device, address, 10).close()


class TestVmm:
    def test_rounds_up_and_counts(self, fake: FakeDriver, device: Device) -> None:
        with VmmMemory.allocate(device, 3 * MIB) as memory:
            assert memory.nbytes == 2 * GRANULARITY_BYTES
            assert fake.used_nbytes() == memory.nbytes
            found = fake.pointer(memory.address + 5)
            assert (found.base, found.nbytes) == (memory.address, memory.nbytes)
            assert found.fd_capable and not found.ipc_capable
        assert fake.used_nbytes() == 0

    def test_exported_to_another_driver_and_outliving_its_maker(self, device: Device) -> None:
        other = FakeDriver()
        memory = VmmMemory.allocate(device, 10)
        descriptors = [exported(device, memory.address)]
        put(memory.address, b"shared")
        with Device(other, 0) as there:
            opened = VmmMemory.from_fds(there, descriptors, [memory.nbytes])
            for descriptor in descriptors:
                os.close(descriptor)
            memory.close()
            assert get(opened.address, 6) == b"shared"
            opened.close()
        assert other.live() == []

    def test_several_allocations_in_one_range(self, device: Device) -> None:
        parts = [VmmMemory.allocate(device, 1) for _ in range(3)]
        descriptors, sizes = [], []
        for index, part in enumerate(parts):
            put(part.address, bytes([index]) * part.nbytes)
            found = device.driver.pointer(part.address + 100)
            assert (found.base, found.nbytes) == (part.address, part.nbytes)
            descriptors.append(exported(device, part.address + 100))
            sizes.append(found.nbytes)
        other = FakeDriver()
        with (
            Device(other, 0) as there,
            VmmMemory.from_fds(there, descriptors, sizes) as whole,
        ):
            assert whole.nbytes == sum(sizes)
            for index, size in enumerate(sizes):
                assert get(whole.address + index * size, size) == bytes([index]) * size
        assert other.live() == []
        for owned in parts:
            owned.close()
        for descriptor in descriptors:
            os.close(descriptor)

    @pytest.mark.parametrize("call", ["vmm_reserve", "vmm_map", "vmm_set_access", "vmm_create"])
    def test_a_failure_on_the_way_leaves_nothing(self, fake: FakeDriver, call: str) -> None:
        with Device(fake, 0) as device:
            fake.fail(call, "CUDA_ERROR_OUT_OF_MEMORY")
            with pytest.raises(CudaMemoryError):
                VmmMemory.allocate(device, 10)
        assert fake.live() == []

    def test_a_descriptor_of_something_else_is_refused(self, device: Device) -> None:
        with open("/dev/null") as file, pytest.raises(CudaError, match="INVALID_VALUE"):
            VmmMemory.from_fds(device, [file.fileno()], [GRANULARITY_BYTES])


class TestIpc:
    def test_not_in_the_process_that_exported_it(self, fake: FakeDriver, device: Device) -> None:
        with DeviceMemory(device, 100) as memory:
            with device.current():
                handle = fake.ipc_handle(memory.address + 50)
            with pytest.raises(CudaError, match="INVALID_CONTEXT"):
                IpcMemory(device, handle)

    def test_opened_twice_closed_twice(self, fake: FakeDriver, device: Device) -> None:
        other = FakeDriver()
        with DeviceMemory(device, 100) as memory, Device(other, 0) as there:
            put(memory.address, b"z" * 100)
            with device.current():
                handle = fake.ipc_handle(memory.address)
            first, second = IpcMemory(there, handle), IpcMemory(there, handle)
            assert first.address == second.address
            first.close()
            assert get(second.address, 100) == b"z" * 100
            second.close()
        assert other.live() == []

    def test_freed_memory_is_refused(self, fake: FakeDriver, device: Device) -> None:
        memory = DeviceMemory(device, 100)
        with device.current():
            handle = fake.ipc_handle(memory.address)
        memory.close()
        with Device(FakeDriver(), 0) as there, pytest.raises(CudaError, match="INVALID_VALUE"):
            IpcMemory(there, handle)

    def test_between_processes(self, fake: FakeDriver, device: Device) -> None:
        script = """
import ctypes, sys
from mx.cuda.device import Device, IpcMemory
from tests.support.fake_cuda import FakeDriver
with Device(FakeDriver(), 0) as device, IpcMemory(device, bytes.fromhex(sys.argv[1])) as memory:
    print(ctypes.string_at(memory.address, 4).decode())
    ctypes.memmove(memory.address, b"back", 4)
"""
        with DeviceMemory(device, 100) as memory:
            put(memory.address, b"sent")
            with device.current():
                handle = fake.ipc_handle(memory.address)
            done = subprocess.run(
                [sys.executable, "-c", script, handle.hex()],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parents[2],
            )
            assert done.stdout.strip() == "sent"
            assert get(memory.address, 4) == b"back"


class TestLoading:
    def test_probe_reports_the_gpus(self) -> None:
        with drivers.installed(FakeDriver(gpus=1)):
            assert drivers.probe() == Viable("CUDA 13.0: Fake GPU")

    def test_probe_reports_why_not(self) -> None:
        broken = FakeDriver()
        broken.fail("device_count", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
        with drivers.installed(broken):
            found = drivers.probe()
        assert isinstance(found, Unavailable)
        assert "MISMATCH" in found.reason and "reboot" in found.reason

    def test_load_raises_a_fresh_error_each_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
