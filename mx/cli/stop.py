"""What ends a command that serves until it is stopped."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mx.cli import notify, outcome


class Stop:
    """Handles signals while serving. The first SIGTERM or Ctrl-C drains, the second ends at once.
    SIGHUP, which a terminal sends when it is closed, is ignored."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._number = 0

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        previous = {n: signal.signal(n, self._take) for n in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGHUP] = outcome.ignore_hangup()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            sys.exit(128 + number)
        self._number = number
        self._asked.set()

    def wait(self) -> None:
        """Wait for the first signal, and tell the service manager."""
        self._asked.wait()
        notify.stopping()
