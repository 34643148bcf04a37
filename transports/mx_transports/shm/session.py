"""The target side of shm: threads that copy by system calls; the source has no part in a read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import add, gt

from mx.buffers import map_private
from mx.errors import ClosedError, LocalError, NotAllowedError, PeerLostError, PeerRefusedError
from mx.transport import (
    BLOCK_DIGEST_BYTES,
    Grant,
    Piece,
    Read,
    ScatteredView,
    View,
    host_view,
    slices,
)
from mx.units import MIB
from mx_transports.shm.exposure import (
    BUSY,
    DIGESTS,
    ENTRY,
    IDLE,
    INFO,
    MAGIC,
    MAX_DIGESTS_BYTES,
    MAX_PLACES,
    MAX_REGIONS,
    PLACE,
)
from mx_transports.toolkit import kernel
from mx_transports.toolkit.local import BATCH, LocalSource, LocalTicket
from mx_transports.toolkit.session import ThreadedSession

#: 1, 2 and 4 MiB were tried: 2 was a tenth faster than 1, and no slower than 4, which takes fewer
#: calls.
STEP_BYTES = 4 * MIB


@dataclass(slots=True)
class _ProcessRegion:
    """A region in the source's process. A scattered one has columns of its places: where each
    begins in the region, its address, its length."""

    nbytes: int
    address: int
    descriptor: int | None
    begins: array[int] = field(default_factory=partial(array, PLACE))
    addresses: array[int] = field(default_factory=partial(array, PLACE))
    lengths: array[int] = field(default_factory=partial(array, PLACE))

    def places(self, offset: int, nbytes: int, found: array[int]) -> None:
        """Append the address and the length of each place that these bytes touch to `found`; there
        is at least one byte.

        Raises:
            ValueError: Some of them have no place.
        """
        begins = self.begins
        if not begins:
            found.extend((self.address + offset, nbytes))
            return
        first = bisect_right(begins, offset) - 1
        last = bisect_left(begins, offset + nbytes, max(first, 0))
        addresses, lengths = self.addresses[first:last], self.lengths[first:last]
        inside, there = offset - begins[first], sum(lengths)
        # The places do not overlap: if there is no gap between them they are as long as all.
        whole = there == begins[last - 1] + lengths[-1] - begins[first] if lengths else False
        if first < 0 or not whole or inside + nbytes > there:
            raise ValueError("a read reaches where the source has no memory")
        addresses[0] += inside
        lengths[0] -= inside
        lengths[-1] -= there - inside - nbytes
        found += _in_turn(addresses, lengths)


def _in_turn(addresses: array[int], lengths: array[int]) -> array[int]:
    """Return addresses and lengths as the kernel takes them."""
    found = array(kernel.PLACE, bytes(addresses.itemsize * 2 * len(addresses)))
    found[::2], found[1::2] = addresses, lengths
    return found


#: How many addresses there are.
_ADDRESSES = 1 << 64
#: Where the padding between tensors goes that is read along with them.
_PADDING = (ctypes.c_char * 256)()


class _FileRun:
    """Places to fill from a memfd by one call: their bytes follow each other there, apart from
    padding."""

    def __init__(self, descriptor: int, piece: Piece) -> None:
        self._places = array(kernel.PLACE)
        self._pins: list[object] = []
        self._descriptor = descriptor
        self._begin = self._end = piece.region_offset
        self.add(descriptor, piece)

    def add(self, descriptor: int, piece: Piece) -> bool:
        """Add a piece. Returns False if its bytes do not follow the others."""
        gap = piece.region_offset - self._end
        if descriptor != self._descriptor or not 0 <= gap < len(_PADDING):
            return False
        if gap:
            self._places.extend((ctypes.addressof(_PADDING), gap))
        self._pins.append(_append_places(piece.view, self._places))
        self._end = piece.region_offset + len(piece.view)
        return True

    def read(self, peer: str) -> None:
        """Fill the places."""
        kernel.read_descriptor_places(self._descriptor, self._begin, self._places, peer)


def _append_places(view: View, found: array[int]) -> object:
    """Append the address and the length of each place of a destination to `found`. Returns what
    keeps its memory while the kernel writes there. Raises LocalError: a part has no memory."""
    places = view.places() if isinstance(view, ScatteredView) else None
    if places is not None:
        addresses, lengths = (array(kernel.PLACE, column) for column in places[1:])
        if sum(lengths) != len(view):
            raise LocalError(f"a part of these {len(view)} bytes is in no memory of this process")
        found += _in_turn(addresses, lengths)
        return view
    pins = []
    for span in view.spans() if isinstance(view, ScatteredView) else (view,):
        if len(span):
            pin = ctypes.c_char.from_buffer(host_view(span))
            found.extend((ctypes.addressof(pin), len(span)))
            pins.append(pin)
    return pins


class ShmSource(LocalSource):
    """What a reader holds of its source, the regions' descriptors among it."""

    def __init__(self, grant: Grant, ticket: LocalTicket) -> None:
        super().__init__("shm", MAGIC, grant, ticket)
        self.regions: dict[int, _ProcessRegion] = {}
        #: The digests that the source states of the grant's content, if it states any.
        self.digests: mmap.mmap | None = None

    def receive_greeting(self) -> None:
        count, digests_nbytes = self.receive_control(INFO)
        if (
            count > MAX_REGIONS
            or digests_nbytes > MAX_DIGESTS_BYTES
            or digests_nbytes % BLOCK_DIGEST_BYTES
        ):
            raise self.wrong("its greeting is malformed")
        places: dict[int, int] = {}
        while len(self.regions) < count:
            batch = min(BATCH, count - len(self.regions))
            entries, descriptors = self.receive(ENTRY.size * batch, batch)
            for index, nbytes, address, attached, scattered in ENTRY.iter_unpack(entries):
                impossible = attached and (scattered or not descriptors)
                if index in self.regions or impossible or address + nbytes > _ADDRESSES:
                    raise self.wrong("its list of regions is malformed")
                descriptor = descriptors.pop(0) if attached else None
                self.regions[index] = _ProcessRegion(nbytes, address, descriptor)
                places[index] = scattered
        if digests_nbytes:
            self._receive_digests(digests_nbytes)
        if sum(places.values()) > MAX_PLACES:
            raise self.wrong("its list of places is too long")
        for index, scattered in places.items():
            self._receive_places(self.regions[index], scattered)

    def _receive_places(self, region: _ProcessRegion, count: int) -> None:
        columns = array(PLACE, bytes(8 * 3 * count))
        if not count:
            return
        self.fill(memoryview(columns).cast("B"))
        if sys.byteorder == "little":
            columns.byteswap()
        begins, addresses, lengths = (columns[i * count : (i + 1) * count] for i in range(3))
        limits = chain(begins[1:], (region.nbytes,))
        beyond = chain(
            map(gt, map(add, begins, lengths), limits),
            map(gt, map(add, addresses, lengths), repeat(_ADDRESSES)),
        )
        if any(beyond):
            raise self.wrong("its list of places is malformed")
        region.begins, region.addresses, region.lengths = begins, addresses, lengths

    def _receive_digests(self, nbytes: int) -> None:
        said, found = self.receive(len(DIGESTS), 1)
        if said != DIGESTS or len(found) != 1:
            raise self.wrong("the descriptor of its digests is missing")
        if not kernel.fully_sealed(found[0]):
            raise self.wrong("its digests are not sealed")
        if os.fstat(found[0]).st_size != nbytes:
            raise self.wrong("its digests are not as many as it says")
        if self.grant.content:  # else nothing says whose they are
            # The memory can be read without them where this process can map no more.
            with contextlib.suppress(OSError):
                self.digests = mmap.mmap(
                    found[0], nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
                )
        # A map has a descriptor of its own.
        self.descriptors.remove(found[0])
        os.close(found[0])

    def close(self) -> None:
        # A view that was handed out keeps the map, which ends with the last such view.
        self.digests = None
        super().close()

    def try_memory(self) -> None:
        """Find out now, not at the first read, whether the kernel allows process_vm_readv.

        Raises:
            SourceError: It does not.
        """
        for region in self.regions.values():
            address = region.addresses[0] if region.begins else region.address
            if region.descriptor is None and region.nbytes:
                byte = ctypes.c_char()
                there = array(kernel.PLACE, (address, 1))
                here = array(kernel.PLACE, (ctypes.addressof(byte), 1))
                kernel.read_places(self.ticket.pid, there, here, self.peer)
                return


