"""A reader's side of the GPU transports: connection, control page, mapped memory.

A `RemoteMemory` is counted: the session and each view attached through it hold it, and the last to
let go unmaps everything and then closes the connection, by which the source knows.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

from mx.cuda.errors import CudaError, is_own
from mx.errors import LocalPathError, PathError, PeerProtocolError
from mx.transport import Grant
from mx_transports.toolkit.cuda import wire
from mx_transports.toolkit.cuda.maps import Maps
from mx_transports.toolkit.cuda.places import MAX_PLACES, ScatterTable
from mx_transports.toolkit.cuda.wire import Allocation, RegionKind, RemoteRegion
from mx_transports.toolkit.local import BATCH, LocalSource, LocalTicket


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
        self, path: str, magic: bytes, grant: Grant, ticket: GpuTicket, maps: Maps
    ) -> None:
        super().__init__(path, magic, grant, ticket)
        self.maps = maps
        self._gpus = ticket.gpus
        # Reentrant: a collection, and so the finalizer of a holder, can run inside any line.
        self._lock = threading.RLock()
        self._holders = 1
        self.regions: dict[int, RemoteRegion] = {}

    def receive_greeting(self) -> None:
        allocations, regions = self.receive_control(wire.GREETING)
        if max(allocations, regions) > wire.MAX_ENTRIES:
            raise self.wrong("its greeting is malformed")
        for first in range(0, allocations, BATCH):
            batch = min(BATCH, allocations - first)
            data, descriptors = self.receive(wire.ALLOCATION.size * batch, batch)
            found = [Allocation.unpack(item) for item in wire.ALLOCATION.iter_unpack(data)]
            if len(descriptors) != sum(a.export is wire.Export.FD for a in found):
                raise self.wrong("descriptors of its memory are missing")
            if not {allocation.uuid for allocation in found} <= self._gpus:
                raise self.wrong("its memory is on other GPUs than its ticket says")
            left = iter(descriptors)
            with translated(self.path, self.peer):
                for allocation in found:
                    by_descriptor = allocation.export is wire.Export.FD
                    self.maps.take(allocation, next(left) if by_descriptor else -1)
            self.descriptors = [each for each in self.descriptors if each not in descriptors]
            for descriptor in descriptors:
                os.close(descriptor)
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
        """Map all allocations.

        Raises:
            PathError: CUDA can't.
            PeerProtocolError: The source's memory is not as its ticket describes it.
        """
        maps = self.maps
        with translated(self.path, self.peer):
            maps.open(own=self.ticket.is_own)
        for region in self.regions.values():
            if region.places is not None:
                for address, nbytes in zip(
                    region.places.addresses, region.places.lengths, strict=True
                ):
                    maps.check(address, nbytes)
            elif region.on_gpu and region.nbytes:
                maps.check(region.address, region.nbytes)

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
        # Unmapped first: closing the connection reports it to the source.
        try:
            # Where CUDA has broken there is nothing left to unmap.
            with contextlib.suppress(CudaError):
                self.maps.close()
        finally:
            self.close()
