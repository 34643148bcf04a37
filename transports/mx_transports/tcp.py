"""The `tcp` transport: several connections, bytes received straight into their destination.

Works between any two processes that can route to each other. Each connection is a lane with a
thread; the next request goes out before the current response has ended, so that the source
never waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mx.core.topology import Place
from mx.errors import (
    MxError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    SourceError,
    StaleGenerationError,
)
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Read,
    Session,
    Unavailable,
    Viable,
)
from mx.units import MIB
from mx_transports import _dial as dial
from mx_transports import _frames as frames
from mx_transports._lanes import LaneSession, steps
from mx_transports._stream import Stream
from mx_transports._tcp_source import TcpExposure
from mx_transports._tcp_wire import MAGIC, MAX_U32, MAX_U64, RESPONSE, encode_request
from mx_transports._tls import tls_context

#: Estimates for planning: what two cores of a server do over loopback, and what several streams
#: do over a fast network, if its interfaces do not set a lower limit.
LOOPBACK_GB_PER_S = 2.0
GB_PER_S = 3.0
#: 1, 2 and 4 MiB were tried: 4 took a tenth off a pull over loopback, mostly of Python's time.
STEP_BYTES = 4 * MIB
#: More is requested when no more than this is still to come: late, so that chunks go to the
#: lane that is free for them, but early enough that the source never waits.
AHEAD_BYTES = 4 * MIB
#: Requests go out ahead only if they surely fit in the peer's socket buffers: both sides would
#: otherwise wait for each other to read.
AHEAD_REQUESTS = 8
AHEAD_REQUEST_BYTES = 8 * 1024


class TcpTransport:
    """See `mx.transport.Transport`."""

    name = "tcp"

    def probe(self) -> Viable | Unavailable:
        return Viable("sockets")

    def reach(self, here: Place, there: Place) -> Path | None:
        """Any two places with addresses; those of one machine only reach it by loopback."""
        if here.device != "cpu" or there.device != "cpu":
            return None
        same_net = (here.boot_id, here.net_namespace) == (there.boot_id, there.net_namespace)
        if not same_net and (dial.only_loopback(here) or dial.only_loopback(there)):
            return None
        if same_net:
            return Path(self.name, LOOPBACK_GB_PER_S, detail="loopback")
        return Path(self.name, GB_PER_S, medium=Medium.NETWORK)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Raises LocalError where a host can't be listened on, ConfigError for bad TLS files."""
        tls = tls_context(options.tls, server=True) if options.tls else None
        return TcpExposure(regions, options, tls)

    def open(self, grant: Grant) -> Session:
        """Raises SourceError, or ConfigError for bad TLS files."""
        ticket = frames.decode_ticket(grant.ticket, grant.peer)
        addresses = dial.addresses(ticket, grant)
        tls = tls_context(grant.tls, server=False) if grant.tls else None
        streams: list[Stream] = []
        try:
            for lane in range(max(1, grant.streams)):
                # Spread over the source's addresses, but any that answers will do.
                order = addresses[lane % len(addresses) :] + addresses[: lane % len(addresses)]
                streams.append(dial.connect_any(MAGIC, order, addresses, ticket, grant, tls))
            # Only now, so that the source admits all of them while the first is waited for.
            for stream in streams:
                dial.greet(MAGIC, stream, grant)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return TcpSession(grant, streams)


class TcpSession(LaneSession):
    """A lane per connection, each with at most one request ahead of the one it receives."""

    def __init__(self, grant: Grant, streams: list[Stream]) -> None:
        super().__init__("mx-tcp", grant, len(streams))
        self._streams = streams
        self.depth = 2 * len(streams)
        self._start()

    def _abort(self) -> None:
        with self._wake:
            for stream in self._streams:
                stream.abort()

    def _release(self) -> None:
        self._streams.clear()

    def _carry(self, lane: int) -> None:
        stream = self._streams[lane]
        taken: deque[tuple[int, Read]] = deque()
        failure: SourceError = PeerLostError(f"{self._peer}: abandoned", peer=self._peer)
        try:
            while taken or self._request(stream, taken, wait=True):
                self._receive(stream, taken)
        except OSError as error:
            failure = dial.translate(error, self._peer, self._peer)
            raise failure from error
        except SourceError as error:
            failure = error
            raise
        finally:
            with self._wake:
                # Under the lock, so that `abort` never meets a descriptor that is another's.
                stream.close()
            for _, read in taken:
                self._fail(read, failure)

    def _request(self, stream: Stream, taken: deque[tuple[int, Read]], *, wait: bool) -> bool:
        """Ask for the next read in the queue, if there is one."""
        while (read := self._take(wait)) is not None:
            request_id = (taken[-1][0] + 1) & MAX_U32 if taken else 0
            try:
                self._check_bounds(read, self._grant.region_nbytes)
                self._check_generation()
                frame = encode_request(request_id, self._grant.generation, read)
            except MxError as error:
                self._fail(read, error)
                continue
            if not wait and len(frame) > AHEAD_REQUEST_BYTES:
                self._requeue(read)
                return False
            taken.append((request_id, read))
            stream.send_all([frame])
            return True
        return False

    def _request_ahead(
        self, stream: Stream, taken: deque[tuple[int, Read]], current_nbytes: int
    ) -> None:
        """Keep the source busy once the response at hand has `current_nbytes` or less to go."""
        while current_nbytes <= AHEAD_BYTES and len(taken) < AHEAD_REQUESTS:
            to_come = current_nbytes + sum(read.nbytes for _, read in taken) - taken[0][1].nbytes
            if to_come > AHEAD_BYTES or not self._request(stream, taken, wait=False):
                return

    def _receive(self, stream: Stream, taken: deque[tuple[int, Read]]) -> None:
        request_id, read = taken[0]
        self._request_ahead(stream, taken, read.nbytes)
        status = self._response(stream, request_id, read)
        if status == frames.OK:
            for parts, landed in steps(read, STEP_BYTES):
                stream.fill_all([part.view for part in parts])
                read.sink.landed(landed)
                self._request_ahead(stream, taken, read.nbytes - landed)
            status = self._response(stream, request_id, read)
        taken.popleft()
        if status == frames.OK:
            read.sink.done()
            return
        kind = StaleGenerationError if status == frames.STALE else PeerRefusedError
        text = frames.STATUS_TEXT.get(status, f"refused ({status})")
        self._fail(read, kind(f"{self._peer}: {text}", peer=self._peer))

    def _response(self, stream: Stream, request_id: int, read: Read) -> int:
        frame = memoryview(bytearray(RESPONSE.size))
        stream.fill(frame)
        answered, status, nbytes = RESPONSE.unpack(frame)
        if answered != request_id or (status == frames.OK and nbytes != read.nbytes):
            raise PeerProtocolError(
                f"{self._peer} answered what was not asked (request {answered}, {nbytes} bytes)",
                peer=self._peer,
            )
        return int(status)

    def _check_generation(self) -> None:
        if not 0 <= self._grant.generation <= MAX_U64:
            raise StaleGenerationError(
                f"{self._peer}: {self._grant.generation} is no generation", peer=self._peer
            )
