"""Addresses of byte views, copies between them that hold no interpreter lock, and maps and seals of
memory files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _PyBuffer(ctypes.Structure):
    # Py_buffer of the stable ABI (PEP 688 leaves it unchanged).
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE, _WRITABLE = 0, 1
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.c_void_p]
_release_buffer.restype = None


@contextmanager
def _locked(view: memoryview, flags: int) -> Iterator[int]:
    """Give the address of the view's first byte, whose memory can't be let go meanwhile."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), flags)
    try:
        yield int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view's first byte; 0 for an empty view.

    Works for read-only views too, which ctypes' from_buffer refuses.
    """
    if not view.nbytes:
        return 0
    with _locked(view, _SIMPLE) as address:
        return address


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between contiguous byte views of equal length, without the interpreter lock (which a
    slice assignment holds).

    Raises:
        ValueError: Their lengths differ.
        BufferError: `target` is read-only, or one of them is not contiguous.
    """
    nbytes = target.nbytes
    if source.nbytes != nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {nbytes}")
    with _locked(target, _WRITABLE) as to, _locked(source, _SIMPLE) as origin:
        ctypes.memmove(to, origin, nbytes)


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """Return a writable view of bytes at an address in this process.

    Args:
        address: The address of the first byte.
        nbytes: How many.
        owner: The object that keeps the memory. The view, and every view of it, keeps the owner.
    """
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


HUGE_PAGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000  # Python names it from 3.12 on
_MAP_FIXED = 0x10
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
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Advise the kernel about memory, as madvise(2), which Python's own calls under the interpreter
    lock.

    Returns:
        True if it took the advice.
    """
    return bool(_libc.madvise(address, nbytes, advice) == 0)


def map_at(
    address: int, nbytes: int, *, descriptor: int, protection: int, flags: int, offset: int = 0
) -> None:
    """Map a file in place of what is mapped at an address.

    Args:
        address: The address of the first byte, a multiple of the page size.
        nbytes: How many bytes.
        descriptor: The file; it may be closed afterwards.
        protection: PROT_ flags of mmap(2).
        flags: MAP_ flags beside MAP_FIXED.
        offset: Where in the file its bytes begin, a multiple of the page size.

    Raises:
        OSError: It can't be mapped.
    """
    if _libc.mmap(address, nbytes, protection, flags | _MAP_FIXED, descriptor, offset) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def map_private(descriptor: int, nbytes: int, offset: int = 0) -> memoryview:
    """Map a memory file privately, at an address at which its huge pages can be mapped as such.

    Args:
        descriptor: The file; it may be closed afterwards.
        nbytes: How many bytes; at least 1.
        offset: Where in the file they begin, a multiple of `HUGE_PAGE_BYTES`.

    Returns:
        A writable view, which keeps the map. A page that is written to becomes this process's own;
        no memory is reserved for those that are not.

    Raises:
        OSError: It can't be mapped.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return _mapped(descriptor, nbytes, protection, mmap.MAP_PRIVATE | _MAP_NORESERVE, offset)


def map_shared(descriptor: int, nbytes: int) -> memoryview:
    """Map a memory file for reading, as `map_private` does. Returns a read-only view."""
    return _mapped(descriptor, nbytes, mmap.PROT_READ, mmap.MAP_SHARED).toreadonly()


def _mapped(
    descriptor: int, nbytes: int, protection: int, flags: int, offset: int = 0
) -> memoryview:
    # The map of a file can't be placed by Python: it replaces one of nothing that is large enough.
    whole = memoryview(
        mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    )
    skip = -address_of(whole) % HUGE_PAGE_BYTES
    view = whole[skip : skip + nbytes]
    place = address_of(view)
    map_at(place, nbytes, descriptor=descriptor, protection=protection, flags=flags, offset=offset)
    return view


def seal(descriptor: int, seals: int) -> None:
    """Add seals to a memory file that is mapped for writing nowhere.

    Pages that the kernel moves at the moment (compaction, reclaim) count as mapped for writing: it
    waits 0.15 s for them, which is too short where memory is scarce. So it is asked for 0.75 s.

    Raises:
        OSError: EBUSY: a writable map is left, or something keeps the pages.
    """
    for pause_s in (0.05, 0.1, 0.2, 0.4):
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(pause_s)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
