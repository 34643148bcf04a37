"""A change of lent memory, between the thread that makes it and the loop that looks after it.

The thread may be interrupted at any bytecode, and its side of the change may be dropped. So the
loop alone moves the state on (`mx.source.lending`), and what the two sides share is made of steps
that are whole or were never begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from mx.errors import MxError
from mx.tasks import Latch


class MemoryChange:
    """One change of lent memory. The methods, and what has no latch, are the loop's."""

    def __init__(self, names: Collection[str] | None, grace_s: float) -> None:
        """
        Args:
            names: The tensors that it writes to; None: any.
            grace_s: How long readers have to finish.
        """
        self.names = names
        self.grace_s = grace_s
        #: The owner may write from now on.
        self.entered = Latch()
        #: The change is over. `error` says what went wrong, if anything did.
        self.ended = Latch()
        self.error: MxError | None = None
        self.begun = False
        #: The owner has left its block; `failed` if by an exception.
        self.left = self.failed = False
        #: Returns what the thread holds for as long as it makes the change: None once that was
        #: dropped.
        self.driver: Callable[[], object] = lambda: self
        self._interrupted = False
        self._told = asyncio.Event()

    @property
    def gone(self) -> bool:
        """True if the thread no longer makes the change: it was interrupted."""
        return self._interrupted or self.driver() is None

    def leave(self, *, failed: bool) -> None:
        """Record that the owner has left its block."""
        self.left, self.failed = True, failed
        self._told.set()

    def interrupt(self) -> None:
        """Record that the thread no longer makes the change. Idempotent."""
        self._interrupted = True
        self._told.set()
        if not self.begun:
            self.end(None)

    def wake(self) -> None:
        """Make `told` return."""
        self._told.set()

    async def told(self, timeout_s: float) -> None:
        """Wait until the owner has left, is gone, or `wake` was called, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._told.wait()
                self._told.clear()

    def end(self, error: MxError | None) -> None:
        """Record that the change is over. Idempotent."""
        if not self.ended.is_set:
            self.error = None if self.gone else error  # it refers to the memory
            self.ended.set()
            self.entered.set()
