"""What `Source.changing` returns: the block in which an owner writes to tensors that are lent."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection
from types import TracebackType

from mx import runtime
from mx.errors import ClosedError, ConfigError, MxError
from mx.source.changes import MemoryChange
from mx.source.lending import Lending
from mx.tasks import Latch

#: How often a wait looks whether the loop still runs: it may stop with the process.
_LOOK_S = 1.0


class Changing(contextlib.AbstractContextManager[None]):
    """One change of lent tensors, made by the thread that is inside; a context manager, once.

    An exception may come at any bytecode here, from a signal. So what enters and leaves is a task
    on the loop, which is told by single calls what becomes of the block, and withdraws the tensors
    if this object is gone before it has left.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        lending: Callable[[], Lending],
        names: Collection[str] | None,
        grace_s: float,
    ) -> None:
        """
        Args:
            loop: The source's loop.
            lending: Returns what looks after the tensors. Raises what entering raises.
            names: The tensors that the block writes to; None: any.
            grace_s: Seconds that readers have to finish.
        """
        self._loop = loop
        self._find = lending
        self._names, self._grace_s = names, grace_s
        self._change: MemoryChange | None = None

    def __enter__(self) -> None:
        """Return once no reader trusts what it reads. Raises as `Source.changing`."""
        if self._change is not None:
            raise ConfigError("a change is made once", hint="call `changing` again")
        self._loop.require_other_thread()
        lending = self._find()
        change = MemoryChange(self._names, self._grace_s)
        change.driver = weakref.ref(self, _dropping(self._loop, change))
        self._change = change
        try:
            self._tell(lambda: lending.begin(change))
            self._wait(change.entered)
        except BaseException:  # also an interrupt: then the block never runs
            self._give_up(change)
            raise
        if change.error is not None:
            _raise(change)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return once the tensors are listed again. Raises as `Source.changing`, unless the block
        raised."""
        change, failed = self._change, kind is not None
        if change is None or self._loop.inherited:  # in a forked child nothing is lent
            return
        try:
            self._tell(lambda: change.leave(failed=failed))
            self._wait(change.ended)
        except BaseException:
            self._give_up(change)
            raise
        if failed:  # the block's own error counts; this one was logged
            change.error = None
        elif change.error is not None:
            _raise(change)

    def _give_up(self, change: MemoryChange) -> None:
        """End the change from outside, and wait until that is done."""
        with contextlib.suppress(ClosedError):
            self._tell(change.interrupt)
            self._wait(change.ended)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has stopped, and so everything was closed
            raise ClosedError("the source was closed") from None

    def _wait(self, latch: Latch) -> None:
        self._loop.require_other_thread()
        while not latch.wait(_LOOK_S):
            if self._loop.loop.is_closed():
                raise ClosedError("the source was closed")


def _raise(change: MemoryChange) -> None:
    error: MxError | None = change.error
    change.error = None
    assert error is not None
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame


def _dropping(loop: runtime.LoopThread, change: MemoryChange) -> Callable[[object], None]:
    """Return the callback for when the thread's side was dropped; it is called on any thread."""
    told = weakref.ref(change)

    def dropped(_: object) -> None:
        found = told()
        if found is not None and not found.ended.is_set and not loop.inherited:
            with contextlib.suppress(RuntimeError):  # the loop has stopped
                loop.loop.call_soon_threadsafe(found.wake)

    return dropped
