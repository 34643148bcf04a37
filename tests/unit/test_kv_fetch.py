"""A fetch of KV blocks ends once, with each block right or failed, however its reads end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import PeerLostError
from mx.kv import fetch as kv_fetch
from mx.kv.fetch import KvFetch, Taken
from mx.kv.index import KvEntry
from mx.kv.layout import KvMemory
from mx.kv.peer import KvLink, fitted
from mx.transport import Read

LAYERS, SLOTS, PART = 3, 6, 64


class Session:
    """Keeps the reads that it is given."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def read(self, reads: Sequence[Read]) -> None:
        self.reads += reads


class Giver:
    """Counts how often each block has ended, and which were wrong."""

    def __init__(self) -> None:
        self.ends: list[bytes] = []
        self.wrong: set[bytes] = set()

    def end(self, _: Any, block: bytes, entry: KvEntry, *, wrong: bool = False) -> None:
        del entry
        self.ends.append(block)
        self.wrong |= {block} if wrong else set()


def whole(seed: int) -> tuple[KvMemory, Any]:
    random = np.random.default_rng(seed)
    shape = (SLOTS, LAYERS * PART)
    kept = random.integers(0, 255, shape, np.uint8) if seed else np.zeros(shape, np.uint8)
    return KvMemory.whole(kept, [PART] * LAYERS, 0, 1), kept


@given(st.data(), st.integers(1, SLOTS), st.sampled_from([1, PART, 2 * PART, 5 * PART, 1 << 20]))
def test_blocks_are_right_or_failed(data: st.DataObject, count: int, read_bytes: int) -> None:
    theirs, source = whole(1)
    own, kept = whole(0)
    slots = data.draw(st.permutations(range(SLOTS)))[:count]
    giver, session = Giver(), Session()
    mine, copied = fitted(own, theirs.rows, range(1), "it")
    link = KvLink(session, theirs.rows, mine, copied, range(1), "test")
    names = [bytes([slot]) * 32 for slot in slots]
    taken = [
        Taken(name, number, giver, link, KvEntry(slot, theirs.digests(slot)))  # type: ignore[arg-type]
        for number, (name, slot) in enumerate(zip(names, slots, strict=True))
    ]
    spoilt = {
        (data.draw(st.sampled_from(slots)), data.draw(st.integers(0, LAYERS - 1)))
        for _ in range(data.draw(st.integers(0, 2)))
    }
    for slot, layer in spoilt:
        source[slot, layer * PART] ^= 1
    before = kv_fetch._READ_BYTES, kv_fetch._LEAST_READ_BYTES
    kv_fetch._READ_BYTES = kv_fetch._LEAST_READ_BYTES = read_bytes
    try:
        fetch = KvFetch(taken, [], LAYERS)
        fetch.begin(own)
    finally:
        kv_fetch._READ_BYTES, kv_fetch._LEAST_READ_BYTES = before
    assert sum(read.nbytes for read in session.reads) == count * LAYERS * PART
    came = 0
    for at in data.draw(st.permutations(range(len(session.reads)))):
        assert not fetch.is_done and not fetch.came()
        read = session.reads[at]
        begins = [piece.region_offset for piece in read.pieces]
        for piece, begin in zip(read.pieces, begins, strict=True):
            view, there = piece.view, theirs.views[0]
            assert isinstance(view, memoryview) and isinstance(there, memoryview)
            view[:] = there[begin : begin + len(view)]
        steps = data.draw(st.lists(st.integers(0, read.nbytes), max_size=3).map(sorted))
        for nbytes in steps:
            read.sink.landed(nbytes)
        if data.draw(st.booleans()):
            read.sink.done()
            came += 1
        else:
            read.sink.failed(PeerLostError("it ended"))
    assert fetch.wait(0) and fetch.is_done
    assert sorted(giver.ends) == sorted(names)  # once each
    # What was wrong is known unless it did not come.
    wrong = {names[list(slots).index(slot)] for slot, _ in spoilt}
    assert giver.wrong <= wrong and wrong <= fetch.failed
    if came == len(session.reads):
        assert giver.wrong == fetch.failed == wrong
    assert fetch.came().keys() == set(names) - fetch.failed
    for name, entry in fetch.came().items():
        assert entry.digests == own.digests(entry.slot)
        assert (kept[entry.slot] == source[slots[names.index(name)]]).all()


def test_a_pool_lets_go_of_its_blocks_while_another_one_is_slow() -> None:
    theirs, _ = whole(1)
    own, _ = whole(0)
    mine, copied = fitted(own, theirs.rows, range(1), "it")
    givers, sessions, taken = [Giver(), Giver()], [Session(), Session()], []
    for slot, (giver, session) in enumerate(zip(givers, sessions, strict=True)):
        link = KvLink(session, theirs.rows, mine, copied, range(1), "test")
        entry = KvEntry(slot, theirs.digests(slot))
        taken.append(Taken(bytes([slot]) * 32, slot, giver, link, entry))  # type: ignore[arg-type]
    fetch = KvFetch(taken, [], LAYERS)
    fetch.begin(own)
    for number in (1, 0):
        for read in sessions[number].reads:
            read.sink.failed(PeerLostError("it ended"))
        assert givers[number].ends == [bytes([number]) * 32]
        assert fetch.is_done == (number == 0)
