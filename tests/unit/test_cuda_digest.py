"""Digests of device memory are those of the same bytes in host memory."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core.grid import BLOCK_BYTES
from mx.cuda import blake3 as compiler
from mx.cuda.blake3 import CHAINS_BYTES, MAX_CHUNKS, PROGRAM_CHUNKS
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester, DeviceHasher
from mx.cuda.errors import CudaError
from mx.errors import LocalError
from mx.transport import DeviceView
from mx.units import KIB, MIB
from tests.support import fake_kernels
from tests.support.fake_cuda import FakeDriver

#: The lengths at which something changes: words of 4, units of 16, messages of 64 bytes, chunks of
#: 1 KiB, programs of 128 chunks; and numbers of chunks from one to many, odd, even, powers of two.
FEW = (1, 4, 15, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 129 * KIB + 1)
MANY = (
    *(
        2,
        3,
        5,
        16,
        31,
        32,
        33,
        960,
        961,
        2047,
        2048,
        2049,
        3 * KIB - 1,
        3 * KIB,
        3 * KIB + 1,
        4 * KIB,
    ),
    *(5 * KIB - 1, 7 * KIB, 13 * KIB + 64, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 127 * KIB),
    *(128 * KIB, 255 * KIB + 13, 512 * KIB + 1, MIB - KIB, MIB - 1, MIB),
    *(random.Random(11).randint(1, MIB) for _ in range(4)),
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(compiler, "compiled", fake_kernels.images)
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


def digest(address: int, nbytes: int) -> bytes:
    return blake3(ctypes.string_at(address, nbytes)).digest()


#: In a process of its own: Triton decides at import whether its interpreter runs the kernels.
INTERPRET = """
import random, sys
import torch
from mx.cuda import blake3_kernel as kernels
from mx.cuda.blake3 import MAX_CHUNKS, PROGRAM_CHUNKS

sizes = [int(size) for size in sys.argv[1:]]
# Garbage where nothing was written, and after each input.
data = torch.full((len(sizes), 1 << 20), 0xA5, dtype=torch.uint8)
assert data.data_ptr() % 16 == 0
for row, size in zip(data, sizes):
    row[:size] = torch.frombuffer(bytearray(random.Random(size).randbytes(size)), dtype=torch.uint8)
inputs = torch.tensor([row.data_ptr() for row in data])
lengths = torch.tensor(sizes)
chains = torch.full((len(sizes), 2, MAX_CHUNKS, 8), 0x5A5A5A5A, dtype=torch.uint32)
digests = torch.zeros((len(sizes), 8), dtype=torch.uint32)
common = {"lanes": PROGRAM_CHUNKS, "row": MAX_CHUNKS}
programs = MAX_CHUNKS // PROGRAM_CHUNKS
kernels.chain_chunks[(programs, len(sizes))](inputs, lengths, chains, **common)
kernels.hash_parents[(len(sizes), 1)](lengths, chains, digests, **common)
for row in digests.numpy():
    print(row.tobytes().hex())
"""


@pytest.mark.timeout(350)
@pytest.mark.parametrize(
    "sizes",
    [FEW, *(pytest.param(MANY[part::4], marks=pytest.mark.slow) for part in range(4))],
    ids=["few", *(f"many{part}" for part in range(4))],
)
def test_the_triton_kernels_are_blake3(sizes: Sequence[int]) -> None:
    """The kernels themselves, run by Triton's interpreter: one launch for all lengths."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET, *map(str, sizes)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [blake3(random.Random(size).randbytes(size)).hexdigest() for size in sizes]
    assert dict(zip(sizes, done.stdout.split(), strict=True)) == dict(
        zip(sizes, expected, strict=True)
    )


def test_the_triton_kernels_compile_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiler.compiled.__wrapped__(90)
    for kernel in (found.chain_chunks, found.hash_parents):
        assert kernel.cubin[:4] == b"\x7fELF"
        assert 3 <= kernel.parameters <= 3 + 4


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LocalError, match="need Triton"):
        compiler.compiled.__wrapped__(90)


@given(st.lists(st.integers(1, BLOCK_BYTES), min_size=1, max_size=4), st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_the_kernels_in_numpy_are_blake3(sizes: list[int], seed: int) -> None:
    """What fake GPUs run."""
    rows = -(-max(sizes) // 16)
    data = np.zeros((len(sizes), rows, 2), np.uint64)  # rows of 16 bytes
    data.view(np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, (len(sizes), rows, 16))
    inputs = np.array([row.ctypes.data for row in data], np.int64)
    lengths = np.array(sizes, np.int64)
    chains = np.zeros((len(sizes), CHAINS_BYTES), np.uint8)
    digests = np.zeros((len(sizes), 32), np.uint8)
    at = [array.ctypes.data for array in (inputs, lengths, chains, digests)]
    programs = MAX_CHUNKS // PROGRAM_CHUNKS
    fake_kernels.chain_chunks((programs, len(sizes)), [*at[:3], 0, 0])
    fake_kernels.hash_parents((len(sizes), 1), [*at[1:], 0, 0])
    expected = [
        blake3(row.tobytes()[:size]).digest() for row, size in zip(data, sizes, strict=True)
    ]
    assert [row.tobytes() for row in digests] == expected


class TestBlockDigester:
    def test_all_lengths_in_one_go(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        blocks = [(memory.address + 16 * i, size) for i, size in enumerate((*FEW, *MANY))]
        assert digester.digests(blocks) == [digest(*block) for block in blocks]

    def test_more_than_a_batch(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        blocks = [(memory.address + 16 * i, 250 + i) for i in range(300)]
        assert digester.digests(blocks) == [digest(*block) for block in blocks]

    def test_nothing(self, digester: BlockDigester) -> None:
        assert digester.digests([]) == []

    @pytest.mark.parametrize("size", [0, BLOCK_BYTES + 1])
    def test_sizes_that_are_none(
        self, digester: BlockDigester, memory: DeviceMemory, size: int
    ) -> None:
        with pytest.raises(ValueError, match="1 byte to 1 MiB"):
            digester.digests([(memory.address, size)])

    def test_starts_that_are_none(self, digester: BlockDigester, memory: DeviceMemory) -> None:
        with pytest.raises(ValueError, match="a multiple of 16"):
            digester.digests([(memory.address + 8, 100)])

    def test_threads_get_their_own(self, digester: BlockDigester, memory: DeviceMemory) -> None:
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
            assert digests == [digest(*block) for block in blocks(start)]

    def test_a_failure_fails_the_caller_only(
        self, fake: FakeDriver, digester: BlockDigester, memory: DeviceMemory
    ) -> None:
        fake.fail("launch", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        with pytest.raises(CudaError, match="OUT_OF_RESOURCES"):
            digester.digests([(memory.address, 500)])
        assert digester.digests([(memory.address, 500)]) == [digest(memory.address, 500)]


def test_a_read_s_digests_are_those_of_its_blocks(
    digester: BlockDigester, memory: DeviceMemory
) -> None:
    views = [
        DeviceView("cuda:x", memory.address + at, nbytes)
        for at, nbytes in ((256, MIB), (MIB + 256, 700), (2 * MIB, 3))
    ]
    hasher = DeviceHasher(views, digester.digests)
    hasher.landed(1)
    assert hasher.block_digests() == b"".join(digest(view.address, len(view)) for view in views)
