"""The source side of shm: an abstract unix socket that hands out descriptors, to its own uid.

After the HELLO the source sends INFO with one descriptor, the grant's control page, then an
ENTRY for each region, with a duplicate of its memfd where it has a sealed one. The connection
then stays open: its end tells the reader that the source is gone, and the source that the
reader is. The reader says on it when it becomes busy and when idle.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence

from mx.errors import LocalError
from mx.transport import ExposedRegion, ExposeOptions
from mx_transports import _vm as vm
from mx_transports._control import Controls, peer_credentials
from mx_transports._door import DoorExposure, Granted
from mx_transports._listeners import Listener
from mx_transports._stream import Stream

MAGIC = b"mxshm\0\0\1"
#: Number of regions.
INFO = struct.Struct("!I")
#: Index, nbytes, address, whether a descriptor comes along.
ENTRY = struct.Struct("!IQQ?")
#: Entries that are sent together; the kernel takes at most 253 descriptors at once.
BATCH = 64
MAX_REGIONS = 1 << 16
BUSY, IDLE = b"B", b"I"


class ShmExposure(DoorExposure):
    """Regions of this process's memory for other processes of its uid on its kernel."""

    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        if len(regions) > MAX_REGIONS:
            raise LocalError(f"shm exposes at most {MAX_REGIONS} regions, not {len(regions)}")
        self._regions = [
            (
                ENTRY.pack(region.index, len(region.view), region.address, descriptor is not None),
                descriptor,
            )
            for region in regions
            # A descriptor of memory that can still be written is not handed out.
            for descriptor in [
                region.memfd
                if region.memfd is not None
                and vm.seals(region.memfd) & vm.FULL_SEALS == vm.FULL_SEALS
                else None
            ]
        ]
        self._socket_name = f"mx-shm-{secrets.token_hex(16)}"
        self._controls = Controls()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + self._socket_name.encode())
        listener.listen(256)
        super().__init__(
            name="mx-shm-source",
            magic=MAGIC,
            listeners=[Listener(listener)],
            stall_timeout_s=options.stall_timeout_s,
        )
        self._start()

    def _allowed(self, sock: socket.socket) -> bool:
        return peer_credentials(sock)[1] == os.geteuid()

    def _ticket_fields(self) -> dict[str, object]:
        pid = os.getpid()
        return {"socket": self._socket_name, "pid": pid, "start_ticks": vm.start_ticks(pid)}

    def _changed(self, granted: Granted) -> None:
        self._controls.write(granted.key, self._generation, granted.revoked)

    def _released(self) -> None:
        self._regions.clear()

    def _serve(self, stream: Stream, granted: Granted) -> None:
        with self._lock:
            if granted.revoked:
                return
            control = self._controls.descriptor(granted.key, self._generation)
        try:
            stream.send_descriptors(INFO.pack(len(self._regions)), [control])
        finally:
            os.close(control)
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
                    with self._lock:
                        granted.busy += 1 if busy else -1
        finally:
            if busy:
                with self._lock:
                    granted.busy -= 1
