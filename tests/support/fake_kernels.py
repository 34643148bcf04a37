"""The kernels of `mx.cuda.blake3_kernel` in numpy, over host memory: what fake GPUs run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mx.cuda.blake3 import CHAINS_BYTES, CHUNK_BYTES, PROGRAM_CHUNKS, Blake3Kernels, Kernel

_U32 = NDArray[np.uint32]
_IV = np.array(
    [
        *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
        *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
    ],
    np.uint32,
)
_PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8


def _array(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _int64s(address: int, count: int) -> list[int]:
    return [int(value) for value in _array(address, 8 * count).view(np.int64)]


def _chains(address: int, index: int, count: int) -> _U32:
    return _array(address + index * CHAINS_BYTES, 32 * count).view(np.uint32).reshape(count, 8)


def _rotated(words: _U32, bits: int) -> _U32:
    return (words >> np.uint32(bits)) | (words << np.uint32(32 - bits))


def _mix(rows: list[_U32], x: _U32, y: _U32) -> list[_U32]:
    a, b, c, d = rows
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        a = a + b + word
        d = _rotated(d ^ a, first)
        c = c + d
        b = _rotated(b ^ c, second)
    return [a, b, c, d]


def _turned(rows: list[_U32], by: int) -> list[_U32]:
    """Make columns of the diagonals (1), or diagonals of the columns (-1)."""
    return [np.roll(row, -index * by, axis=0) for index, row in enumerate(rows)]


def _compress(h: _U32, m: _U32, counter: _U32, nbytes: _U32, flags: _U32) -> _U32:
    """`h`: [n, 8], `m`: [n, 16], the others: [n]."""
    h, m = h.T, m.T
    iv = np.broadcast_to(_IV[:4, None], (4, len(counter)))
    rows = [h[:4], h[4:], iv, np.stack([counter, np.zeros_like(counter), nbytes, flags])]
    for _ in range(7):
        rows = _mix(rows, m[0:8:2], m[1:8:2])
        rows = _turned(_mix(_turned(rows, 1), m[8::2], m[9::2]), -1)
        m = m[_PERMUTATION]
    return np.concatenate([rows[0] ^ rows[2], rows[1] ^ rows[3]]).T


def _counts(sizes: Sequence[int]) -> list[int]:
    return [-(-size // CHUNK_BYTES) for size in sizes]


def chain_chunks(grid: tuple[int, int], parameters: Sequence[int]) -> None:
    inputs, lengths, chains = parameters[:3]
    addresses, sizes = _int64s(inputs, grid[1]), _int64s(lengths, grid[1])
    counts = [min(count, grid[0] * PROGRAM_CHUNKS) for count in _counts(sizes)]
    data = np.zeros((sum(counts), CHUNK_BYTES), np.uint8)
    counter, left, root = (np.zeros(len(data), np.int64) for _ in range(3))
    at = 0
    for address, size, count in zip(addresses, sizes, counts, strict=True):
        if address % 16:
            raise ValueError("an input starts at a multiple of 16")
        here = slice(at, at + count)
        counter[here] = np.arange(count)
        left[here] = size - counter[here] * CHUNK_BYTES
        root[here] = _ROOT if size <= CHUNK_BYTES else 0
        nbytes = min(size, count * CHUNK_BYTES)
        data[here].reshape(-1)[:nbytes] = _array(address, nbytes)
        at += count
    messages = data.view(np.uint32).reshape(-1, 16, 16)
    last = (np.minimum(left, CHUNK_BYTES) - 1) // 64
    h = np.tile(_IV, (len(data), 1))
    for index in range(16):
        active = index <= last
        flags = np.where(index == last, _CHUNK_END | root, 0) | (_CHUNK_START if index == 0 else 0)
        nbytes_here = np.minimum(left - 64 * index, 64)
        numbers = (counter[active], nbytes_here[active], flags[active])
        h[active] = _compress(
            h[active], messages[active, index], *(each.astype(np.uint32) for each in numbers)
        )
    for index, found in enumerate(np.split(h, np.cumsum(counts)[:-1])):
        _chains(chains, index, len(found))[:] = found


def hash_parents(grid: tuple[int, int], parameters: Sequence[int]) -> None:
    lengths, chains, digests = parameters[:3]
    counts = _counts(_int64s(lengths, grid[0]))
    levels = [_chains(chains, index, count) for index, count in enumerate(counts)]
    while any(len(level) > 1 for level in levels):
        pairs = [level[: len(level) // 2 * 2].reshape(-1, 16) for level in levels]
        m = np.concatenate(pairs)
        flags = [_PARENT | _ROOT if len(level) == 2 else _PARENT for level in levels]
        above = _compress(
            np.tile(_IV, (len(m), 1)),
            m,
            np.zeros(len(m), np.uint32),
            np.full(len(m), 64, np.uint32),
            np.repeat(np.array(flags, np.uint32), [len(pair) for pair in pairs]),
        )
        parents = np.split(above, np.cumsum([len(pair) for pair in pairs])[:-1])
        # A last one without a neighbour goes up as it is.
        levels = [
            level if len(level) == 1 else np.concatenate([found, level[len(level) // 2 * 2 :]])
            for level, found in zip(levels, parents, strict=True)
        ]
    _array(digests, 32 * grid[0]).view(np.uint32)[:] = np.concatenate(levels).reshape(-1)


KERNELS: dict[str, Callable[[tuple[int, int], Sequence[int]], None]] = {
    "chain_chunks": chain_chunks,
    "hash_parents": hash_parents,
}


def images(capability: int) -> Blake3Kernels:
    """Return images that only a fake driver can load, in place of `mx.cuda.blake3.compiled`."""
    return Blake3Kernels(
        Kernel("chain_chunks", b"fake", 128, 0, 5), Kernel("hash_parents", b"fake", 128, 0, 5)
    )
