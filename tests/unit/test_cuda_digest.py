"""Digests of device memory are those of the same bytes in host memory."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from mx.core.digest import chunk_digest
from mx.core.types import BLOCK_BYTES, Segment
from mx.cuda import xxh3
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester, DeviceHasher
from mx.cuda.errors import CudaError
from mx.cuda.xxh3_table import MAX_UNITS, PROGRAM_UNITS, TABLE
from mx.errors import LocalError
from mx.transport import DeviceView
from mx.units import MIB
from tests.support import fake_kernels
from tests.support.fake_cuda import FakeDriver

#: The lengths at which something changes: units of 1024, stripes of 64, words of 8.
EDGES = (241, 255, 256, 257, 320, 1023, 1024, 1025, 1088, 1089, 2048, 16385, 17413)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(xxh3, "compiled", fake_kernels.images)
    driver = FakeDriver()
    yield driver
    assert driver.live() == []


@pytest.fixture
def digester(fake: FakeDriver) -> Iterator[BlockDigester]:
    with Device(fake, 0) as device:
        found = BlockDigester(device)
        yield found
        found.close()


@pytest.fixture
def memory(fake: FakeDriver) -> Iterator[DeviceMemory]:
    with Device(fake, 0) as device, DeviceMemory(device, 4 * MIB) as found:
        fill(found.address, random.Random(7).randbytes(found.nbytes))
        yield found


def fill(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def get(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


#: In a process of its own: Triton decides at import whether its interpreter runs the kernels.
INTERPRET = """
import random, struct, sys
import numpy as np, torch
from mx.cuda import xxh3_kernel as kernels
from mx.cuda.xxh3_table import MAX_UNITS, PROGRAM_UNITS, TABLE

sizes = [int(size) for size in sys.argv[1:]]
inputs = [random.Random(size).randbytes(size) for size in sizes]
tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in inputs]
addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
table = torch.from_numpy(np.array(TABLE, dtype=np.uint64))
sums = torch.full((len(inputs), MAX_UNITS, 8), 0x5A5A5A5A, dtype=torch.uint64)
digests = torch.zeros((len(inputs), 2), dtype=torch.uint64)
common = (addresses, torch.tensor(sizes), table, sums)
grid = (len(inputs), MAX_UNITS // PROGRAM_UNITS)
kernels.unit_sums[grid](*common, units=PROGRAM_UNITS)
kernels.finish[(len(inputs),)](*common, digests)
for row in digests.numpy():
    print(struct.pack(">QQ", *map(int, row)).hex())
"""


def test_the_triton_kernels_are_xxh3() -> None:
    """The kernels themselves, run by Triton's interpreter."""
    pytest.importorskip("triton")
    sizes = (*EDGES, BLOCK_BYTES)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, *map(str, sizes)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [xxh3_128_digest(random.Random(size).randbytes(size)).hex() for size in sizes]
    assert done.stdout.split() == expected


def test_the_triton_kernels_compile_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = xxh3.compiled.__wrapped__(90)
    for kernel, own in ((found.unit_sums, 4), (found.finish, 5)):
        assert kernel.cubin[:4] == b"\x7fELF"
        assert own <= kernel.parameters <= own + 4


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LocalError, match="need Triton"):
        xxh3.compiled.__wrapped__(90)


@given(st.integers(241, BLOCK_BYTES), st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_the_specification_in_numpy_is_xxh3(size: int, seed: int) -> None:
    data = np.frombuffer(random.Random(seed).randbytes(size) + bytes(-size % 8), np.uint8).copy()
    inputs, lengths = np.array([data.ctypes.data], np.uint64), np.array([size], np.uint64)
    table, digest = np.array(TABLE, np.uint64), np.zeros(2, np.uint64)
    sums = np.zeros((MAX_UNITS, 8), np.uint64)
    common = [array.ctypes.data for array in (inputs, lengths, table, sums)]
    fake_kernels.unit_sums((1, MAX_UNITS // PROGRAM_UNITS), [*common, 0, 0])
    fake_kernels.finish((1, 1), [*common, digest.ctypes.data, 0, 0])
    assert struct.pack(">QQ", *map(int, digest)) == xxh3_128_digest(data[:size].tobytes())


class TestBlockDigester:
    def test_all_kinds_in_one_go(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        at = memory.address
        blocks = [
            [(at, BLOCK_BYTES)],
            [(at + 8, 241)],
            [(at + 3, 1000)],  # starts nowhere near a word
            [(at, 240)],
            [(at, 1)],
            [(at + 256, 700), (at + 4096, 5000), (at + 16384, 3)],
            [(at + 5, 7), (at + 100, 9)],
        ]
        expected = [xxh3_128_digest(b"".join(get(*part) for part in block)) for block in blocks]
        assert digester.digests(blocks) == expected

    def test_more_than_a_batch(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        blocks = [[(memory.address + 8 * i, 250 + i)] for i in range(300)]
        blocks += [[(memory.address + 8 * i + 1, 2000)] for i in range(40)]
        expected = [xxh3_128_digest(get(*block[0])) for block in blocks]
        assert digester.digests(blocks) == expected

    def test_nothing(self, digester: BlockDigester) -> None:
        assert digester.digests([]) == []

    @pytest.mark.parametrize("size", [0, BLOCK_BYTES + 1])
    def test_sizes_that_are_none(
        self, digester: BlockDigester, memory: DeviceMemory, size: int
    ) -> None:
        with pytest.raises(ValueError, match="1 byte to 1 MiB"):
            digester.digests([[(memory.address, size)]])

    def test_threads_get_their_own(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        found: dict[int, list[bytes]] = {}

        def ask(start: int) -> None:
            found[start] = digester.digests(
                [[(memory.address + start + 8 * i, 999)] for i in range(start % 5 + 1)]
            )

        threads = [threading.Thread(target=ask, args=(8 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for start, digests in found.items():
            expected = [get(memory.address + start + 8 * i, 999) for i in range(start % 5 + 1)]
            assert digests == [xxh3_128_digest(data) for data in expected]

    def test_a_failure_fails_the_caller_only(
        self, fake: FakeDriver, digester: BlockDigester, memory: DeviceMemory
    ) -> None:
        fake.fail("launch", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        with pytest.raises(CudaError, match="OUT_OF_RESOURCES"):
            digester.digests([[(memory.address, 500)]])
        assert digester.digests([[(memory.address, 500)]]) == [
            xxh3_128_digest(get(memory.address, 500))
        ]


@given(
    st.lists(st.tuples(st.integers(1, 600_000), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_a_chunk_s_digest_is_the_host_s(parts: list[tuple[int, int]], first: int) -> None:
    """Segments of any length with gaps between them, blocks of several segments included."""
    segments, offset = [], first * BLOCK_BYTES
    for nbytes, gap in parts:
        segments.append(Segment(offset, offset, nbytes))
        offset += nbytes + gap
    start, total = segments[0].offset, offset - segments[0].offset
    data = np.frombuffer(random.Random(total).randbytes(total), np.uint8).copy()
    base = data.ctypes.data
    host = [memoryview(data.data)[s.offset - start : s.offset - start + s.nbytes] for s in segments]
    device = [DeviceView("cuda:x", base + s.offset - start, s.nbytes) for s in segments]

    def digests(blocks: object) -> list[bytes]:
        return [
            xxh3_128_digest(b"".join(get(*part) for part in block))
            for block in blocks  # type: ignore[attr-defined]
        ]

    hasher = DeviceHasher(segments, device, digests)
    hasher.landed(1)
    assert hasher.digest() == chunk_digest(segments, host)
