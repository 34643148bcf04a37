"""Measures the bare copy: memmove from a map of a memfd, in pieces of 2 MiB, by one thread.

In calls of hundreds of MiB glibc bypasses the cache, which a copy that hashes its bytes while they
are there can't do. Nothing is hashed, but by `Reused.hashing`, where one or more threads take
pieces in turn and compute the xxh3_128 of each MiB of a piece that they have copied.

*Fresh* maps the source and allocates the destination inside the timed region, as a new replica
does; the destination is advised to huge pages and either populated first or faulted by the copy
itself. *Reused* copies between existing maps.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_128_digest

_MADV_POPULATE_WRITE = 23
_HUGE = 2 << 20
_PIECE = 2 << 20
_MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(fd: int, nbytes: int, prot: int, flags: int) -> int:
    address = _libc.mmap(None, nbytes, prot, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def _copy(target: int, source: int, nbytes: int) -> None:
    for at in range(0, nbytes, _PIECE):
        ctypes.memmove(target + at, source + at, min(_PIECE, nbytes - at))


def fresh(memfd: int, nbytes: int, *, populate: bool) -> float:
    """Return the seconds to map, allocate, perhaps populate, and copy; unmapping is not timed."""
    start_s = time.perf_counter()
    source = _map(memfd, nbytes, mmap.PROT_READ, mmap.MAP_SHARED)
    room = _map(
        -1,
        nbytes + _HUGE,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    target = -(-room // _HUGE) * _HUGE
    _libc.madvise(target, nbytes, mmap.MADV_HUGEPAGE)
    if populate:
        _libc.madvise(target, nbytes, _MADV_POPULATE_WRITE)
    _copy(target, source, nbytes)
    seconds = time.perf_counter() - start_s
    _libc.munmap(source, nbytes)
    _libc.munmap(room, nbytes + _HUGE)
    return seconds


class Reused:
    """A source map and a destination with every page faulted already."""

    def __init__(self, memfd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._source = _map(memfd, nbytes, mmap.PROT_READ, mmap.MAP_SHARED)
        self._room = _map(
            -1,
            nbytes + _HUGE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        self._target = -(-self._room // _HUGE) * _HUGE
        _libc.madvise(self._target, nbytes, mmap.MADV_HUGEPAGE)
        self.copy()

    def copy(self) -> float:
        start_s = time.perf_counter()
        _copy(self._target, self._source, self.nbytes)
        return time.perf_counter() - start_s

    def hashing(self, threads: int) -> float:
        """Return the seconds for so many threads to copy and hash."""
        start_s = time.perf_counter()
        view = memoryview((ctypes.c_char * self.nbytes).from_address(self._target)).cast("B")
        pieces = iter(range(0, self.nbytes, _PIECE))

        def work() -> None:
            for at in pieces:
                end = min(at + _PIECE, self.nbytes)
                ctypes.memmove(self._target + at, self._source + at, end - at)
                for block in range(at, end, _MIB):
                    xxh3_128_digest(view[block : min(block + _MIB, end)])

        with ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(work) for _ in range(threads)]:
                each.result()
        return time.perf_counter() - start_s

    def close(self) -> None:
        _libc.munmap(self._source, self.nbytes)
        _libc.munmap(self._room, self.nbytes + _HUGE)
