"""Connects to a source: finds the addresses that are its own, and presents the grant's secret."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

from mx.core.locality import own_addresses
from mx.errors import (
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SourceError,
)
from mx.transport import Grant
from mx_transports.toolkit import framing, proof
from mx_transports.toolkit.reach import is_loopback
from mx_transports.toolkit.stream import SocketStream


def addresses(ticket: framing.Ticket, grant: Grant) -> list[tuple[str, int]]:
    """Return the addresses to dial: those of the ticket that are the source's own, at its control
    endpoint's host, or proved.

    Blocks where an address has to be proved, up to the grant's stall timeout.

    Args:
        ticket: A ticket with a field `addresses`, pairs of host and port. A host of "" stands for
            that of the source's control endpoint.
        grant: The grant of the ticket. With a rail, only its far end is dialled.

    Raises:
        PeerProtocolError: The ticket has no address, or none at the rail's far end.
        PeerTimeoutError: None of them is proved to be the source's.
    """
    peer, found = grant.peer, []
    listed = ticket.fields.get("addresses")
    for entry in listed if isinstance(listed, list) else []:
        try:
            host, port = entry
            at = [str(ipaddress.ip_address(host))] if host else grant.peer_addresses
            if type(port) is int and 0 < port < 1 << 16:
                found += [(each, port) for each in at]
        except (ValueError, TypeError):
            continue
    if not found:
        raise PeerProtocolError(f"{peer} handed out a ticket without any address", peer=peer)
    if grant.rail is not None:
        far = grant.rail.remote_address
        found = [address for address in found if address[0] == far]
        if not found:
            raise PeerProtocolError(f"{peer} does not listen at {far}, as it had said", peer=peer)
    known = [address for address in found if _is_known(address[0], grant)]
    own = known or proof.proved(found, ticket, grant)
    if not own:
        hosts = ", ".join(dict.fromkeys(host for host, _ in found))
        raise PeerTimeoutError(
            f"{peer} has not proved that {hosts} is its own address (nothing answers there by "
            "UDP), and is not dialled there",
            peer=peer,
            hint="let datagrams through to the source's data ports, as connections are",
        )
    return own


def _is_known(host: str, grant: Grant) -> bool:
    """Return True if the control connection goes to this host: to the same address or, where that
    does not leave this machine, to any address of this machine."""
    if host in grant.peer_addresses:
        return True
    mine = own_addresses(grant.place)
    stays = any(is_loopback(each) or each in mine for each in grant.peer_addresses)
    return stays and (is_loopback(host) or host in mine)


#: A way to connect: `network` here, `unix.connect`. From a ticket and what it came with to sockets
#: that are connected to the source, one after the other; the caller closes those that it takes.
#: Raises SourceError or ConfigError.
Connect = Callable[[framing.Ticket, Grant], Iterator[socket.socket]]


def network(ticket: framing.Ticket, grant: Grant) -> Iterator[socket.socket]:
    """Connect to the addresses of a ticket of `listeners.listen`; see `Connect`."""
    yield from connections(addresses(ticket, grant), grant)


def open_streams(magic: bytes, grant: Grant, connect: Connect = network) -> list[SocketStream]:
    """Open as many connections as a grant says, and have the source admit them.

    Args:
        magic: The magic of the source's exposure.
        grant: The grant, whose ticket is one of `framing`, as `SocketExposure` makes it.
        connect: The way to connect, the counterpart of the one in which the source listens.

    Returns:
        The connections, which the source has admitted. The caller closes them.

    Raises:
        SourceError: The source can't be reached, or does not admit the reader.
        ConfigError: A TLS file can't be used.
    """
    ticket = framing.decode_ticket(grant.ticket, grant.peer)
    streams: list[SocketStream] = []
    try:
        for sock in itertools.islice(connect(ticket, grant), max(1, grant.streams)):
            streams.append(begin(magic, sock, ticket, grant))
        # Only now, so that the source admits all of them while the first is waited for.
        for stream in streams:
            greet(magic, stream, grant)
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return streams


def connections(known: Sequence[tuple[str, int]], grant: Grant) -> Iterator[socket.socket]:
    """Connect to addresses in turn, encrypted where the grant has files for TLS.

    Args:
        known: What `addresses` returned.
        grant: The grant.

    Yields:
        A connection: to another address, where the one whose turn it is does not answer.

    Raises:
        SourceError: No address answers, or TLS fails.
        ConfigError: A TLS file can't be used.
    """
    tls: ssl.SSLContext | None = None
    if grant.tls:
        from mx_transports.toolkit.tls import tls_context

        tls = tls_context(grant.tls, server=False)
    left = list(known)
    for number in itertools.count():
        # Spread over the source's addresses, but any that answers will do.
        first = number % len(left)
        for address in left[first:] + left[:first]:
            try:
                sock = _connect(address, grant, tls)
                break
            except (PeerLostError, PeerTimeoutError):
                if len(left) == 1:
                    raise
                left.remove(address)
        yield sock


def _connect(address: tuple[str, int], grant: Grant, tls: ssl.SSLContext | None) -> socket.socket:
    sock: socket.socket | None = None
    try:
        known = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, to = known[0]
        sock = socket.socket(family, kind)
        sock.setblocking(False)
        if grant.rail is not None:
            sock.bind((grant.rail.local_address, 0))
        failed = sock.connect_ex(to)
        grant.cancelled.covers(sock)  # what connects already can be shut down
        if failed == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            if not poller.poll(grant.stall_timeout_s * 1000):
                raise TimeoutError("timed out")
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        sock.settimeout(grant.stall_timeout_s)
        if tls is None:
            return sock
        # The address may be any of the source's own, and its certificate names the endpoint.
        host = grant.peer.rpartition(":")[0].strip("[]").rstrip(".")
        secure = sock = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        grant.cancelled.covers(secure)
        secure.do_handshake()
        from mx.revocations import is_revoked

        if grant.tls is not None and is_revoked(secure, grant.tls):
            raise PeerRefusedError(f"{grant.peer}: its certificate is revoked", peer=grant.peer)
        return secure
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError):
            where = f"{grant.peer} (data at {address[0]}:{address[1]})"
            raise _failed(error, where, grant.peer) from error
        raise


def begin(magic: bytes, sock: socket.socket, ticket: framing.Ticket, grant: Grant) -> SocketStream:
    """Present a ticket's secret.

    Args:
        magic: The magic of the source's exposure.
        sock: A connection to the source; closed if this raises.
        ticket: The grant's ticket.
        grant: The grant.

    Returns:
        A connection for `greet`. The caller closes it.

    Raises:
        SourceError: The connection is lost, or TLS fails.
    """
    try:
        stream = SocketStream(sock, grant.stall_timeout_s)
        stream.send_all([framing.PREAMBLE.pack(magic, ticket.key, ticket.secret)])
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise _failed(error, f"{grant.peer} (its data endpoint)", grant.peer) from error
        raise
    return stream


def greet(magic: bytes, stream: SocketStream, grant: Grant) -> None:
    """Read the source's answer to the preamble.

    Raises:
        SourceError: It does not admit the reader, or does not answer as the transport does.
    """
    where = f"{grant.peer} (its data endpoint)"
    try:
        spoken, status = framing.HELLO.unpack(stream.receive(framing.HELLO.size))
    except OSError as error:
        raise _failed(error, where, grant.peer) from error
    framing.check_magic(magic, spoken, where, grant.peer)
    if status != framing.OK:
        raise framing.refusal(status, grant.peer)


def _failed(error: OSError, where: str, peer: str) -> SourceError:
    """Return the error for a connection that could not be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefusedError(
            f"{where}: its certificate is not accepted: {error.verify_message}",
            peer=peer,
            hint="the certificate of a source names the host of its endpoint, and is signed by an "
            "authority in `tls_ca`",
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
        return PeerRefusedError(
            f"{where}: TLS failed: {error.reason or error}",
            peer=peer,
            hint="both sides need TLS, and certificates of the same CA",
        )
    return translate(error, where, peer)


def translate(error: OSError, where: str, peer: str) -> SourceError:
    """Return the error of mx for an OSError of a connection.

    Args:
        error: What was raised.
        where: What the message begins with.
        peer: Whom the error names.

    Returns:
        A PeerTimeoutError where the peer is there and makes no progress, else a PeerLostError.
    """
    if isinstance(error, TimeoutError):
        return PeerTimeoutError(f"{where} does not answer: {error}", peer=peer)
    return PeerLostError(f"{where} is gone: {error.strerror or error}", peer=peer)
