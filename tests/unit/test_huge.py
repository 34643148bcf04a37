"""Memory files in huge pages: their bytes, their maps, and what is let go of."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mx.buffers import HUGE_PAGE_BYTES, address_of, map_private
from mx.fleet.collapsing import Collapser, collapse
from mx.memory.arena import MemfdArena
from mx.memory.huge import HugePages
from mx.storage.spans import ArenaWriter
from mx.units import MIB

NBYTES = 68 * MIB + 4096


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    made = MemfdArena(NBYTES)
    made.view[:] = random.Random(1).randbytes(NBYTES)
    made.seal()
    yield made
    made.release()


def inode_of(arena: MemfdArena) -> int:
    assert arena.memfd is not None
    return os.fstat(arena.memfd).st_ino


def mapped_in_huge_pages(inode: int, at: int | None = None) -> int:
    """Return how many bytes of a file this process maps in huge pages; of all its maps, or of the
    one that begins at an address."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            begin = int(fields[0].partition("-")[0], 16)
            ours = fields[4] == str(inode) and at in (None, begin)
        elif ours and fields[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(fields[1]) * 1024
    return total


def test_the_same_bytes_in_huge_pages(arena: MemfdArena) -> None:
    assert arena.memfd is not None
    before = arena.private_view()
    expected = bytes(before)
    found = collapse(arena.memfd, NBYTES, lambda: False)
    assert 0 <= found <= NBYTES
    assert bytes(before) == expected
    after = arena.private_view()
    assert bytes(after) == expected
    if found:  # the kernel has them, and some were free
        assert mapped_in_huge_pages(inode_of(arena)) >= HUGE_PAGE_BYTES


def test_pages_are_huge_before_they_are_filled(arena: MemfdArena) -> None:
    """Threads that write next to each other, in any order, lose no byte to each other's pages."""
    assert arena.memfd is not None
    expected = random.Random(2).randbytes(NBYTES)
    filled = MemfdArena(NBYTES)
    try:
        writer = ArenaWriter(filled.view, filled.memfd)
        step = 300_000  # some begin in one page and end in another
        begins = list(range(0, NBYTES, step))
        random.Random(3).shuffle(begins)
        with ThreadPoolExecutor(4) as pool:
            for begin in begins:
                part = memoryview(expected)[begin : begin + step]
                pool.submit(writer.write, begin, part)
        del writer
        filled.seal()
        assert filled.address % HUGE_PAGE_BYTES == 0 and filled.view.readonly
        assert filled.view == expected
        if collapse(arena.memfd, NBYTES, lambda: False):  # the kernel has huge pages
            assert mapped_in_huge_pages(inode_of(filled)) >= HUGE_PAGE_BYTES
    finally:
        filled.release()


def test_short_writes_are_in_huge_pages_too(arena: MemfdArena) -> None:
    assert arena.memfd is not None
    made = MemfdArena(2 * HUGE_PAGE_BYTES)
    try:
        ArenaWriter(made.view, made.memfd).write(HUGE_PAGE_BYTES + 5, memoryview(b"x"))
        view = made.private_view()
        assert view[HUGE_PAGE_BYTES + 5] == ord("x") and not view[0]
        if collapse(arena.memfd, NBYTES, lambda: False):
            smaps = Path("/proc/self/smaps").read_text()
            assert mapped_in_huge_pages(inode_of(made), address_of(view)) == HUGE_PAGE_BYTES, smaps
    finally:
        made.release()


def test_pages_that_can_not_be_made_are_left() -> None:
    """To touch them would end the process: the file has no bytes there."""
    descriptor = os.memfd_create("mx:test")
    try:
        HugePages(descriptor, NBYTES).prepare(0, NBYTES)
        assert os.fstat(descriptor).st_blocks == 0
    finally:
        os.close(descriptor)
    HugePages(1 << 20, NBYTES).prepare(0, NBYTES)  # no descriptor


def test_a_private_page_stays_private(arena: MemfdArena) -> None:
    assert arena.memfd is not None
    mine, other = arena.private_view(), arena.private_view()
    old = mine[5 * MIB]
    mine[5 * MIB] = old ^ 1
    collapse(arena.memfd, NBYTES, lambda: False)
    mine[7 * MIB] ^= 1
    assert mine[5 * MIB] == old ^ 1 and other[5 * MIB] == old
    assert arena.view[7 * MIB] == other[7 * MIB] != mine[7 * MIB]


def test_stopped_and_small_files(arena: MemfdArena) -> None:
    assert arena.memfd is not None
    assert collapse(arena.memfd, NBYTES, lambda: True) == 0
    assert collapse(arena.memfd, HUGE_PAGE_BYTES - 1, lambda: False) == 0


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE_BYTES, NBYTES])
def test_maps_are_aligned_and_outlive_the_descriptor(nbytes: int) -> None:
    made = MemfdArena(nbytes)
    made.view[nbytes - 1] = 7
    made.seal()
    assert made.memfd is not None
    view = map_private(made.memfd, nbytes)
    inode = inode_of(made)
    made.release()
    assert address_of(view) % HUGE_PAGE_BYTES == 0
    assert (view.nbytes, view[nbytes - 1], view.readonly) == (nbytes, 7, False)
    part = view[nbytes - 1 :]
    del view
    assert part[0] == 7
    del part
    assert str(inode) not in Path("/proc/self/maps").read_text().split()


def test_a_descriptor_that_is_none() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_private(1 << 20, 4096)


def test_files_wait_and_are_let_go_of(arena: MemfdArena) -> None:
    assert arena.memfd is not None
    before = memory_files()
    collapser = Collapser()
    try:
        cancels = [collapser.add(arena.memfd, NBYTES) for _ in range(5)]
        for cancel in reversed(cancels):
            cancel()
            cancel()
        assert str(inode_of(arena)) in Path("/proc/self/maps").read_text().split()
    finally:
        collapser.close()
        collapser.close()
    assert memory_files() == before


def memory_files() -> int:
    """Return how many descriptors of mx's memory files this process has."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("/memfd:mx:" in link for link in links)
