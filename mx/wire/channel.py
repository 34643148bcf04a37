"""Client channels: one set of options for all connections of mx."""

from __future__ import annotations

import os
import socket
from typing import Any

import grpc
import grpc.aio

from mx import forks
from mx.transport import TlsFiles
from mx.wire.address import require_protection, split_address
from mx.wire.status import Remote, Role, translate, translating

__all__ = ["Remote", "Role", "cut", "dial", "translate", "translating"]

#: While an RPC is open, a stopped peer is detected after about 2.5 s: a ping each second, 1.5 s for
#: its answer. Current gRPC obeys ping_timeout_ms; with keepalive_timeout_ms alone it would take a
#: minute.
#: gRPC sets keepalive_timeout_ms as TCP_USER_TIMEOUT of its sockets: an unusual number, by which a
#: forked child recognises the gRPC sockets of mx.
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
    # Also bounds one attempt to connect, such as to a port that accepts and sends nothing.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Otherwise the channels of one process would share connections, and their backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # A connection without a call is closed before the server does that (`mx.wire.server.IDLE_S`),
    # of which gRPC would print a line here. It takes up to twice this.
    ("grpc.client_idle_timeout_ms", 14_000),
    # Peers are dialled directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)


_unix_addresses: set[str] = set()


def remember_unix(address: str) -> None:
    """Record that gRPC's sockets at this unix:PATH belong to mx."""
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
    """Return a channel, not yet connected. Call this on the event loop that will use it.

    Args:
        address: HOST:PORT or unix:PATH.
        tls: Both sides show certificates, and the peer's must name the host in `address`.
        insecure: Allow plain text beyond this machine.

    Returns:
        The channel; the caller closes it.

    Raises:
        ConfigError: The address is malformed, a PEM file cannot be read, or plain text beyond
            this machine is not allowed.
        NotAllowedError: No server would accept the certificate.
    """
    if address.startswith("unix:"):
        remember_unix(address)
    else:
        split_address(address)
    require_protection(address, tls=tls, insecure=insecure, verb="connect to")
    if tls is None:
        return _released(grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS))
    from mx.wire.reloading import ReloadingChannel  # without TLS it is not needed

    channel: Any = ReloadingChannel(
        tls,
        lambda shown: _released(grpc.aio.secure_channel(address, shown, options=_CHANNEL_OPTIONS)),
    )
    return channel  # type: ignore[no-any-return]


def files_of(channel: Any) -> object:
    """Return what tells apart the certificates that new calls of a channel show; None for none."""
    return getattr(channel, "files", None)


def _released(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Return a channel whose connection goes with its last call.

    That of grpc.aio 1.83 gives each call a callback that refers to the call, for a set that forgets
    calls by itself: a closed connection would stay open until garbage is collected.
    """
    calls = getattr(channel, "_active_calls", None)
    if calls is not None and hasattr(channel, "_register_call"):
        vars(channel)["_register_call"] = calls.add
    return channel


def cut(call: Any) -> None:
    """End a call of grpc.aio in any state. Idempotent.

    When a write fails because the other end is gone, grpc.aio (1.85) considers the call done and
    `cancel` does nothing. But the core still waits until the received messages are read, and the
    call would keep itself, its connection and the poller's thread for ever.
    """
    if not call.cancel():
        call._cython_call.cancel("the call was cut")
