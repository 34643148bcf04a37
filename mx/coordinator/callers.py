"""Which hosts a caller may name as its own: where others send requests because of its word."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any

import psutil

from mx.wire.address import host_of_peer

#: What gRPC calls the names in a client's certificate that it has verified.
_CERTIFIED = ("peer_dns", "peer_ip", "x509_subject_alternative_name")


def own_host(context: Any, host: str) -> str:
    """Return the host at which a caller takes requests.

    Args:
        context: The call's servicer context.
        host: The host that the caller names; "" if it names none.

    Returns:
        That host, if the caller may name it (`may_name`); else the address of its connection; ""
        if that has none.
    """
    address = host_of_peer(context.peer())
    return host if may_name(host, address, certified(context)) else address


def own_port(context: Any, endpoint: str, port: int) -> int:
    """Return the port at which a source takes requests: 0 for none, also if the caller may not name
    the host of its endpoint as its own.

    Args:
        context: The call's servicer context.
        endpoint: The HOST:PORT that the source registers.
        port: The port of that host that it names; 0: none.
    """
    if not port:
        return 0
    host = endpoint.rpartition(":")[0]
    return port if may_name(host, host_of_peer(context.peer()), certified(context)) else 0


def may_name(
    host: str, address: str, names: Collection[str], local: Collection[str] | None = None
) -> bool:
    """Return True if a caller may name this host as its own.

    It may name the address that it calls from, and the names and addresses in its certificate. A
    caller on this machine may name this machine's other addresses, too.

    Args:
        host: A name or an address.
        address: The caller's, "" if it is not known.
        names: The DNS names and the addresses in its certificate.
        local: The addresses of this machine; None: as they are now.
    """
    wanted = _plain(host)
    if not wanted:
        return False
    if wanted == _plain(address) or wanted in {_plain(name) for name in names}:
        return True
    return _is_here(address) and wanted in (_local_addresses() if local is None else local)


def certified(context: Any) -> set[str]:
    """Return the names and addresses in the certificate of a call's client; none without one."""
    found = context.auth_context()
    return {value.decode(errors="replace") for name in _CERTIFIED for value in found.get(name, ())}


def _plain(host: str) -> str:
    """Return a host as hosts are compared: the shortest form of an address, names in lower case."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host.lower().rstrip(".")


def _is_here(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return not address  # a unix socket


def _local_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces but loopback ones."""
    found = {
        each.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    return {_plain(each) for each in found if not _is_here(each)}
