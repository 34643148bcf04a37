"""The address that a source is registered with: one that others reach, or a refusal."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from mx import discovery
from mx.errors import ConfigError
from mx.wire.address import WILDCARDS, is_local, join_address, split_address


def is_wildcard(address: str) -> bool:
    """Return True for HOST:PORT that means every address of this machine."""
    return split_address(address)[0] in WILDCARDS


def dialled_host(listen: str, advertise: str, coordinator: str) -> str:
    """Choose the host that others dial. May look names up, so it may block.

    Args:
        listen: where the control endpoint listens.
        advertise: what is registered in its place, or "".
        coordinator: where it is registered, or "" if nowhere. It decides which of this machine's
            addresses stands for a wildcard: the one that leads there.

    Raises:
        ConfigError: as `require_dialable`.
    """
    host, port = split_address(advertise or listen)
    if not advertise and is_wildcard(listen):
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
        towards = "" if _is_here(coordinator) else _address_towards(coordinator, family)
        host = towards or discovery.dialable_host(host)
    require_dialable(join_address(host, port), coordinator)
    return host


def require_dialable(endpoint: str, coordinator: str) -> None:
    """Refuse to register an address that means another machine wherever it is read.

    May look names up, so it may block.

    Args:
        endpoint: HOST:PORT as it would be registered.
        coordinator: where, or "" if nowhere.

    Raises:
        ConfigError: `endpoint` is of this machine alone and the coordinator is elsewhere, or it
            is a wildcard. The hint names the address of this machine that leads there.
    """
    host, port = split_address(endpoint)
    if is_wildcard(endpoint):
        raise ConfigError(
            f"{endpoint} is no address that others can dial",
            hint="give `advertise` the one that they reach this process at",
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
        hint=f"give `listen={mine}` (MX_PEER_LISTEN), or behind address translation and in "
        "containers `advertise=HOST:PORT` (MX_PEER_ADVERTISE)",
    )


def _is_here(coordinator: str) -> bool:
    return not coordinator or is_local(coordinator)


def _is_loopback(host: str) -> bool:
    """Does this host, as this machine resolves it, stand for nothing but loopback?"""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [str(where[0]) for *_, where in socket.getaddrinfo(host, None)]
    return bool(found) and all(ipaddress.ip_address(a).is_loopback for a in found)


def _address_towards(coordinator: str, family: int) -> str:
    """This machine's address on the way to the coordinator; "" if there is no way."""
    host, port = split_address(coordinator)
    found: list[tuple[int, tuple[object, ...]]] = []
    with contextlib.suppress(OSError):
        answers = socket.getaddrinfo(host, port or 1, family, socket.SOCK_DGRAM)
        found = [(int(kind), where) for kind, _, _, _, where in answers]
    for kind, where in found:
        # A connected datagram socket sends nothing, but the kernel has chosen its address.
        with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
            if "%" not in address:  # a link's own address means nothing elsewhere
                return address
    return ""
