"""A pool's lists and its readers' mirrors, with delays between them: no slot is free while a
reader reads it, none is lost or doubled, and all know the same once all is quiet."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import PeerProtocolError
from mx.kv.index import KvChange, KvEntry, KvIndex
from mx.kv.mirror import KvMirror

SLOTS, DIGEST = 6, 4


class Reading:
    """One reader: what is on its way to it and back, and what it reads."""

    def __init__(self) -> None:
        self.mirror = KvMirror(SLOTS, DIGEST)
        self.events: deque[tuple[list[KvChange], int]] = deque()
        self.confirmations: deque[int] = deque()
        #: What it reads: the block, and what it began with.
        self.reads: list[tuple[bytes, KvEntry]] = []


class World:
    """A pool, its engine, which takes slots, writes and publishes, and readers that come and go."""

    def __init__(self, seed: int) -> None:
        self.index: KvIndex[Reading] = KvIndex(free=list(range(SLOTS)))
        self.readers: list[Reading] = []
        self.taken: list[int] = []
        #: What each slot holds: changes whenever the engine writes it.
        self.content = [b"-" * DIGEST] * SLOTS
        self.before: dict[bytes, bytes] = {}  # what was before each block when it was listed
        self.numbers = itertools.count(1)
        self.random = random.Random(seed)

    def step(self) -> None:
        """Do one thing, the engine or a reader, by chance."""
        own = (self.take, self.publish, self.withdraw, self.evict, self.use, self.join)
        of_readers = (self.tell, self.hear, self.begin, self.end, self.confirm, self.arrive)
        rare = (self.publish_again, self.leave, self.lie)
        kind = self.random.random()
        if not self.readers or kind < 0.4:
            self.random.choice(own)()
        elif kind < 0.95:
            self.random.choice(of_readers)(self.random.choice(self.readers))
        else:
            self.random.choice(rare)(self.random.choice(self.readers))
        self.check()

    def block(self) -> bytes:
        return bytes([self.random.randrange(10)])

    # -- the engine

    def take(self) -> None:
        if self.index.free:
            slot = self.index.free.pop()
            self.content[slot] = next(self.numbers).to_bytes(DIGEST, "big")  # it is written
            self.taken.append(slot)

    def publish(self) -> None:
        if self.taken:
            slot = self.taken.pop(self.random.randrange(len(self.taken)))
            block, before = self.block(), self.random.choice([b"", self.block()])
            if self.index.publish(block, KvEntry(slot, self.content[slot]), before):
                self.before[block] = before
                assert list(self.index.listed)[-1] == block

    def publish_again(self, _: Reading) -> None:
        for block, entry in list(self.index.listed.items())[:1]:
            assert not self.index.publish(block, entry)
            assert self.index.listed[block] == entry

    def withdraw(self) -> None:
        block = self.block()
        entry = self.index.listed.get(block)
        assert self.index.withdraw(block) == (entry.slot if entry else None)

    def evict(self) -> None:
        count, order = self.random.randint(-1, 3), list(self.index.listed)
        assert self.index.oldest(count) == order[: max(0, count)]
        for block in self.index.oldest(count):
            self.index.withdraw(block)

    def use(self) -> None:
        block, others = self.block(), list(self.index.listed)
        self.index.used(block)
        prompt: list[bytes] = []
        while block in others:  # also of blocks that come before each other
            others.remove(block)
            prompt.append(block)
            block = self.before[block]
        assert list(self.index.listed) == others + prompt  # its beginning is the last to go

    # -- readers

    def join(self) -> None:
        if len(self.readers) < 3:
            self.readers.append(Reading())
            self.index.join(self.readers[-1])

    def leave(self, reader: Reading) -> None:
        """Its stream has ended: it reads no more, whatever it believes."""
        self.readers.remove(reader)
        self.index.leave(reader)
        self.index.leave(reader)

    def tell(self, reader: Reading) -> None:
        most = self.random.randint(1, 3)
        changes, number = self.index.changes(reader, most)
        assert len(changes) <= most
        if changes:
            reader.events.append((changes, number))

    def hear(self, reader: Reading) -> None:
        if reader.events:
            reader.mirror.hear(*reader.events.popleft())

    def begin(self, reader: Reading) -> None:
        if reader.mirror.entries:
            block = self.random.choice(sorted(reader.mirror.entries))
            entry = reader.mirror.begin(block)
            assert entry is not None
            reader.reads.append((block, entry))

    def end(self, reader: Reading) -> None:
        if reader.reads:
            _, entry = reader.reads.pop(self.random.randrange(len(reader.reads)))
            reader.mirror.end(entry.slot)

    def confirm(self, reader: Reading) -> None:
        reader.confirmations.append(reader.mirror.confirmed)

    def arrive(self, reader: Reading) -> None:
        if reader.confirmations:
            # It never confirms beyond what it was told.
            assert self.index.confirm(reader, reader.confirmations.popleft())

    def lie(self, reader: Reading) -> None:
        """What was not told can't be confirmed, and to try changes nothing."""
        free, told = list(self.index.free), self.index.changes(reader, 0)[1]
        assert not self.index.confirm(reader, told + self.random.randint(1, 9))
        assert self.index.free == free

    # -- what always holds

    def check(self) -> None:
        listed = [each.slot for each in self.index.listed.values()]
        here = [*listed, *self.index.free, *self.taken]
        assert len(here) == len(set(here))  # each slot is once somewhere
        assert len(here) + self.index.leaving == SLOTS
        for reader in self.readers:
            assert reader.mirror.confirmed >= 0  # what a message can carry
            # What is read, or could be from now on, is not written.
            read = [entry for _, entry in reader.reads]
            for entry in (*read, *reader.mirror.entries.values()):
                assert entry.slot not in self.index.free
                assert self.content[entry.slot] == entry.digests
        waiting = set(self.index.waits_for())
        assert waiting <= set(self.readers)
        assert bool(waiting) == bool(self.index.leaving)

    def end_quietly(self) -> None:
        """Once all is quiet, mirrors are the index, and no slot waits."""
        for reader in self.readers:
            while self.index.has_changes(reader):
                reader.events.append(self.index.changes(reader, 2))
            for event in reader.events:
                reader.mirror.hear(*event)
            assert reader.mirror.entries == self.index.listed
            for block, entry in reader.reads:
                current = self.index.listed.get(block)
                assert reader.mirror.lists_still(block, entry) == (current == entry)
                reader.mirror.end(entry.slot)
            reader.reads.clear()
            assert not reader.mirror.reading
            assert not reader.mirror.ignored
            assert self.index.confirm(reader, reader.mirror.confirmed)
        self.check()
        assert not self.index.leaving
        for block in list(self.index.listed):
            self.index.withdraw(block)
        for reader in self.readers:
            self.index.leave(reader)
        assert len(self.index.free) + len(self.taken) == SLOTS


