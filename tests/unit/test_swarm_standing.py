"""Readers of a source that hold slots and do not read: what they lose, and who goes first then."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core.swarm import standing
from mx.core.swarm.origin import SUGGESTIONS, Seeder
from mx.core.swarm.slots import Allow, Answer, Reject, Slots, Unchoke
from mx.core.swarm.standing import (
    BACKOFF_MOST_S,
    BACKOFF_S,
    LONGEST_S,
    MOST_READ,
    MOST_RECORDS,
    WINDOW_S,
    Reader,
    Standing,
)
from mx.units import MIB

STEP_S = 0.2
HOG, OTHER_HOG, HONEST, NEIGHBOUR = 1, 2, 3, 4
ADDRESSES = {HOG: "bad", OTHER_HOG: "bad", HONEST: "good", NEIGHBOUR: "bad"}


class Source:
    """A gate, its readers, and time."""

    def __init__(self, *, seen: bool = True, width: int = 2) -> None:
        self.sent: Counter[str] = Counter()
        self.standing = Standing(MIB, lambda reader: self.sent[reader.name] if seen else None)
        self.gate = Slots(width=width, standing=self.standing)
        self.now_s = 0.0
        self.answers: list[Allow | Unchoke | Reject] = []
        for number, address in ADDRESSES.items():
            self.standing.joined(number, Reader(address, str(number)))

    def passes(self, seconds: float, *, moving: dict[int, float] | None = None) -> None:
        """Time, in ticks; `moving` says how many bytes per second readers are sent."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += STEP_S
            for number, bytes_per_s in (moving or {}).items():
                self.sent[str(number)] += int(bytes_per_s * STEP_S)
            self.answers += self.gate.tick(self.now_s)

    def taken_back(self) -> list[Reject]:
        return [each for each in self.answers if isinstance(each, Reject)]


def test_a_slot_without_a_byte_is_taken_back_and_given_to_another() -> None:
    source = Source()
    assert source.gate.request(HOG, 0) is source.gate.request(OTHER_HOG, 1) is Answer.ALLOW
    assert source.gate.request(HONEST, 0) is Answer.ALLOW, "one address leaves a slot to another"
    assert source.gate.request(NEIGHBOUR, 0) is Answer.REJECT
    assert source.gate.interested(NEIGHBOUR) == []
    source.passes(WINDOW_S + 1, moving={HONEST: 1e6})
    assert source.taken_back() == [Reject(HOG, 0), Reject(OTHER_HOG, 1)]
    assert Unchoke(NEIGHBOUR) in source.answers
    assert source.gate.reading == 1


def test_a_slot_that_brings_bytes_is_kept_and_one_that_trickles_is_not() -> None:
    source = Source()
    assert source.gate.request(HONEST, 0) is source.gate.request(HOG, 0) is Answer.ALLOW
    source.passes(WINDOW_S * 3, moving={HONEST: 100_000, HOG: 1000})
    assert source.taken_back() == [Reject(HOG, 0)]


def test_one_that_reads_far_more_than_its_chunk_loses_its_slot() -> None:
    source = Source()
    assert source.gate.request(HOG, 0) is Answer.ALLOW
    source.passes(2 * MOST_READ, moving={HOG: MIB})
    assert source.taken_back() == [Reject(HOG, 0)]


def test_one_that_fetches_unseen_has_a_time_that_grows_with_the_chunk() -> None:
    source = Source(seen=False)
    assert source.gate.request(HOG, 0) is Answer.ALLOW
    source.passes(WINDOW_S + 0.5)
    assert source.taken_back() == []
    source.passes(2)
    assert source.taken_back() == [Reject(HOG, 0)]


def test_the_time_of_those_that_fetch_unseen_follows_what_such_slots_take() -> None:
    source = Source(seen=False)
    for chunk in range(5):
        assert source.gate.request(HONEST, chunk) is Answer.ALLOW
        source.passes(3)
        source.gate.done(HONEST, chunk)
    assert source.gate.request(HOG, 0) is Answer.ALLOW
    source.passes(10)
    assert source.taken_back() == []
    source.passes(LONGEST_S)
    assert source.taken_back() == [Reject(HOG, 0)]


