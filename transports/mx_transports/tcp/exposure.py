"""The source side of tcp: a thread per connection answers requests from the regions' memory."""

from __future__ import annotations

from collections.abc import Sequence

from mx.transport import ExposedRegion, ExposeOptions
from mx_transports.tcp.wire import MAGIC, REQUEST, RESPONSE
from mx_transports.toolkit import framing
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.pieces import MAX_PIECES, PIECE
from mx_transports.toolkit.sending import SendingExposure
from mx_transports.toolkit.stream import SocketStream


class TcpExposure(SendingExposure):
    """Regions behind listening sockets, one for each host of the options."""

    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        """Raises LocalError where a host can't be listened on, or a GPU's memory can't be copied,
        and ConfigError where a TLS file can't be used."""
        super().__init__(regions, options, name="mx-tcp-source", magic=MAGIC)
        self.start()

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        request = memoryview(bytearray(REQUEST.size))
        table = bytearray()
        while True:
            stream.next_message(request)
            request_id, generation, count = REQUEST.unpack(request)
            if count > MAX_PIECES:
                return  # Not one of ours; what follows can't be made sense of.
            if len(table) < count * PIECE.size:
                table = bytearray(count * PIECE.size)
            pieces = memoryview(table)[: count * PIECE.size]
            stream.fill(pieces)
            views = self.find(pieces)
            status = framing.OUT_OF_RANGE if views is None else self.status(generation)
            if views is None or status != framing.OK:
                stream.send_all([RESPONSE.pack(request_id, status, 0)])
                continue
            nbytes = sum(len(view) for view in views)
            with self.reading(grant):
                # Straight from the region. Sending pages by sendfile or splice was no faster
                # over loopback (1.0 x), and would let the kernel hold on to the pages after
                # this source counts them as no longer read.
                self.send(stream, grant, RESPONSE.pack(request_id, framing.OK, nbytes), views)
                views.clear()
                stream.send_all([RESPONSE.pack(request_id, self.status(generation), nbytes)])
