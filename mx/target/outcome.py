"""The outcome of one attempt's transfer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from mx.errors import MxError
from mx.runtime import unexpected


class Outcome:
    """How a transfer ends: reported on any thread, changed on the loop on which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.lost: dict[int, MxError] = {}  # connections that the transfer gave up
        self.ended = False
        self.failure: MxError | None = None
        self.causes: Sequence[MxError] | None = None  # of a transfer that has run out of sources

    def connection_lost(self, connection: int, error: MxError) -> None:
        self._on_loop(lambda: self.lost.update({connection: error}))

    def complete(self) -> None:
        """End: every layer is ready."""
        self._on_loop(self._end)

    def failed(self, causes: Sequence[MxError]) -> None:
        """End: no connection is left that could finish the transfer."""

        def end() -> None:
            self.causes = causes
            self._end()

        self._on_loop(end)

    def broken(self, error: MxError) -> None:
        """End with this error: the pull can't go on."""
        self._on_loop(lambda: self._end(error))

    def raised(self, error: BaseException) -> None:
        """End with any exception, as an MxError."""
        self.broken(unexpected(error))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make an exception in the block the pull's failure, and suppress it: on other threads it
        would be lost, and the pull would wait for ever."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - reported
            self.raised(error)

    def _end(self, error: MxError | None = None) -> None:
        self.failure = self.failure or error
        self.ended = True

    def _on_loop(self, change: Callable[[], object]) -> None:
        def run() -> None:
            change()
            self.changed.set()

        with contextlib.suppress(RuntimeError):  # the loop was closed: the pull is over
            self._loop.call_soon_threadsafe(run)
