"""The receiver: any order of events, with losses, duplicates and neighbours that go."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm import (
    ANNOUNCE_S,
    BUSY_S,
    END_CHUNKS,
    LATE_S,
    Ask,
    Cancel,
    Command,
    Decline,
    Pass,
    Receiver,
    members,
)

ELSEWHERE = -1


def bits(*chunks: int) -> int:
    return sum(1 << chunk for chunk in chunks)


class Driver:
    """Keeps the books of what was commanded, and checks each command against them."""

    def __init__(self, chunks: int, width: int) -> None:
        self.receiver = Receiver(chunks, width=width)
        self.chunks = chunks
        self.width = width
        self.now_s = 0.0
        self.have: dict[int, int] = {}  # peer -> what it told
        self.offered: dict[int, int] = {}  # peer -> what it offered, and was not declined
        self.asked: dict[int, set[int]] = {}  # peer -> chunks
        self.held = 0
        self.hedged = 0

    def take(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            match command:
                case Ask(peer, chunk):
                    assert peer in self.have, "asked of one who is gone"
                    assert not self.held >> chunk & 1, "asked for what is here"
                    there = self.have[peer] | self.offered[peer]
                    assert there >> chunk & 1, "asked of one who never had it"
                    askers = self.askers(chunk)
                    assert peer not in askers
                    if askers:
                        assert len(askers) == 1
                        assert self.chunks - self.held.bit_count() <= END_CHUNKS
                        self.hedged += 1
                    self.asked[peer].add(chunk)
                case Cancel(peer, chunk):
                    self.asked[peer].remove(chunk)
                    self.offered[peer] &= ~(1 << chunk)
                case Decline(peer, chunk):
                    self.offered[peer] &= ~(1 << chunk)
                case Pass(peer):
                    assert peer in self.have
        self.check()
        return commands

    def askers(self, chunk: int) -> list[int]:
        return [peer for peer, asked in self.asked.items() if chunk in asked]

    def check(self) -> None:
        receiver = self.receiver
        assert receiver.held == self.held
        assert receiver.left == self.chunks - self.held.bit_count()
        assert receiver.hedges == self.hedged
        assert set(receiver.peers) == set(self.have)
        for peer, asked in self.asked.items():
            plain = [chunk for chunk in asked if not self.offered[peer] >> chunk & 1]
            assert len(plain) <= 1, "one at a time, but for what it offers"
        for chunk in range(self.chunks):
            assert sorted(receiver.asked(chunk)) == sorted(self.askers(chunk))

    # -- events ---------------------------------------------------------------------------------

    def joins(self, peer: int, have: int) -> None:
        self.have[peer], self.offered[peer], self.asked[peer] = have, 0, set()
        assert self.receiver.joined(peer, have) == self.held
        self.take(self.receiver.plan(self.now_s))

    def goes(self, peer: int) -> None:
        self.have.pop(peer, None)
        self.offered.pop(peer, None)
        self.asked.pop(peer, None)
        self.take(self.receiver.gone(peer, self.now_s))

    def announces(self, peer: int, chunks: int) -> None:
        if peer in self.have:
            self.have[peer] |= chunks
        self.take(self.receiver.announced(peer, chunks, self.now_s))

    def offers(self, peer: int, chunk: int) -> None:
        if peer in self.have:
            self.offered[peer] |= 1 << chunk
        self.take(self.receiver.offered(peer, chunk, self.now_s))

    def refuses(self, peer: int, chunk: int) -> None:
        if chunk in self.asked.get(peer, ()):
            self.asked[peer].remove(chunk)
            self.offered[peer] &= ~(1 << chunk)
        self.take(self.receiver.busy(peer, chunk, self.now_s))

    def has_room(self, peer: int) -> None:
        commands = self.take(self.receiver.room(peer, self.now_s))
        answers = [each for each in commands if isinstance(each, Ask | Pass) and each.peer == peer]
        assert len(answers) == (peer in self.have)

    def fails(self, peer: int, chunk: int) -> None:
        if chunk in self.asked.get(peer, ()):
            self.asked[peer].remove(chunk)
            self.offered[peer] &= ~(1 << chunk)
            self.have[peer] |= 1 << chunk  # it is asked again when nothing else is left
        self.take(self.receiver.failed(peer, chunk, self.now_s))

    def lands(self, peer: int, chunk: int) -> None:
        others = [each for each in self.askers(chunk) if each != peer]
        self.asked.get(peer, set()).discard(chunk)
        self.held |= 1 << chunk
        commands = self.take_landed(peer, chunk)
        assert {each.peer for each in commands if isinstance(each, Cancel)} == set(others)

    def take_landed(self, peer: int, chunk: int) -> list[Command]:
        return self.take(self.receiver.landed(peer, chunk, self.now_s))

    def ticks(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.receiver.tick(self.now_s))

    def finish(self) -> None:
        """Every neighbour answers from now on: all that anybody holds arrives, and soon."""
        reachable = self.held
        for peer, have in self.have.items():
            reachable |= have | self.offered[peer]
        for _ in range(20 * self.chunks + 20):
            if self.held == reachable:
                break
            asks = [(peer, chunk) for peer, asked in self.asked.items() for chunk in asked]
            if asks:
                self.lands(*asks[0])
            else:
                self.ticks(BUSY_S)
        assert self.held == reachable


PEERS = st.integers(0, 4)


@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_any_events_in_any_order(data: st.DataObject, chunks: int, width: int) -> None:
    driver = Driver(chunks, width)
    some = st.integers(0, (1 << chunks) - 1)
    one = st.integers(0, chunks - 1)
    for _ in range(data.draw(st.integers(0, 60))):
        peer, chunk = data.draw(PEERS), data.draw(one)
        outstanding = [(p, c) for p, asked in driver.asked.items() for c in asked]
        answers = data.draw(st.booleans())
        if outstanding and answers:  # to something that was asked
            peer, chunk = data.draw(st.sampled_from(outstanding))
        match data.draw(st.integers(0, 10)):
            case 0 | 1 if peer not in driver.have:
                driver.joins(peer, data.draw(some))
            case 2:
                driver.goes(peer)
            case 3:
                driver.announces(peer, data.draw(some))
            case 4:
                driver.offers(peer, chunk)
            case 5:
                driver.refuses(peer, chunk)
            case 6:
                driver.has_room(peer)
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
    while asks := [(peer, chunk) for peer, asked in driver.asked.items() for chunk in asked]:
        assert len(asks) <= width
        assert len({peer for peer, _ in asks}) == len(asks)
        driver.lands(*rng.choice(asks))
    assert driver.hedged == 0
    driver.finish()


@given(st.data(), st.integers(2, 10), st.integers(1, 3))
def test_who_stops_answering_holds_up_only_what_nobody_else_has(
    data: st.DataObject, chunks: int, width: int
) -> None:
    """Peer 0 never answers, and is never known to be gone."""
    driver = Driver(chunks, width)
    everything = (1 << chunks) - 1
    driver.joins(0, everything)
    others = data.draw(st.integers(0, everything))
    driver.joins(1, others)
    for _ in range(20 * chunks):
        asks = [(peer, chunk) for peer, asked in driver.asked.items() if peer for chunk in asked]
        if asks:
            driver.now_s += 0.01
            driver.lands(*asks[0])
        else:
            driver.ticks(LATE_S)
    assert driver.held == others


# -- one thing at a time ------------------------------------------------------------------------


def test_the_lowest_chunk_first_from_whom_has_the_least_to_give() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(1, bits(2, 3, 4, 5))
    assert receiver.plan(0.0) == [Ask(1, 2)]
    receiver.joined(2, bits(0, 3, 4))
    assert receiver.landed(1, 2, 1.0) == [Ask(2, 0)]
    assert receiver.landed(2, 0, 2.0) == [Ask(2, 3)]


def test_of_two_that_hold_the_same_the_faster_one() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(1, bits(0, 2, 3))
    assert receiver.plan(0.0) == [Ask(1, 0)]
    receiver.joined(2, bits(1, 2, 3))
    assert receiver.landed(1, 0, 1.0) == [Ask(2, 1)]
    assert receiver.landed(2, 1, 3.0) == [Ask(1, 2)]


def test_an_offer_comes_before_everything_else() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(0)
    receiver.joined(1, bits(0, 1, 2))
    assert receiver.plan(0.0) == [Ask(1, 0)]
    assert receiver.offered(0, 7, 0.0) == []
    assert receiver.landed(1, 0, 1.0) == [Ask(0, 7)]


def test_an_offer_of_what_is_here_or_asked_of_another_is_declined() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(0)
    receiver.joined(1, bits(3))
    receiver.landed(ELSEWHERE, 2, 0.0)
    receiver.plan(0.0)
    assert receiver.offered(0, 2, 0.0) == [Decline(0, 2)]
    assert receiver.offered(0, 3, 0.0) == [Decline(0, 3)]


def test_an_offer_made_twice_is_one() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(0)
    assert receiver.offered(0, 2, 0.0) == [Ask(0, 2)]
    assert receiver.offered(0, 3, 0.0) == []
    assert receiver.offered(0, 2, 0.0) == receiver.offered(0, 3, 0.0) == []
    assert receiver.landed(0, 2, 1.0) == [Ask(0, 3)]


def test_an_offer_whose_chunk_came_from_elsewhere_meanwhile() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(0)
    receiver.offered(0, 2, 0.0)
    receiver.offered(0, 3, 0.0)
    receiver.landed(ELSEWHERE, 3, 0.5)
    assert receiver.landed(0, 2, 1.0) == [Decline(0, 3)]


def test_what_the_dead_had_offered_is_asked_of_others_unless_it_is_here() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(0)
    for chunk in (0, 1, 2):
        receiver.offered(0, chunk, 0.0)
    receiver.landed(ELSEWHERE, 1, 0.0)
    receiver.joined(1, bits(0, 1, 2))
    assert receiver.gone(0, 1.0) == [Ask(1, 0)]
    assert receiver.landed(1, 0, 2.0) == [Ask(1, 2)]


def test_a_busy_neighbour_is_asked_again_when_it_has_room() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(1, bits(0))
    assert receiver.plan(0.0) == [Ask(1, 0)]
    assert receiver.busy(1, 0, 0.0) == []
    assert receiver.tick(BUSY_S / 2) == []
    assert receiver.room(1, BUSY_S / 2) == [Ask(1, 0)]


def test_a_busy_neighbour_that_forgets_is_asked_again() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.busy(1, 0, 0.0)
    assert receiver.tick(BUSY_S) == [Ask(1, 0)]


def test_room_that_is_not_needed_is_passed_on() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.joined(2)
    receiver.plan(0.0)
    assert receiver.room(2, 0.0) == [Pass(2)]


def test_wrong_bytes_are_not_asked_for_again_of_the_same_one() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    assert receiver.failed(1, 0, 0.1) == []
    receiver.joined(2, bits(0))
    assert receiver.plan(0.2) == [Ask(2, 0)]


def test_wrong_bytes_are_asked_for_again_when_there_is_nothing_else() -> None:
    receiver = Receiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.failed(1, 0, 0.1)
    assert receiver.tick(0.2) == [Ask(1, 0)]


def warmed(chunks: int = 40) -> tuple[Receiver, float]:
    """Three neighbours, each with two chunks given in 0.1 s each; one of them is asked for more."""
    receiver = Receiver(chunks, width=1)
    now_s = 0.0
    for peer in (1, 2, 3):
        receiver.joined(peer, (1 << chunks) - 1)
    asks = receiver.plan(now_s)
    for _ in range(6):
        (ask,) = asks
        assert isinstance(ask, Ask)
        now_s += 0.1
        asks = receiver.landed(*ask, now_s)
    return receiver, now_s


def test_a_late_chunk_is_asked_of_another_instead() -> None:
    receiver, now_s = warmed()
    (late,) = receiver.asked(6)
    commands = receiver.tick(now_s + 2)
    other = next(iter(receiver.asked(6)))
    assert commands == [Cancel(late, 6), Ask(other, 6)]
    assert other != late
    assert receiver.hedges == 0


def test_near_the_end_a_late_chunk_is_asked_of_another_too() -> None:
    receiver, now_s = warmed(chunks=7)
    (late,) = receiver.asked(6)
    receiver.tick(now_s + 2)
    first, second = receiver.asked(6)
    assert first == late
    assert receiver.hedges == 1
    assert receiver.landed(second, 6, now_s + 3) == [Cancel(late, 6)]
    assert receiver.left == 0


def test_one_that_was_late_is_shunned() -> None:
    receiver, now_s = warmed()
    (late,) = receiver.asked(6)
    receiver.tick(now_s + 2)
    now_s += 2
    for chunk in range(6, 30):
        (asker,) = receiver.asked(chunk)
        assert asker != late
        now_s += 0.1
        receiver.landed(asker, chunk, now_s)
        receiver.tick(now_s)


def test_what_only_shunned_ones_hold_is_asked_of_them() -> None:
    receiver, now_s = warmed(chunks=7)
    (late,) = receiver.asked(6)
    receiver.tick(now_s + 2)
    for peer in {1, 2, 3} - {late}:
        receiver.gone(peer, now_s + 2)
    receiver.tick(now_s + 3)
    assert receiver.asked(6) == (late,)


def test_holdings_are_told_in_time_and_once() -> None:
    receiver = Receiver(8)
    receiver.joined(1, bits(0, 1))
    receiver.joined(2)
    receiver.landed(ELSEWHERE, 1, 1.0)
    receiver.landed(ELSEWHERE, 5, 1.01)
    assert receiver.announce_at_s == 1.0 + ANNOUNCE_S
    assert receiver.announcements() == [(1, bits(5)), (2, bits(1, 5))]
    assert receiver.announcements() == []
    assert not receiver.announce_at_s


def test_holdings_are_told_sooner_where_chunks_come_fast() -> None:
    receiver = Receiver(8, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.landed(1, 0, 0.01)
    assert receiver.announce_at_s is not None
    assert 0.01 < receiver.announce_at_s <= 0.02


def test_a_newcomer_is_told_everything() -> None:
    receiver = Receiver(8)
    receiver.landed(ELSEWHERE, 3, 0.0)
    receiver.announcements()
    assert receiver.joined(1) == bits(3)
    with pytest.raises(ValueError, match="there already"):
        receiver.joined(1)


@given(st.sets(st.integers(0, 300)))
def test_members_of_a_bit_set(chunks: set[int]) -> None:
    assert list(members(bits(*chunks))) == sorted(chunks)
