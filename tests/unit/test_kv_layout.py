"""Where KV blocks are in tensors of any order of dimensions, and with gaps: the runs have exactly
the elements of the block, also between a rank with all heads and one with some."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import ConfigError, PeerProtocolError
from mx.kv.layout import MOST_RUNS, KvMemory, Rows, copies, digest_of, rows_of
from mx.memory.arrays import array_of

BLOCKS = 3
#: The order of dimensions in memory, of a tensor that an engine sees as blocks, 2, heads, tokens,
#: elements: what engines and their backends have.
ORDERS = {
    "2,b,t,h,d": (1, 0, 3, 2, 4),
    "b,2,t,h,d": (0, 1, 3, 2, 4),
    "b,2,h,t,d": (0, 1, 2, 3, 4),
    "2,b,h,t,d": (1, 0, 2, 3, 4),
    "b,h,2,t,d": (0, 2, 1, 3, 4),
}


def tensor(
    shape: tuple[int, ...], order: tuple[int, ...], pads: tuple[int, ...], seed: int = 1
) -> Any:
    """Return a tensor of random numbers whose dimensions are in this order in memory, each with so
    many elements more than are in it."""
    held = [shape[at] + pads[at] for at in order]
    whole = np.random.default_rng(seed).integers(0, 2**16, held, dtype=np.uint16)
    found = whole.transpose(np.argsort(order))
    return found[tuple(slice(0, each) for each in shape)]


def bytes_at(memory: Any, rows: Rows, slot: int) -> bytes:
    view = memory.view()
    return b"".join(bytes(view[begin : begin + size]) for begin, size in rows.runs(slot))


@given(
    st.tuples(*[st.integers(1, 4)] * 5),
    st.permutations(range(5)),
    st.tuples(*[st.integers(0, 2)] * 5),
    st.integers(0, 4),
)
def test_a_part_has_the_elements_of_its_block(
    shape: tuple[int, ...], order: list[int], pads: tuple[int, ...], blocks: int
) -> None:
    whole = tensor(shape, tuple(order), pads)
    array = array_of("x", whole)
    rows, count = rows_of(array, 0, blocks, None)
    assert count == shape[blocks]
    rest = [at for at in order if at != blocks]
    for slot in range(count):
        expected = np.take(whole, slot, blocks).transpose([at - (at > blocks) for at in rest])
        assert bytes_at(array, rows, slot) == expected.tobytes()
        assert bytes_at(array, rows.joined(), slot) == expected.tobytes()
        assert expected.nbytes == rows.nbytes == rows.joined().nbytes
    rows.check([array.span_nbytes], count)
    with pytest.raises(PeerProtocolError):
        rows.check([array.span_nbytes - 1], count)


@given(
    st.sampled_from(sorted(ORDERS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.tuples(*[st.integers(0, 2)] * 3),
)
def test_ranks_read_their_heads_of_each_other(
    name: str, ranks: int, own: int, block_tokens: int, size: int, pads: tuple[int, ...]
) -> None:
    """N pools have some heads each, and a reader has all; and each to each."""
    order, heads = ORDERS[name], ranks * own
    shape = (BLOCKS, 2, heads, block_tokens, size)
    # Within a head nothing may be between; outside anything.
    free = order[: order.index(2)] if order.index(2) < order.index(3) else order[:3]
    own_pads = tuple(pads[at % 3] if at in free and at != 2 else 0 for at in range(5))
    target = tensor(shape, order, own_pads, seed=0)
    reader = KvMemory.of([target], 0, 2)
    expected = np.zeros(shape, np.uint16)
    for rank in range(ranks):
        part = tensor((BLOCKS, 2, own, block_tokens, size), order, (0,) * 5, seed=rank + 1)
        pool = KvMemory.of([part], 0, 2, rank * own)
        assert (pool.heads, pool.first_head, pool.slots) == (own, rank * own, BLOCKS)
        mine = reader.rows[0].heads(rank * own, own, heads)
        _move(pool, pool.rows[0], reader, mine)
        expected[:, :, rank * own : (rank + 1) * own] = part[::-1]
        # What is hashed there is what lands here.
        for slot in range(BLOCKS):
            there = digest_of(next(pool.parts(slot, pool.rows)))
            assert there == digest_of(next(reader.parts(BLOCKS - 1 - slot, [mine])))
    assert (target == expected).all()


def _move(pool: KvMemory, theirs: Rows, reader: KvMemory, own: Rows) -> None:
    """Copy slots into those of the reader's, in the other order, as a fetch does."""
    source, target = pool.views[0], reader.views[0]
    assert isinstance(source, memoryview)
    assert isinstance(target, memoryview)
    moved = 0
    for slot in range(BLOCKS):
        for begin, to, nbytes in copies(theirs, own):
            at = begin + slot * theirs.stride
            here = to + (BLOCKS - 1 - slot) * own.stride
            target[here : here + nbytes] = source[at : at + nbytes]
            moved += nbytes
    assert moved == theirs.nbytes * BLOCKS


