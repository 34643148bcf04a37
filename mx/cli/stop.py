"""What ends a command that serves until it is stopped."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mx import packs
from mx.cli import outcome

#: New objects between two collections of garbage while a command serves. While it starts there are
#: more (`mx.cli`), and what calls leave in cycles would grow to megabytes.
_COLLECTED_AT = 10_000


class Stop:
    """Handles signals while serving. The first SIGTERM or Ctrl-C drains, the second ends at once.
    SIGHUP, which a terminal sends when it is closed, is ignored."""

    def __init__(self) -> None:
        self._is_asked = False
        self._number = 0
        # Not an Event: its lock may be held by the very code that the handler interrupts. What is
        # written here as a signal comes also ends a read that begins before the handler has run.
        self._reading = self._writing = -1

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        wakes = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        previous = {n: signal.signal(n, self._take) for n in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGHUP] = outcome.ignore_hangup()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakes)
            os.close(self._reading)
            os.close(self._writing)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            outcome.count_signal(number)
            sys.exit(128 + number)
        self._is_asked, self._number = True, number

    def wait(self) -> None:
        """Wait for the first signal, tell the service manager, and say what ends the command."""
        gc.set_threshold(_COLLECTED_AT)
        while not self._is_asked:
            os.read(self._reading, 1)
        why = "Ctrl-C" if self._number == signal.SIGINT else signal.Signals(self._number).name
        outcome.say(f"stopping: {why} was received")
        packs.tell("stopping")
