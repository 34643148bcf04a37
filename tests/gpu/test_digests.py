"""Digests that the device computes equal those of the host."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest
from blake3 import blake3

from mx.core.grid import BLOCK_BYTES
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester, DeviceHasher
from mx.cuda.errors import CudaError
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import KIB, MIB
from tests.gpu.rig import Spy

#: Words, units, messages, chunks, programs: around all of them.
SIZES = (1, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, KIB - 1, KIB, KIB + 1, 2 * KIB + 1)
LARGE_SIZES = (64 * KIB - 1, 64 * KIB + 1, 128 * KIB, 129 * KIB + 5, 512 * KIB + 1, MIB - 1, MIB)


def test_device_digests_equal_the_host_s(gpu: Device) -> None:
    data = os.urandom(8 * MIB)
    draw = random.Random(3)
    with DeviceMemory(gpu, len(data)) as memory:
        spans.poke(DeviceView(gpu.key, memory.address, len(data), memory), data)
        sizes = [*SIZES, *(n * KIB for n in range(2, 40)), *LARGE_SIZES]
        sizes += [draw.randint(1, MIB) for _ in range(300)]
        blocks = [(16 * draw.randrange((len(data) - size) // 16), size) for size in sizes]
        blocks.append((len(data) - MIB, MIB))
        blocks.append((len(data) - 16, 13))
        digester = BlockDigester(gpu)
        try:
            got = digester.digests([(memory.address + at, size) for at, size in blocks])
        finally:
            digester.close()
    assert got == [blake3(data[at : at + size]).digest() for at, size in blocks]


class Memory(DeviceMemory):
    """Device memory of known bytes."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, 4 * MIB)
        self._data = random.Random(7).randbytes(self.nbytes)
        spans.poke(DeviceView(device.key, self.address, self.nbytes, self), self._data)

    def digest(self, address: int, nbytes: int) -> bytes:
        at = address - self.address
        return blake3(self._data[at : at + nbytes]).digest()


@pytest.fixture
def digester(gpu: Device) -> Iterator[BlockDigester]:
    found = BlockDigester(gpu)
    yield found
    found.close()


@pytest.fixture
def memory(gpu: Device) -> Iterator[Memory]:
    with Memory(gpu) as found:
        yield found


class TestBlockDigester:
    def test_all_lengths_in_one_go(self, digester: BlockDigester, memory: Memory) -> None:
        blocks = [(memory.address + 16 * i, size) for i, size in enumerate(SIZES)]
        assert digester.digests(blocks) == [memory.digest(*block) for block in blocks]

    def test_more_than_a_batch(self, digester: BlockDigester, memory: Memory) -> None:
        blocks = [(memory.address + 16 * i, 250 + i) for i in range(300)]
        assert digester.digests(blocks) == [memory.digest(*block) for block in blocks]

    def test_nothing(self, digester: BlockDigester) -> None:
        assert digester.digests([]) == []

    @pytest.mark.parametrize("size", [0, BLOCK_BYTES + 1])
    def test_sizes_that_are_none(self, digester: BlockDigester, memory: Memory, size: int) -> None:
        with pytest.raises(ValueError, match="1 byte to 1 MiB"):
            digester.digests([(memory.address, size)])

    def test_starts_that_are_none(self, digester: BlockDigester, memory: Memory) -> None:
        with pytest.raises(ValueError, match="a multiple of 16"):
            digester.digests([(memory.address + 8, 100)])

    def test_threads_get_their_own(self, digester: BlockDigester, memory: Memory) -> None:
        found: dict[int, list[bytes]] = {}

        def blocks(start: int) -> list[tuple[int, int]]:
            return [(memory.address + 16 * (start + i), 999) for i in range(start % 5 + 1)]

        def ask(start: int) -> None:
            found[start] = digester.digests(blocks(start))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        for start, digests in found.items():
            assert digests == [memory.digest(*block) for block in blocks(start)]

    def test_a_failure_fails_the_caller_only(
        self, spy: Spy, digester: BlockDigester, memory: Memory
    ) -> None:
        spy.fail("cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        with pytest.raises(CudaError, match="OUT_OF_RESOURCES"):
            digester.digests([(memory.address, 500)])
        assert digester.digests([(memory.address, 500)]) == [memory.digest(memory.address, 500)]


def test_a_read_s_digests_are_those_of_its_blocks(digester: BlockDigester, memory: Memory) -> None:
    views = [
        DeviceView("cuda:x", memory.address + at, nbytes)
        for at, nbytes in ((256, MIB), (MIB + 256, 700), (2 * MIB, 3))
    ]
    hasher = DeviceHasher(views, digester.digests)
    hasher.landed(1)
    assert hasher.block_digests() == b"".join(
        memory.digest(view.address, len(view)) for view in views
    )