def test_what_is_in_turn_is_one_run() -> None:
    whole = tensor((BLOCKS, 2, 2, 4, 8), ORDERS["b,2,h,t,d"], (0,) * 5)
    rows, _ = rows_of(array_of("x", whole), 0, 0, 2)
    assert len(rows.offsets) == 2  # heads may be taken from each
    assert len(rows.joined().offsets) == 1
    assert len(copies(rows, rows)) == 1
    half = rows.heads(0, 1, 2)
    assert len(half.joined().offsets) == 2


@pytest.mark.parametrize(
    ("first", "count", "of"),
    [(-1, 1, 2), (1, 2, 2), (0, 0, 2), (0, 3, 2), (0, 10**9, 2), (0, 1, 3)],
)
def test_heads_that_are_not_there(first: int, count: int, of: int) -> None:
    with pytest.raises(ConfigError):
        Rows(0, 0, 128, (0, 64), 32).heads(first, count, of)


def test_tensors_that_no_block_can_be_read_from() -> None:
    shape = (BLOCKS, 2, 2, 4, 8)
    apart = tensor(shape, ORDERS["b,2,h,t,d"], (0, 0, 0, 0, 1))
    with pytest.raises(ConfigError, match="not contiguous"):
        KvMemory.of([apart], 0, 2)
    KvMemory.of([apart], 0, None)  # whole blocks can
    whole = tensor(shape, (0, 1, 2, 3, 4), (0,) * 5)
    for wrong in ([], [whole, whole[:2]], [np.zeros((0, 2, 2, 4, 8), np.uint16)]):
        with pytest.raises(ConfigError):
            KvMemory.of(wrong, 0, 2)
    with pytest.raises(ConfigError, match="runs"):
        KvMemory.of([np.zeros((2 * MOST_RUNS, BLOCKS), np.uint16)], 1, None)


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("rows", "slots"),
    [
        (Rows(1, 0, 16, (0,), 16), 4),
        (Rows(HUGE, 0, 16, (0,), 16), 4),
        (Rows(0, 0, 16, (), 16), 4),
        (Rows(0, 0, 16, (0,) * (MOST_RUNS + 1), 16), 4),
        (Rows(0, 0, 16, (0,), 0), 4),
        (Rows(0, 0, 16, (0,), 16), 0),
        (Rows(0, 0, 16, (0,), 16), 5),
        (Rows(0, 1, 16, (0,), 16), 4),
        (Rows(0, 0, 17, (0,), 16), 4),
        (Rows(0, 0, 16, (1,), 16), 4),
        (Rows(0, 0, 16, (0,), 17), 4),
        (Rows(0, HUGE, 16, (0,), 16), 4),
        (Rows(0, 0, HUGE, (0,), 16), 4),
        (Rows(0, 0, 16, (0, HUGE), 16), 4),
        (Rows(0, 0, 16, (0,), HUGE), 4),
        (Rows(0, HUGE, HUGE, (HUGE,), HUGE), HUGE),
    ],
)
def test_rows_that_are_not_in_their_region(rows: Rows, slots: int) -> None:
    Rows(0, 0, 16, (0,), 16).check([64], 4)
    with pytest.raises(PeerProtocolError):
        rows.check([64], slots)


@given(st.integers(0, 2**32))
def test_copies_are_each_byte_once_in_order(seed: int) -> None:
    """Also where the runs of the two ends end at different places."""
    chance = random.Random(seed)
    nbytes = chance.randint(1, 24)

    def rows() -> Rows:
        run = chance.choice([each for each in range(1, nbytes + 1) if nbytes % each == 0])
        offsets, at = list[int](), 0
        for _ in range(nbytes // run):
            at += chance.choice((0, 0, 1, 3))
            offsets.append(at)
            at += run
        return Rows(0, 0, 1000, tuple(offsets), run)

    def places(of: Rows) -> list[int]:
        return [at for begin, size in of.runs(0) for at in range(begin, begin + size)]

    one, other = rows(), rows()
    assert places(one.joined()) == places(one)
    found = copies(one, other)
    for side, of in enumerate((one, other)):
        said = [at for each in found for at in range(each[side], each[side] + each[2])]
        assert said == places(of)
    assert len(copies(one, one)) == len(one.joined().offsets)
