"""Block digests and roots do not depend on how the bytes arrived, and do on each of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from benchmarks.roots import root_of
from mx.core.digest import (
    DIGEST_BYTES,
    PIN_CONTEXT,
    SHORTCUT_BYTES,
    BlockHasher,
    block_digest,
    document_digest,
    pin_of,
    shortcut_blocks,
    shortcut_digest,
    tensor_root,
)
from mx.core.grid import BLOCK_BYTES
from tests.support import naive_identity as naive
from tests.support.identity_vectors import stored

VECTORS = stored()["roots"]
DATA = naive.pattern(3, 3 * BLOCK_BYTES + 5)
# Blocks of several tensors, with gaps between them.
BLOCKS = [(0, 1000), (1024, 1), (1280, BLOCK_BYTES), (1280 + BLOCK_BYTES, 7), (2 << 20, 256)]
PAYLOAD = sum(nbytes for _, nbytes in BLOCKS)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['nbytes']}-{v['seed']}")
def test_published_vectors(vector: dict[str, object]) -> None:
    assert isinstance(vector["seed"], int) and isinstance(vector["nbytes"], int)
    data = naive.pattern(vector["seed"], vector["nbytes"])
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    digests = [block_digest(block) for block in blocks]
    assert [digest.hex() for digest in digests] == vector["blocks"]
    assert tensor_root(len(data), b"".join(digests)).hex() == vector["root"]
    assert root_of(data).hex() == vector["root"]


def test_a_root_is_over_all_bytes_of_a_view_whatever_its_items() -> None:
    numbers = struct.pack("<400000d", *range(400_000))
    root = naive.root(numbers)
    views: list[Any] = [memoryview(numbers), memoryview(bytearray(numbers))]
    views += [views[0].cast("d"), views[0].cast("d", (400, 1000))]
    assert [root_of(view) for view in views] == [root] * 4
    assert root_of(b"") == root_of(views[2][:0]) == naive.root(b"")


def test_a_root_depends_on_the_length() -> None:
    """The digests alone would do for tensors of other lengths."""
    digests = block_digest(b"a") + block_digest(b"b")
    lengths = [BLOCK_BYTES + 1, BLOCK_BYTES + 2, 2 * BLOCK_BYTES]
    assert len({tensor_root(nbytes, digests) for nbytes in lengths}) == len(lengths)
    assert tensor_root(1, block_digest(b"a")) == root_of(b"a")


def test_digests_of_different_things_differ() -> None:
    """What is right as one cannot be passed off as another, though it has the same bytes."""
    data = struct.pack("<Q", 1) + block_digest(b"a")  # what the root of b"a" is taken over
    identity, packaging = block_digest(b"i"), block_digest(b"p")
    assert tensor_root(1, block_digest(b"a")) not in (block_digest(data), document_digest(data))
    assert pin_of(identity, packaging) not in (
        document_digest(identity + packaging),
        tensor_root(1, identity + packaging),
    )


def test_the_pin_without_files_is_the_identity() -> None:
    identity, packaging = block_digest(b"i"), block_digest(b"p")
    assert pin_of(identity, b"") == identity
    by_hand = blake3(identity + packaging, derive_key_context=PIN_CONTEXT).digest()
    assert pin_of(identity, packaging) == by_hand
    assert pin_of(packaging, identity) != by_hand


def test_sizes() -> None:
    assert len(block_digest(b"")) == len(document_digest(b"")) == DIGEST_BYTES
    assert len(root_of(b"")) == len(pin_of(bytes(32), bytes(32))) == DIGEST_BYTES
    assert shortcut_digest(b"abc") == xxh3_128_digest(b"abc")
    assert len(shortcut_digest(b"")) == SHORTCUT_BYTES


# -- blocks that land -----------------------------------------------------------------------------


def views(data: bytes | bytearray = DATA) -> list[memoryview]:
    return [memoryview(data)[at : at + nbytes] for at, nbytes in BLOCKS]


EXPECTED = b"".join(naive.digest(bytes(view)) for view in views())


@given(st.lists(st.integers(-5, PAYLOAD + 5), max_size=10))
def test_the_same_however_it_is_announced(marks: list[int]) -> None:
    """In any order, too: less than what was announced already says nothing new."""
    hasher = BlockHasher(views())
    for mark in marks:
        hasher.landed(mark)
    assert hasher.block_digests() == EXPECTED
    assert hasher.block_digests() == EXPECTED


@given(st.lists(st.integers(0, PAYLOAD), max_size=6))
def test_a_block_is_hashed_once_and_as_soon_as_it_is_there(marks: list[int]) -> None:
    """What has not landed is not looked at, and what has landed is not looked at again."""
    memory = bytearray(len(DATA))
    ends = [sum(nbytes for _, nbytes in BLOCKS[: i + 1]) for i in range(len(BLOCKS))]
    hashed: list[int] = []

    def digests_of(blocks: Iterable[memoryview]) -> Iterable[bytes]:
        for view in blocks:
            hashed.append(len(view))
            yield block_digest(view)

    hasher = BlockHasher(views(memory), digests_of)
    for mark in [*sorted(marks), PAYLOAD]:
        landed = [end <= mark for end in ends]
        for (at, nbytes), there in zip(BLOCKS, landed, strict=True):
            memory[at : at + nbytes] = DATA[at : at + nbytes] if there else bytes(nbytes)
        hasher.landed(mark)
        assert hashed == [nbytes for _, nbytes in BLOCKS][: sum(landed)]
    memory[:] = bytes(len(memory))
    assert hasher.block_digests() == EXPECTED


@pytest.mark.parametrize(("at", "nbytes"), BLOCKS)
@pytest.mark.parametrize("last", [False, True])
def test_each_byte_counts_in_its_block_only(at: int, nbytes: int, last: bool) -> None:
    changed = bytearray(DATA)
    changed[at + (nbytes - 1 if last else 0)] ^= 1
    found = BlockHasher(views(changed)).block_digests()
    differ = [found[i : i + 32] != EXPECTED[i : i + 32] for i in range(0, len(found), 32)]
    assert differ == [block == (at, nbytes) for block in BLOCKS]


def test_gaps_do_not_count() -> None:
    changed = bytearray(DATA)
    for position in (1000, 1023, 1025, 1279, 1287 + BLOCK_BYTES, (2 << 20) + 256):
        changed[position] ^= 1
    assert BlockHasher(views(changed)).block_digests() == EXPECTED


def test_a_shortcut_hasher_and_one_without_blocks() -> None:
    expected = b"".join(xxh3_128_digest(bytes(view)) for view in views())
    assert BlockHasher(views(), shortcut_blocks).block_digests() == expected
    nothing = BlockHasher([])
    nothing.landed(10)
    assert nothing.block_digests() == b""
