"""A reader's side of the GPU transports: connection, control page, mapped memory.

A `RemoteMemory` is counted: the session and each view attached through it hold it, and the last to
let go unmaps everything and then closes the connection, by which the source knows. Memory is opened
as it is needed, by reads and by who looks at an attached view: also after the session's end, since
the source keeps for an attached view all that it has exposed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from mx.cuda.errors import CudaError, is_own
from mx.errors import LocalPathError, PathError, PeerProtocolError, PeerRefusedError
from mx.transport import Grant, Read
from mx_transports.toolkit import dial
from mx_transports.toolkit.cuda import wire
from mx_transports.toolkit.cuda.maps import DeviceFor, Maps
from mx_transports.toolkit.cuda.places import MAX_PLACES, ScatterTable
from mx_transports.toolkit.cuda.wire import Allocation, RegionKind, RemoteRegion
from mx_transports.toolkit.local import BATCH, LocalSource, LocalTicket
from mx_transports.toolkit.stream import SocketStream


def path_error(error: CudaError, path: str, peer: str) -> PathError:
    """Return the PathError for CUDA's error: a pull may go on by other paths to `peer`."""
    kind = LocalPathError if is_own(error) else PathError
    return kind(f"{peer} by {path}: {error.message}", peer=peer, hint=error.hint)


@contextlib.contextmanager
def translated(path: str, peer: str) -> Iterator[None]:
    """Raise a CudaError inside the block as the error that `path_error` returns."""
    try:
        yield
    except CudaError as error:
        raise path_error(error, path, peer) from error


class GpuTicket(LocalTicket):
    """A ticket of a GpuExposure. Raises PeerProtocolError where it is malformed."""

    def __init__(self, data: bytes, peer: str) -> None:
        super().__init__(data, peer)
        gpus = self.fields.get("gpus")
        if not isinstance(gpus, list) or not all(isinstance(uuid, str) for uuid in gpus):
            raise PeerProtocolError(f"{peer} handed out a ticket that can't be read", peer=peer)
        self.gpus = frozenset(gpus)


