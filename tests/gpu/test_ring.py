"""The ring of pinned memory: right bytes in both directions, slots never reused too early."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.errors import CudaError, CudaMemoryError
from mx.cuda.ring import PinnedRing, RingSlot
from mx.errors import ClosedError
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import KIB, MIB
from tests.gpu.rig import Spy

SLOT = 64 * KIB


@pytest.fixture
def ring(gpu: Device) -> Iterator[PinnedRing]:
    found = PinnedRing(gpu, slot_nbytes=SLOT, slots=3)
    yield found
    found.close()


def held(memory: DeviceMemory, at: int, nbytes: int) -> bytes:
    return spans.peek(DeviceView(memory.device.key, memory.address + at, nbytes, memory))


@pytest.mark.parametrize("nbytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 11 * SLOT + 5])
def test_up_and_down(gpu: Device, ring: PinnedRing, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    with DeviceMemory(gpu, nbytes + 16) as memory:
        ring.upload(memory.address + 8, memoryview(data))
        assert held(memory, 8, nbytes) == data
        back = bytearray(nbytes)
        ring.download(memory.address + 8, memoryview(back))
        assert back == data
    assert ring.free == 3


def test_both_ways_at_once(gpu: Device, ring: PinnedRing) -> None:
    up, down = random.Random(1).randbytes(2 * MIB), random.Random(2).randbytes(2 * MIB)
    back = bytearray(len(down))
    with DeviceMemory(gpu, len(up)) as to, DeviceMemory(gpu, len(down)) as here:
        ring.upload(here.address, memoryview(down))
        threads = [
            threading.Thread(target=ring.upload, args=(to.address, memoryview(up))),
            threading.Thread(target=ring.download, args=(here.address, memoryview(back))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held(to, 0, len(up)) == up
        assert back == down


def test_a_reader_that_stops_gives_its_slots_back(gpu: Device, ring: PinnedRing) -> None:
    with DeviceMemory(gpu, MIB) as memory:
        pieces = ring.read(memory.address, MIB)
        assert len(next(pieces)) == SLOT
        assert ring.free < 3
        pieces.close()
        assert ring.free == 3


def test_closed_while_a_slot_is_out(gpu: Device, spy: Spy) -> None:
    ring = PinnedRing(gpu, slot_nbytes=SLOT, slots=2)
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
    freed = spy.calls["cuMemFreeHost"]
    del slot
    ring.give(other)
    ring.close()
    assert (freed, spy.calls["cuMemFreeHost"]) == (0, 1)


def test_a_ring_is_extended(gpu: Device, ring: PinnedRing, spy: Spy) -> None:
    spy.fail("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaMemoryError):
        ring.extend(2)
    assert (ring.free, ring.slots) == (3, 3)
    held_up = [ring.take() for _ in range(3)]
    more: list[RingSlot] = []
    waiting = threading.Thread(target=lambda: more.append(ring.take()))
    waiting.start()
    ring.extend(2)
    waiting.join()
    slots = [*held_up, *more, ring.take()]
    assert ring.try_take() is None
    data = [random.Random(number).randbytes(SLOT) for number in range(5)]
    with DeviceMemory(gpu, 5 * SLOT) as memory:
        for number, slot in enumerate(slots):
            slot.view[:] = data[number]
            ring.push(slot, memory.address + number * SLOT, SLOT)
        ring.flush()
        assert held(memory, 0, 5 * SLOT) == b"".join(data)
    ring.close()
    freed = spy.calls["cuMemFreeHost"]
    for slot in slots:
        ring.give(slot)
    assert (freed, spy.calls["cuMemFreeHost"]) == (0, 2)
    with pytest.raises(ClosedError):
        ring.extend(1)
    assert spy.calls["cuMemFreeHost"] == 3


def test_a_failed_copy_raises(gpu: Device, ring: PinnedRing, spy: Spy) -> None:
    spy.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE")
    with DeviceMemory(gpu, SLOT) as memory:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            ring.upload(memory.address, memoryview(bytes(SLOT)))
        ring.upload(memory.address, memoryview(bytes(SLOT)))
        assert held(memory, 0, SLOT) == bytes(SLOT)


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
def test_a_ring_that_can_t_be_made_leaves_nothing(gpu: Device, spy: Spy, call: str) -> None:
    spy.fail(call, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaMemoryError):
        PinnedRing(gpu)