class ShmSession(ThreadedSession):
    """See `mx.transport.Session`. `source` is connected, and the session's from here on."""

    def __init__(self, grant: Grant, source: ShmSource) -> None:
        workers = max(1, grant.streams)
        super().__init__("mx-shm", grant, workers)
        self.depth = 2 * workers
        self.sizes = {index: region.nbytes for index, region in source.regions.items()}
        self._source = source
        self._busy = 0
        self._busy_lock = threading.Lock()
        self._polls: dict[int, select.poll] = {}
        self.start()

    def grow(self, streams: int) -> None:
        """See `mx.transport.Growing`."""
        self.add_threads(streams)

    def attach(self, region: int) -> memoryview:
        with self.lock:
            if self.closed:
                raise ClosedError(f"the session with {self.peer} is closed")
            found = self._source.regions.get(region)
            descriptor = found.descriptor if found is not None else None
            if found is None or descriptor is None:
                raise NotAllowedError(
                    f"{self.peer}: region {region} is not in a sealed memfd: it can be copied, "
                    "not attached"
                )
            if not kernel.fully_sealed(descriptor):
                raise NotAllowedError(f"{self.peer}: region {region} is not fully sealed")
            if os.fstat(descriptor).st_size != found.nbytes or not found.nbytes:
                raise NotAllowedError(
                    f"{self.peer}: region {region} is not as large as the source says"
                )
            try:
                return map_private(descriptor, found.nbytes)
            except OSError as error:
                raise LocalError(f"can't map {found.nbytes} bytes: {error.strerror}") from error

    def vouched_digests(self) -> memoryview | None:
        """See `mx.transport.Vouching`."""
        with self.lock:
            digests = self._source.digests
            return None if self.closed or digests is None else memoryview(digests)

    # --- the threads. They look at `closed` after each step; none blocks on the peer.

    def release(self) -> None:
        self._source.close()

    def carry(self, worker: int) -> None:
        busy = False
        self._polls[worker] = select.poll()
        self._source.register(self._polls[worker])
        try:
            while True:
                read = self.take(wait=False)
                if read is None:
                    # The source is notified at the end of a run of reads, not between them.
                    busy = self._set_busy(busy, False)
                    read = self.take()
                if read is None:
                    return
                busy = self._set_busy(busy, True)
                self.complete(worker, read)
        finally:
            self._set_busy(busy, False)

    def fetch(self, worker: int, read: Read) -> None:
        poll, landed = self._polls[worker], 0
        self._source.check(poll)
        for pieces, nbytes in slices(read, STEP_BYTES):
            if self.closed:
                raise PeerLostError("closed", peer=self.peer)
            self._move(pieces)
            landed += nbytes
            # After the bytes: what was read is good only if nothing had changed by then.
            self._source.check(poll)
            read.sink.landed(landed)

    def _move(self, pieces: Sequence[Piece]) -> None:
        sources, targets = array(kernel.PLACE), array(kernel.PLACE)
        pins: list[object] = []
        runs: list[_FileRun] = []
        for piece in pieces:
            region = self._source.regions[piece.region]
            if region.descriptor is not None:
                if not runs or not runs[-1].add(region.descriptor, piece):
                    runs.append(_FileRun(region.descriptor, piece))
                continue
            try:
                region.places(piece.region_offset, len(piece.view), sources)
            except ValueError as error:
                raise PeerRefusedError(f"{self.peer}: {error}", peer=self.peer) from None
            pins.append(_append_places(piece.view, targets))
        for run in runs:
            run.read(self.peer)
        if targets:
            kernel.read_places(self._source.ticket.pid, sources, targets, self.peer)

    def _set_busy(self, before: bool, now: bool) -> bool:
        """Change the count of busy threads; notify the source where it leaves 0 or returns to 0."""
        if before == now:
            return now
        with self._busy_lock:
            self._busy += 1 if now else -1
            # The first thread to begin, or the last to end.
            if self._busy == now:
                self._source.notify(BUSY if now else IDLE)
        return now
