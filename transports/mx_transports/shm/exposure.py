"""The source side of shm: a unix socket that hands out descriptors, to its own uid.

After the HELLO the source sends its content's label and INFO with the grant's control page, then an
ENTRY for each region, with a duplicate of its memfd where it has a sealed one, then DIGESTS with a
duplicate of the sealed memfd of its blocks' digests, if it has any, then the places of each
scattered region: in columns, the offset in the region, the address and the length of each. The
reader reports on the connection when it becomes busy and when idle.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import chain

from mx import forks
from mx.buffers import address_of
from mx.contexts import Undo
from mx.errors import LocalError
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, ScatteredView, host_view
from mx_transports.toolkit import kernel
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.local import BATCH, LocalExposure
from mx_transports.toolkit.stream import SocketStream

MAGIC = b"mxshm\0\0\3"
#: Number of regions, bytes of digests.
INFO = struct.Struct("!IQ")
#: Index, nbytes, address, whether a descriptor comes along, the number of its places if scattered.
ENTRY = struct.Struct("!IQQ?I")
MAX_REGIONS = 1 << 16
#: The most places of all regions, and what they are sent as: 64 bits each, big-endian.
MAX_PLACES = 1 << 21
PLACE = "Q"
#: Those of 64 TiB in blocks of 1 MiB.
MAX_DIGESTS_BYTES = 1 << 30
DIGESTS = b"D"
BUSY, IDLE = b"B", b"I"
_DIGESTS_NAME = "mx-digests"
forks.recognise(lambda fd, link: link.startswith(f"/memfd:{_DIGESTS_NAME}"))


class ShmExposure(LocalExposure):
    """Regions of this process's memory for other processes of its uid on its kernel."""

    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        """Raises LocalError for too many regions or digests, for memory of a GPU, and where this
        process has no socket, no descriptor or no memory left."""
        if len(regions) > MAX_REGIONS:
            raise LocalError(f"shm exposes at most {MAX_REGIONS} regions, not {len(regions)}")
        for region in regions:
            if isinstance(region.view, DeviceView):
                raise LocalError(f"shm does not expose the memory of {region.device}")
        digests = memoryview(options.block_digests or b"").cast("B")
        if len(digests) > MAX_DIGESTS_BYTES:
            raise LocalError(f"shm hands out at most {MAX_DIGESTS_BYTES} bytes of digests")
        # A descriptor of memory that can still be written is not handed out.
        descriptors = [
            region.memfd if kernel.fully_sealed(region.memfd) else None for region in regions
        ]
        self._places = [_places(region) for region in regions]
        if sum(map(len, self._places)) > 3 * MAX_PLACES:
            raise LocalError(f"shm exposes tensors in at most {MAX_PLACES} places")
        self._regions = [
            (
                ENTRY.pack(
                    region.index,
                    len(region.view),
                    region.address,
                    descriptor is not None,
                    len(places) // 3,
                ),
                descriptor,
            )
            for region, descriptor, places in zip(regions, descriptors, self._places, strict=True)
        ]
        self._digests_nbytes = len(digests)
        #: The memfd of the digests, or -1; under `lock`.
        self._digests = _memfd_of(digests)
        with Undo(self._close_digests):
            super().__init__(name="mx-shm", magic=MAGIC, options=options)
        self.start()

    def withdraw_content(self) -> None:
        super().withdraw_content()
        self._close_digests()

    def released(self) -> None:
        self._regions.clear()
        self._places.clear()
        with self.lock:
            self._close_digests()

    def _close_digests(self) -> None:
        descriptor, self._digests = self._digests, -1
        if descriptor >= 0:
            os.close(descriptor)

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        with self.lock:
            digests = os.dup(self._digests) if self._digests >= 0 else -1
        try:
            greeted = self._greet(stream, grant, digests)
        finally:
            if digests >= 0:
                os.close(digests)
        if greeted:
            self._count_reads(stream, grant)

    def _greet(self, stream: SocketStream, grant: GrantState, digests: int) -> bool:
        """Send a reader all that it needs. Returns False where its grant has ended."""
        regions = list(self._regions)
        info = INFO.pack(len(regions), self._digests_nbytes if digests >= 0 else 0)
        if not self.send_control(stream, grant, info):
            return False
        for first in range(0, len(regions), BATCH):
            batch = regions[first : first + BATCH]
            stream.send_descriptors(
                b"".join(entry for entry, _ in batch),
                [descriptor for _, descriptor in batch if descriptor is not None],
            )
        if digests >= 0:
            stream.send_descriptors(DIGESTS, [digests])
        stream.send_all([memoryview(places).cast("B") for places in self._places if places])
        return True

    def _count_reads(self, stream: SocketStream, grant: GrantState) -> None:
        """Count a reader's reads by what it reports, until its connection ends."""
        busy, said = False, memoryview(bytearray(1))
        try:
            while stream.wait(said) and said in (BUSY, IDLE):
                if busy != (said == BUSY):
                    busy = not busy
                    self.count_reads(grant, 1 if busy else -1)
        finally:
            if busy:
                self.count_reads(grant, -1)


def _places(region: ExposedRegion) -> array[int]:
    """Return the places of a scattered region, in columns and in network order; empty for others.

    Raises:
        LocalError: Some are not in host memory.
    """
    if not isinstance(region.view, ScatteredView):
        return array(PLACE)
    known = region.view.places()
    if known is None:
        begins, spans = region.view.located()
        views = [host_view(span) for span in spans]
        known = begins, list(map(address_of, views)), list(map(len, views))
    columns = array(PLACE, chain.from_iterable(known))
    if sys.byteorder == "little":
        columns.byteswap()
    return columns


def _memfd_of(digests: memoryview) -> int:
    """Return a sealed memfd of the digests, -1 if there are none. Raises LocalError."""
    if not digests:
        return -1
    try:
        return kernel.sealed_memfd(_DIGESTS_NAME, digests)
    except OSError as error:
        raise LocalError(f"shm: no memory file for digests: {error.strerror}") from error
