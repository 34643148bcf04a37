"""The receiver, one rule at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.holdings import members
from mx.core.swarm.commands import (
    Cancel,
    Command,
    Decline,
    Interested,
    NotInterested,
    ReadFreely,
    Request,
)
from mx.core.swarm.free import FREE_S
from mx.core.swarm.receiver import ANNOUNCE_S, BUSY_S, Receiver
from tests.support.receivers import LoneReceiver

ELSEWHERE = -1


def bits(*chunks: int) -> int:
    return sum(1 << chunk for chunk in chunks)


def test_the_lowest_chunk_is_requested_first_from_the_least_loaded_peer() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(1, bits(2, 3, 4, 5))
    assert receiver.plan(0.0) == [Request(1, 2)]
    receiver.joined(2, bits(0, 3, 4))
    assert receiver.landed(1, 2, 1.0) == [Request(2, 0)]
    assert receiver.landed(2, 0, 2.0) == [Request(2, 3)]


def test_of_two_peers_that_hold_the_same_the_faster_one_gets_the_request() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(1, bits(0, 2, 3))
    assert receiver.plan(0.0) == [Request(1, 0)]
    receiver.joined(2, bits(1, 2, 3))
    assert receiver.landed(1, 0, 1.0) == [Request(2, 1)]
    assert receiver.landed(2, 1, 3.0) == [Request(1, 2)]


def test_a_suggestion_comes_before_everything_else() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(0)
    receiver.joined(1, bits(0, 1, 2))
    assert receiver.plan(0.0) == [Request(1, 0)]
    assert receiver.suggested(0, 7, 0.0) == []
    assert receiver.landed(1, 0, 1.0) == [Request(0, 7)]


def test_a_suggestion_of_a_chunk_that_is_held_or_requested_is_declined() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(0)
    receiver.joined(1, bits(3))
    receiver.landed(ELSEWHERE, 2, 0.0)
    receiver.plan(0.0)
    assert receiver.suggested(0, 2, 0.0) == [Decline(0, 2)]
    assert receiver.suggested(0, 3, 0.0) == [Decline(0, 3)]


def test_a_suggestion_made_twice_counts_once() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(0)
    assert receiver.suggested(0, 2, 0.0) == [Request(0, 2)]
    assert receiver.suggested(0, 3, 0.0) == []
    assert receiver.suggested(0, 2, 0.0) == receiver.suggested(0, 3, 0.0) == []
    assert receiver.landed(0, 2, 1.0) == [Request(0, 3)]


def test_a_suggestion_whose_chunk_came_from_elsewhere_is_declined() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(0)
    receiver.suggested(0, 2, 0.0)
    receiver.suggested(0, 3, 0.0)
    receiver.landed(ELSEWHERE, 3, 0.5)
    assert receiver.landed(0, 2, 1.0) == [Decline(0, 3)]


def test_suggestions_of_a_dead_peer_are_requested_from_others_unless_held() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(0)
    for chunk in (0, 1, 2):
        receiver.suggested(0, chunk, 0.0)
    receiver.landed(ELSEWHERE, 1, 0.0)
    receiver.joined(1, bits(0, 1, 2))
    assert receiver.gone(0, 1.0) == [Request(1, 0)]
    assert receiver.landed(1, 0, 2.0) == [Request(1, 2)]


def test_a_neighbour_that_rejected_gets_a_request_when_it_has_a_free_slot() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0))
    assert receiver.plan(0.0) == [Request(1, 0)]
    assert receiver.rejected(1, 0, 0.0) == [Interested(1)]
    assert receiver.tick(BUSY_S / 2) == []
    assert receiver.unchoked(1, BUSY_S / 2) == [Request(1, 0)]
    assert receiver.rejected(1, 0, BUSY_S / 2) == [Interested(1)], "it has to be sent again"


def test_a_receiver_with_other_peers_to_turn_to_is_not_interested() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0, 1))
    receiver.joined(2, bits(0, 1))
    assert receiver.plan(0.0) == [Request(1, 0)]
    assert receiver.rejected(1, 0, 0.0) == [Request(2, 0)]
    assert receiver.landed(2, 0, 0.1) == [Request(2, 1)]
    assert receiver.rejected(2, 1, 0.2) == [Interested(1), Interested(2)], (
        "now there is no other peer"
    )


def test_a_neighbour_that_announces_no_free_slot_gets_a_request_after_a_while() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.rejected(1, 0, 0.0)
    assert receiver.tick(BUSY_S) == [Request(1, 0)]


def test_a_free_slot_that_is_not_needed_is_answered_with_not_interested() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.joined(2)
    receiver.plan(0.0)
    assert receiver.unchoked(2, 0.0) == [NotInterested(2)]


def test_a_wrong_chunk_is_not_requested_again_from_the_same_peer() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    assert receiver.failed(1, 0, 0.1) == []
    receiver.joined(2, bits(0))
    assert receiver.plan(0.2) == [Request(2, 0)]


def test_a_wrong_chunk_is_requested_again_when_there_is_nothing_else() -> None:
    receiver = LoneReceiver(4, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.failed(1, 0, 0.1)
    assert receiver.tick(0.2) == [Request(1, 0)]


def warmed(chunks: int = 40) -> tuple[Receiver, float]:
    """Three neighbours that gave two chunks in 0.1 s each; one of them has another request."""
    receiver = LoneReceiver(chunks, width=1)
    now_s = 0.0
    for peer in (1, 2, 3):
        receiver.joined(peer, (1 << chunks) - 1)
    requests = receiver.plan(now_s)
    for _ in range(6):
        (request,) = requests
        assert isinstance(request, Request)
        now_s += 0.1
        requests = receiver.landed(*request, now_s)
    return receiver, now_s


def test_a_late_chunk_is_requested_from_another_peer_instead() -> None:
    receiver, now_s = warmed()
    (late,) = receiver.requested(6)
    commands = receiver.tick(now_s + 2)
    other = next(iter(receiver.requested(6)))
    assert commands == [Cancel(late, 6), Request(other, 6)]
    assert other != late
    assert receiver.hedges == 0


def test_near_the_end_a_late_chunk_is_requested_from_another_peer_too() -> None:
    receiver, now_s = warmed(chunks=7)
    (late,) = receiver.requested(6)
    receiver.tick(now_s + 2)
    first, second = receiver.requested(6)
    assert first == late
    assert receiver.hedges == 1
    assert receiver.landed(second, 6, now_s + 3) == [Cancel(late, 6)]
    assert receiver.left == 0


def test_a_peer_that_was_late_is_shunned() -> None:
    receiver, now_s = warmed()
    (late,) = receiver.requested(6)
    receiver.tick(now_s + 2)
    now_s += 2
    for chunk in range(6, 30):
        (requester,) = receiver.requested(chunk)
        assert requester != late
        now_s += 0.1
        receiver.landed(requester, chunk, now_s)
        receiver.tick(now_s)


def test_chunks_that_only_shunned_peers_hold_are_requested_from_them() -> None:
    receiver, now_s = warmed(chunks=7)
    (late,) = receiver.requested(6)
    receiver.tick(now_s + 2)
    for peer in {1, 2, 3} - {late}:
        receiver.gone(peer, now_s + 2)
    receiver.tick(now_s + 3)
    assert receiver.requested(6) == (late,)


def test_holdings_are_announced_in_time_and_once() -> None:
    receiver = LoneReceiver(8)
    receiver.joined(1, bits(0, 1))
    receiver.joined(2)
    receiver.landed(ELSEWHERE, 1, 1.0)
    receiver.landed(ELSEWHERE, 5, 1.01)
    assert receiver.announce_at_s == 1.0 + ANNOUNCE_S
    assert receiver.announcements() == [(1, bits(5)), (2, bits(1, 5))]
    assert receiver.announcements() == []
    assert not receiver.announce_at_s


def test_holdings_are_announced_sooner_where_chunks_come_fast() -> None:
    receiver = LoneReceiver(8, width=1)
    receiver.joined(1, bits(0))
    receiver.plan(0.0)
    receiver.landed(1, 0, 0.01)
    assert receiver.announce_at_s is not None
    assert 0.01 < receiver.announce_at_s <= 0.02


def test_all_holdings_are_announced_to_a_new_neighbour() -> None:
    receiver = LoneReceiver(8)
    receiver.landed(ELSEWHERE, 3, 0.0)
    receiver.announcements()
    assert receiver.joined(1) == bits(3)
    with pytest.raises(ValueError, match="there already"):
        receiver.joined(1)


@given(st.sets(st.integers(0, 300)))
def test_members_of_a_bit_set(chunks: set[int]) -> None:
    assert list(members(bits(*chunks))) == sorted(chunks)


def starved(receiver: Receiver) -> list[Command]:
    """Let time pass without a chunk until free reading begins."""
    assert not any(isinstance(each, ReadFreely) for each in receiver.tick(0.0))
    assert not any(isinstance(each, ReadFreely) for each in receiver.tick(FREE_S))
    return receiver.tick(FREE_S + 0.1)


def test_a_receiver_that_gets_nothing_reads_one_chunk_at_a_time_without_requests() -> None:
    receiver = LoneReceiver(3)
    receiver.joined(0, whole=True)  # an origin that suggests nothing
    assert starved(receiver) == [ReadFreely(0, 0)]
    assert receiver.free
    assert receiver.rejected(0, 0, 6.3) == []
    assert receiver.tick(6.4) == []
    assert receiver.landed(0, 0, 6.5) == []
    assert receiver.tick(6.6) == [ReadFreely(0, 1)]


def test_free_reading_ends_once_a_whole_source_has_given_a_slot() -> None:
    receiver = LoneReceiver(4)
    receiver.joined(0, whole=True)
    assert starved(receiver) == [ReadFreely(0, 0)]
    assert receiver.suggested(0, 2, 6.2) == [Request(0, 2)]
    receiver.landed(0, 2, 6.3)
    assert not receiver.free
    receiver.landed(0, 0, 6.4)
    assert receiver.tick(6.5) == []


def test_while_chunks_come_free_reading_does_not_begin() -> None:
    receiver = LoneReceiver(100, width=1)
    receiver.joined(0, whole=True)
    receiver.joined(1, (1 << 100) - 1)
    for chunk in range(20):
        receiver.plan(float(chunk))
        receiver.landed(1, chunk, float(chunk))
        assert not any(isinstance(each, ReadFreely) for each in receiver.tick(chunk + 0.5))
    assert not receiver.free


def test_a_chunk_requested_from_a_silent_peer_is_read_freely() -> None:
    receiver = LoneReceiver(1)
    receiver.joined(1, 1)
    assert receiver.plan(0.0) == [Request(1, 0)]
    receiver.joined(0, whole=True)
    assert starved(receiver) == [Cancel(1, 0), ReadFreely(0, 0)]


def test_a_chunk_whose_slot_is_taken_back_is_requested_elsewhere_and_may_still_land() -> None:
    receiver = LoneReceiver(1)
    receiver.joined(1, 1)
    assert receiver.plan(0.0) == [Request(1, 0)]
    receiver.joined(2, 1)
    assert receiver.rejected(1, 0, 4.0) == [Request(2, 0)]
    assert receiver.landed(1, 0, 4.1) == [Cancel(2, 0)]
    assert receiver.left == 0


def test_free_reading_turns_from_a_slow_source_to_the_next() -> None:
    receiver = LoneReceiver(1)
    receiver.joined(0, whole=True)
    receiver.joined(1, whole=True)
    assert starved(receiver) == [ReadFreely(0, 0)]
    assert receiver.tick(FREE_S + 3) == []
    assert receiver.tick(2 * FREE_S + 1) == [Cancel(0, 0), ReadFreely(1, 0)]
