"""Dialling: one set of channel options for everything that mx talks to."""

from __future__ import annotations

import os
import socket
from typing import Any

import grpc
import grpc.aio

from mx import forks
from mx.transport import TlsFiles
from mx.wire.address import read_tls, require_protection, split_address
from mx.wire.status import Remote, Role, translate, translating
from mx.wire.tls import check_client_files

__all__ = ["Remote", "Role", "cut", "dial", "translate", "translating"]

#: A stopped peer is noticed about 2.5 s after it fell silent, while an RPC is open: a ping each
#: second, 1.5 s for its answer. ping_timeout_ms is what current gRPC obeys; keepalive_timeout_ms
#: alone would let it take a minute.
#: gRPC gives each of its sockets the latter as TCP_USER_TIMEOUT: an odd number, by which a forked
#: child can tell those of mx's from others, of gRPC's too.
_PING_TIMEOUT_MS = 1511
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long one attempt to connect may take: a port that accepts and says nothing.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Channels of one process would share connections, and each other's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are dialled directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)


_unix_addresses: set[str] = set()


def remember_unix(address: str) -> None:
    """gRPC's sockets at this unix:PATH are mx's."""
    _unix_addresses.add(address.removeprefix("unix:"))


def _is_grpc_socket(fd: int, link: str) -> bool:
    if not link.startswith("socket:"):
        return False
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family == socket.AF_UNIX:
            names = [sock.getsockname()]
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                names.append(sock.getpeername())
            return not _unix_addresses.isdisjoint(names)
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        timeout_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        return timeout_ms == _PING_TIMEOUT_MS


forks.recognise(_is_grpc_socket)


def dial(address: str, *, tls: TlsFiles | None = None, insecure: bool = False) -> grpc.aio.Channel:
    """A channel to HOST:PORT (or unix:PATH), not yet connected; the caller closes it.

    With `tls` both sides show certificates, and the peer's must name the host in `address`.
    Call it in the event loop that will use it. Raises ConfigError for a malformed address,
    unreadable PEM files, and plain text off this machine without `insecure`; NotAllowedError for
    a certificate that no server would accept.
    """
    if address.startswith("unix:"):
        remember_unix(address)
    else:
        split_address(address)
    require_protection(address, tls=tls, insecure=insecure, verb="talk to")
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    check_client_files(tls)
    certificate, key, authority = read_tls(tls)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def cut(call: Any) -> None:
    """End a call of grpc.aio's, whatever has become of it. Idempotent.

    When a write fails, because the other end has gone, grpc.aio (1.85) takes the call for done
    and `cancel` does nothing; but the core still waits for what was received to be read, and the
    call would keep itself, its connection and the poller's thread for ever.
    """
    if not call.cancel():
        call._cython_call.cancel("the call was cut")
