"""The source side of shm: a unix socket that hands out descriptors, to its own uid.

After the HELLO the source sends INFO with the grant's control page, then an ENTRY for each region,
with a duplicate of its memfd where it has a sealed one. The reader reports on the connection when
it becomes busy and when idle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mx.errors import LocalError
from mx.transport import ExposedRegion, ExposeOptions
from mx_transports.toolkit import kernel
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.local import BATCH, LocalExposure
from mx_transports.toolkit.stream import SocketStream

MAGIC = b"mxshm\0\0\1"
#: Number of regions.
INFO = struct.Struct("!I")
#: Index, nbytes, address, whether a descriptor comes along.
ENTRY = struct.Struct("!IQQ?")
MAX_REGIONS = 1 << 16
BUSY, IDLE = b"B", b"I"


class ShmExposure(LocalExposure):
    """Regions of this process's memory for other processes of its uid on its kernel."""

    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        """Raises LocalError for too many regions, or where there is no socket to be had."""
        if len(regions) > MAX_REGIONS:
            raise LocalError(f"shm exposes at most {MAX_REGIONS} regions, not {len(regions)}")
        # A descriptor of memory that can still be written is not handed out.
        descriptors = [
            region.memfd if kernel.fully_sealed(region.memfd) else None for region in regions
        ]
        self._regions = [
            (
                ENTRY.pack(region.index, len(region.view), region.address, descriptor is not None),
                descriptor,
            )
            for region, descriptor in zip(regions, descriptors, strict=True)
        ]
        super().__init__(name="mx-shm", magic=MAGIC, options=options)
        self.start()

    def released(self) -> None:
        self._regions.clear()

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        if not self.send_control(stream, grant, INFO.pack(len(self._regions))):
            return
        regions = list(self._regions)
        for first in range(0, len(regions), BATCH):
            batch = regions[first : first + BATCH]
            stream.send_descriptors(
                b"".join(entry for entry, _ in batch),
                [descriptor for _, descriptor in batch if descriptor is not None],
            )
        busy, said = False, memoryview(bytearray(1))
        try:
            while stream.wait(said) and said in (BUSY, IDLE):
                if busy != (said == BUSY):
                    busy = not busy
                    self.count_reads(grant, 1 if busy else -1)
        finally:
            if busy:
                self.count_reads(grant, -1)