def test_bytes_from_before_a_slot_do_not_count_when_they_can_be_seen_at_last() -> None:
    """A reader that fetched for itself, and goes on over a way by which it is sent to."""
    sent: list[int | None] = [None]
    standing = Standing(MIB, lambda reader: sent[0])
    gate = Slots(standing=standing)
    standing.joined(HONEST, Reader("good", "reader"))
    assert gate.request(HONEST, 0) is Answer.ALLOW
    gate.tick(0.0)
    for tenths in range(1, 20):
        sent[0] = 100 * MIB + tenths * (MIB // 20)
        assert gate.tick(tenths / 10) == []
    assert gate.reading == 1 and standing.clean


def test_who_lost_a_slot_gets_one_only_if_no_other_waits() -> None:
    source = Source()
    source.gate.request(HOG, 0)
    source.passes(WINDOW_S + 0.6)
    assert source.gate.request(HOG, 1) is Answer.ALLOW
    source.gate.done(HOG, 1)
    source.gate.request(HONEST, 0)
    source.gate.interested(NEIGHBOUR, later=True)
    source.standing.prove(NEIGHBOUR)
    assert source.gate.request(HOG, 2) is Answer.REJECT
    assert source.gate.request(HOG, 2, suggested=True) is Answer.REJECT


def test_the_slots_of_those_that_come_last_are_no_obstacle() -> None:
    source = Source()
    source.gate.request(HOG, 0)
    source.gate.request(OTHER_HOG, 0)
    source.passes(WINDOW_S + 0.6)
    assert source.gate.request(HOG, 1) is source.gate.request(OTHER_HOG, 1) is Answer.ALLOW
    source.standing.prove(NEIGHBOUR)
    assert source.gate.request(NEIGHBOUR, 0) is source.gate.request(HONEST, 0) is Answer.ALLOW


def test_the_back_off_doubles_up_to_a_bound_and_a_chunk_ends_it() -> None:
    source = Source()
    lasted = []
    for _ in range(7):
        source.standing.took_back(HOG)
        began_s = source.now_s
        while source.standing.last(HOG):
            source.passes(STEP_S)
        lasted.append(source.now_s - began_s)
    expected = [min(BACKOFF_S * 2**n, BACKOFF_MOST_S) for n in range(7)]
    for seconds, backoff_s in zip(lasted, expected, strict=True):
        assert backoff_s - 1e-6 <= seconds <= backoff_s + 2 * STEP_S
    source.standing.took_back(HOG)
    source.sent[str(HOG)] += MIB
    source.passes(STEP_S)
    assert not source.standing.last(HOG)


def test_a_new_id_at_a_bad_address_has_its_record_until_it_has_read_a_chunk() -> None:
    source = Source()
    source.standing.took_back(HOG)
    assert source.standing.last(NEIGHBOUR) and not source.standing.last(HONEST)
    assert source.standing.waits(Reader("bad", "new"))
    source.sent[str(NEIGHBOUR)] += MIB
    source.passes(STEP_S)
    assert not source.standing.last(NEIGHBOUR)
    assert source.standing.last(HOG)


def test_one_that_says_it_is_done_without_a_byte_is_treated_as_one_that_stopped() -> None:
    source = Source()
    source.gate.request(HOG, 0)
    source.passes(WINDOW_S - 0.5)
    source.gate.done(HOG, 0)
    assert source.standing.last(HOG)
    source.gate.request(HONEST, 0)
    source.passes(WINDOW_S - 0.5)
    source.gate.gone(HONEST)
    assert source.standing.last(HONEST)


def test_one_reader_has_one_slot_while_others_wait_however_many_streams_it_has() -> None:
    source = Source()
    source.standing.joined(OTHER_HOG, Reader("bad", str(HOG)))
    source.gate.interested(HONEST, later=True)
    assert source.gate.request(HOG, 0) is Answer.ALLOW
    assert source.gate.request(OTHER_HOG, 1) is Answer.REJECT
    assert source.gate.request(HOG, 2) is Answer.REJECT
    source.gate.gone(HONEST)
    assert source.gate.request(OTHER_HOG, 1) is Answer.ALLOW, "nobody waits"
    assert source.gate.request(NEIGHBOUR, 0) is Answer.ALLOW, "both are one reader's"


def test_those_that_are_told_of_room_and_say_nothing_hold_up_nobody_for_long() -> None:
    source = Source(width=1)
    for number in range(10, 30):
        source.gate.interested(number, later=True)
    source.gate.interested(HONEST, later=True)
    source.passes(10)
    assert Unchoke(HONEST) in source.answers


def test_one_that_loses_slot_after_slot_is_banned_for_a_while() -> None:
    source = Source()
    hog = Reader("bad", str(HOG))
    for _ in range(standing.MOST_TAKEN_BACK):
        assert not source.standing.banned(hog)
        source.standing.took_back(HOG)
    assert source.standing.banned(hog)
    source.passes(BACKOFF_MOST_S + 1)
    assert not source.standing.banned(hog)


def test_records_are_bounded_and_forgotten() -> None:
    source = Source()
    for number in range(100, 100 + MOST_RECORDS + 50):
        source.standing.joined(number, Reader(f"host{number}", "x"))
        source.standing.took_back(number)
        source.standing.gone(number)
    assert len(source.standing._records) == MOST_RECORDS
    source.standing.tick(source.now_s + standing.FORGET_S + 1)
    assert source.standing.clean


def test_offers_go_round_one_that_accepts_them_and_its_address() -> None:
    standing = Standing()
    for number, address in ADDRESSES.items():
        standing.joined(number, Reader(address, str(number)))
    seeder = Seeder(20, standing=standing)
    suggestions = seeder.joined(HOG, 0, 0.0)
    assert [suggestion.reader for suggestion in suggestions] == [HOG] * SUGGESTIONS
    assert seeder.joined(OTHER_HOG, 0, 0.0) == seeder.joined(HONEST, 0, 0.0) == []
    given = seeder.tick(5.0)
    assert [suggestion.reader for suggestion in given] == [HONEST] * SUGGESTIONS
    while given:
        given = [new for suggestion in given for new in seeder.done(*suggestion, 5.5)]
        assert all(suggestion.reader == HONEST for suggestion in given)
    assert seeder.all_out


def test_that_many_do_not_take_their_offers_does_not_make_waiting_usual() -> None:
    standing = Standing()
    seeder = Seeder(100, standing=standing)
    for number in range(10):
        seeder.joined(number, 0, 0.0)
    now_s = 0.0
    while not seeder.all_out and now_s < 60:  # the last one alone takes what it is offered
        now_s += 0.2
        seeder.tick(now_s)
        for chunk in range(100):
            if seeder.suggested(9, chunk):
                seeder.done(9, chunk, now_s)
    assert seeder.all_out


@settings(max_examples=30)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_an_honest_reader_gets_slots_whatever_the_others_do(
    data: st.DataObject, width: int, same_address: bool
) -> None:
    """The others ask, want, pass, leave and come back; only one reads what it is given."""
    source = Source(width=width)
    hogs = range(10, 10 + data.draw(st.integers(1, 5)))
    honest = 3
    for number in (*hogs, honest):
        address = "bad" if same_address or number != honest else "good"
        source.standing.joined(number, Reader(address, str(number)))
    if same_address:  # it has read without asking
        source.sent[str(honest)] += MIB
    read = 0
    choices = data.draw(st.lists(st.integers(0, 5), min_size=20, max_size=20))
    for step in range(600):
        for number in hogs:
            match choices[(step + number) % 20]:
                case 0:
                    source.gate.interested(number)
                case 1:
                    source.gate.not_interested(number)
                case 2:
                    source.gate.done(number, step % 7)
                case 3:
                    source.gate.gone(number)
                    source.standing.joined(number, Reader("bad", f"{number}.{step}"))
                case _:
                    source.gate.request(number, step % 7)
        if source.gate.request(honest, 0) is Answer.ALLOW:
            source.sent[str(honest)] += MIB
            source.passes(STEP_S)
            source.gate.done(honest, 0)
            read += 1
        else:
            source.gate.interested(honest)
        source.passes(STEP_S)
    assert read >= 10
