"""The target side of tcp: a thread per connection, with at most one response under way on each."""

from __future__ import annotations

import time
from collections import deque

from mx.core.striping import way_nbytes
from mx.errors import MxError, PeerLostError, PeerProtocolError, SourceError
from mx.transport import Grant, Read
from mx.units import MIB
from mx_transports.tcp.wire import MAGIC, REQUEST, RESPONSE
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.pieces import encode_request
from mx_transports.toolkit.session import GrowingSession
from mx_transports.toolkit.slicing import host_views
from mx_transports.toolkit.stream import SocketStream

#: 1, 2 and 4 MiB were tried: 4 took a tenth off a pull over loopback, mostly of Python's time.
STEP_BYTES = 4 * MIB
#: More is requested when no more than this is still to come: late, so that chunks go to the
#: connection that is free for them, but early enough that the source never waits. Over a long way
#: it is more, and so many times as many requests.
AHEAD_BYTES = 4 * MIB
AHEAD_REQUESTS = 8
#: Requests go out ahead only if together they surely fit in the peer's socket buffers: both sides
#: would otherwise wait for each other to read. So much, and no more requests: each takes some more.
MOST_AHEAD_BYTES = 64 * 1024
MOST_AHEAD_REQUESTS = 64

#: A request's id, its read, its frame's bytes, and when it was sent on an idle connection; 0: not.
_Taken = tuple[int, Read, int, float]


class TcpSession(GrowingSession):
    """See `mx.transport.Session`. Requests go out ahead of the response that is received."""

    magic = MAGIC

    def __init__(self, grant: Grant, streams: list[SocketStream]) -> None:
        super().__init__("mx-tcp", grant, streams)
        #: The least of those that the connections have seen last, each when it was idle.
        self.round_trip_s = 0.0
        self._round_trips_s: dict[int, float] = {}
        self.start()

    def carry(self, worker: int) -> None:
        stream = self.stream(worker)
        taken: deque[_Taken] = deque()
        ahead_nbytes = AHEAD_BYTES  # so much has to come when more is requested
        failure: SourceError = PeerLostError(f"{self.peer}: abandoned", peer=self.peer)
        try:
            while taken or self._request(stream, taken, wait=True):
                ahead_nbytes = self._receive(worker, stream, taken, ahead_nbytes)
        except OSError as error:
            failure = dial.translate(error, self.peer, self.peer)
            raise failure from error
        except SourceError as error:
            failure = error
            raise
        finally:
            self.hang_up(worker)
            for _, read, _, _ in taken:
                self.fail(read, failure)

    def _request(self, stream: SocketStream, taken: deque[_Taken], *, wait: bool) -> bool:
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
            # The peer has read the first one's frame before it answers.
            ahead_nbytes = len(frame) + sum(each[2] for each in taken) - taken[0][2] if taken else 0
            if ahead_nbytes > MOST_AHEAD_BYTES:
                self.put_back(read)
                return False
            taken.append((request_id, read, len(frame), time.monotonic() if wait else 0.0))
            stream.send_all([frame])
            return True
        return False

    def _request_ahead(
        self, stream: SocketStream, taken: deque[_Taken], current_nbytes: int, ahead_nbytes: int
    ) -> None:
        """Request more until `ahead_nbytes` are to come, of the response at hand
        `current_nbytes`."""
        most = min(AHEAD_REQUESTS * ahead_nbytes // AHEAD_BYTES, MOST_AHEAD_REQUESTS)
        while len(taken) < most:
            to_come = current_nbytes - taken[0][1].nbytes
            for _, read, _, _ in taken:
                to_come += read.nbytes
            if to_come > ahead_nbytes or not self._request(stream, taken, wait=False):
                return

    def _receive(
        self, worker: int, stream: SocketStream, taken: deque[_Taken], ahead_nbytes: int
    ) -> int:
        """Receive a response. Returns the new `ahead_nbytes`."""
        request_id, read, _, asked_s = taken[0]
        if read.nbytes <= ahead_nbytes:
            self._request_ahead(stream, taken, read.nbytes, ahead_nbytes)
        status = self._response(stream, request_id, read)
        began_s = time.monotonic()
        if asked_s:
            self._round_trips_s[worker] = began_s - asked_s
            self.round_trip_s = min(self._round_trips_s.values())
        if status == framing.OK:
            for views, landed in host_views(read, STEP_BYTES):
                stream.fill_all(views)
                read.sink.landed(landed)
                passed_s = max(time.monotonic() - began_s, 1e-6)
                way = way_nbytes(landed / passed_s, self.round_trip_s)
                # What the socket had buffered comes faster than the rest will: not at once.
                ahead_nbytes = max(AHEAD_BYTES, min(way, 2 * ahead_nbytes))
                if (left_nbytes := read.nbytes - landed) <= ahead_nbytes:
                    self._request_ahead(stream, taken, left_nbytes, ahead_nbytes)
            status = self._response(stream, request_id, read)
        taken.popleft()
        if status == framing.OK:
            read.sink.done()
        else:
            self.fail(read, framing.refusal(status, self.peer))
        return ahead_nbytes

    def _response(self, stream: SocketStream, request_id: int, read: Read) -> int:
        answered, status, nbytes = RESPONSE.unpack(stream.receive(RESPONSE.size))
        if answered != request_id or (status == framing.OK and nbytes != read.nbytes):
            raise PeerProtocolError(
                f"{self.peer} sent a response to no request ({answered}, {nbytes} bytes)",
                peer=self.peer,
            )
        return int(status)
