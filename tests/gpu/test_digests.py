"""Digests that the device computes equal those of the host."""

import os
import random

import pytest
from blake3 import blake3

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import KIB, MIB

pytestmark = pytest.mark.gpu

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
