"""The giving side: who reads now, and what an origin hands out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm_slots import Answer, Gate, Go, Room
from mx.core.swarm_source import LATE_S, OFFERS, Offer, Seeder

READERS = range(6)


class GateBooks:
    """What each reader was told, by a gate; each reader is at an address of its own."""

    def __init__(self, width: int) -> None:
        self.gate = Gate(width=width)
        self.width = width
        self.reading: set[tuple[int, int]] = set()
        self.waiting: list[tuple[int, int]] = []  # promised, in their order
        self.hungry: list[int] = []  # without having been told of room since
        self.told: set[int] = set()  # of room, without an answer

    def counted(self) -> int:
        """The slots that count for a reader that has none."""
        return len({reader for reader, _ in self.reading})

    def contested(self, reader: int) -> bool:
        waiting = (other for other, _ in self.waiting)
        return any(other != reader for other in (*self.hungry, *self.told, *waiting))

    def has_room(self, reader: int) -> bool:
        if not self.contested(reader) and len(self.reading) < self.width:
            return True
        return all(r != reader for r, _ in self.reading) and self.counted() < self.width

    def take(self, answers: list[Go | Room]) -> None:
        for each in answers:
            match each:
                case Go(reader, chunk):
                    assert self.has_room(reader)
                    earlier = self.waiting[: self.waiting.index((reader, chunk))]
                    assert not any(self.has_room(r) for r, _ in earlier), "out of turn"
                    self.waiting.remove((reader, chunk))
                    self.reading.add((reader, chunk))
                case Room(reader):
                    assert not any(self.has_room(r) for r, _ in self.waiting), "promises first"
                    earlier_ones = self.hungry[: self.hungry.index(reader)]
                    assert not any(self.has_room(r) for r in earlier_ones), "out of turn"
                    self.hungry.remove(reader)
                    self.told.add(reader)
        assert not any(self.has_room(r) for r, _ in self.waiting), "there is room, and one waits"
        self.check()

    def check(self) -> None:
        assert self.gate.reading == len(self.reading) < 2 * self.width
        assert self.counted() <= self.width

    def asks(self, reader: int, chunk: int, *, promised: bool) -> None:
        self.told.discard(reader)
        has_room = self.has_room(reader)
        answer = self.gate.ask(reader, chunk, promised=promised)
        if (reader, chunk) in self.reading:
            assert answer is Answer.GO
        elif (reader, chunk) in self.waiting:
            assert answer is Answer.WAIT
        elif has_room:
            assert answer is Answer.GO
            self.reading.add((reader, chunk))
        elif promised:
            assert answer is Answer.WAIT
            self.waiting.append((reader, chunk))
        else:
            assert answer is Answer.BUSY
        self.check()

    def wants(self, reader: int, *, later: bool) -> None:
        self.told.discard(reader)
        if reader not in self.hungry:
            self.hungry.append(reader)
        answers = self.gate.want(reader, later=later)
        assert not (later and answers)
        if not later:
            self.take(answers)

    def passes(self, reader: int) -> None:
        self.told.discard(reader)
        self.take(self.gate.passed(reader))

    def ends(self, reader: int, chunk: int) -> None:
        self.told.clear()
        self.reading.discard((reader, chunk))
        if (reader, chunk) in self.waiting:
            self.waiting.remove((reader, chunk))
        self.take(self.gate.done(reader, chunk))

    def goes(self, reader: int) -> None:
        self.reading = {ask for ask in self.reading if ask[0] != reader}
        self.waiting = [ask for ask in self.waiting if ask[0] != reader]
        self.hungry = [each for each in self.hungry if each != reader]
        self.told.discard(reader)
        self.take(self.gate.gone(reader))


@given(st.data(), st.integers(1, 3))
def test_the_gate_keeps_its_width_and_its_order(data: st.DataObject, width: int) -> None:
    books = GateBooks(width)
    for _ in range(data.draw(st.integers(0, 60))):
        reader, chunk = data.draw(st.sampled_from(READERS)), data.draw(st.integers(0, 3))
        reads = bool(books.reading) and data.draw(st.booleans())
        if reads:
            reader, chunk = data.draw(st.sampled_from(sorted(books.reading)))
        match data.draw(st.integers(0, 6)):
            case 0 | 1:
                books.asks(reader, chunk, promised=data.draw(st.booleans()))
            case 2 | 3:
                books.ends(reader, chunk)
            case 4:
                books.goes(reader)
            case 5:
                books.wants(reader, later=data.draw(st.booleans()))
            case _:
                books.passes(reader)
    # All that read now end, and nobody answers to being told of room: nobody is forgotten.
    while books.reading:
        books.ends(*sorted(books.reading)[0])
    assert not books.waiting
    for _ in range(len(READERS)):
        books.ends(99, 0)
    assert not books.hungry


def test_a_reader_that_is_told_of_room_and_stops_holds_up_nobody() -> None:
    gate = Gate(width=1)
    assert gate.ask(0, 0) is Answer.GO
    for reader in range(1, 20):
        assert gate.ask(reader, 0) is Answer.BUSY
        assert gate.want(reader) == []
    told = [each.reader for each in gate.done(0, 0)]
    assert told == list(range(1, 1 + len(told)))
    assert gate.next() == []  # as many as that are expected to answer
    assert gate.ask(99, 0) is Answer.GO
    assert gate.done(99, 0)[0] == Room(told[-1] + 1)


def test_one_that_passes_makes_room_for_the_next() -> None:
    gate = Gate(width=1)
    gate.ask(0, 0)
    for reader in range(1, 20):
        gate.want(reader)
    told = gate.done(0, 0)
    assert gate.passed(1) == [Room(len(told) + 1)]


def test_one_that_wants_room_where_there_is_some_is_told_at_once() -> None:
    gate = Gate()
    assert gate.want(3) == [Room(3)]


def test_one_that_is_to_be_told_later_is_told_when_a_read_has_ended() -> None:
    gate = Gate()
    gate.ask(1, 0)
    assert gate.want(3, later=True) == []
    assert gate.done(1, 0) == [Room(3)]


# -- the seeder ---------------------------------------------------------------------------------


class SeederBooks:
    def __init__(self, chunks: int, offers: int = OFFERS) -> None:
        self.seeder = Seeder(chunks, offers=offers)
        self.chunks = chunks
        self.offers = offers
        self.now_s = 0.0
        self.open: dict[int, set[int]] = {}  # reader -> chunks
        self.has: dict[int, int] = {}  # reader -> chunks, as far as the origin can know
        self.given: list[Offer] = []

    def take(self, offers: list[Offer]) -> None:
        for reader, chunk in offers:
            assert reader in self.open, "offered to one who is gone"
            known = self.known()
            assert not known >> chunk & 1, "somebody has it, or was offered it"
            assert chunk == (~known & (known + 1)).bit_length() - 1, "not the lowest"
            self.open[reader].add(chunk)
            self.given.append(Offer(reader, chunk))
        assert sum(map(len, self.open.values())) <= self.offers
        for reader, chunks in self.open.items():
            for chunk in range(self.chunks):
                assert self.seeder.promised(reader, chunk) == (chunk in chunks)
        if self.open:
            assert self.seeder.all_out == (self.known() == (1 << self.chunks) - 1)
            full = sum(map(len, self.open.values())) == self.offers
            assert full or self.seeder.all_out, "it could offer more"

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
        """Every reader takes what it is offered: soon everything is out."""
        for _ in range(self.chunks + self.offers):
            for reader, chunk in [(r, c) for r, chunks in self.open.items() for c in chunks]:
                self.takes(reader, chunk)
        if self.open:
            assert self.known() == (1 << self.chunks) - 1
            assert self.seeder.all_out


@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_the_seeder_hands_out_what_nobody_has(
    data: st.DataObject, chunks: int, offers: int
) -> None:
    books = SeederBooks(chunks, offers)
    some = st.integers(0, (1 << chunks) - 1)
    for _ in range(data.draw(st.integers(0, 50))):
        reader, chunk = data.draw(st.sampled_from(READERS)), data.draw(st.integers(0, chunks - 1))
        offered = sorted((r, c) for r, cs in books.open.items() for c in cs)
        answers = data.draw(st.booleans())
        if offered and answers:
            reader, chunk = data.draw(st.sampled_from(offered))
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
def test_each_chunk_goes_out_once(chunks: int, readers: int, rng: random.Random) -> None:
    books = SeederBooks(chunks)
    for reader in range(readers):
        books.joins(reader, 0)
    while offered := [(r, c) for r, cs in books.open.items() for c in cs]:
        books.now_s += 0.1
        books.takes(*rng.choice(offered))
    assert sorted(offer.chunk for offer in books.given) == list(range(chunks))


def test_readers_take_turns() -> None:
    books = SeederBooks(30, offers=1)
    for reader in range(5):
        books.joins(reader, 0)
    books.finish()
    assert [offer.reader for offer in books.given] == [0, 1, 2, 3, 4] * 6


def test_what_a_dead_reader_alone_had_goes_out_again() -> None:
    books = SeederBooks(4, offers=1)
    books.joins(0, 0)
    books.joins(1, 0)
    for _ in range(4):
        ((reader, chunk),) = [(r, c) for r, cs in books.open.items() for c in cs]
        books.takes(reader, chunk)
    assert [offer.reader for offer in books.given] == [0, 1, 0, 1]
    books.announces(1, 0b0101)  # it had one of the other's meanwhile
    books.goes(0)
    assert books.given[4:] == []
    books.goes(1)
    books.joins(2, 0b0001)
    books.finish()
    assert [offer.chunk for offer in books.given[4:]] == [1, 2, 3]


def test_a_reader_that_comes_back_frees_what_it_was_offered() -> None:
    seeder = Seeder(4, offers=1)
    assert seeder.joined(0, 0, 0.0) == [Offer(0, 0)]
    assert seeder.joined(0, 0b0001, 1.0) == [Offer(0, 1)]


def test_a_late_offer_goes_to_another() -> None:
    seeder = Seeder(2, offers=1)
    assert seeder.joined(0, 0, 0.0) == [Offer(0, 0)]
    assert seeder.joined(1, 0, 0.0) == []
    assert seeder.tick(LATE_S) == []
    assert seeder.tick(5 * LATE_S) == [Offer(1, 0)]
    assert seeder.forced == 1
    assert not seeder.promised(0, 0)
    # The first one takes it after all, late as it is: that does no harm.
    assert seeder.done(0, 0, 6 * LATE_S) == []
    assert seeder.done(1, 0, 6 * LATE_S) == [Offer(1, 1)]


def test_what_one_failed_to_read_goes_to_another() -> None:
    seeder = Seeder(4, offers=2)
    assert seeder.joined(0, 0, 0.0) == [Offer(0, 0), Offer(0, 1)]
    seeder.joined(1, 0, 0.0)
    assert seeder.done(0, 0, 1.0) == [Offer(1, 2)]
    assert seeder.failed(0, 1, 1.0) == [Offer(1, 1)]


def test_a_lone_reader_is_given_time() -> None:
    seeder = Seeder(2, offers=1)
    seeder.joined(0, 0, 0.0)
    assert seeder.tick(100.0) == []
    assert seeder.promised(0, 0)


def test_a_slow_reader_gets_no_offers_while_there_are_others() -> None:
    seeder = Seeder(40, offers=1)
    now_s = 0.0
    offers = seeder.joined(0, 0, now_s)
    for reader in (1, 2):
        offers += seeder.joined(reader, 0, now_s)
    asked_slow = 0
    for _ in range(39):
        ((reader, chunk),) = offers
        asked_slow += reader == 2
        now_s += 0.9 if reader == 2 else 0.1
        offers = seeder.done(reader, chunk, now_s)
    assert asked_slow == 1


def test_before_all_is_out_only_what_was_offered_may_be_asked_for() -> None:
    seeder = Seeder(OFFERS + 2)
    offers = seeder.joined(0, 0, 0.0)
    seeder.joined(1, 0, 0.0)
    assert [offer.chunk for offer in offers] == list(range(OFFERS))
    assert seeder.may_ask(0, 0)
    assert not seeder.may_ask(1, 0)
    seeder.done(0, 0, 1.0)
    assert not seeder.may_ask(1, 0)
    seeder.done(0, 1, 1.0)
    assert seeder.may_ask(1, 0)
    assert seeder.all_out
