"""process_vm_readv, preadv and memfd seals, with an error type for each failure."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from array import array
from collections.abc import Sequence

from mx.buffers import seal
from mx.contexts import Undo
from mx.errors import PeerLostError, PeerProtocolError, PeerRefusedError, SourceError

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10
#: What makes memory safe to map: it can neither be cut off (SIGBUS) nor change, and no seal
#: goes away again in any case.
FULL_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE


def seals(descriptor: int) -> int:
    """Return the seals on a memfd; 0 for a descriptor that is not one."""
    try:
        return fcntl.fcntl(descriptor, F_GET_SEALS)
    except OSError:
        return 0


def fully_sealed(descriptor: int | None) -> bool:
    """Return True for a memfd that has FULL_SEALS."""
    return descriptor is not None and seals(descriptor) & FULL_SEALS == FULL_SEALS


def add_seals(descriptor: int, wanted: int) -> None:
    """Add seals to a memfd. Raises OSError: EBUSY where a writable mapping stands in the way of
    F_SEAL_WRITE."""
    fcntl.fcntl(descriptor, F_ADD_SEALS, wanted)


def sealed_memfd(name: str, data: memoryview) -> int:
    """Return a new memfd that holds `data`, and can't change. Raises OSError: there are no
    descriptors or no memory left."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with Undo(os.close, descriptor):
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])
        seal(descriptor, FULL_SEALS | F_SEAL_SEAL)
    return descriptor


def start_ticks(pid: int) -> int:
    """Return when a process started, field 22 of /proc/PID/stat; -1 where there is no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may itself hold spaces and parentheses.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


_libc = ctypes.CDLL(None, use_errno=True)
#: A call through ctypes releases the GIL.
_process_vm_readv = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
#: Python's own `os.preadv` takes an object for each place.
_preadv = _libc.preadv
_preadv.restype = ctypes.c_ssize_t
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
#: The kernel's limit.
_MAX_VECTORS = 1024
_VECTOR_BYTES = 16
#: The type of an array of addresses and lengths.
PLACE = "Q"


def can_read_processes() -> bool:
    """Return True if the C library has process_vm_readv."""
    return _process_vm_readv is not None


def read_process(pid: int, parts: Sequence[tuple[int, memoryview]], peer: str) -> None:
    """Fill writable views from addresses in another process.

    Args:
        pid: The process.
        parts: Pairs of an address there and a view here.
        peer: Whom errors name.

    Raises:
        SourceError: As `read_places`.
    """
    sources, targets = array(PLACE), array(PLACE)
    # These pin the views' buffers for as long as the kernel writes there.
    pins = [ctypes.c_char.from_buffer(view) for _, view in parts if len(view)]
    for pin, (address, view) in zip(pins, [part for part in parts if len(part[1])], strict=True):
        sources.extend((address, len(view)))
        targets.extend((ctypes.addressof(pin), len(view)))
    read_places(pid, sources, targets, peer)


def read_places(pid: int, sources: array[int], targets: array[int], peer: str) -> None:
    """Copy from memory of another process into memory of this one.

    Both arrays are what the kernel takes: an address and a length in turn, of the type `PLACE`, so
    that no object is made for a place. The bytes fill one place after the other, whatever the
    places of the other side are.

    Args:
        pid: The process.
        sources: The places there; as many bytes as `targets`. Changed.
        targets: The places here, whose memory the caller keeps. Changed.
        peer: Whom errors name.

    Raises:
        PeerRefusedError: The kernel forbids it.
        PeerLostError: The process is gone.
        PeerProtocolError: It has nothing mapped there.
    """
    assert _process_vm_readv is not None
    left = sum(targets[1::2])
    source = target = 0  # the first places that are not done
    while left:
        got = _process_vm_readv(
            pid,
            targets.buffer_info()[0] + _VECTOR_BYTES * target,
            min(len(targets) // 2 - target, _MAX_VECTORS),
            sources.buffer_info()[0] + _VECTOR_BYTES * source,
            min(len(sources) // 2 - source, _MAX_VECTORS),
            0,
        )
        if got <= 0:
            raise _refusal(ctypes.get_errno() if got < 0 else errno.EFAULT, peer)
        left -= got
        if left:
            source = _skip(sources, source, got)
            target = _skip(targets, target, got)


def _skip(places: array[int], first: int, nbytes: int) -> int:
    """Cut `nbytes` bytes off the front of places. Return the first one that has any left."""
    while nbytes and nbytes >= places[2 * first + 1]:
        nbytes -= places[2 * first + 1]
        first += 1
    if nbytes:
        places[2 * first] += nbytes
        places[2 * first + 1] -= nbytes
    return first


def read_descriptor(descriptor: int, offset: int, view: memoryview, peer: str) -> None:
    """Fill one writable view from a memfd, as `read_descriptor_places` does."""
    if len(view):
        pin = ctypes.c_char.from_buffer(view)
        places = array(PLACE, (ctypes.addressof(pin), len(view)))
        read_descriptor_places(descriptor, offset, places, peer)


def read_descriptor_places(descriptor: int, offset: int, targets: array[int], peer: str) -> None:
    """Fill places from a memfd, one after the other.

    Args:
        descriptor: The memfd.
        offset: Where in it the bytes begin.
        targets: Where they go, as for `read_places`. Changed.
        peer: Whom errors name.

    Raises:
        PeerProtocolError: The memfd ends before that.
        OSError: It can't be read.
    """
    left = sum(targets[1::2])
    target = 0  # the first place that is not full
    while left:
        got = _preadv(
            descriptor,
            targets.buffer_info()[0] + _VECTOR_BYTES * target,
            min(len(targets) // 2 - target, _MAX_VECTORS),
            offset,
        )
        if got < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            raise OSError(number, os.strerror(number))
        if not got:
            raise PeerProtocolError(f"{peer}: its memfd is shorter than announced", peer=peer)
        offset += got
        left -= got
        if left:
            target = _skip(targets, target, got)


def _refusal(number: int, peer: str) -> SourceError:
    if number == errno.EPERM:
        return PeerRefusedError(
            f"{peer}: the kernel does not let this process read the source's memory",
            peer=peer,
            hint="Yama's ptrace_scope or a container's seccomp profile; tcp works regardless",
        )
    if number == errno.ESRCH:
        return PeerLostError(f"{peer}: the source's process is gone", peer=peer)
    return PeerProtocolError(
        f"{peer}: the source's memory can't be read: {os.strerror(number)}", peer=peer
    )
