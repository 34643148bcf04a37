"""Paths between two places, and rails: pairs of interfaces that two places can use at the same
time."""

from __future__ import annotations

import enum
import functools
import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from mx.core.topology import Nic, Place

#: The speed assumed of an interface that does not report one: 10 Gbit/s.
UNKNOWN_GB_PER_S = 1.25
#: How many connections a path has at first, where nothing else is said.
FIRST_STREAMS = 2


class Medium(enum.Enum):
    """What a path's bytes go through.

    A pull uses one transport per medium at a time, since two would share the same limit. NETWORK
    is one medium per rail.
    """

    MEMORY = "memory"  # this host's memory bandwidth and cores
    NETWORK = "network"
    DEVICE = "device"  # inside one GPU
    NVLINK = "nvlink"
    PCIE = "pcie"


@dataclass(frozen=True, slots=True)
class Path:
    """A path from a source to a target.

    `gb_per_s` is an estimate until it is measured. For a path between hosts it is what the
    transport itself can do, whatever the rails allow, and `rdma_gb_per_s` is what it can do over
    rails with RDMA (0: it does not use RDMA), of which `rdma_detail` is said. A `trusting` path
    enforces no bounds: between hosts it needs a network whose every user is trusted. Over a `plain`
    path data is in the clear, also where there are files for TLS: it is `trusting`, too. mx sets
    `staged`: the path ends in host memory, from which mx copies to the target's GPU. `not_beside`
    says what the path costs the source, "" for nothing: it is not used beside a better path to that
    source.
    """

    transport: str
    gb_per_s: float
    attach: bool = False
    detail: str = ""
    medium: Medium = Medium.MEMORY
    rdma_gb_per_s: float = 0.0
    rdma_detail: str = "RDMA"
    trusting: bool = False
    plain: bool = False
    staged: bool = False
    not_beside: str = ""


class Rail(NamedTuple):
    """One pair of interfaces.

    The target binds to `local_address` and dials `remote_address`. `gb_per_s` is the slower
    interface's speed, divided by the number of rails that share the interface. `rdma` is True if
    both interfaces have an RDMA port of the same link layer.
    """

    local_nic: str
    local_address: str
    remote_nic: str
    remote_address: str
    gb_per_s: float
    rdma: bool = False

    def __str__(self) -> str:
        return f"{self.local_nic}→{self.remote_nic}"


class _End(NamedTuple):
    nic: Nic
    address: str


def rails(here: Place, there: Place) -> list[Rail]:
    """Return the rails from the data endpoints of `there` to `here`, in a fixed order.

    Interfaces pair up within a subnet. Each is used once, but the side with fewer interfaces in
    that subnet uses them several times. Two interfaces that share several subnets make one rail,
    over IPv4 if possible.

    Returns:
        The rails; none if the two places share no subnet (then the kernel routes between them),
        or if one of them does not list its interfaces.
    """
    mine, theirs = _by_subnet(here), _by_subnet(there)
    found: dict[tuple[str, str], tuple[_End, _End]] = {}
    for subnet in sorted(mine.keys() & theirs.keys(), key=lambda subnet: (":" in subnet, subnet)):
        near, far = mine[subnet], theirs[subnet]
        for i in range(max(len(near), len(far))):
            one, other = near[i % len(near)], far[i % len(far)]
            # Two hosts may have the same address, such as that of a bridge for containers.
            if one.address != other.address:
                found.setdefault((one.nic.name, other.nic.name), (one, other))
    local = Counter(name for name, _ in found)
    remote = Counter(name for _, name in found)
    return [
        _rail(one, other, local[one.nic.name], remote[other.nic.name])
        for one, other in found.values()
    ]


def _by_subnet(place: Place) -> dict[str, list[_End]]:
    found: dict[str, list[_End]] = {}
    for nic in sorted(place.nics, key=lambda nic: nic.name):
        for network, address in _networks(nic.addresses):
            if address in place.addresses:
                found.setdefault(network, []).append(_End(nic, address))
    return found


@functools.lru_cache(maxsize=4096)  # the same interfaces come again for each path and each place
def _networks(addresses: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (subnet, address), one address for each subnet."""
    found: dict[str, str] = {}
    for text in addresses:
        try:
            interface = ipaddress.ip_interface(text)
        except ValueError:
            continue  # another machine sent it: useless, but no reason to fail
        network = str(interface.network)
        if not interface.is_loopback:
            found.setdefault(network, str(interface.ip))
    return tuple(found.items())


def nic_gb_per_s(nic: Nic) -> float:
    """Return an interface's speed, or `UNKNOWN_GB_PER_S` if it does not report one."""
    return nic.speed_mbit_per_s / 8000 if nic.speed_mbit_per_s > 0 else UNKNOWN_GB_PER_S


def _rail(near: _End, far: _End, near_rails: int, far_rails: int) -> Rail:
    """Return a rail; `near_rails` and `far_rails` count the rails that share each interface."""
    # The far end declares its own speed: that can lower the estimate, but never raise it beyond
    # the speed of this machine's interface.
    speed = nic_gb_per_s(near.nic) / near_rails
    if far.nic.speed_mbit_per_s > 0:
        speed = min(speed, far.nic.speed_mbit_per_s / 8000 / far_rails)
    elif near.nic.speed_mbit_per_s <= 0:
        speed = UNKNOWN_GB_PER_S / max(near_rails, far_rails)
    rdma = bool(near.nic.rdma_device and far.nic.rdma_device)
    return Rail(
        near.nic.name,
        near.address,
        far.nic.name,
        far.address,
        speed,
        rdma and near.nic.link_layer == far.nic.link_layer,
    )
