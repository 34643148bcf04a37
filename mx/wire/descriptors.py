"""The descriptors of a server's process, and its connections when they become few.

Each connection takes a descriptor. gRPC tells Python neither of a new connection nor that it could
not accept one, so a server looks at its process's own descriptors. What else the process has open
leaves that many fewer to connections: all parts below are of the rest.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import resource
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from mx.core.quota import level_down
from mx.units import KIB
from mx.wire.address import address_of_peer

#: More are not asked for: a connection also takes 15 KB, and a coordinator's other bounds allow
#: about twenty thousand.
MOST_DESCRIPTORS = 32_768
#: As many as Linux allows a process by default.
_NO_LIMIT = 1 << 20
#: From this part on, connections without a running call are ended, and from the next on others
#: too, until the lowest is reached. gRPC accepts none beyond the last.
_LOWEST, _CROWDED, _FULL, _ACCEPTED = 10 / 16, 12 / 16, 14 / 16, 15 / 16

_OWN = "/proc/self/fd"
#: Where `struct tcp_info` has the number of bytes that were received, since Linux 4.1.
_RECEIVED_AT = 128
#: As much as no connection sends before its first call is understood.
_MUCH_BYTES = 256 * KIB


def raise_limit() -> None:
    """Raise this process's soft limit of descriptors to its hard limit, at most
    `MOST_DESCRIPTORS`. For programs of mx: other processes have reasons for theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def most_connections() -> int:
    """Return how many connections gRPC may accept: a few descriptors stay for everything else."""
    return max(1, int(_room(in_use()) * _ACCEPTED))


def in_use() -> int:
    """Return the number of descriptors of this process."""
    try:
        found = os.stat(_OWN).st_size  # the number itself since Linux 6.2, else 0
        return found or len(os.listdir(_OWN))
    except OSError:  # none is left to list them by
        return limit()


@dataclass(frozen=True, slots=True)
class EndedConnections:
    """What `AcceptedConnections.make_room` has done: `count` connections were ended, most of them
    from `address`, while `used` of `limit` descriptors were in use."""

    used: int
    limit: int
    count: int
    address: str


class AcceptedConnections:
    """The accepted connections of one server, found by its port among the process's descriptors.

    Works where no descriptor is left, too: it keeps one for that. `close` it.
    """

    def __init__(self, port: int) -> None:
        """
        Args:
            port: Where the server listens.

        Raises:
            OSError: No descriptor is left.
        """
        self._port = port
        self._others = 0  # the descriptors that were no connections of this server, lately
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._copy = os.dup(self._nothing)
        except OSError:
            os.close(self._nothing)
            raise

    def close(self) -> None:
        """Let the descriptors go. Idempotent."""
        with self._lock:
            copy, self._copy = self._copy, -1
            nothing, self._nothing = self._nothing, -1
        for each in (copy, nothing):
            if each >= 0:
                os.close(each)

    def crowded(self) -> bool:
        """Return True if few descriptors may be left for connections."""
        return in_use() > self._part(_CROWDED)

    def make_room(self, busy: frozenset[str]) -> EndedConnections | None:
        """End connections, if few descriptors are left.

        The addresses with the most connections lose theirs until all is level: first those without
        a running call, chosen at random, so that an address that others flood keeps some. Blocks;
        call it on a thread.

        Args:
            busy: The connections that have running calls, as gRPC names their other ends.

        Returns:
            What was done; None if there is room.
        """
        used = in_use()
        if used <= self._part(_CROWDED):
            return None
        running = {_endpoint_of(peer) for peer in busy}
        idle: dict[str, list[int]] = {}
        others: dict[str, list[int]] = {}
        for descriptor, endpoint in self._accepted():
            kind = others if endpoint in running else idle
            kind.setdefault(address_of_peer(_peer_of(endpoint)), []).append(descriptor)
        counts = {
            each: len(idle.get(each, ())) + len(others.get(each, ()))
            for each in idle.keys() | others.keys()
        }
        self._others = max(0, used - sum(counts.values()))
        if used <= self._part(_CROWDED):
            return None
        kinds = [idle, others] if used > self._part(_FULL) else [idle]
        ended: Counter[str] = Counter()
        for address, share in level_down(counts, used - self._part(_LOWEST)).items():
            for kind in kinds:
                found = kind.get(address, [])
                random.shuffle(found)
                for descriptor in found[: share - ended[address]]:
                    ended[address] += self._end(descriptor)
        return EndedConnections(
            used, limit(), ended.total(), ended.most_common(1)[0][0] if ended else ""
        )

    def end(self, peers: frozenset[str], flooding: frozenset[str], spared: frozenset[str]) -> None:
        """End connections, which are named as gRPC names their other ends. Blocks; call it on a
        thread.

        Args:
            peers: The connections.
            flooding: Addresses of which others are ended, too, that have sent much.
            spared: Those of them that are not.
        """
        endpoints = {_endpoint_of(peer) for peer in peers}
        stay = {_endpoint_of(peer) for peer in spared}
        for descriptor, endpoint in self._accepted():
            if endpoint in endpoints or (
                flooding
                and endpoint not in stay
                and address_of_peer(_peer_of(endpoint)) in flooding
                and self._received(descriptor) > _MUCH_BYTES
            ):
                self._end(descriptor)

    def _received(self, descriptor: int) -> int:
        """Return how many bytes a connection has received; 0 if that is not known."""
        with contextlib.suppress(OSError, struct.error), self._borrowed(descriptor) as sock:
            about = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int(struct.unpack_from("=Q", about, _RECEIVED_AT)[0])
        return 0

    def _part(self, part: float) -> int:
        """Return how many descriptors are in use once connections have this part of theirs."""
        return self._others + int(_room(self._others) * part)

    def _accepted(self) -> Iterator[tuple[int, tuple[str, int]]]:
        """Yield the descriptor and the other end of each connection."""
        for descriptor in _all():
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with self._borrowed(descriptor) as sock:
                    there = _other_end(sock, self._port)
                if there is not None:
                    yield descriptor, there

    def _end(self, descriptor: int) -> bool:
        """Shut a connection down, as if its other end had; gRPC then closes it. Return False if the
        descriptor has come to be something else."""
        with contextlib.suppress(OSError), self._borrowed(descriptor) as sock:
            if _other_end(sock, self._port) is not None:
                sock.shutdown(socket.SHUT_RDWR)
                return True
        return False

    @contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket]:
        # A copy: gRPC may close its own at any time, and another file may get the number. It takes
        # the place of one that is open, since there may be no other.
        with self._lock:
            if self._copy < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            os.dup2(descriptor, self._copy, inheritable=False)
            try:
                sock = socket.socket(fileno=self._copy)
                try:
                    yield sock
                finally:
                    sock.detach()
            finally:
                os.dup2(self._nothing, self._copy, inheritable=False)


def _room(others: int) -> int:
    """Return how many descriptors there are for connections, beside so many others."""
    return min(max(0, limit() - others), MOST_DESCRIPTORS)


def _all() -> Iterable[int]:
    """Return the process's descriptors; where none is left to list them by, all there may be."""
    try:
        return [int(name) for name in os.listdir(_OWN)]
    except OSError:
        return range(limit())


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
