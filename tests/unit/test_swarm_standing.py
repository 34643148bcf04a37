"""Readers of a source that hold slots and do not read: they lose them, and come after others."""

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
    """A source's slots, its readers, and time."""

    def __init__(self, *, seen: bool = True, width: int = 2) -> None:
        self.sent: Counter[str] = Counter()
        self.standing = Standing(MIB, lambda reader: self.sent[reader.name] if seen else None)
        self.slots = Slots(width=width, standing=self.standing)
        self.now_s = 0.0
        self.answers: list[Allow | Unchoke | Reject] = []
        for number, address in ADDRESSES.items():
            self.standing.joined(number, Reader(address, str(number)))

    def passes(self, seconds: float, *, moving: dict[int, float] | None = None) -> None:
        """Let time pass, in ticks; `moving` maps readers to the bytes per second sent to them."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += STEP_S
            for number, bytes_per_s in (moving or {}).items():
                self.sent[str(number)] += int(bytes_per_s * STEP_S)
            self.answers += self.slots.tick(self.now_s)

    def taken_back(self) -> list[Reject]:
        return [each for each in self.answers if isinstance(each, Reject)]


def test_a_slot_without_a_byte_is_taken_back_and_given_to_another() -> None:
    source = Source()
    assert source.slots.request(HOG, 0) is source.slots.request(OTHER_HOG, 1) is Answer.ALLOW
    assert source.slots.request(HONEST, 0) is Answer.ALLOW, "one address leaves a slot to another"
    assert source.slots.request(NEIGHBOUR, 0) is Answer.REJECT
    assert source.slots.interested(NEIGHBOUR) == []
    source.passes(WINDOW_S + 1, moving={HONEST: 1e6})
    assert source.taken_back() == [Reject(HOG, 0), Reject(OTHER_HOG, 1)]
    assert Unchoke(NEIGHBOUR) in source.answers
    assert source.slots.reading == 1


def test_a_slot_that_brings_bytes_is_kept_and_a_trickle_is_taken_back() -> None:
    source = Source()
    assert source.slots.request(HONEST, 0) is source.slots.request(HOG, 0) is Answer.ALLOW
    source.passes(WINDOW_S * 3, moving={HONEST: 100_000, HOG: 1000})
    assert source.taken_back() == [Reject(HOG, 0)]


def test_a_reader_that_reads_far_more_than_its_chunk_loses_its_slot() -> None:
    source = Source()
    assert source.slots.request(HOG, 0) is Answer.ALLOW
    source.passes(2 * MOST_READ, moving={HOG: MIB})
    assert source.taken_back() == [Reject(HOG, 0)]


def test_the_time_of_a_reader_that_fetches_unseen_grows_with_the_chunk() -> None:
    source = Source(seen=False)
    assert source.slots.request(HOG, 0) is Answer.ALLOW
    source.passes(WINDOW_S + 0.5)
    assert source.taken_back() == []
    source.passes(2)
    assert source.taken_back() == [Reject(HOG, 0)]


def test_the_time_of_readers_that_fetch_unseen_follows_the_median_of_such_slots() -> None:
    source = Source(seen=False)
    for chunk in range(5):
        assert source.slots.request(HONEST, chunk) is Answer.ALLOW
        source.passes(3)
        source.slots.done(HONEST, chunk)
    assert source.slots.request(HOG, 0) is Answer.ALLOW
    source.passes(10)
    assert source.taken_back() == []
    source.passes(LONGEST_S)
    assert source.taken_back() == [Reject(HOG, 0)]


def test_bytes_from_before_a_slot_do_not_count_once_they_are_seen() -> None:
    """A reader that fetched for itself continues over a path on which the source sends."""
    sent: list[int | None] = [None]
    standing = Standing(MIB, lambda reader: sent[0])
    slots = Slots(standing=standing)
    standing.joined(HONEST, Reader("good", "reader"))
    assert slots.request(HONEST, 0) is Answer.ALLOW
    slots.tick(0.0)
    for tenths in range(1, 20):
        sent[0] = 100 * MIB + tenths * (MIB // 20)
        assert slots.tick(tenths / 10) == []
    assert slots.reading == 1 and standing.clean


def test_a_reader_that_lost_a_slot_gets_one_only_if_no_other_waits() -> None:
    source = Source()
    source.slots.request(HOG, 0)
    source.passes(WINDOW_S + 0.6)
    assert source.slots.request(HOG, 1) is Answer.ALLOW
    source.slots.done(HOG, 1)
    source.slots.request(HONEST, 0)
    source.slots.interested(NEIGHBOUR, later=True)
    source.standing.prove(NEIGHBOUR)
    assert source.slots.request(HOG, 2) is Answer.REJECT
    assert source.slots.request(HOG, 2, suggested=True) is Answer.REJECT


def test_the_slots_of_readers_that_come_last_do_not_count() -> None:
    source = Source()
    source.slots.request(HOG, 0)
    source.slots.request(OTHER_HOG, 0)
    source.passes(WINDOW_S + 0.6)
    assert source.slots.request(HOG, 1) is source.slots.request(OTHER_HOG, 1) is Answer.ALLOW
    source.standing.prove(NEIGHBOUR)
    assert source.slots.request(NEIGHBOUR, 0) is source.slots.request(HONEST, 0) is Answer.ALLOW


def test_the_backoff_doubles_up_to_a_bound_and_a_chunk_ends_it() -> None:
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


def test_a_new_id_shares_the_record_of_its_address_until_it_has_read_a_chunk() -> None:
    source = Source()
    source.standing.took_back(HOG)
    assert source.standing.last(NEIGHBOUR) and not source.standing.last(HONEST)
    assert source.standing.comes_last(Reader("bad", "new"))
    source.sent[str(NEIGHBOUR)] += MIB
    source.passes(STEP_S)
    assert not source.standing.last(NEIGHBOUR)
    assert source.standing.last(HOG)


def test_a_reader_that_is_done_without_a_byte_counts_as_stopped() -> None:
    source = Source()
    source.slots.request(HOG, 0)
    source.passes(WINDOW_S - 0.5)
    source.slots.done(HOG, 0)
    assert source.standing.last(HOG)
    source.slots.request(HONEST, 0)
    source.passes(WINDOW_S - 0.5)
    source.slots.gone(HONEST)
    assert source.standing.last(HONEST)


def test_a_reader_with_several_streams_has_one_slot_while_others_wait() -> None:
    source = Source()
    source.standing.joined(OTHER_HOG, Reader("bad", str(HOG)))
    source.slots.interested(HONEST, later=True)
    assert source.slots.request(HOG, 0) is Answer.ALLOW
    assert source.slots.request(OTHER_HOG, 1) is Answer.REJECT
    assert source.slots.request(HOG, 2) is Answer.REJECT
    source.slots.gone(HONEST)
    assert source.slots.request(OTHER_HOG, 1) is Answer.ALLOW, "no reader waits"
    assert source.slots.request(NEIGHBOUR, 0) is Answer.ALLOW, "both slots belong to one reader"


def test_unchoked_readers_that_do_not_answer_keep_others_waiting_briefly() -> None:
    source = Source(width=1)
    for number in range(10, 30):
        source.slots.interested(number, later=True)
    source.slots.interested(HONEST, later=True)
    source.passes(10)
    assert Unchoke(HONEST) in source.answers


def test_a_reader_that_loses_several_slots_in_a_row_is_banned_for_a_while() -> None:
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


def test_suggestions_avoid_a_reader_that_does_not_take_them_and_its_address() -> None:
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


def test_readers_that_take_no_suggestions_do_not_raise_the_usual_time() -> None:
    standing = Standing()
    seeder = Seeder(100, standing=standing)
    for number in range(10):
        seeder.joined(number, 0, 0.0)
    now_s = 0.0
    while not seeder.all_out and now_s < 60:  # only the last reader takes suggested chunks
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
    """The others send any messages, leave and return; only one reads the chunks it is allowed."""
    source = Source(width=width)
    hogs = range(10, 10 + data.draw(st.integers(1, 5)))
    honest = 3
    for number in (*hogs, honest):
        address = "bad" if same_address or number != honest else "good"
        source.standing.joined(number, Reader(address, str(number)))
    if same_address:  # it has read freely
        source.sent[str(honest)] += MIB
    read = 0
    choices = data.draw(st.lists(st.integers(0, 5), min_size=20, max_size=20))
    for step in range(600):
        for number in hogs:
            match choices[(step + number) % 20]:
                case 0:
                    source.slots.interested(number)
                case 1:
                    source.slots.not_interested(number)
                case 2:
                    source.slots.done(number, step % 7)
                case 3:
                    source.slots.gone(number)
                    source.standing.joined(number, Reader("bad", f"{number}.{step}"))
                case _:
                    source.slots.request(number, step % 7)
        if source.slots.request(honest, 0) is Answer.ALLOW:
            source.sent[str(honest)] += MIB
            source.passes(STEP_S)
            source.slots.done(honest, 0)
            read += 1
        else:
            source.slots.interested(honest)
        source.passes(STEP_S)
    assert read >= 10
