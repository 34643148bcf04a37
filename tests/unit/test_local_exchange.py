"""The exchange of blocks among ranks on one host, and their meeting: real sockets and memory."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mx.core.grid import ChunkGrid
from mx.core.local_ranks import LocalRanks, Shares, index_nbytes, index_of
from mx.core.striping import Part
from mx.core.wanted import ASIDE_BYTES
from mx.fetching import exchange
from mx.fetching import ranks as meeting
from mx.fetching.exchange import Exchange, Fellow
from mx.fetching.ranks import meet
from mx.fetching.ring import SLOTS, Ring
from tests.support.local_exchange import TIMEOUT_S, all_of, content_of
from tests.support.transfer_machine import grid_of


class Pulling:
    """Notes what an exchange does with a pull."""

    def __init__(self) -> None:
        self.given_by: list[int] = []
        self.taken_up: list[int] = []
        self.errors: list[BaseException] = []
        self.changed = threading.Condition()
        self.writing: Callable[[], object] = lambda: None

    def write_given(self, part: Part, data: memoryview) -> None:
        assert not any(data)
        self.writing()

    def given(self, rank: int, part: Part) -> None:
        self._note(self.given_by, rank)

    def landed_nbytes(self) -> int:
        return len(self.given_by)

    def expects(self, rank: int) -> bool:
        return rank not in self.taken_up

    def take_up(self, rank: int) -> bool:
        self._note(self.taken_up, rank)
        return True

    def raised(self, error: BaseException) -> None:
        self._note(self.errors, error)

    def _note(self, where: list[Any], what: Any) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S)


class Ranks:
    """Ranks that have met, and want everything; sockets and memory of `size` ranks."""

    def __init__(self, grid: ChunkGrid, size: int) -> None:
        self.grid, self.size = grid, size
        wanted = all_of(grid)
        index = index_of(grid, wanted)
        indices = dict.fromkeys(range(size), index)
        self.shares = [Shares(grid, rank, wanted, indices) for rank in range(size)]
        self.rings = [Ring.create(index, wanted.nbytes) for _ in range(size)]
        self.socks: dict[tuple[int, int], socket.socket] = {}
        for one in range(size):
            for other in range(one):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.socks[one, other], self.socks[other, one] = ends
        self._closing = ExitStack()
        self.pulls = [Pulling() for _ in range(size)]

    def exchange(self, rank: int) -> Exchange:
        others = [
            Fellow(
                other,
                self.socks.pop((rank, other)),
                Ring(os.dup(self.rings[other].fd), index_nbytes(self.grid), writable=False),
            )
            for other in range(self.size)
            if other != rank
        ]
        found = Exchange(self.grid, self.rings[rank], others)
        self._closing.callback(found.close)
        return found

    def parts(self, rank: int) -> list[tuple[Part, list[memoryview]]]:
        """What the rank hands out: slots of zeros."""
        parts = [
            piece
            for chunk in self.shares[rank].mine.chunks
            for part in self.shares[rank].mine.parts(chunk)
            for piece, _ in self.shares[rank].pieces(part)
        ]
        zeros = memoryview(bytes(ASIDE_BYTES))
        return [
            (part, [zeros[:n] for _, n in self.grid.blocks(part.chunk)[part.begin : part.end]])
            for part in parts
        ]

    def close(self) -> None:
        self._closing.close()
        for sock in self.socks.values():
            sock.close()
        for ring in self.rings:
            ring.close()


@contextmanager
def ranks_of(grid: ChunkGrid, size: int) -> Iterator[Ranks]:
    ranks = Ranks(grid, size)
    try:
        yield ranks
    finally:
        ranks.close()


def test_a_rank_that_gives_without_a_pause_keeps_no_other_waiting() -> None:
    with ranks_of(grid_of([400]), 3) as ranks, ThreadPoolExecutor() as pool:
        first, second, third = (ranks.exchange(rank) for rank in range(3))
        for rank, each in ((1, second), (2, third)):
            each.begin(ranks.pulls[rank], ranks.shares[rank], 3600.0)
        ahead = threading.Semaphore(0)
        parts = ranks.parts(1)

        def give() -> None:
            for part, blocks in parts:
                second.hand_out(part, blocks)
                ahead.release()

        third.hand_out(*ranks.parts(2)[0])
        giving = pool.submit(give)
        ranks.pulls[0].writing = lambda: ahead.acquire(timeout=TIMEOUT_S)
        for _ in range(SLOTS):  # its slots are full: it is ahead from now on
            assert ahead.acquire(timeout=TIMEOUT_S)
        ahead.release(SLOTS)
        pull = ranks.pulls[0]
        first.begin(pull, ranks.shares[0], 3600.0)
        pull.until(lambda: 2 in pull.given_by)
        assert len(pull.given_by) < SLOTS < len(parts)
        pull.writing = lambda: None
        first.close()
        second.close()
        giving.result(TIMEOUT_S)


def test_a_rank_that_has_missed_a_message_is_left() -> None:
    """Also if it says something afterwards: it would wait for that block forever."""
    with ranks_of(grid_of([400]), 2) as ranks:
        ranks.socks[0, 1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        other = ranks.socks[1, 0]
        pull, first = ranks.pulls[0], ranks.exchange(0)
        began, goes_on = threading.Event(), threading.Event()

        def writing() -> None:
            began.set()
            goes_on.wait(TIMEOUT_S)

        pull.writing = writing
        first.begin(pull, ranks.shares[0], 3600.0)
        part, _ = ranks.parts(1)[0]
        count = ranks.rings[1].begin_use(0)
        other.send(struct.pack("<B3xIIIIQ", 1, part.chunk, part.begin, part.end, 0, count))
        assert began.wait(TIMEOUT_S)
        for each in ranks.parts(0)[:SLOTS]:  # more than the socket holds
            first.hand_out(*each)
        heard = threading.Semaphore(0)

        def hear() -> None:
            while other.recv(64):
                heard.release()

        hearing = threading.Thread(target=hear)
        hearing.start()
        assert heard.acquire(timeout=TIMEOUT_S)  # there is room again
        other.send(struct.pack("<B3xIIIIQ", 0, 0, 0, 0, 0, 0))
        goes_on.set()
        pull.until(lambda: pull.taken_up == [1])
        hearing.join(TIMEOUT_S)


def test_a_rank_that_lives_but_gets_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, so that it is not silent: others would wait for its share for ever."""
    monkeypatch.setattr(exchange, "_PATIENCE", 1e-4)
    with ranks_of(grid_of([4]), 2) as ranks:
        for rank, each in enumerate([ranks.exchange(0), ranks.exchange(1)]):
            each.begin(ranks.pulls[rank], ranks.shares[rank], 3600.0)
        for rank, pull in enumerate(ranks.pulls):
            pull.until(lambda: pull.taken_up == [1 - rank])  # noqa: B023


