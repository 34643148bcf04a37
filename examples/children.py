"""What an example starts ends with it: on Ctrl-C, SIGTERM and SIGHUP, and also when it is killed.

As a script it runs a command that ends with the process that has asked for it:

    python examples/children.py PID COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP (a terminal that closes) end this process as Ctrl-C does, by an
    exception: blocks that have started something end it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> NoReturn:
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)


def command(*words: object) -> list[str]:
    """Return a command that runs another one, which ends when this process does, however that
    ends."""
    return [sys.executable, os.path.abspath(__file__), str(os.getpid()), *map(str, words)]


def end_with(parent: int | None = None) -> None:
    """Have Linux end this process when the thread that has started it ends.

    Args:
        parent: The process of that thread; None: the one that has started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it has ended before that
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
