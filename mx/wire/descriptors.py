"""The descriptors of a server's process, and its connections when they become few.

Each connection takes a descriptor. gRPC tells Python neither of a new connection nor that it could
not accept one, so a server looks at its process's own descriptors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import resource
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from mx.core.quota import level_down
from mx.wire.address import address_of_peer

#: More are not asked for: a connection also takes 15 KB, and a coordinator's other bounds allow
#: about twenty thousand.
MOST_DESCRIPTORS = 32_768
#: From this part of the limit on, connections without a running call are ended, and from the next
#: on others too, until the lowest is reached. gRPC accepts none beyond the last.
_LOWEST, _CROWDED, _FULL, _ACCEPTED = 10 / 16, 12 / 16, 14 / 16, 15 / 16

_OWN = "/proc/self/fd"


def raise_limit() -> None:
    """Raise this process's soft limit of descriptors to its hard limit, at most
    `MOST_DESCRIPTORS`. For programs of mx: other processes have reasons for theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return how many descriptors this process may have, at most `MOST_DESCRIPTORS`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)


def most_connections() -> int:
    """Return how many connections gRPC may accept: a few descriptors stay for everything else."""
    return int(limit() * _ACCEPTED)


def in_use() -> int:
    """Return the number of descriptors of this process."""
    found = os.stat(_OWN).st_size  # the number itself since Linux 6.2, else 0
    return found or len(os.listdir(_OWN))


def crowded() -> bool:
    """Return True if few descriptors are left."""
    return in_use() > limit() * _CROWDED


@dataclass(frozen=True, slots=True)
class Ended:
    """What `make_room` has done: `count` connections were ended, most of them from
    `address`, while `used` of `limit` descriptors were in use."""

    used: int
    limit: int
    count: int
    address: str


def make_room(port: int, busy: frozenset[str]) -> Ended | None:
    """End connections of a server, if few descriptors are left.

    The addresses with the most connections lose theirs until all is level: first those without a
    running call, chosen at random, so that an address that others flood keeps some. Blocks; call
    it on a thread.

    Args:
        port: Where the server listens.
        busy: The connections that have running calls, as gRPC names their other ends.

    Returns:
        What was done; None if there is room.
    """
    most, used = limit(), in_use()
    if used <= most * _CROWDED:
        return None
    excess = used - int(most * _LOWEST)
    running = {_endpoint_of(peer) for peer in busy}
    idle: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for descriptor, endpoint in _accepted(port):
        kind = others if endpoint in running else idle
        kind.setdefault(address_of_peer(_peer_of(endpoint)), []).append(descriptor)
    counts = {a: len(idle.get(a, ())) + len(others.get(a, ())) for a in idle.keys() | others.keys()}
    kinds = [idle, others] if used > most * _FULL else [idle]
    ended: Counter[str] = Counter()
    for address, share in level_down(counts, excess).items():
        for kind in kinds:
            found = kind.get(address, [])
            random.shuffle(found)
            for descriptor in found[: share - ended[address]]:
                ended[address] += _end(descriptor, port)
    return Ended(used, most, ended.total(), ended.most_common(1)[0][0] if ended else "")


def end(port: int, peers: frozenset[str]) -> None:
    """End these connections of a server. Blocks; call it on a thread.

    Args:
        port: Where the server listens.
        peers: The connections, as gRPC names their other ends.
    """
    endpoints = {_endpoint_of(peer) for peer in peers}
    for descriptor, endpoint in _accepted(port):
        if endpoint in endpoints:
            _end(descriptor, port)


def _accepted(port: int) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield the descriptor and the other end of each accepted connection of a port."""
    for name in os.listdir(_OWN):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with _borrowed(int(name)) as sock:
                there = _other_end(sock, port)
            if there is not None:
                yield int(name), there


def _end(descriptor: int, port: int) -> bool:
    """Shut a connection of this port down, as if its other end had; gRPC then closes it. Return
    False if the descriptor has come to be something else."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as sock:
        if _other_end(sock, port) is not None:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    # A copy: gRPC may close its own at any time, and another file may get the number.
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        yield sock


def _other_end(sock: socket.socket, port: int) -> tuple[str, int] | None:
    """Return the other end of a connection whose local port this is, None for other sockets."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    if sock.getsockname()[1] != port:
        return None
    there = sock.getpeername()  # an OSError for the socket that listens
    return _plain(str(there[0])), int(there[1])


def _plain(host: str) -> str:
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _peer_of(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _endpoint_of(peer: str) -> tuple[str, int] | None:
    """Return the address and port in gRPC's name of a connection's other end."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None
