"""The memory through which a rank hands blocks to others on its host."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from mx.contexts import Undo
from mx.core.wanted import ASIDE_BYTES
from mx.errors import CapacityError, PeerProtocolError
from mx.units import align_up, format_bytes

#: The most slots of a ring.
SLOTS = 16

_PAGE = 4096
_COUNTS = struct.Struct("<Q")


class Ring:
    """Shared memory of one rank: uses of each slot, what the rank shows, and the slots.

    The rank that made it writes, others map it and read.
    """

    def __init__(self, fd: int, index_nbytes: int, *, writable: bool) -> None:
        """
        Args:
            fd: The memfd, which this object closes.
            index_nbytes: The length of what the rank shows.
            writable: True for the rank that made it.

        Raises:
            PeerProtocolError: It is not a ring for this model.
            OSError: It can't be mapped.
        """
        self.fd = fd
        self._index_nbytes = index_nbytes
        self._first = _PAGE + align_up(index_nbytes, _PAGE)
        self._nbytes = os.fstat(fd).st_size
        self.slots, rest = divmod(self._nbytes - self._first, ASIDE_BYTES)
        with Undo(os.close, fd):
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if rest or not 0 < self.slots <= SLOTS or not sealed:
                raise PeerProtocolError("a rank on this host shares memory of a wrong size")
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._view = memoryview(mmap.mmap(fd, self._nbytes, prot=prot))

    @staticmethod
    def create(index: bytes, nbytes: int) -> Ring:
        """Return a ring for a rank that wants `nbytes` in all, and shows `index` at first: what it
        wants, and what else there is for the others.

        Raises:
            CapacityError: There is too little memory.
        """
        slots = min(SLOTS, max(1, -(-nbytes // ASIDE_BYTES)))
        size = _PAGE + align_up(len(index), _PAGE) + slots * ASIDE_BYTES
        fd = -1
        try:
            fd = os.memfd_create("mx:ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            own, fd = fd, -1
            ring = Ring(own, len(index), writable=True)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise CapacityError(
                f"{format_bytes(size)} to share with other ranks can't be obtained: "
                f"{error.strerror}",
                hint="free memory, or leave out `local_ranks`",
            ) from error
        ring._view[_PAGE : _PAGE + len(index)] = index
        return ring

    @property
    def shown(self) -> memoryview:
        """What the rank shows, at once; a view, which keeps the memory mapped."""
        return self._view[_PAGE : _PAGE + self._index_nbytes]

    def use(self, slot: int) -> int:
        """Return how often the slot was used so far."""
        found: int = _COUNTS.unpack_from(self._view, slot * _COUNTS.size)[0]
        return found

    def begin_use(self, slot: int) -> int:
        """Count a use of the slot, which is about to be written, and return the count."""
        count = self.use(slot) + 1
        _COUNTS.pack_into(self._view, slot * _COUNTS.size, count)
        return count

    def slot(self, number: int, nbytes: int) -> memoryview:
        """Return the first bytes of a slot."""
        begin = self._first + number * ASIDE_BYTES
        return self._view[begin : begin + nbytes]

    def close(self) -> None:
        """Drop the memory. Views of it keep it mapped. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._view = memoryview(b"")
