"""The slots of a source, and the chunks that an origin suggests."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm.origin import LATE_S, SUGGESTIONS, Seeder, Suggest
from mx.core.swarm.slots import Allow, Answer, Slots, Unchoke

READERS = range(6)


class SlotBooks:
    """A source's slots and the answers it gave. Each reader has its own address."""

    def __init__(self, width: int) -> None:
        self.slots = Slots(width=width)
        self.width = width
        self.reading: set[tuple[int, int]] = set()
        self.waiting: list[tuple[int, int]] = []  # for suggested chunks, in order
        self.interested: list[int] = []  # not unchoked since
        self.unchoked: set[int] = set()  # without an answer

    def counted(self) -> int:
        """Return the number of slots that count against a reader without one."""
        return len({reader for reader, _ in self.reading})

    def contested(self, reader: int) -> bool:
        waiting = (other for other, _ in self.waiting)
        return any(other != reader for other in (*self.interested, *self.unchoked, *waiting))

    def may_have_slot(self, reader: int) -> bool:
        if not self.contested(reader) and len(self.reading) < self.width:
            return True
        return all(r != reader for r, _ in self.reading) and self.counted() < self.width

    def take(self, answers: list[Allow | Unchoke]) -> None:
        for each in answers:
            match each:
                case Allow(reader, chunk):
                    assert self.may_have_slot(reader)
                    earlier = self.waiting[: self.waiting.index((reader, chunk))]
                    assert not any(self.may_have_slot(r) for r, _ in earlier), "out of turn"
                    self.waiting.remove((reader, chunk))
                    self.reading.add((reader, chunk))
                case Unchoke(reader):
                    assert not any(self.may_have_slot(r) for r, _ in self.waiting), (
                        "suggested chunks first"
                    )
                    earlier_ones = self.interested[: self.interested.index(reader)]
                    assert not any(self.may_have_slot(r) for r in earlier_ones), "out of turn"
                    self.interested.remove(reader)
                    self.unchoked.add(reader)
        assert not any(self.may_have_slot(r) for r, _ in self.waiting), (
            "a slot is free, and a request waits"
        )
        self.check()

    def check(self) -> None:
        assert self.slots.reading == len(self.reading) < 2 * self.width
        assert self.counted() <= self.width

    def requests(self, reader: int, chunk: int, *, suggested: bool) -> None:
        self.unchoked.discard(reader)
        may_have_slot = self.may_have_slot(reader)
        answer = self.slots.request(reader, chunk, suggested=suggested)
        if (reader, chunk) in self.reading:
            assert answer is Answer.ALLOW
        elif (reader, chunk) in self.waiting:
            assert answer is Answer.WAIT
        elif may_have_slot:
            assert answer is Answer.ALLOW
            self.reading.add((reader, chunk))
        elif suggested:
            assert answer is Answer.WAIT
            self.waiting.append((reader, chunk))
        else:
            assert answer is Answer.REJECT
        self.check()

    def wants(self, reader: int, *, later: bool) -> None:
        self.unchoked.discard(reader)
        if reader not in self.interested:
            self.interested.append(reader)
        answers = self.slots.interested(reader, later=later)
        assert not (later and answers)
        if not later:
            self.take(answers)

    def passes(self, reader: int) -> None:
        self.unchoked.discard(reader)
        self.take(self.slots.not_interested(reader))

    def ends(self, reader: int, chunk: int) -> None:
        self.unchoked.clear()
        self.reading.discard((reader, chunk))
        if (reader, chunk) in self.waiting:
            self.waiting.remove((reader, chunk))
        self.take(self.slots.done(reader, chunk))

    def goes(self, reader: int) -> None:
        self.reading = {request for request in self.reading if request[0] != reader}
        self.waiting = [request for request in self.waiting if request[0] != reader]
        self.interested = [each for each in self.interested if each != reader]
        self.unchoked.discard(reader)
        self.take(self.slots.gone(reader))


@given(st.data(), st.integers(1, 3))
def test_slots_keep_their_number_and_their_order(data: st.DataObject, width: int) -> None:
    books = SlotBooks(width)
    for _ in range(data.draw(st.integers(0, 60))):
        reader, chunk = data.draw(st.sampled_from(READERS)), data.draw(st.integers(0, 3))
        reads = bool(books.reading) and data.draw(st.booleans())
        if reads:
            reader, chunk = data.draw(st.sampled_from(sorted(books.reading)))
        match data.draw(st.integers(0, 6)):
            case 0 | 1:
                books.requests(reader, chunk, suggested=data.draw(st.booleans()))
            case 2 | 3:
                books.ends(reader, chunk)
            case 4:
                books.goes(reader)
            case 5:
                books.wants(reader, later=data.draw(st.booleans()))
            case _:
                books.passes(reader)
    # All reads end, and no unchoked reader answers: all of them are unchoked in the end.
    while books.reading:
        books.ends(*sorted(books.reading)[0])
    assert not books.waiting
    for _ in range(len(READERS)):
        books.ends(99, 0)
    assert not books.interested


