"""The messages of a source of the GPU transports to an admitted reader, all of fixed size.

After the HELLO: the content's label and GREETING, with one descriptor, the grant's control page;
then each allocation, then each region (with a descriptor where it is a sealed memfd), then the
places of each region that is scattered, then one byte, with a socket where allocations are exported
as descriptors. The connection then stays open. The reader sends on it when it is busy, when idle,
that it holds the memory beyond its session, and of which allocations it wants descriptors: these
come through the socket, all of a request with one byte, or none where the grant has ended. The
source sends when the grant has ended, and then waits for the reader to unmap the memory: the reader
signals this by closing the connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mx.cuda.driver import IPC_HANDLE_BYTES
from mx_transports.toolkit.cuda.places import ScatterTable

#: Numbers of allocations and of regions.
GREETING = struct.Struct("!II")
#: Kind, the GPU's UUID, base address at the source, nbytes, legacy IPC handle.
ALLOCATION = struct.Struct(f"!B40sQQ{IPC_HANDLE_BYTES}s")
#: Index, address at the source (of a scattered region: the number of its places), nbytes, where.
REGION = struct.Struct("!IQQB")
MAX_ENTRIES = 1 << 16
#: The number of an allocation of which a descriptor is wanted.
NUMBER = struct.Struct("!I")

BUSY, IDLE, HELD, WANTED = b"B", b"I", b"H", b"W"
ENDED = b"E"
#: Comes with a socket, and with descriptors.
HANDED = b"D"


def wanted(numbers: Sequence[int]) -> bytes:
    """Return the request for descriptors of the allocations with these numbers, 255 at most."""
    return WANTED + bytes([len(numbers)]) + b"".join(map(NUMBER.pack, numbers))


class Export(enum.IntEnum):
    """How an allocation is exported to another process."""

    IPC = 1  # cuMemAlloc's, by a legacy handle
    FD = 2  # virtual memory management's, by a descriptor, of which a reader says when it wants it


class RegionKind(enum.IntEnum):
    DEVICE = 0
    MEMFD = 1
    PROCESS = 2
    SCATTERED = 3  # in GPU memory, in several places


@dataclass(frozen=True, slots=True)
class Allocation:
    """One piece of GPU memory as its source made it: what is exported, and mapped, as a whole."""

    export: Export
    uuid: str
    base: int
    nbytes: int
    handle: bytes = b""

    @property
    def end(self) -> int:
        return self.base + self.nbytes

    def pack(self) -> bytes:
        uuid = self.uuid.encode()
        return ALLOCATION.pack(self.export, uuid, self.base, self.nbytes, self.handle)

    @classmethod
    def unpack(cls, fields: tuple[int, bytes, int, int, bytes]) -> Allocation:
        """Raises ValueError for what no source of mx sends."""
        export, uuid, base, nbytes, handle = fields
        if not nbytes or base + nbytes > 1 << 63:
            raise ValueError("an allocation of impossible size")
        return cls(Export(export), uuid.rstrip(b"\0").decode("ascii"), base, nbytes, handle)


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """`address` is the source's. `descriptor` is a sealed memfd here, or -1. A region that is
    scattered has `places` in place of an address."""

    index: int
    address: int
    nbytes: int
    where: RegionKind
    descriptor: int = -1
    places: ScatterTable | None = None

    @property
    def on_gpu(self) -> bool:
        return self.where in (RegionKind.DEVICE, RegionKind.SCATTERED)

    def pack(self) -> bytes:
        address = self.address if self.places is None else len(self.places.begins)
        return REGION.pack(self.index, address, self.nbytes, self.where)

    def parts(self, offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
        """Yield the address at the source and the length of each part of some bytes. Raises
        ValueError where a scattered region has no memory."""
        if self.places is None:
            return ((self.address + offset, nbytes),)
        return self.places.at(offset, nbytes)