class RemoteMemory(LocalSource):
    """Made by `connect`, which raises SourceError; then `map` what it brought.

    `maps` are where it is mapped, and this object's.
    """

    def __init__(
        self,
        path: str,
        magic: bytes,
        grant: Grant,
        ticket: GpuTicket,
        device_for: DeviceFor,
        on_unmapped: Callable[[], None],
    ) -> None:
        """
        Args:
            path: The transport's name, for errors.
            magic: The magic of the exposure.
            grant: The grant.
            ticket: The grant's ticket.
            device_for: See `Maps`.
            on_unmapped: Called once nothing is mapped any more, and nothing will be.
        """
        super().__init__(path, magic, grant, ticket)
        self.maps = Maps(grant.peer, device_for, self._descriptors)
        self._gpus = ticket.gpus
        self._on_unmapped = on_unmapped
        # Reentrant: a collection, and so the finalizer of a holder, can run inside any line.
        self._lock = threading.RLock()
        self._holders = 1
        self.regions: dict[int, RemoteRegion] = {}
        self._allocations: list[Allocation] = []
        self._hands: SocketStream | None = None  # through which descriptors come
        self._wanting = threading.Lock()  # held from a request for some until they are there

    def receive_greeting(self) -> None:
        allocations, regions = self.receive_control(wire.GREETING)
        if max(allocations, regions) > wire.MAX_ENTRIES:
            raise self.wrong("its greeting is malformed")
        data, _ = self.receive(wire.ALLOCATION.size * allocations, 0)
        self._allocations = [Allocation.unpack(item) for item in wire.ALLOCATION.iter_unpack(data)]
        if not {allocation.uuid for allocation in self._allocations} <= self._gpus:
            raise self.wrong("its memory is on other GPUs than its ticket says")
        self._receive_regions(regions)
        _, hands = self.receive(len(wire.HANDED), 1)
        if hands:
            self.descriptors.remove(hands[0])
            self._hands = SocketStream(socket.socket(fileno=hands[0]), self.grant.stall_timeout_s)
        elif any(found.export is wire.Export.FD for found in self._allocations):
            raise self.wrong("descriptors of its memory are missing")

    def _receive_regions(self, regions: int) -> None:
        scattered: dict[int, int] = {}
        for first in range(0, regions, BATCH):
            batch = min(BATCH, regions - first)
            data, descriptors = self.receive(wire.REGION.size * batch, batch)
            for index, address, nbytes, where in wire.REGION.iter_unpack(data):
                if index in self.regions or (where == RegionKind.MEMFD and not descriptors):
                    raise self.wrong("its list of regions is malformed")
                descriptor = descriptors.pop(0) if where == RegionKind.MEMFD else -1
                self.regions[index] = RemoteRegion(
                    index, address, nbytes, RegionKind(where), descriptor
                )
                if where == RegionKind.SCATTERED:
                    scattered[index] = address
        if sum(scattered.values()) > MAX_PLACES:
            raise self.wrong("its list of places is too long")
        for index, count in scattered.items():
            data = bytearray(3 * 8 * count)
            if data:
                self.fill(memoryview(data))
            region = self.regions[index]
            places = ScatterTable.unpack(memoryview(data), region.nbytes)
            self.regions[index] = replace(region, address=0, places=places)

    def map(self) -> None:
        """Check where all memory is, and map the first allocation of each GPU: if its memory can't
        be mapped, that shows by one.

        Raises:
            PathError: CUDA can't.
            PeerProtocolError: The source's memory is not as its ticket describes it.
        """
        maps = self.maps
        maps.place(self._allocations, own=self.ticket.is_own)
        probes: dict[str, tuple[int, int]] = {}
        for region in self.regions.values():
            places: Iterable[tuple[int, int]] = ()
            if region.places is not None:
                places = zip(region.places.addresses, region.places.lengths, strict=True)
            elif region.on_gpu and region.nbytes:
                places = ((region.address, region.nbytes),)
            for address, nbytes in places:
                probes.setdefault(maps.check(address, nbytes), (address, 1))
        self.open(probes.values())

    def open(self, places: Iterable[tuple[int, int]]) -> None:
        """Map what is at addresses of the source, each with a length, if that is not done. Raises
        as `map`, and SourceError where the source does not hand it over."""
        if not self.maps.whole:
            with translated(self.path, self.peer):
                self.maps.open(places)

    def places_of(self, read: Read) -> Iterator[tuple[int, int]]:
        """Yield where a read within the regions touches a GPU's memory. Raises as `places`."""
        for piece in read.pieces:
            region = self.regions[piece.region]
            if region.on_gpu:
                yield from self.places(region, piece.region_offset, len(piece.view))

    def places(self, region: RemoteRegion, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the address at the source and the length of each part of some bytes of a region.
        Raises PeerRefusedError where a scattered region has no memory."""
        try:
            return list(region.parts(offset, nbytes))
        except ValueError as error:
            peer = self.peer
            raise PeerRefusedError(f"{peer} by {self.path}: {error}", peer=peer) from error

    def _descriptors(self, numbers: Sequence[int]) -> list[int]:
        """Have the source send descriptors of allocations. Raises SourceError."""
        assert self._hands is not None
        with self._wanting:
            self.send(wire.wanted(numbers))
            try:
                handed = memoryview(bytearray(len(wire.HANDED)))
                found = self._hands.fill_descriptors(handed, len(numbers))
            except OSError as error:
                raise dial.translate(error, self.peer, self.peer) from error
        if len(found) != len(numbers):
            for descriptor in found:
                os.close(descriptor)
            self.check_grant()
            raise self.wrong("descriptors of its memory are missing")
        return found

    def hold(self) -> None:
        """Count another holder, who calls `drop`."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """Remove a holder. The last one unmaps everything and closes the connection."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        if self._hands is not None:
            self._hands.abort()  # what waits for descriptors
        # Unmapped first: closing the connection reports it to the source.
        try:
            # Where CUDA has broken there is nothing left to unmap.
            with contextlib.suppress(CudaError):
                self.maps.close()
        finally:
            self.close()
            self._on_unmapped()

    def close(self) -> None:
        if self._hands is not None:
            self._hands.close()
        super().close()
