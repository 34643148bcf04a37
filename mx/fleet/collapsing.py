"""Puts memory files that are complete into huge pages: see `mx.memory.huge`."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from mx.buffers import HUGE_PAGE_BYTES, address_of, advise, map_private
from mx.memory.huge import MADV_COLLAPSE, MOST_FAILURES

#: What one call moves: some ten milliseconds. Between calls the thread needs the GIL.
_PIECE_BYTES = 16 * HUGE_PAGE_BYTES


def collapse(descriptor: int, nbytes: int, stopped: Callable[[], bool]) -> int:
    """Put a memory file into huge pages, as far as there are some. Blocks, without the GIL.

    Processes may map and read the file meanwhile: a reader waits some milliseconds at most, while
    the piece that it reads is moved.

    Args:
        descriptor: The file, which nothing writes to any more.
        nbytes: Its size.
        stopped: Asked before each piece of 32 MiB.

    Returns:
        How many bytes are in huge pages; 0 if the kernel can't.
    """
    whole = nbytes - nbytes % HUGE_PAGE_BYTES
    if not whole:
        return 0
    try:
        view = map_private(descriptor, whole)
    except OSError:
        return 0
    begin, done_nbytes, failures = address_of(view), 0, 0
    for offset in range(0, whole, _PIECE_BYTES):
        if stopped() or failures == MOST_FAILURES:
            break
        moved_nbytes = _moved(begin + offset, min(_PIECE_BYTES, whole - offset))
        failures = 0 if moved_nbytes else failures + 1
        done_nbytes += moved_nbytes
    return done_nbytes


def _moved(address: int, nbytes: int) -> int:
    """Move a piece, and return how much of it is in huge pages."""
    if advise(address, nbytes, MADV_COLLAPSE):
        return nbytes
    # Part of it may be: what is there already succeeds at once.
    pages = range(address, address + nbytes, HUGE_PAGE_BYTES)
    return HUGE_PAGE_BYTES * sum(advise(each, HUGE_PAGE_BYTES, MADV_COLLAPSE) for each in pages)


class _HugePageWork:
    """One file that waits for huge pages, or gets them."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._nbytes = nbytes
        self._lock = threading.Lock()  # while the descriptor is used or closed
        self._cancelled = False

    def run(self) -> None:
        with self._lock:
            if not self._cancelled:
                collapse(self._descriptor, self._nbytes, lambda: self._cancelled)
        self.cancel()

    def cancel(self) -> None:
        """Release the file. Waits while a piece is moved. Idempotent."""
        self._cancelled = True
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class Collapser:
    """Puts memory files into huge pages, one after the other, on a thread. `close` it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_HugePageWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, descriptor: int, nbytes: int) -> Callable[[], None]:
        """Put a file into huge pages when those before it are done.

        Args:
            descriptor: The file. It may be closed afterwards.
            nbytes: Its size.

        Returns:
            What lets go of the file, done or not: call it. It blocks for some milliseconds at most,
            and is idempotent. Thread-safe, as this is.
        """
        try:
            work = _HugePageWork(descriptor, nbytes)
        except OSError:  # too many open files
            return lambda: None
        self._queue.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mx-huge", daemon=True)
                self._thread.start()
        return work.cancel

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()

    def close(self) -> None:
        """Wait until the files that were added are done: cancel them before. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
