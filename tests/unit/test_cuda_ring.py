"""The ring of pinned memory: right bytes in both directions, slots never reused too early."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.errors import CudaError, CudaMemoryError
from mx.cuda.ring import PinnedRing
from mx.errors import ClosedError
from mx.units import KIB, MIB
from tests.support.fake_cuda import FakeDriver

SLOT = 64 * KIB


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    driver = FakeDriver(eager=request.param)
    yield driver
    assert driver.live() == []


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(fake, 0) as found:
        yield found


@pytest.fixture
def ring(device: Device) -> Iterator[PinnedRing]:
    found = PinnedRing(device, slot_nbytes=SLOT, slots=3)
    yield found
    found.close()


@pytest.mark.parametrize("nbytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 11 * SLOT + 5])
def test_up_and_down(device: Device, ring: PinnedRing, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    with DeviceMemory(device, nbytes + 16) as memory:
        ring.upload(memory.address + 8, memoryview(data))
        assert ctypes.string_at(memory.address + 8, nbytes) == data
        back = bytearray(nbytes)
        ring.download(memory.address + 8, memoryview(back))
        assert back == data
    assert ring.free == 3


def test_both_ways_at_once(device: Device, ring: PinnedRing) -> None:
    up, down = random.Random(1).randbytes(2 * MIB), random.Random(2).randbytes(2 * MIB)
    back = bytearray(len(down))
    with DeviceMemory(device, len(up)) as to, DeviceMemory(device, len(down)) as here:
        ring.upload(here.address, memoryview(down))
        threads = [
            threading.Thread(target=ring.upload, args=(to.address, memoryview(up))),
            threading.Thread(target=ring.download, args=(here.address, memoryview(back))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ctypes.string_at(to.address, len(up)) == up
        assert back == down


def test_a_reader_that_stops_gives_its_slots_back(device: Device, ring: PinnedRing) -> None:
    with DeviceMemory(device, MIB) as memory:
        pieces = ring.read(memory.address, MIB)
        assert len(next(pieces)) == SLOT
        assert ring.free < 3
        pieces.close()
        assert ring.free == 3


def test_closed_while_a_slot_is_out(fake: FakeDriver, device: Device) -> None:
    ring = PinnedRing(device, slot_nbytes=SLOT, slots=2)
    slot = ring.take()
    other = ring.take()
    refused: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(ClosedError) as caught:
            ring.take()
        refused.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    thread.join()
    assert refused
    slot.view[0] = 1  # still there
    ring.give(slot)
    assert "1 host" in fake.live()
    del slot
    ring.give(other)
    ring.close()


def test_a_failed_copy_raises(fake: FakeDriver, device: Device, ring: PinnedRing) -> None:
    fake.fail("copy_htod", "CUDA_ERROR_INVALID_VALUE")
    with DeviceMemory(device, SLOT) as memory:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            ring.upload(memory.address, memoryview(bytes(SLOT)))
        ring.upload(memory.address, memoryview(bytes(SLOT)))
        assert ctypes.string_at(memory.address, SLOT) == bytes(SLOT)


@pytest.mark.parametrize("call", ["host_alloc", "stream_create", "event_create"])
def test_a_ring_that_can_t_be_made_leaves_nothing(
    fake: FakeDriver, device: Device, call: str
) -> None:
    fake.fail(call, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaMemoryError):
        PinnedRing(device)
