"""What a caller may say of itself: which hosts are its own, where others connect because of its
word, and which sources."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any

import psutil

from mx.core.answers import ListedSource
from mx.core.policy import Right, plain_host
from mx.core.types import SourceRecord
from mx.errors import NotAllowedError
from mx.wire.address import host_of_peer
from mx.wire.principals import Access, Caller, caller_of

#: As /etc/hosts has them.
_LOOPBACK_NAMES = (
    *("localhost", "localhost.localdomain", "localhost4", "localhost6"),
    *("ip6-localhost", "ip6-loopback"),
)


def check_places(context: Any, record: SourceRecord) -> None:
    """Refuse a source that names places where its certificate is not: readers dial them.

    Args:
        context: The servicer context of the call that registers it; without a certificate nothing
            is refused.
        record: The source.

    Raises:
        NotAllowedError: The certificate does not name the host of its endpoint, or an address at
            which it gives its data; or one of these is a machine's own, and it is on another one.
    """
    subject, address = caller_of(context).subject, host_of_peer(context.peer())
    if subject is None:
        return
    for host in (record.endpoint.rpartition(":")[0], *record.place.addresses):
        if not subject.is_at(host):
            raise NotAllowedError(
                f"the certificate of {subject.name} does not name {host}, where the source says "
                f"that it is: it names {', '.join(subject.hosts[:8]) or 'no host'}",
                hint="listen at a host that `tls_cert` names; docs/tls.md shows how certificates "
                "are made",
            )
        if _is_loopback(host) and not _is_on_this_machine(address):
            raise NotAllowedError(
                f"the source says that it is at {host}, which is another machine for a reader "
                f"it elsewhere, and {address} is not the coordinator's",
                hint="listen at an address that others reach",
            )


def check_owner(caller: Caller, listed: ListedSource) -> None:
    """Raise NotAllowedError unless a source with this certificate has registered the source."""
    if caller.subject is not None and listed.address != caller.name:
        raise NotAllowedError(
            f"source {listed.record.source_id} was registered by {listed.address}, and not by "
            f"{caller.name}"
        )


def own_host(context: Any, host: str) -> str:
    """Return the host at which a caller takes requests.

    Args:
        context: The call's servicer context.
        host: The host that the caller names; "" if it names none.

    Returns:
        That host, if the caller may name it (`may_name`); else the address of its connection; ""
        if that has none, or a certificate does not name it.
    """
    address, caller = host_of_peer(context.peer()), caller_of(context)
    return next((each for each in (host, address) if _is_of(caller, each, address)), "")


def measured_host(context: Any, host: str) -> str:
    """Return the host to which what a caller measures counts: the name that it gives, if its
    certificate has that; else this machine's, or the address of its connection.

    Args:
        context: The call's servicer context.
        host: The name that the caller gives.
    """
    address, caller = host_of_peer(context.peer()), caller_of(context)
    if caller.subject is not None and caller.subject.is_at(host):
        return host
    return socket.gethostname() if _is_on_this_machine(address) else address


def own_port(context: Any, access: Access, model: str, endpoint: str, port: int) -> int:
    """Return the port at which a source takes requests: 0 for none, also if the caller may not name
    the host of its endpoint as its own, or the policy does not let it take requests.

    Args:
        context: The call's servicer context.
        access: The policy.
        model: The name of the source's model.
        endpoint: The HOST:PORT that the source registers.
        port: The port of that host that it names; 0: none.
    """
    caller = caller_of(context)
    if not port or not _is_of(caller, endpoint.rpartition(":")[0], host_of_peer(context.peer())):
        return 0
    return port if takes_requests(access, caller, model) else 0


def takes_requests(access: Access, caller: Caller, model: str) -> bool:
    """Return True if a caller may take requests for a model; either has its audit line."""
    if access.allows(caller, (Right.TAKE_REQUESTS,), model):
        access.granted(caller, Right.TAKE_REQUESTS.value, model=model)
        return True
    error = NotAllowedError(f"{caller.name} may not take requests for {model!r}")
    access.refused(caller, error, Right.TAKE_REQUESTS.value, model=model)
    return False


def _is_of(caller: Caller, host: str, address: str) -> bool:
    """Return True if a caller may name a host: one that its certificate names, loopback only on
    this machine; without one, as `may_name`."""
    if caller.subject is not None:
        local = not _is_loopback(host) or _is_on_this_machine(address)
        return local and caller.subject.is_at(host)
    return may_name(host, address)


def may_name(host: str, address: str, local: Collection[str] | None = None) -> bool:
    """Return True if a caller without a certificate may name this host as its own.

    It may name the address that it calls from. A caller on this machine may name this machine's
    other addresses, too.

    Args:
        host: A name or an address.
        address: The caller's, "" if it is not known.
        local: The addresses of this machine; None: as they are now.
    """
    wanted = plain_host(host)
    if not wanted:
        return False
    if wanted == plain_host(address):
        return True
    return _is_here(address) and wanted in (_local_addresses() if local is None else local)


def _is_here(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return not address  # a unix socket


def _is_on_this_machine(address: str) -> bool:
    """Return True if a caller's address, "" for a unix socket's, is one of this machine."""
    return _is_here(address) or plain_host(address) in _local_addresses()


def _is_loopback(host: str) -> bool:
    """Return True for what means to each machine itself."""
    name = plain_host(host)
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback or (mapped or found).is_unspecified


def _local_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces but loopback ones."""
    found = {
        each.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    return {plain_host(each) for each in found if not _is_here(each)}
