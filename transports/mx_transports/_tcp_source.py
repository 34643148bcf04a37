"""The source side of tcp: a thread per connection answers requests from the regions' memory."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence

from mx.transport import ExposedRegion, ExposeOptions, host_view
from mx.units import KIB
from mx_transports import _frames as frames
from mx_transports._door import DoorExposure, Granted
from mx_transports._listeners import listen
from mx_transports._stream import Stream
from mx_transports._tcp_wire import MAGIC, MAX_PIECES, PIECE, REQUEST, RESPONSE

#: Shorter slices cost more in calls than they gain in fairness.
LEAST_SLICE = 16 * KIB
#: How often a pause looks whether it is still of use.
_LOOK_S = 0.1


def pause(seconds: float, ended: Callable[[], bool]) -> None:
    """Sleep so long, or a little beyond the moment when `ended` says so."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not ended():
        time.sleep(min(left_s, _LOOK_S))


class TcpExposure(DoorExposure):
    """Regions behind listening sockets, one for each host of the options."""

    def __init__(
        self,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._limiter = options.limiter
        self._sent_bytes = 0
        self._views = {region.index: host_view(region.view) for region in regions}
        listeners = listen(options.hosts, options.ports)
        names = [listener.address for listener in listeners]
        # Without a host: at the one that the reader dials for control.
        found = dict.fromkeys(("" if options.at_peer else host, port) for host, port in names)
        self._addresses = [list(address) for address in found]
        super().__init__(
            name="mx-tcp-source",
            magic=MAGIC,
            listeners=listeners,
            stall_timeout_s=options.stall_timeout_s,
            tls=tls,
        )
        self._start()

    def sent_bytes(self) -> int:
        return self._sent_bytes

    def sent_to(self, grant_id: str) -> int:
        with self._lock:
            standing = self._granted.values()
            return sum(each.sent_nbytes for each in standing if each.grant_id == grant_id)

    def _ticket_fields(self) -> dict[str, object]:
        return {"addresses": self._addresses}

    def _changed(self, granted: Granted) -> None:
        pass  # Each request is checked against the generation when it is answered.

    def _released(self) -> None:
        self._views.clear()

    def _serve(self, stream: Stream, granted: Granted) -> None:
        request = memoryview(bytearray(REQUEST.size))
        table = bytearray()
        while True:
            got = stream.wait(request)
            stream.fill(request[got:])
            request_id, generation, count = REQUEST.unpack(request)
            if count > MAX_PIECES:
                return  # Not one of ours; what follows can't be made sense of.
            if len(table) < count * PIECE.size:
                table = bytearray(count * PIECE.size)
            pieces = memoryview(table)[: count * PIECE.size]
            stream.fill(pieces)
            views: list[memoryview] = []
            status = self._find(generation, pieces, views)
            if status != frames.OK:
                stream.send_all([RESPONSE.pack(request_id, status, 0)])
                continue
            nbytes = sum(len(view) for view in views)
            with self._lock:
                granted.busy += 1
            try:
                # Straight from the region. Sending pages by sendfile or splice was no faster
                # over loopback (1.0 x), and would let the kernel hold on to the pages after
                # the source has been told that nobody reads them any more.
                self._send(stream, granted, RESPONSE.pack(request_id, frames.OK, nbytes), views)
                stream.send_all([RESPONSE.pack(request_id, self._status(generation), nbytes)])
            finally:
                views.clear()
                with self._lock:
                    granted.busy -= 1

    def _send(self, stream: Stream, granted: Granted, head: bytes, views: list[memoryview]) -> None:
        if self._limiter is None:
            left = len(head)  # which is no payload

            def on_sent(nbytes: int) -> None:
                nonlocal left
                payload, left = max(0, nbytes - left), max(0, left - nbytes)
                self._count(granted, payload)

            stream.send_all([head, *views], on_sent)
            return
        stream.send_all([head])
        for view in views:
            sent = 0
            while sent < len(view):
                # A reader's streams share its slice, so that it gains nothing by having many.
                slice_nbytes = self._limiter.slice_nbytes(granted.grant_id)
                size = max(LEAST_SLICE, slice_nbytes // max(1, len(granted.streams)))
                part = view[sent : sent + size]
                pause(self._limiter.delay_s(len(part)), lambda: granted.revoked)
                stream.send_all([part])
                self._count(granted, len(part))
                sent += len(part)

    def _count(self, granted: Granted, nbytes: int) -> None:
        with self._lock:
            self._sent_bytes += nbytes
            granted.sent_nbytes += nbytes

    def _status(self, generation: int) -> int:
        return frames.OK if generation == self._generation else frames.STALE

    def _find(self, generation: int, pieces: memoryview, views: list[memoryview]) -> int:
        """Append each piece's memory to `views`; anything but OK means that none may be sent."""
        for region, offset, nbytes in PIECE.iter_unpack(pieces):
            view = self._views.get(region)
            if view is None or offset + nbytes > len(view):
                return frames.OUT_OF_RANGE
            views.append(view[offset : offset + nbytes])
        return self._status(generation)
