"""Single keys from a terminal, without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from typing import Any


class Keys:
    """A context in which a terminal on standard input gives keys as they are pressed.

    They are not echoed, and Ctrl-C interrupts as ever. Leaving it restores the terminal's settings.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._before: Any = None

    def __enter__(self) -> Keys:
        with contextlib.suppress(OSError, ValueError, termios.error):  # no input, or no terminal
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)
            self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal was closed
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        self._descriptor = -1

    def wait(self, seconds: float) -> str:
        """Wait for keys.

        Args:
            seconds: For how long at most.

        Returns:
            What was pressed, "" if nothing was. Where there is no terminal it only waits.
        """
        if self._descriptor < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._descriptor, 64)
        if not pressed:  # end of file: select would report it as readable for ever
            self._descriptor = -1
        return pressed.decode(errors="replace")
