"""The calling half of the door: finding the address to dial, connecting, being let in."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Sequence

from mx.core.locality import own_addresses
from mx.core.topology import Place
from mx.errors import (
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SourceError,
)
from mx.transport import Grant
from mx_transports import _frames as frames
from mx_transports import _proof as proof
from mx_transports._stream import Stream


def only_loopback(place: Place) -> bool:
    return all(address == "localhost" or is_loopback(address) for address in place.addresses)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses(ticket: frames.Ticket, grant: Grant) -> list[tuple[str, int]]:
    """What the ticket says to dial, as far as it is the source's own; with a rail, at its far end
    alone. An address without a host is at the host of the source's control endpoint. Blocks where
    an address has to be proved. Raises PeerProtocolError, PeerTimeoutError."""
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
    return _own(found, ticket, grant)


def _own(found: list[proof.Address], ticket: frames.Ticket, grant: Grant) -> list[proof.Address]:
    """Those that are the source's own: at its control endpoint's address, or proved."""
    known = [address for address in found if _is_known(address[0], grant)]
    own = known or proof.proved(found, ticket, grant)
    if not own:
        hosts = ", ".join(dict.fromkeys(host for host, _ in found))
        raise PeerTimeoutError(
            f"{grant.peer} has not proved that {hosts} is its own address (nothing answers there "
            "by UDP), and is not dialled there",
            peer=grant.peer,
            hint="let datagrams through to the source's data ports, as connections are",
        )
    return own


def _is_known(host: str, grant: Grant) -> bool:
    """Is it where the control connection goes: the same address or, if that does not leave this
    machine, any address of this machine?"""
    if host in grant.peer_addresses:
        return True
    mine = own_addresses(grant.place)
    stays = any(is_loopback(each) or each in mine for each in grant.peer_addresses)
    return stays and (is_loopback(host) or host in mine)


def connect_any(
    magic: bytes,
    order: Sequence[tuple[str, int]],
    known: list[tuple[str, int]],
    ticket: frames.Ticket,
    grant: Grant,
    tls: ssl.SSLContext | None,
) -> Stream:
    """Connect to the first address that answers; those that don't leave
    `known`."""
    failure: SourceError | None = None
    for address in order:
        try:
            return _connect(magic, address, ticket, grant, tls)
        except (PeerLostError, PeerTimeoutError) as error:
            failure = error
            if len(known) > 1:
                known.remove(address)
    assert failure is not None
    raise failure


def _connect(
    magic: bytes,
    address: tuple[str, int],
    ticket: frames.Ticket,
    grant: Grant,
    tls: ssl.SSLContext | None,
) -> Stream:
    where = f"{grant.peer} (data at {address[0]}:{address[1]})"
    sock: socket.socket | None = None
    try:
        near = None if grant.rail is None else (grant.rail.local_address, 0)
        sock = socket.create_connection(address, grant.stall_timeout_s, source_address=near)
        if tls is not None:
            sock = tls.wrap_socket(sock)
        stream = Stream(sock, grant.stall_timeout_s)
        stream.send_all([frames.PREAMBLE.pack(magic, ticket.key, ticket.secret)])
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
            raise _tls_failed(error, where, grant.peer) from error
        if isinstance(error, OSError):
            raise translate(error, where, grant.peer) from error
        raise
    return stream


def greet(magic: bytes, stream: Stream, grant: Grant) -> None:
    """Read what the source says to our preamble."""
    where = f"{grant.peer} (its data endpoint)"
    hello = memoryview(bytearray(frames.HELLO.size))
    try:
        stream.fill(hello)
    except ssl.SSLError as error:
        raise _tls_failed(error, where, grant.peer) from error
    except OSError as error:
        raise translate(error, where, grant.peer) from error
    spoken, status = frames.HELLO.unpack(hello)
    if spoken != magic:
        raise PeerProtocolError(f"{where} does not speak this transport", peer=grant.peer)
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


def translate(error: OSError, where: str, peer: str) -> SourceError:
    if isinstance(error, TimeoutError):
        return PeerTimeoutError(f"{where} does not answer: {error}", peer=peer)
    return PeerLostError(f"{where} is gone: {error.strerror or error}", peer=peer)
