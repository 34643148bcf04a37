"""process_vm_readv, preadv and memfd seals, with an error type for each failure."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

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
    try:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])
        add_seals(descriptor, FULL_SEALS | F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def start_ticks(pid: int) -> int:
    """Return when a process started, field 22 of /proc/PID/stat; -1 where there is no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may itself hold spaces and parentheses.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
#: A call through ctypes releases the GIL.
_process_vm_readv = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.POINTER(_Iovec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
#: The kernel's limit is 1024.
_MAX_VECTORS = 512


def can_read_processes() -> bool:
    """Return True if the C library has process_vm_readv."""
    return _process_vm_readv is not None


def read_process(pid: int, parts: Sequence[tuple[int, memoryview]], peer: str) -> None:
    """Copy from addresses in another process into writable views, each wholly.

    Args:
        pid: The process.
        parts: Pairs of an address there and a view here.
        peer: Whom errors name.

    Raises:
        PeerRefusedError: The kernel forbids it.
        PeerLostError: The process is gone.
        PeerProtocolError: It has nothing mapped there.
    """
    rest = [(address, view) for address, view in parts if len(view)]
    while rest:
        batch = rest[:_MAX_VECTORS]
        # These pin the views' buffers for as long as the kernel writes there.
        pins = [ctypes.c_char.from_buffer(view) for _, view in batch]
        local, remote = (_Iovec * len(batch))(), (_Iovec * len(batch))()
        for index, (pin, (address, view)) in enumerate(zip(pins, batch, strict=True)):
            local[index] = _Iovec(ctypes.addressof(pin), len(view))
            remote[index] = _Iovec(address, len(view))
        assert _process_vm_readv is not None
        got = _process_vm_readv(pid, local, len(batch), remote, len(batch), 0)
        number = ctypes.get_errno()
        del pins
        if got <= 0:
            raise _refusal(number if got < 0 else errno.EFAULT, peer)
        while rest and got >= len(rest[0][1]):
            got -= len(rest.pop(0)[1])
        if got:
            address, view = rest[0]
            rest[0] = (address + got, view[got:])


def read_descriptor(descriptor: int, offset: int, view: memoryview, peer: str) -> None:
    """Fill a view from a memfd.

    Args:
        descriptor: The memfd.
        offset: Where in it the bytes begin.
        view: Where they go, wholly.
        peer: Whom errors name.

    Raises:
        PeerProtocolError: The memfd ends before that.
        OSError: It can't be read.
    """
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if not got:
            raise PeerProtocolError(f"{peer}: its memfd is shorter than announced", peer=peer)
        done += got


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