def test_an_exchange_whose_thread_does_not_start_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ranks_of(grid_of([4]), 2) as ranks:
        unstarted = ranks.exchange(0)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                unstarted.begin(ranks.pulls[0], ranks.shares[0], 1.0)
        unstarted.close()


# -- the meeting -----------------------------------------------------------------------------------


def meet_all(
    pool: ThreadPoolExecutor, which: Sequence[LocalRanks], name: str
) -> list[Exchange | None]:
    grid = grid_of([4])
    meetings = [
        pool.submit(meet, each, content_of(name), grid, all_of(grid), lambda: False)
        for each in which
    ]
    return [each.result(TIMEOUT_S) for each in meetings]


def open_fds() -> set[int]:
    names = os.listdir("/proc/self/fd")  # among them the listing's own
    return {int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")}


def test_too_few_descriptors_let_a_rank_read_alone() -> None:
    """Wherever they run out: no error, and none is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(2) as pool, ExitStack() as closing:
        list(pool.map(threading.Barrier(2).wait, [TIMEOUT_S] * 2))  # its threads have started
        highest = max(open_fds())
        while max(open_fds()) == highest:  # so that no lower number is free
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        before = open_fds()
        highest = max(before)
        for more in (*range(24), limits[0] - highest - 1):
            ranks = [LocalRanks(rank, 2, str(os.getpid()), wait_s=0.2) for rank in range(2)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, limits[1]))
            try:
                found = meet_all(pool, ranks, "descriptors")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert more or not any(found)
            for each in found:
                if each is not None:
                    each.close()
            assert open_fds() == before, more


def test_a_rank_that_was_started_again_meets_the_others() -> None:
    """The process that was this rank has ended while others were waited for."""
    ranks = [LocalRanks(rank, 3, str(os.getpid()), wait_s=TIMEOUT_S) for rank in range(3)]
    grid = grid_of([4])
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(
            meet, ranks[0], content_of("again"), grid, all_of(grid), lambda: False
        )
        ring = Ring.create(index_of(grid, all_of(grid)), 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
            while ended.connect_ex(meeting._address(ranks[0], content_of("again"))):
                assert not leading.done()
            socket.send_fds(ended, [struct.pack("<4sHH", b"mxr1", 1, 3)], [ring.fd])
        ring.close()
        found = [*meet_all(pool, ranks[1:], "again"), leading.result(TIMEOUT_S)]
    for each in found:
        assert each is not None and len(each._fellows) == 2
    for each in found:
        if each is not None:
            each.close()
