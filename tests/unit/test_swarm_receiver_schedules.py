"""The receiver: any order of events, with losses, duplicates and neighbours that go."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm.commands import (
    Cancel,
    Command,
    Decline,
    Interested,
    NotInterested,
    ReadFreely,
    Request,
)
from mx.core.swarm.receiver import BUSY_S, END_CHUNKS, LATE_S
from tests.support.receivers import LoneReceiver

ELSEWHERE = -1


class Driver:
    """Records the commands, and checks each one against the record."""

    def __init__(self, chunks: int, width: int, *, whole: frozenset[int] = frozenset()) -> None:
        """`whole`: the peers that hold everything, though they do not announce it."""
        self.receiver = LoneReceiver(chunks, width=width)
        self.whole = whole
        self.chunks = chunks
        self.now_s = 0.0
        self.have: dict[int, int] = {}  # peer -> what it announced
        self.suggested: dict[int, int] = {}  # peer -> its suggestions, but for declined ones
        self.requested: dict[int, set[int]] = {}  # peer -> chunks
        self.held = 0
        self.hedged = 0
        self.free: set[tuple[int, int]] = set()  # (peer, chunk) that are read freely

    def take(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            match command:
                case Request(peer, chunk):
                    assert peer in self.have, "requested from a peer that is gone"
                    assert not self.held >> chunk & 1, "requested a held chunk"
                    there = self.have[peer] | self.suggested[peer]
                    assert there >> chunk & 1, "requested from a peer that never had it"
                    requesters = self.requesters(chunk)
                    assert peer not in requesters
                    if requesters:
                        assert len(requesters) == 1
                        assert self.chunks - self.held.bit_count() <= END_CHUNKS
                        self.hedged += 1
                    self.requested[peer].add(chunk)
                case ReadFreely(peer, chunk):
                    everything = (1 << self.chunks) - 1
                    assert peer in self.whole or self.have[peer] == everything
                    assert not self.held >> chunk & 1
                    self.free = {each for each in self.free if each[1] in self.requested[each[0]]}
                    assert self.requesters(chunk) in ([], [peer]), "another reads it"
                    assert not self.free, "one at a time"
                    self.free.add((peer, chunk))
                    self.requested[peer].add(chunk)
                case Cancel(peer, chunk):
                    self.free.discard((peer, chunk))
                    self.requested[peer].remove(chunk)
                    self.suggested[peer] &= ~(1 << chunk)
                case Decline(peer, chunk):
                    self.suggested[peer] &= ~(1 << chunk)
                case NotInterested(peer):
                    assert peer in self.have
                case Interested(peer):
                    assert peer in self.have and not self.requested[peer]
        self.check()
        return commands

    def requesters(self, chunk: int) -> list[int]:
        return [peer for peer, requested in self.requested.items() if chunk in requested]

    def check(self) -> None:
        receiver = self.receiver
        assert receiver.held == self.held
        assert receiver.left == self.chunks - self.held.bit_count()
        assert receiver.hedges == self.hedged
        assert set(receiver.peers) == set(self.have)
        for peer, requested in self.requested.items():
            plain = [
                chunk
                for chunk in requested
                if not self.suggested[peer] >> chunk & 1 and (peer, chunk) not in self.free
            ]
            assert len(plain) <= 1, "one at a time, but for its suggestions"
        for chunk in range(self.chunks):
            assert sorted(receiver.requested(chunk)) == sorted(self.requesters(chunk))

    # -- events ---------------------------------------------------------------------------------

    def joins(self, peer: int, have: int) -> None:
        self.have[peer], self.suggested[peer], self.requested[peer] = have, 0, set()
        assert self.receiver.joined(peer, have, whole=peer in self.whole) == self.held
        self.take(self.receiver.plan(self.now_s))

    def goes(self, peer: int) -> None:
        self.have.pop(peer, None)
        self.suggested.pop(peer, None)
        self.requested.pop(peer, None)
        self.free = {each for each in self.free if each[0] != peer}
        self.take(self.receiver.gone(peer, self.now_s))

    def announces(self, peer: int, chunks: int) -> None:
        if peer in self.have:
            self.have[peer] |= chunks
        self.take(self.receiver.announced(peer, chunks, self.now_s))

    def suggestions(self, peer: int, chunk: int) -> None:
        if peer in self.have:
            self.suggested[peer] |= 1 << chunk
        self.take(self.receiver.suggested(peer, chunk, self.now_s))

    def refuses(self, peer: int, chunk: int) -> None:
        if (peer, chunk) in self.free:
            assert self.take(self.receiver.rejected(peer, chunk, self.now_s)) == []
            return
        if chunk in self.requested.get(peer, ()):
            self.requested[peer].remove(chunk)
            self.suggested[peer] &= ~(1 << chunk)
        self.take(self.receiver.rejected(peer, chunk, self.now_s))

    def unchokes(self, peer: int) -> None:
        commands = self.take(self.receiver.unchoked(peer, self.now_s))
        answers = [
            each
            for each in commands
            if isinstance(each, Request | NotInterested) and each.peer == peer
        ]
        assert len(answers) == (peer in self.have)

    def fails(self, peer: int, chunk: int) -> None:
        self.free.discard((peer, chunk))
        if chunk in self.requested.get(peer, ()):
            self.requested[peer].remove(chunk)
            self.suggested[peer] &= ~(1 << chunk)
            self.have[peer] |= 1 << chunk  # it is requested again when nothing else is left
        self.take(self.receiver.failed(peer, chunk, self.now_s))

    def lands(self, peer: int, chunk: int) -> None:
        others = [each for each in self.requesters(chunk) if each != peer]
        self.requested.get(peer, set()).discard(chunk)
        self.free = {each for each in self.free if each[1] != chunk}
        self.held |= 1 << chunk
        commands = self.take_landed(peer, chunk)
        assert {each.peer for each in commands if isinstance(each, Cancel)} == set(others)

    def take_landed(self, peer: int, chunk: int) -> list[Command]:
        return self.take(self.receiver.landed(peer, chunk, self.now_s))

    def ticks(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.receiver.tick(self.now_s))

    def finish(self) -> None:
        """Every neighbour answers from now on: all that any neighbour holds arrives, and soon."""
        reachable = self.held
        for peer, have in self.have.items():
            reachable |= have | self.suggested[peer]
        for _ in range(20 * self.chunks + 20):
            if self.held & reachable == reachable:
                break
            requests = [
                (peer, chunk) for peer, requested in self.requested.items() for chunk in requested
            ]
            if requests:
                self.lands(*requests[0])
            else:
                self.ticks(BUSY_S)
        assert self.held & reachable == reachable


PEERS = st.integers(0, 4)


@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_any_events_in_any_order(data: st.DataObject, chunks: int, width: int) -> None:
    driver = Driver(chunks, width, whole=data.draw(st.frozensets(PEERS, max_size=2)))
    some = st.integers(0, (1 << chunks) - 1)
    one = st.integers(0, chunks - 1)
    for _ in range(data.draw(st.integers(0, 60))):
        peer, chunk = data.draw(PEERS), data.draw(one)
        outstanding = [(p, c) for p, requested in driver.requested.items() for c in requested]
        answers = data.draw(st.booleans())
        if outstanding and answers:  # to an outstanding request
            peer, chunk = data.draw(st.sampled_from(outstanding))
        match data.draw(st.integers(0, 10)):
            case 0 | 1 if peer not in driver.have:
                driver.joins(peer, data.draw(some))
            case 2:
                driver.goes(peer)
            case 3:
                driver.announces(peer, data.draw(some))
            case 4:
                driver.suggestions(peer, chunk)
            case 5:
                driver.refuses(peer, chunk)
            case 6:
                driver.unchokes(peer)
            case 7:
                driver.fails(peer, chunk)
            case 8:
                driver.lands(data.draw(st.sampled_from([peer, ELSEWHERE])), chunk)
            case _:
                driver.ticks(data.draw(st.floats(0, 3)))
    driver.finish()


@given(st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
def test_without_delay_no_more_is_outstanding_than_the_width(
    chunks: int, width: int, rng: random.Random
) -> None:
    driver = Driver(chunks, width)
    for peer in range(4):
        driver.joins(peer, rng.getrandbits(chunks))
    while requests := [
        (peer, chunk) for peer, requested in driver.requested.items() for chunk in requested
    ]:
        assert len(requests) <= width
        assert len({peer for peer, _ in requests}) == len(requests)
        driver.lands(*rng.choice(requests))
    assert driver.hedged == 0
    driver.finish()


@given(st.data(), st.integers(2, 10), st.integers(1, 3))
def test_a_silent_peer_delays_only_its_own_chunks(
    data: st.DataObject, chunks: int, width: int
) -> None:
    """Peer 0 never answers, and is never known to be gone."""
    driver = Driver(chunks, width)
    everything = (1 << chunks) - 1
    driver.joins(0, everything)
    others = data.draw(st.integers(0, everything))
    driver.joins(1, others)
    for _ in range(20 * chunks):
        requests = [
            (peer, chunk)
            for peer, requested in driver.requested.items()
            if peer
            for chunk in requested
        ]
        if requests:
            driver.now_s += 0.01
            driver.lands(*requests[0])
        else:
            driver.ticks(LATE_S)
    assert driver.held == others


@given(st.integers(1, 10), st.integers(1, 3), st.integers(0, 3))
def test_a_whole_source_that_refuses_everything_is_read_from_all_the_same(
    chunks: int, width: int, silent: int
) -> None:
    """Peer 0 refuses, the silent ones never answer; what is read freely arrives."""
    driver = Driver(chunks, width, whole=frozenset({0}))
    driver.joins(0, 0)
    for peer in range(1, 1 + silent):
        driver.joins(peer, (1 << chunks) - 1)
    for _ in range(400):
        for peer, chunk in [(p, c) for p, requested in driver.requested.items() for c in requested]:
            if (peer, chunk) in driver.free:
                driver.lands(peer, chunk)
            elif peer == 0:
                driver.refuses(peer, chunk)
        if not driver.receiver.left:
            break
        driver.ticks(0.2)
    assert not driver.receiver.left
