"""Host memory that copy engines reach in place: registered with CUDA window by window, ahead of the
copies, by threads.

Registering pins pages. Memory can be registered once in a process, so that windows are counted:
each is unregistered by the last of its users.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from operator import itemgetter

from mx.cuda.device import Device, PinnedRegion
from mx.cuda.errors import CudaMemoryError
from mx.threads import Threads
from mx.units import MIB, align_up, format_bytes

#: To pin so much takes some 10 ms (18 to 32 GB/s on a machine with an H200), and to begin and end a
#: registration far less.
WINDOW_BYTES = 256 * MIB
#: Of the first window, which the first copy waits for; each is twice as large as the one before.
FIRST_BYTES = 16 * MIB
#: How many windows are registered ahead of the copies, by as many threads.
AHEAD = 4

_log = logging.getLogger(__name__)


def plan(places: Iterable[tuple[int, int]], window_nbytes: int) -> list[tuple[int, int]]:
    """Return where each window over some memory begins and ends, ascending.

    Windows have whole pages and do not overlap. The first one over memory in one piece is small,
    since a copy waits for it, and each is up to twice as large as the one before.

    Args:
        places: The address and length of each piece of the memory, in any order.
        window_nbytes: The size of the largest window, a multiple of the page size.
    """
    pieces: list[tuple[int, int]] = []
    for address, nbytes in sorted(places):
        begin = address - address % mmap.PAGESIZE
        end = align_up(address + nbytes, mmap.PAGESIZE)
        if pieces and begin <= pieces[-1][1]:
            begin, end = pieces[-1][0], max(end, pieces.pop()[1])
        if nbytes:
            pieces.append((begin, end))
    found = []
    for begin, end in pieces:
        size = min(FIRST_BYTES, window_nbytes)
        while begin < end:
            found.append((begin, min(begin + size, end)))
            begin += size
            size = min(2 * size, window_nbytes)
    return found


class _PinnedWindow:
    """Pages that are registered together; `pinning` is done when they are, or can't be."""

    __slots__ = ("holders", "pinning")

    def __init__(self, pinning: Future[PinnedRegion]) -> None:
        self.pinning, self.holders = pinning, 0


class _ProcessWindows:
    """All windows of this process, by where they begin and end."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child does: what it has inherited it can't use."""
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int], _PinnedWindow] = {}

    def hold(
        self, extent: tuple[int, int], pin: Callable[[], Future[PinnedRegion]]
    ) -> _PinnedWindow:
        """Return a window, with one holder more. If there is none yet, `pin` begins to register
        its pages."""
        with self._lock:
            window = self._windows.get(extent)
            if window is None:
                window = self._windows[extent] = _PinnedWindow(pin())
            window.holders += 1
            return window

    def drop(self, extents: Iterable[tuple[int, int]]) -> None:
        """Take a holder away from each window; unregister those that have none left. No work that
        uses them is queued any more."""
        with self._lock:
            for extent in extents:
                window = self._windows[extent]
                window.holders -= 1
                if not window.holders:
                    # Before another registration of these pages can begin.
                    if window.pinning.exception() is None:
                        window.pinning.result().close()
                    del self._windows[extent]


_process_windows = _ProcessWindows()
os.register_at_fork(after_in_child=_process_windows.forget)


def _reason(error: BaseException) -> str:
    """Return why memory could not be registered, with the limit that may be the cause."""
    if not isinstance(error, CudaMemoryError):
        return str(error)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    may = "any number of bytes" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    return f"{error.message} (this process may lock {may}, ulimit -l)"


class PinnedWindows:
    """The windows of one user over memory of its own, or that it reads. Thread-safe; `close` it
    when no work that uses the memory is queued any more."""

    def __init__(
        self, device: Device, what: str, window_nbytes: int, *, read_only: bool = False
    ) -> None:
        """
        Args:
            device: The GPU in whose context memory is registered, for all contexts.
            what: The memory, for the log.
            window_nbytes: The size of a window in bytes.
            read_only: Whether the memory is mapped to be read only.
        """
        self._device, self._what, self._read_only = device, what, read_only
        self._window_nbytes = window_nbytes
        self._lock = threading.Lock()
        self._plan: list[tuple[int, int]] = []
        self._owner: object = None
        #: Those of the plan that are held, by their numbers in it.
        self._windows: dict[int, _PinnedWindow] = {}
        self._threads = Threads(AHEAD, "mx-pin")
        #: Whether no more memory is registered; what is registered stays, and is used.
        self._refused = False
        #: Why some memory could not be registered; "" for all could.
        self.reason = ""

    def adopt(self, places: Iterable[tuple[int, int]], owner: object) -> None:
        """Plan windows over memory, which is registered when it is wanted.

        Args:
            places: The address and length of each piece of it.
            owner: What keeps it; referred to until none of it is registered any more.
        """
        found = plan(places, self._window_nbytes)
        with self._lock:
            self._plan, self._owner = found, owner

    def want(self, address: int, nbytes: int) -> Callable[[], bool]:
        """Begin to register memory, and some of what follows it in the plan.

        Returns:
            What waits until the memory is registered, and returns whether it could be.
        """
        with self._lock:
            numbers = [number for number, _, _ in self._cut(address, nbytes)]
            wanted = [self._hold(number) for number in numbers]
            if wanted and wanted[-1] is not None:
                for number in range(numbers[-1] + 1, numbers[-1] + 1 + AHEAD):
                    self._hold(number)
        return lambda: all([window is not None and self._is_pinned(window) for window in wanted])

    def _cut(self, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each planned window of some memory, -1 for none, and the address and
        length of what it has of the memory."""
        while nbytes > 0:
            number = bisect_right(self._plan, address, key=itemgetter(0)) - 1
            left = self._plan[number][1] - address if number >= 0 else 0
            if left <= 0:
                yield -1, address, nbytes
                return
            yield number, address, min(left, nbytes)
            address += left
            nbytes -= left

    def _hold(self, number: int) -> _PinnedWindow | None:
        """Return a planned window; None where there is none, nor will be."""
        window = self._windows.get(number)
        if window is None and 0 <= number < len(self._plan) and not self._refused:
            extent = self._plan[number]
            window = _process_windows.hold(extent, partial(self._pin, *extent))
            self._windows[number] = window
        return window

    def _pin(self, begin: int, end: int) -> Future[PinnedRegion]:
        region = partial(PinnedRegion, read_only=self._read_only, owner=self._owner)
        return self._threads.submit(region, self._device, begin, end - begin)

    def _is_pinned(self, window: _PinnedWindow) -> bool:
        error = window.pinning.exception()
        if error is None:
            return True
        with self._lock:
            # What is registered by others says nothing of the rest.
            known = getattr(error, "code", "") == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
            self._refused = self._refused or not known
            before = self.reason
            self.reason = before or f"copied through slots: {_reason(error)}"
        if not before:
            _log.warning("%s is %s", self._what, self.reason)
        return False

    def parts(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Return the address and length of each part of some memory, cut where windows end, since
        a copy may not cross such an end; None if not all of it is registered."""
        found = []
        with self._lock:
            for number, at, part_nbytes in self._cut(address, nbytes):
                window = self._windows.get(number)
                if window is None or not window.pinning.done() or window.pinning.exception():
                    return None
                found.append((at, part_nbytes))
        return found

    def close(self) -> None:
        """Unregister the memory, but for windows that have other users. Idempotent."""
        with self._lock:
            self._refused = True
            windows, self._windows = self._windows, {}
        self._threads.shutdown()
        _process_windows.drop([self._plan[number] for number in windows])
        self._owner = None
