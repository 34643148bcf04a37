"""Gives memory files huge pages, just before they are filled.

A process that attaches to a file in pages of 4 KiB pays a fault for each 64 KiB that it touches
(0.15 s for 2 GB), and a walk through the page table for most reads. In huge pages both are gone,
and to fill and to read the file takes half the time or less. The kernel makes them when it is asked
(MADV_COLLAPSE, Linux 6.1), whatever `/sys/kernel/mm/transparent_hugepage` says.
"""

from __future__ import annotations

import mmap

from mx.buffers import HUGE_PAGE_BYTES, address_of, advise, map_private

_MADV_POPULATE_READ = 22
MADV_COLLAPSE = 25
#: After so many failures in a row, for want of huge pages, the rest of a file is left as it is.
MOST_FAILURES = 8


class HugePages:
    """Makes the huge pages of a memory file just before they are written to. Thread-safe.

    Where the kernel has none, the file is written to as it is.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """
        Args:
            descriptor: The file, which its owner keeps open while this is used.
            nbytes: Its size.
        """
        self._descriptor = descriptor
        self._made = bytearray(nbytes // HUGE_PAGE_BYTES)  # 1 for each page that was asked for
        self._failures = 0

    def prepare(self, begin: int, end: int) -> None:
        """Put the bytes from `begin` to `end`, which are about to be written, into huge pages."""
        made = self._made
        for page in range(begin // HUGE_PAGE_BYTES, min(-(-end // HUGE_PAGE_BYTES), len(made))):
            if made[page] or self._failures >= MOST_FAILURES:
                continue
            made[page] = 1
            self._failures = 0 if self._make(page) else self._failures + 1

    def _make(self, page: int) -> bool:
        try:
            view = map_private(self._descriptor, HUGE_PAGE_BYTES, page * HUGE_PAGE_BYTES)
        except OSError:
            return False
        # A huge page is made of small ones, one at least. A byte that is written could come after
        # another thread's, and one that is read would kill where there is no memory.
        at = address_of(view)
        return advise(at, mmap.PAGESIZE, _MADV_POPULATE_READ) and advise(
            at, HUGE_PAGE_BYTES, MADV_COLLAPSE
        )
