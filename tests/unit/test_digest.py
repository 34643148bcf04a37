"""Chunk digests do not depend on how the bytes arrived, and do on each of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from mx.core.digest import ChunkHasher, chunk_digest
from mx.core.types import BLOCK_BYTES, Segment

DATA = bytes(range(251)) * (3 * BLOCK_BYTES // 251 + 1)
# A gap inside the first block, another across the border of the second.
SEGMENTS = [
    Segment(0, 0, 1000),
    Segment(1024, 1024, BLOCK_BYTES - 1124),
    Segment(BLOCK_BYTES + 156, BLOCK_BYTES + 156, BLOCK_BYTES + 5),
]


def views(data: bytes = DATA) -> list[memoryview]:
    return [memoryview(data)[s.offset : s.offset + s.nbytes] for s in SEGMENTS]


def test_by_its_definition() -> None:
    first, second, third = views()
    border = 2 * BLOCK_BYTES - SEGMENTS[2].offset
    blocks = [bytes(first) + bytes(second), bytes(third[:border]), bytes(third[border:])]
    digest = xxh3_128_digest(b"".join(xxh3_128_digest(block) for block in blocks))
    assert chunk_digest(SEGMENTS, views()) == digest


@given(st.lists(st.integers(0, sum(s.nbytes for s in SEGMENTS)), max_size=8))
def test_the_same_however_it_lands(marks: list[int]) -> None:
    hasher = ChunkHasher(SEGMENTS, views())
    for mark in sorted(marks):
        hasher.landed(mark)
    assert hasher.digest() == chunk_digest(SEGMENTS, views())


@pytest.mark.parametrize("position", [0, 999, 1024, BLOCK_BYTES + 156, 2 * BLOCK_BYTES + 160])
def test_each_byte_counts(position: int) -> None:
    changed = bytearray(DATA)
    changed[position] ^= 1
    assert chunk_digest(SEGMENTS, views(bytes(changed))) != chunk_digest(SEGMENTS, views())


@pytest.mark.parametrize("position", [1000, 1023, BLOCK_BYTES, BLOCK_BYTES + 155])
def test_padding_does_not_count(position: int) -> None:
    changed = bytearray(DATA)
    changed[position] ^= 1
    assert chunk_digest(SEGMENTS, views(bytes(changed))) == chunk_digest(SEGMENTS, views())
