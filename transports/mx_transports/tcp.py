"""The `tcp` transport: several connections, bytes received straight into their destination.

Works between any two processes that can route to each other. Each connection is a lane with a
thread; the next request goes out before the current response has ended, so that the source
never waits for one.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Sequence

from mx.core.topology import Place
from mx.errors import (
    MxError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
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
        if not same_net and (_only_loopback(here) or _only_loopback(there)):
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
        addresses = _addresses(ticket, grant)
        tls = tls_context(grant.tls, server=False) if grant.tls else None
        streams: list[Stream] = []
        try:
            for lane in range(max(1, grant.streams)):
                # Spread over the source's addresses, but any that answers will do.
                order = addresses[lane % len(addresses) :] + addresses[: lane % len(addresses)]
                streams.append(_connect_any(order, addresses, ticket, grant, tls))
            # Only now, so that the source admits all of them while the first is waited for.
            for stream in streams:
                _greet(stream, grant)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return TcpSession(grant, streams)


def _only_loopback(place: Place) -> bool:
    return all(address == "localhost" or _is_loopback(address) for address in place.addresses)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _addresses(ticket: frames.Ticket, grant: Grant) -> list[tuple[str, int]]:
    """What the ticket says to dial; with a rail, at its far end alone."""
    peer, found = grant.peer, []
    listed = ticket.fields.get("addresses")
    for entry in listed if isinstance(listed, list) else []:
        try:
            host, port = entry
            ipaddress.ip_address(host)
            if type(port) is int and 0 < port < 1 << 16:
                found.append((host, port))
        except (ValueError, TypeError):
            continue
    if not found:
        raise PeerProtocolError(f"{peer} handed out a ticket without any address", peer=peer)
    if grant.rail is None:
        return found
    far = grant.rail.remote_address
    found = [address for address in found if address[0] == far]
    if not found:
        raise PeerProtocolError(f"{peer} does not listen at {far}, as it had said", peer=peer)
    return found


def _connect_any(
    order: Sequence[tuple[str, int]],
    addresses: list[tuple[str, int]],
    ticket: frames.Ticket,
    grant: Grant,
    tls: ssl.SSLContext | None,
) -> Stream:
    """Connect to the first address that answers; those that don't leave `addresses`."""
    failure: SourceError | None = None
    for address in order:
        try:
            return _connect(address, ticket, grant, tls)
        except (PeerLostError, PeerTimeoutError) as error:
            failure = error
            if len(addresses) > 1:
                addresses.remove(address)
    assert failure is not None
    raise failure


def _connect(
    address: tuple[str, int], ticket: frames.Ticket, grant: Grant, tls: ssl.SSLContext | None
) -> Stream:
    where = f"{grant.peer} (data at {address[0]}:{address[1]})"
    sock: socket.socket | None = None
    try:
        near = None if grant.rail is None else (grant.rail.local_address, 0)
        sock = socket.create_connection(address, grant.stall_timeout_s, source_address=near)
        if tls is not None:
            sock = tls.wrap_socket(sock)
        stream = Stream(sock, grant.stall_timeout_s)
        stream.send_all([frames.PREAMBLE.pack(MAGIC, ticket.key, ticket.secret)])
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
            raise _tls_failed(error, where, grant.peer) from error
        if isinstance(error, OSError):
            raise _translate(error, where, grant.peer) from error
        raise
    return stream


def _greet(stream: Stream, grant: Grant) -> None:
    """Read what the source says to our preamble."""
    where = f"{grant.peer} (its data endpoint)"
    hello = memoryview(bytearray(frames.HELLO.size))
    try:
        stream.fill(hello)
    except ssl.SSLError as error:
        raise _tls_failed(error, where, grant.peer) from error
    except OSError as error:
        raise _translate(error, where, grant.peer) from error
    magic, status = frames.HELLO.unpack(hello)
    if magic != MAGIC:
        raise PeerProtocolError(f"{where} does not speak mx's tcp", peer=grant.peer)
    if status != frames.OK:
        raise PeerRefusedError(
            f"{where}: {frames.STATUS_TEXT.get(status, f'refused ({status})')}",
            peer=grant.peer,
        )


def _tls_failed(error: ssl.SSLError, where: str, peer: str) -> PeerRefusedError:
    return PeerRefusedError(
        f"{where}: TLS failed: {error.reason or error}",
        peer=peer,
        hint="both sides need TLS, and certificates of the same CA",
    )


def _translate(error: OSError, where: str, peer: str) -> SourceError:
    if isinstance(error, TimeoutError):
        return PeerTimeoutError(f"{where} does not answer: {error}", peer=peer)
    return PeerLostError(f"{where} is gone: {error.strerror or error}", peer=peer)


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
            failure = _translate(error, self._peer, self._peer)
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
