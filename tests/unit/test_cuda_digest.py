"""The kernels that hash device memory: blake3 in Triton's interpreter, compiled for GPUs."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from blake3 import blake3

from mx.cuda import blake3 as compiler
from mx.errors import LocalError
from mx.units import KIB, MIB

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
chains = torch.full((len(sizes), MAX_CHUNKS, 8), 0x5A5A5A5A, dtype=torch.uint32)
digests = torch.zeros((len(sizes), 8), dtype=torch.uint32)
common = {"lanes": PROGRAM_CHUNKS, "row": MAX_CHUNKS}
def wrong(count, expected):
    word = torch.zeros(1, dtype=torch.uint32)
    place = inputs, lengths, expected, digests, word, chains
    kernels.digest_blocks[(count, 1)](*place, **common)
    return int(word)
assert wrong(len(sizes), torch.zeros_like(digests)) == 1
for row in digests.numpy():
    print(row.tobytes().hex())
expected = digests.clone()
assert wrong(1, expected) == 0
expected.view(torch.uint8)[0, 31] ^= 1
assert wrong(1, expected) == 1
"""


@pytest.mark.timeout(350)
@pytest.mark.parametrize(
    "sizes",
    [FEW, *(pytest.param(MANY[part::4], marks=pytest.mark.slow) for part in range(4))],
    ids=["few", *(f"many{part}" for part in range(4))],
)
def test_the_triton_kernel_is_blake3(sizes: Sequence[int]) -> None:
    """The kernel itself, run by Triton's interpreter: one launch for all lengths."""
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


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_triton_kernel_compiles_for_gpus_without_spills(
    capability: int, tmp_path: Path
) -> None:
    """As Triton's own cuobjdump says: no stack, no local memory, no instruction that uses it."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kernel = compiler.compiled.__wrapped__(capability)
    assert 6 <= kernel.parameters <= 6 + 4
    cubin = tmp_path / f"{kernel.name}.cubin"
    cubin.write_bytes(kernel.cubin)
    usage, code = (
        subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout
        for what in ("-res-usage", "-sass")
    )
    assert f"Function {kernel.name}" in usage and " STACK:0 " in usage and " LOCAL:0 " in usage
    assert " LDG" in code or " LD." in code, "no code was shown"
    assert not re.search(r"\b(STL|LDL)\b", code)


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LocalError, match="need Triton"):
        compiler.compiled.__wrapped__(90)