def test_unchoked_readers_that_stop_do_not_keep_others_waiting() -> None:
    slots = Slots(width=1)
    assert slots.request(0, 0) is Answer.ALLOW
    for reader in range(1, 20):
        assert slots.request(reader, 0) is Answer.REJECT
        assert slots.interested(reader) == []
    unchoked = [each.reader for each in slots.done(0, 0)]
    assert unchoked == list(range(1, 1 + len(unchoked)))
    assert slots.next() == []  # so many answers are outstanding
    assert slots.request(99, 0) is Answer.ALLOW
    assert slots.done(99, 0)[0] == Unchoke(unchoked[-1] + 1)


def test_when_a_reader_is_not_interested_the_next_is_unchoked() -> None:
    slots = Slots(width=1)
    slots.request(0, 0)
    for reader in range(1, 20):
        slots.interested(reader)
    unchoked = slots.done(0, 0)
    assert slots.not_interested(1) == [Unchoke(len(unchoked) + 1)]


def test_an_interested_reader_is_unchoked_at_once_if_a_slot_is_free() -> None:
    slots = Slots()
    assert slots.interested(3) == [Unchoke(3)]


def test_a_reader_interested_later_is_unchoked_when_a_read_has_ended() -> None:
    slots = Slots()
    slots.request(1, 0)
    assert slots.interested(3, later=True) == []
    assert slots.done(1, 0) == [Unchoke(3)]


# -- the seeder ---------------------------------------------------------------------------------


class SeederBooks:
    def __init__(self, chunks: int, suggestions: int = SUGGESTIONS) -> None:
        self.seeder = Seeder(chunks, suggestions=suggestions)
        self.chunks = chunks
        self.suggestions = suggestions
        self.now_s = 0.0
        self.open: dict[int, set[int]] = {}  # reader -> chunks
        self.has: dict[int, int] = {}  # reader -> chunks, as far as the origin can know
        self.given: list[Suggest] = []

    def take(self, suggestions: list[Suggest]) -> None:
        for reader, chunk in suggestions:
            assert reader in self.open, "suggested to a reader that is gone"
            known = self.known()
            assert not known >> chunk & 1, "a reader has it, or it was suggested"
            assert chunk == (~known & (known + 1)).bit_length() - 1, "not the lowest"
            self.open[reader].add(chunk)
            self.given.append(Suggest(reader, chunk))
        assert sum(map(len, self.open.values())) <= self.suggestions
        for reader, chunks in self.open.items():
            for chunk in range(self.chunks):
                assert self.seeder.suggested(reader, chunk) == (chunk in chunks)
        if self.open:
            assert self.seeder.all_out == (self.known() == (1 << self.chunks) - 1)
            full = sum(map(len, self.open.values())) == self.suggestions
            assert full or self.seeder.all_out, "it could suggest more"

    def known(self) -> int:
        known = 0
        for reader, has in self.has.items():
            known |= has
            for chunk in self.open[reader]:
                known |= 1 << chunk
        return known

    def joins(self, reader: int, have: int) -> None:
        self.open[reader], self.has[reader] = set(), have
        self.take(self.seeder.joined(reader, have, self.now_s))

    def goes(self, reader: int) -> None:
        self.open.pop(reader, None)
        self.has.pop(reader, None)
        self.take(self.seeder.gone(reader, self.now_s))

    def announces(self, reader: int, chunks: int) -> None:
        if reader in self.has:
            self.has[reader] |= chunks
        self.seeder.announced(reader, chunks)

    def takes(self, reader: int, chunk: int) -> None:
        if reader in self.has:
            self.has[reader] |= 1 << chunk
            self.open[reader].discard(chunk)
        self.take(self.seeder.done(reader, chunk, self.now_s))

    def declines(self, reader: int, chunk: int) -> None:
        if chunk in self.open.get(reader, ()):
            self.has[reader] |= 1 << chunk
            self.open[reader].discard(chunk)
        self.take(self.seeder.declined(reader, chunk, self.now_s))

    def fails(self, reader: int, chunk: int) -> None:
        self.open.get(reader, set()).discard(chunk)
        self.take(self.seeder.failed(reader, chunk, self.now_s))

    def finish(self) -> None:
        """Every reader takes the suggested chunks: soon all are out."""
        for _ in range(self.chunks + self.suggestions):
            for reader, chunk in [(r, c) for r, chunks in self.open.items() for c in chunks]:
                self.takes(reader, chunk)
        if self.open:
            assert self.known() == (1 << self.chunks) - 1
            assert self.seeder.all_out


