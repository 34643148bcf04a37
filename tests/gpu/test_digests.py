"""Digests that the device computes equal those of xxhash."""

import os
import random

import pytest
from xxhash import xxh3_128_digest

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import MIB

pytestmark = pytest.mark.gpu


def test_device_digests_equal_xxhash(gpu: Device) -> None:
    data = os.urandom(8 * MIB)
    draw = random.Random(3)
    with DeviceMemory(gpu, len(data)) as memory:
        spans.poke(DeviceView(gpu.key, memory.address, len(data), memory), data)
        blocks = [(0, MIB), (MIB, MIB), (7, MIB), (0, 1), (3, 240), (8, 241), (64, 1024)]
        blocks += [(draw.randrange(7 * MIB), draw.randint(1, MIB)) for _ in range(300)]
        digester = BlockDigester(gpu)
        try:
            got = digester.digests([[(memory.address + at, size)] for at, size in blocks])
            parts = [(memory.address + 5, 1000), (memory.address + 5000, 70_000)]
            in_parts = digester.digests([parts])
        finally:
            digester.close()
    assert got == [xxh3_128_digest(data[at : at + size]) for at, size in blocks]
    assert in_parts == [xxh3_128_digest(data[5:1005] + data[5000:75_000])]
