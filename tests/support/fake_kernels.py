"""The kernels of `mx.cuda.xxh3_kernel` in numpy, over host memory: what fake GPUs run, and the
specification that the Triton ones are tested against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mx.cuda.xxh3 import Kernel, Xxh3Kernels
from mx.cuda.xxh3_table import MAX_UNITS, UNIT_BYTES

_U64 = NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_P32_1 = np.uint64(0x9E3779B1)
_P64_1, _P64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_MASK = (1 << 64) - 1


def _array(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _words(address: int, count: int) -> _U64:
    return _array(address, 8 * count).view(np.uint64)


def _product(key: _U64) -> _U64:
    return (key & _LOW) * (key >> np.uint64(32))


def unit_sums(grid: tuple[int, int], parameters: Sequence[int]) -> None:
    inputs, lengths, table, sums = parameters[:4]
    secret = _words(table, 24)
    keys = np.stack([secret[n : n + 8] for n in range(16)])
    for index, (address, length) in enumerate(
        zip(_words(inputs, grid[0]), _words(lengths, grid[0]), strict=True)
    ):
        if int(address) % 8:
            raise ValueError("an input starts at a multiple of 8")
        full, rest = divmod(int(length) - 1, UNIT_BYTES)
        last = rest // 64
        row = _words(sums + index * MAX_UNITS * 64, (full + 1) * 8).reshape(-1, 8)
        row[:] = 0
        data = _words(int(address), 128 * full + 8 * last)
        swap = [1, 0, 3, 2, 5, 4, 7, 6]
        if full:
            whole = data[: 128 * full].reshape(full, 16, 8)
            row[:full] = (_product(whole ^ keys) + whole[:, :, swap]).sum(axis=1)
        if last:
            tail = data[128 * full :].reshape(last, 8)
            row[full] = (_product(tail ^ keys[:last]) + tail[:, swap]).sum(axis=0)


def finish(grid: tuple[int, int], parameters: Sequence[int]) -> None:
    inputs, lengths, table, sums, digests = parameters[:5]
    words = _words(table, 56)
    for index, (address, length) in enumerate(
        zip(_words(inputs, grid[0]), _words(lengths, grid[0]), strict=True)
    ):
        size = int(length)
        full = (size - 1) // UNIT_BYTES
        row = _words(sums + index * MAX_UNITS * 64, (full + 1) * 8).reshape(-1, 8)
        state = words[48:56].copy()
        for unit in range(full):
            state += row[unit]
            state = ((state ^ (state >> np.uint64(47))) ^ words[16:24]) * _P32_1
        last = _array(int(address) + size - 64, 64).copy().view(np.uint64)
        state += row[full] + _product(last ^ words[24:32]) + last[[1, 0, 3, 2, 5, 4, 7, 6]]
        _words(digests + 16 * index, 2)[:] = (
            _merge(state, words[40:48], ~(size * _P64_2) & _MASK),
            _merge(state, words[32:40], size * _P64_1 & _MASK),
        )


def _merge(state: _U64, keys: _U64, half: int) -> int:
    mixed = [int(word) for word in state ^ keys]
    for i in range(0, 8, 2):
        product = mixed[i] * mixed[i + 1]
        half += (product & _MASK) ^ (product >> 64)
    half &= _MASK
    half = (half ^ (half >> 37)) * 0x165667919E3779F9 & _MASK
    return half ^ (half >> 32)


KERNELS: dict[str, Callable[[tuple[int, int], Sequence[int]], None]] = {
    "unit_sums": unit_sums,
    "finish": finish,
}


def images(capability: int) -> Xxh3Kernels:
    """Return images that only a fake driver can load, in place of `mx.cuda.xxh3.compiled`."""
    return Xxh3Kernels(Kernel("unit_sums", b"fake", 128, 0, 6), Kernel("finish", b"fake", 32, 0, 7))