@given(st.integers(0, 2**32))
def test_no_slot_is_written_while_it_is_read(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step()
    world.end_quietly()


def entry(slot: int = 0, digests: bytes = b"d" * DIGEST) -> KvEntry:
    return KvEntry(slot, digests)


@pytest.mark.parametrize(
    "wrong", [entry(SLOTS), entry(-1), entry(2**32), entry(0, b""), entry(0, b"d" * 5)]
)
def test_a_mirror_refuses_what_has_no_place(wrong: KvEntry) -> None:
    mirror = KvMirror(SLOTS, DIGEST)
    with pytest.raises(PeerProtocolError):
        mirror.hear([KvChange(b"a", wrong)], 1)


def test_a_mirror_refuses_numbers_that_go_back() -> None:
    mirror = KvMirror(SLOTS, DIGEST)
    mirror.hear([KvChange(b"a", entry())], 5)
    mirror.hear([], 5)
    with pytest.raises(PeerProtocolError):
        mirror.hear([], 4)


def test_a_mirror_of_a_pool_that_floods_has_a_bound() -> None:
    mirror = KvMirror(SLOTS, DIGEST, most_blocks=10)
    for number in range(1000):
        mirror.hear([KvChange(number.to_bytes(4, "big"), entry())], number)
    assert len(mirror.entries) == 10
    assert mirror.ignored == 990
    mirror.hear([KvChange((0).to_bytes(4, "big"), None)], 1000)
    mirror.hear([KvChange(b"more", entry())], 1000)
    assert b"more" in mirror.entries


def test_a_pool_that_lists_and_withdraws_what_is_read_takes_no_memory() -> None:
    mirror = KvMirror(SLOTS, DIGEST)
    mirror.hear([KvChange(b"a", entry())], 0)
    assert mirror.begin(b"a") == entry()
    for number in range(1, 2000):
        mirror.hear([KvChange(b"a", None)], number)
        mirror.hear([KvChange(b"a", entry())], number)
    assert mirror.confirmed == 0
    assert len(mirror._left) <= SLOTS
    mirror.end(0)
    assert mirror.confirmed == 1999
    assert not mirror.reading


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, SLOTS - 1)), max_size=20))
def test_a_pool_that_lists_one_slot_twice_breaks_nothing(said: list[tuple[int, int]]) -> None:
    mirror = KvMirror(SLOTS, DIGEST)
    begun = []
    for number, (block, slot) in enumerate(said):
        mirror.hear([KvChange(bytes([block]), entry(slot))], number)
        begun.append(mirror.begin(bytes([block])))
    for each in begun:
        assert each is not None
        assert 0 <= mirror.confirmed <= len(said)
        mirror.end(each.slot)
    assert mirror.confirmed == max(0, len(said) - 1)
    assert not mirror.reading
    assert not mirror._left
