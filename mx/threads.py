"""A few threads that share pieces of work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")

_Piece = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that do pieces of work in turn; a context manager that waits for their end.

    Unlike an executor of Python's they also work for a thread that goes on after the main one has
    ended. Where no thread can start, as while the interpreter ends, `submit` does the work itself.
    """

    def __init__(self, most: int, name: str) -> None:
        """
        Args:
            most: How many threads there are at most.
            name: What they are called.
        """
        self._most, self._name = most, name
        self._threads: list[threading.Thread] = []
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._closed = False

    def submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Have a thread call `work(*arguments)`; one thread calls this.

        Returns:
            The future of what it returns or raises.

        Raises:
            RuntimeError: It was shut down.
        """
        if self._closed:
            raise RuntimeError(f"{self._name} takes no more work")
        future: Future[T] = Future()
        self._pieces.put((future, work, arguments))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    _do(self._pieces.get())
            else:
                self._threads.append(thread)
        return future

    def map(self, work: Callable[..., T], *arguments: Iterable[object]) -> Iterator[T]:
        """Have the threads call `work` with each of the arguments, taken side by side.

        Returns:
            What the calls return, in order; an error is raised in its place, and calls that have
            not begun are left out.
        """
        futures = [self.submit(work, *each) for each in zip(*arguments, strict=True)]
        futures.reverse()

        def results() -> Iterator[T]:
            try:
                while futures:
                    yield futures.pop().result()
            finally:
                for future in futures:
                    future.cancel()

        return results()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more work, and wait for the end of what was begun. Idempotent.

        Args:
            cancel_futures: Whether to leave out what has not begun.
        """
        self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while True:
                    if (piece := self._pieces.get_nowait()) is not None:
                        piece[0].cancel()
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            _do(piece)
            del piece


def _do(piece: _Piece | None) -> None:
    assert piece is not None
    future, work, arguments = piece
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(work(*arguments))
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)
    finally:
        del future, work, arguments, piece  # the error refers to this frame