@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_the_seeder_suggests_chunks_that_no_reader_has(
    data: st.DataObject, chunks: int, suggestions: int
) -> None:
    books = SeederBooks(chunks, suggestions)
    some = st.integers(0, (1 << chunks) - 1)
    for _ in range(data.draw(st.integers(0, 50))):
        reader, chunk = data.draw(st.sampled_from(READERS)), data.draw(st.integers(0, chunks - 1))
        suggested = sorted((r, c) for r, cs in books.open.items() for c in cs)
        answers = data.draw(st.booleans())
        if suggested and answers:
            reader, chunk = data.draw(st.sampled_from(suggested))
        books.now_s += data.draw(st.floats(0, 0.5))
        match data.draw(st.integers(0, 7)):
            case 0 | 1 if reader not in books.open:
                books.joins(reader, data.draw(some))
            case 2:
                books.goes(reader)
            case 3:
                books.announces(reader, data.draw(some))
            case 4 | 5:
                books.takes(reader, chunk)
            case 6:
                books.declines(reader, chunk)
            case _:
                books.fails(reader, chunk)
    books.finish()


@given(st.integers(1, 30), st.integers(1, 5), st.randoms(use_true_random=False))
def test_each_chunk_is_sent_once(chunks: int, readers: int, rng: random.Random) -> None:
    books = SeederBooks(chunks)
    for reader in range(readers):
        books.joins(reader, 0)
    while suggested := [(r, c) for r, cs in books.open.items() for c in cs]:
        books.now_s += 0.1
        books.takes(*rng.choice(suggested))
    assert sorted(suggestion.chunk for suggestion in books.given) == list(range(chunks))


def test_readers_take_turns() -> None:
    books = SeederBooks(30, suggestions=1)
    for reader in range(5):
        books.joins(reader, 0)
    books.finish()
    assert [suggestion.reader for suggestion in books.given] == [0, 1, 2, 3, 4] * 6


def test_chunks_that_only_a_lost_reader_had_are_suggested_again() -> None:
    books = SeederBooks(4, suggestions=1)
    books.joins(0, 0)
    books.joins(1, 0)
    for _ in range(4):
        ((reader, chunk),) = [(r, c) for r, cs in books.open.items() for c in cs]
        books.takes(reader, chunk)
    assert [suggestion.reader for suggestion in books.given] == [0, 1, 0, 1]
    books.announces(1, 0b0101)  # it has read one from the other
    books.goes(0)
    assert books.given[4:] == []
    books.goes(1)
    books.joins(2, 0b0001)
    books.finish()
    assert [suggestion.chunk for suggestion in books.given[4:]] == [1, 2, 3]


def test_a_reader_that_returns_frees_its_suggestions() -> None:
    seeder = Seeder(4, suggestions=1)
    assert seeder.joined(0, 0, 0.0) == [Suggest(0, 0)]
    assert seeder.joined(0, 0b0001, 1.0) == [Suggest(0, 1)]


def test_a_late_chunk_is_suggested_to_another_reader() -> None:
    seeder = Seeder(2, suggestions=1)
    assert seeder.joined(0, 0, 0.0) == [Suggest(0, 0)]
    assert seeder.joined(1, 0, 0.0) == []
    assert seeder.tick(LATE_S) == []
    assert seeder.tick(5 * LATE_S) == [Suggest(1, 0)]
    assert seeder.forced == 1
    assert not seeder.suggested(0, 0)
    # The first reader takes it late: that does no harm.
    assert seeder.done(0, 0, 6 * LATE_S) == []
    assert seeder.done(1, 0, 6 * LATE_S) == [Suggest(1, 1)]


def test_a_chunk_that_failed_to_be_read_is_suggested_to_another_reader() -> None:
    seeder = Seeder(4, suggestions=2)
    assert seeder.joined(0, 0, 0.0) == [Suggest(0, 0), Suggest(0, 1)]
    seeder.joined(1, 0, 0.0)
    assert seeder.done(0, 0, 1.0) == [Suggest(1, 2)]
    assert seeder.failed(0, 1, 1.0) == [Suggest(1, 1)]


def test_a_single_reader_is_never_late() -> None:
    seeder = Seeder(2, suggestions=1)
    seeder.joined(0, 0, 0.0)
    assert seeder.tick(100.0) == []
    assert seeder.suggested(0, 0)


def test_a_slow_reader_gets_no_suggestions_while_there_are_others() -> None:
    seeder = Seeder(40, suggestions=1)
    now_s = 0.0
    suggestions = seeder.joined(0, 0, now_s)
    for reader in (1, 2):
        suggestions += seeder.joined(reader, 0, now_s)
    requested_slow = 0
    for _ in range(39):
        ((reader, chunk),) = suggestions
        requested_slow += reader == 2
        now_s += 0.9 if reader == 2 else 0.1
        suggestions = seeder.done(reader, chunk, now_s)
    assert requested_slow == 1


def test_only_suggested_chunks_may_be_requested_before_all_are_out() -> None:
    seeder = Seeder(SUGGESTIONS + 2)
    suggestions = seeder.joined(0, 0, 0.0)
    seeder.joined(1, 0, 0.0)
    assert [suggestion.chunk for suggestion in suggestions] == list(range(SUGGESTIONS))
    assert seeder.may_request(0, 0)
    assert not seeder.may_request(1, 0)
    seeder.done(0, 0, 1.0)
    assert not seeder.may_request(1, 0)
    seeder.done(0, 1, 1.0)
    assert seeder.may_request(1, 0)
    assert seeder.all_out
