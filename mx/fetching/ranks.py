"""How the ranks on one host meet: over a socket that rank 0 listens on, whose name is in the
abstract namespace and ends with it. Each gives rank 0 its ring; rank 0 gives each the rings of all
others, and a socket to each. From then on all are equal."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import combinations

from mx import forks, users
from mx.contexts import Undo
from mx.core.grid import ChunkGrid
from mx.core.local_ranks import MOST_RANKS, LocalRanks, Shares, index_nbytes, index_of
from mx.core.types import Manifest
from mx.core.wanted import WantedBlocks
from mx.errors import CapacityError, ClosedError, ConfigError, PeerProtocolError
from mx.fetching.exchange import Exchange, Fellow
from mx.fetching.ring import Ring
from mx.runtime import in_thread, uncut

log = logging.getLogger(__name__)

_POLL_S = 0.05
#: How long the others may take to hear from rank 0 once it has stopped waiting.
_ANSWER_S = 1.0
_HELLO = struct.Struct("<4sHH")  # magic, rank, size
_MAGIC = b"mxr1"
_TAKEN = b"taken"


class _Alone(Exception):
    """There is no other rank to share with; says why."""


def meet(
    ranks: LocalRanks,
    content: bytes,
    grid: ChunkGrid,
    wanted: WantedBlocks,
    cancelled: Callable[[], bool],
    *,
    table_nbytes: int = 0,
) -> Exchange | None:
    """Meet the other ranks that pull these weights on this host. Blocks.

    Args:
        ranks: Which rank this is.
        content: What tells the weights from others.
        grid: Their chunks.
        wanted: What this rank wants.
        cancelled: Returns True once the pull was closed.
        table_nbytes: How much each rank shows the others beside what it wants, zeros at first.

    Returns:
        The exchange with those that came in time; None if none did, which is logged.

    Raises:
        ConfigError: Another pull of this host is the same rank.
        ClosedError: `cancelled`.
    """
    if ranks.size == 1:
        return None
    why: object
    try:
        if ambiguity := users.ambiguity():
            raise _Alone(ambiguity)
        with contextlib.ExitStack() as failing:  # closes what no exchange owns
            ring = Ring.create(index_of(grid, wanted) + bytes(table_nbytes), wanted.nbytes)
            failing.callback(ring.close)
            meeting = _Meeting(ranks, _address(ranks, content), ring, cancelled)
            fellows = _fellows(meeting.others(), index_nbytes(grid) + table_nbytes, failing)
            exchange = Exchange(grid, ring, fellows)
            failing.pop_all()
    except _Alone as alone:
        why = alone
    except (CapacityError, PeerProtocolError) as error:  # such as a rank of another version
        why = error.message
    except OSError as error:  # such as too many open files
        why = error.strerror or error
    else:
        if len(fellows) < ranks.size - 1:
            log.warning("%d of %d ranks on this host have met", len(fellows) + 1, ranks.size)
        return exchange
    log.warning("rank %d shares with no other on this host: %s", ranks.rank, why)
    return None


def _fellows(
    others: Sequence[tuple[int, socket.socket, int]],
    index_nbytes: int,
    failing: contextlib.ExitStack,
) -> list[Fellow]:
    found = []
    with contextlib.ExitStack() as closing:
        for _, sock, fd in others:
            closing.enter_context(sock)
            closing.callback(os.close, fd)
        for rank, sock, fd in others:
            # Copies: the originals are closed in any case.
            its = Ring(os.dup(fd), index_nbytes, writable=False)
            failing.callback(its.close)
            found.append(Fellow(rank, sock.dup(), its))
            failing.callback(found[-1].close)
    return found


def _address(ranks: LocalRanks, content: bytes) -> str:
    what = (content, ranks.size, ranks.group)
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    return f"\0mx-ranks-{users.own()}-{name}"


def _has_ended(sock: socket.socket) -> bool:
    """Return True if the other side of a socket, which has nothing more to say, is closed."""
    sock.setblocking(False)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _Meeting:
    """One rank's way to the others. It closes the sockets and descriptors that it does not
    return."""

    def __init__(
        self, ranks: LocalRanks, address: str, ring: Ring, cancelled: Callable[[], bool]
    ) -> None:
        self._ranks = ranks
        self._address = address
        self._ring = ring
        self._cancelled = cancelled
        self._until_s = time.monotonic() + ranks.wait_s

    def others(self) -> list[tuple[int, socket.socket, int]]:
        """Return (rank, socket, ring) of the others. Raises _Alone, OSError and what `meet`
        does."""
        with contextlib.ExitStack() as closing:
            return self._lead(closing) if self._ranks.rank == 0 else self._follow(closing)

    def _waits(self, until_s: float) -> bool:
        if self._cancelled():
            raise ClosedError("the pull was closed")
        return time.monotonic() < until_s

    # -- rank 0 -----------------------------------------------------------------------------------

    def _lead(self, closing: contextlib.ExitStack) -> list[tuple[int, socket.socket, int]]:
        listener = closing.enter_context(_socket())
        self._listen(listener)
        came: dict[int, tuple[socket.socket, int]] = {}
        while self._waits(self._until_s):
            if len(came) == self._ranks.size - 1:
                came = {rank: each for rank, each in came.items() if not _has_ended(each[0])}
                if len(came) == self._ranks.size - 1:
                    break
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            if not users.is_own_peer(sock):
                sock.close()  # before it is waited for, and without a word: it may come for ever
                continue
            closing.enter_context(sock)
            rank, fd = self._greeted(sock, closing)
            if rank in came and not _has_ended(came[rank][0]):
                with contextlib.suppress(OSError):
                    sock.send(_TAKEN)
            elif rank:
                came[rank] = sock, fd
        if not came:
            raise _Alone(f"none came within {self._ranks.wait_s:g} s")
        return self._introduce(came, closing)

    def _listen(self, listener: socket.socket) -> None:
        try:
            listener.bind(self._address)
        except OSError as error:
            with _socket() as other:
                try:
                    other.connect(self._address)
                    own = users.is_own_peer(other)
                except OSError:
                    own = False
            if own:
                raise self._taken() from error
            raise _Alone(f"they can't meet ({error.strerror})") from error
        listener.listen(socket.SOMAXCONN)  # also where others connect, too

    def _taken(self) -> ConfigError:
        rank, size, group = self._ranks.rank, self._ranks.size, self._ranks.group
        return ConfigError(
            f"another pull of these weights on this host is rank {rank} of {size}"
            + (f" in group {group!r}" if group else ""),
            hint="give each group of ranks on a host a name of its own: LocalRanks(..., group=...)",
        )

    def _greeted(self, sock: socket.socket, closing: contextlib.ExitStack) -> tuple[int, int]:
        """Return the rank that has connected, and its ring; (0, -1): what came is not a hello."""
        sock.settimeout(_ANSWER_S)
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(sock, _HELLO.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                closing.callback(os.close, fd)
            magic, rank, size = _HELLO.unpack(data)
        except (OSError, struct.error):
            return 0, -1
        known = magic == _MAGIC and size == self._ranks.size and 0 < rank < size
        return (rank, fds[0]) if known and fds else (0, -1)

    def _introduce(
        self, came: dict[int, tuple[socket.socket, int]], closing: contextlib.ExitStack
    ) -> list[tuple[int, socket.socket, int]]:
        """Give each rank a socket to each other one, and its ring. Returns rank 0's."""
        rings = {0: self._ring.fd} | {rank: fd for rank, (_, fd) in came.items()}
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in rings}
        own = contextlib.ExitStack()
        with own:
            for one, other in combinations(sorted(rings), 2):
                ends[one][other], ends[other][one] = socket.socketpair(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET
                )
                closing.enter_context(ends[other][one])
                (closing if one else own).enter_context(ends[one][other])
            found = []
            for rank, end in ends[0].items():
                found.append((rank, end, os.dup(rings[rank])))
                own.callback(os.close, found[-1][2])
            own.pop_all()
        for rank, (sock, _) in came.items():
            others = ends[rank]
            header = struct.pack(f"<4s{len(others)}H", _MAGIC, *others)
            fds = [fd for other, end in others.items() for fd in (end.fileno(), rings[other])]
            with contextlib.suppress(OSError):  # it is gone: its sockets say so
                socket.send_fds(sock, [header], fds)
        return found

    # -- the others -------------------------------------------------------------------------------

    def _follow(self, closing: contextlib.ExitStack) -> list[tuple[int, socket.socket, int]]:
        sock = closing.enter_context(self._connected())
        hello = _HELLO.pack(_MAGIC, self._ranks.rank, self._ranks.size)
        until_s = time.monotonic() + self._ranks.wait_s + _ANSWER_S  # rank 0 may have just come
        try:
            socket.send_fds(sock, [hello], [self._ring.fd])
            while self._waits(until_s):
                with contextlib.suppress(TimeoutError):
                    return self._introduced(sock)
        except OSError as error:
            raise _Alone(f"rank 0 has gone on without it ({error.strerror})") from error
        raise _Alone("rank 0 does not answer")

    def _connected(self) -> socket.socket:
        sock = _socket()
        with Undo(sock.close):
            while self._waits(self._until_s):
                try:
                    sock.connect(self._address)
                except (ConnectionRefusedError, BlockingIOError, TimeoutError):
                    time.sleep(_POLL_S)
                    continue
                if not users.is_own_peer(sock):
                    raise _Alone("another user listens in place of rank 0")
                return sock
        sock.close()
        raise _Alone(f"rank 0 did not arrive within {self._ranks.wait_s:g} s")

    def _introduced(self, sock: socket.socket) -> list[tuple[int, socket.socket, int]]:
        """Return what rank 0 sends. Raises TimeoutError while nothing has come."""
        data, fds, flags, _ = socket.recv_fds(
            sock, 4 + 2 * MOST_RANKS, 2 * MOST_RANKS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if data == _TAKEN:
                raise self._taken()
            if not data:
                raise _Alone("rank 0 has gone on without it")
            if flags & socket.MSG_CTRUNC:
                raise _Alone(os.strerror(errno.EMFILE))
            count = len(fds) // 2
            if len(data) != 4 + 2 * count or data[:4] != _MAGIC or len(fds) != 2 * count:
                raise PeerProtocolError("rank 0 on this host sent a malformed answer")
            others: Sequence[int] = struct.unpack(f"<{count}H", data[4:])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        pairs = zip(others, fds[::2], fds[1::2], strict=True)
        return [(rank, socket.socket(fileno=end), ring) for rank, end, ring in pairs]


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_POLL_S)
    forks.own(sock)
    return sock


async def meet_ranks(
    ranks: LocalRanks,
    manifest: Manifest,
    wanted: WantedBlocks,
    closing: AsyncExitStack,
    cancelled: Callable[[], bool],
) -> tuple[Exchange, Shares] | None:
    """Meet the ranks on this host that want blocks of the same weights; on the loop.

    Args:
        ranks: Which rank this is, and of how many.
        manifest: The weights.
        wanted: The blocks that this rank wants.
        closing: Gets what closes the exchange.
        cancelled: Returning True stops the wait.

    Returns:
        The exchange and who reads what; None if the ranks did not meet.
    """

    async def met() -> Exchange | None:
        content = manifest.ref.content
        found = await in_thread(meet, ranks, content, manifest.grid, wanted, cancelled)
        if found is not None:
            closing.push_async_callback(in_thread, found.close)
        return found

    exchange = await uncut(met())  # it is closed also if this is cancelled meanwhile
    if exchange is None:
        return None
    return exchange, await in_thread(exchange.shares, ranks.rank, wanted)
