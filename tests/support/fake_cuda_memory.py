"""The memory of fake GPUs: memfds mapped into this process at the addresses that a driver would
give, so that a device address can be looked at like any other."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

PAGE_BYTES = 4096
#: What fresh memory is full of: not zero, so that bytes that were never written are not taken for
#: padding.
GARBAGE = 0xA5

_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 16, 32, 0x4000
_PROT_NONE, _PROT_ALL = 0, 3
_FAILED = ctypes.c_void_p(-1).value
_NAME = "mx-fake-gpu"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int, nbytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if found == _FAILED or found is None:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


def unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def reserve(nbytes: int, alignment: int) -> int:
    """Return an aligned range of addresses with nothing behind it."""
    found = _mmap(
        0, nbytes + alignment, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1
    )
    base = -(-found // alignment) * alignment
    if base > found:
        unmap(found, base - found)
    unmap(base + nbytes, found + alignment - base)
    return base


def unback(address: int, nbytes: int) -> None:
    """Take the memory away from addresses, which stay reserved."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, nbytes, _PROT_NONE, flags, -1)


def new_memfd(uuid: str, nbytes: int) -> int:
    """Return memory of the GPU `uuid`, full of garbage."""
    fd = os.memfd_create(f"{_NAME}:{uuid}", os.MFD_CLOEXEC)
    size = max(nbytes, PAGE_BYTES)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as fresh:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(fresh)), GARBAGE, size)
    return fd


def uuid_of(fd: int) -> str | None:
    """Return the GPU whose memory a descriptor is, None if it is something else."""
    try:
        _, found, rest = os.readlink(f"/proc/self/fd/{fd}").partition(f"/memfd:{_NAME}:")
    except OSError:
        return None
    return rest.removesuffix(" (deleted)") if found else None


def back(fd: int, nbytes: int, address: int = 0) -> int:
    """Map a memfd, at `address` if given, and return the address."""
    return _mmap(address, nbytes, _PROT_ALL, _MAP_SHARED | (_MAP_FIXED if address else 0), fd)


@dataclass
class Range:
    """Addresses with memory behind them. `ordinal` is the GPU it is on, -1 for pinned host
    memory; `readers` are the ordinals that may touch it (host memory: all)."""

    address: int
    nbytes: int
    ordinal: int
    kind: str  # "alloc", "vmm", "ipc", "host", "registered"
    buffer_id: int = 0
    fd: int = -1
    handle: int = 0
    readers: set[int] = field(default_factory=set)

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class Ranges:
    """Ranges by address; they never overlap."""

    def __init__(self) -> None:
        self._by_address: dict[int, Range] = {}
        self._sorted: list[int] = []

    def add(self, found: Range) -> None:
        self._by_address[found.address] = found
        self._sorted = sorted(self._by_address)

    def pop(self, address: int, *kinds: str) -> Range | None:
        found = self._by_address.get(address)
        if found is None or found.kind not in kinds:
            return None
        del self._by_address[address]
        self._sorted.remove(address)
        return found

    def at(self, address: int) -> Range | None:
        """Return the range that `address` is in, None if there is none."""
        index = bisect_right(self._sorted, address) - 1
        found = self._by_address[self._sorted[index]] if index >= 0 else None
        return found if found is not None and found.holds(address, 1) else None

    def overlapping(self, address: int, nbytes: int) -> list[Range]:
        return [r for r in self if r.address < address + nbytes and address < r.address + r.nbytes]

    def spans(self, address: int, nbytes: int) -> list[Range]:
        """Return the ranges that cover [address, address + nbytes); [] where there is a hole."""
        found: list[Range] = []
        end = address + nbytes
        while address < end:
            part = self.at(address)
            if part is None:
                return []
            found.append(part)
            address = part.address + part.nbytes
        return found

    def __iter__(self) -> Iterator[Range]:
        return iter(list(self._by_address.values()))
