"""The target side of tcp: a thread per connection, with at most one response under way on each."""

from __future__ import annotations

from collections import deque

from mx.errors import MxError, PeerLostError, PeerProtocolError, SourceError
from mx.transport import Grant, Read
from mx.units import MIB
from mx_transports.tcp.wire import REQUEST, RESPONSE
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.pieces import encode_request
from mx_transports.toolkit.session import StreamSession
from mx_transports.toolkit.slicing import host_steps
from mx_transports.toolkit.stream import SocketStream

#: 1, 2 and 4 MiB were tried: 4 took a tenth off a pull over loopback, mostly of Python's time.
STEP_BYTES = 4 * MIB
#: More is requested when no more than this is still to come: late, so that chunks go to the
#: connection that is free for them, but early enough that the source never waits.
AHEAD_BYTES = 4 * MIB
#: Requests go out ahead only if they surely fit in the peer's socket buffers: both sides would
#: otherwise wait for each other to read.
AHEAD_REQUESTS = 8
AHEAD_REQUEST_BYTES = 8 * 1024


class TcpSession(StreamSession):
    """See `mx.transport.Session`. Requests go out ahead of the response that is received."""

    def __init__(self, grant: Grant, streams: list[SocketStream]) -> None:
        super().__init__("mx-tcp", grant, streams)
        self.start()

    def carry(self, worker: int) -> None:
        stream = self.streams[worker]
        taken: deque[tuple[int, Read]] = deque()
        failure: SourceError = PeerLostError(f"{self.peer}: abandoned", peer=self.peer)
        try:
            while taken or self._request(stream, taken, wait=True):
                self._receive(stream, taken)
        except OSError as error:
            failure = dial.translate(error, self.peer, self.peer)
            raise failure from error
        except SourceError as error:
            failure = error
            raise
        finally:
            self.hang_up(worker)
            for _, read in taken:
                self.fail(read, failure)

    def _request(self, stream: SocketStream, taken: deque[tuple[int, Read]], *, wait: bool) -> bool:
        """Request the next read in the queue. Returns False if there is none."""
        while (read := self.take(wait=wait)) is not None:
            request_id = (taken[-1][0] + 1) & framing.MAX_U32 if taken else 0
            try:
                self.check_bounds(read)
                self.check_generation(framing.MAX_U64)
                frame = encode_request(REQUEST, (request_id, self.grant.generation), read.pieces)
            except MxError as error:
                self.fail(read, error)
                continue
            if not wait and len(frame) > AHEAD_REQUEST_BYTES:
                self.put_back(read)
                return False
            taken.append((request_id, read))
            stream.send_all([frame])
            return True
        return False

    def _request_ahead(
        self, stream: SocketStream, taken: deque[tuple[int, Read]], current_nbytes: int
    ) -> None:
        """Keep the source busy once the response at hand has `current_nbytes` or less to go."""
        while current_nbytes <= AHEAD_BYTES and len(taken) < AHEAD_REQUESTS:
            to_come = current_nbytes + sum(read.nbytes for _, read in taken) - taken[0][1].nbytes
            if to_come > AHEAD_BYTES or not self._request(stream, taken, wait=False):
                return

    def _receive(self, stream: SocketStream, taken: deque[tuple[int, Read]]) -> None:
        request_id, read = taken[0]
        self._request_ahead(stream, taken, read.nbytes)
        status = self._response(stream, request_id, read)
        if status == framing.OK:
            for slices, landed in host_steps(read, STEP_BYTES):
                stream.fill_all([each.view for each in slices])
                read.sink.landed(landed)
                self._request_ahead(stream, taken, read.nbytes - landed)
            status = self._response(stream, request_id, read)
        taken.popleft()
        if status == framing.OK:
            read.sink.done()
        else:
            self.fail(read, framing.refusal(status, self.peer))

    def _response(self, stream: SocketStream, request_id: int, read: Read) -> int:
        answered, status, nbytes = RESPONSE.unpack(stream.receive(RESPONSE.size))
        if answered != request_id or (status == framing.OK and nbytes != read.nbytes):
            raise PeerProtocolError(
                f"{self.peer} sent a response to no request ({answered}, {nbytes} bytes)",
                peer=self.peer,
            )
        return int(status)
