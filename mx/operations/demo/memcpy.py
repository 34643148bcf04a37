"""What the demo compares a pull's speed with: one thread's memcpy on the same machine."""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import dataclass

ROUNDS = 3


@dataclass(frozen=True)
class Memcpy:
    """Speeds of one thread's memcpy, in decimal gigabytes per second.

    Attributes:
        fresh_gb_per_s: Into memory that the process touches for the first time.
        warm_gb_per_s: Into memory that it wrote just before.
    """

    fresh_gb_per_s: float
    warm_gb_per_s: float


def measure(nbytes: int) -> Memcpy:
    """Copy between two anonymous maps that may have huge pages, a few times.

    Args:
        nbytes: What one copy moves; more than 0. Twice as much memory is allocated.

    Returns:
        The median speeds.
    """

    def new() -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def timed(target: memoryview) -> float:
        start = time.perf_counter()
        target[:] = source_view
        return nbytes / (time.perf_counter() - start) / 1e9

    fresh, warm = [], []
    with new() as source, memoryview(source) as source_view:
        source_view[:] = b"\x5a" * nbytes
        for _ in range(ROUNDS):
            with new() as target, memoryview(target) as target_view:
                fresh.append(timed(target_view))
                warm.append(timed(target_view))
    return Memcpy(statistics.median(fresh), statistics.median(warm))
