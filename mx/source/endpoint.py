"""The address that a source registers: one that others can dial, else an error."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from mx import discovery
from mx.errors import ConfigError
from mx.wire.address import WILDCARDS, each_address, is_local, join_address, split_address


def is_wildcard(address: str) -> bool:
    """Return True if HOST:PORT means every address of this machine."""
    return split_address(address)[0] in WILDCARDS


def dialled_host(listen: str, advertise: str, coordinator: str) -> str:
    """Return the host that others dial. May resolve names, so it may block.

    Args:
        listen: The address on which the control endpoint listens.
        advertise: The address that is registered instead, or "".
        coordinator: The coordinator's address or addresses, "" for none. This machine's address on
            the route to it replaces a wildcard.

    Raises:
        ConfigError: As `require_dialable`.
    """
    host, port = split_address(advertise or listen)
    if not advertise and is_wildcard(listen):
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
        towards = "" if _is_here(coordinator) else _address_towards(coordinator, family)
        host = towards or discovery.dialable_host(host)
    require_dialable(join_address(host, port), coordinator)
    return host


def require_dialable(endpoint: str, coordinator: str) -> None:
    """Raise ConfigError if other machines cannot dial an endpoint that is to be registered.

    May resolve names, so it may block.

    Args:
        endpoint: HOST:PORT as it would be registered.
        coordinator: The coordinator's address, or "" for none.

    Raises:
        ConfigError: `endpoint` is a wildcard, or only this machine reaches it and the coordinator
            is elsewhere. The hint names this machine's address on the route to the coordinator.
    """
    host, port = split_address(endpoint)
    if is_wildcard(endpoint):
        raise ConfigError(
            f"{endpoint} is not an address that others can dial",
            hint="set `advertise` to the address at which others reach this process",
        )
    if _is_here(coordinator) or not _is_loopback(host):
        return
    towards = _address_towards(coordinator, socket.AF_UNSPEC)
    if towards and ipaddress.ip_address(towards).is_loopback:
        return  # the coordinator's name stands for this machine
    mine = join_address(towards, port) if towards else "HOST:PORT"
    raise ConfigError(
        f"only this machine reaches {join_address(host, port)}, so it can't be registered with "
        f"the coordinator at {coordinator}, which lists it to others",
        hint=f"give `listen={mine}` (MX_PEER_LISTEN); behind address translation or in a "
        "container, give `advertise=HOST:PORT` (MX_PEER_ADVERTISE)",
    )


def _is_here(coordinator: str) -> bool:
    return not coordinator or is_local(coordinator)


def _is_loopback(host: str) -> bool:
    """Return True if this machine resolves the host to loopback addresses alone."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [str(where[0]) for *_, where in socket.getaddrinfo(host, None)]
    return bool(found) and all(ipaddress.ip_address(a).is_loopback for a in found)


def _address_towards(coordinator: str, family: int) -> str:
    """Return this machine's address on the route to the coordinator, of several to the first that
    is elsewhere and has a route; "" if there is no route."""
    found: list[tuple[int, tuple[object, ...]]] = []
    elsewhere = [each for each in each_address(coordinator) if not is_local(each)]
    for host, port in map(split_address, elsewhere):
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(host, port or 1, family, socket.SOCK_DGRAM)
            found += [(int(kind), where) for kind, _, _, _, where in answers]
    for kind, where in found:
        # Connecting a datagram socket sends nothing, but makes the kernel choose its address.
        with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
            if "%" not in address:  # a link-local address means nothing on other machines
                return address
    return ""
