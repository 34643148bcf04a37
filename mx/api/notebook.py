"""What a notebook shows of a pull: a bar while it is waited for, and the pull itself as HTML."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mx.text import plain

if TYPE_CHECKING:
    from mx.api.target import Pull
    from mx.core.progress import Progress

T = TypeVar("T")

#: Between two forms of the bar. Each is a message to the browser.
INTERVAL_S = 0.5


def shows_bars() -> bool:
    """Return True on the main thread of a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and getattr(shell, "kernel", None) is not None


def as_html(model: str, state: str, progress: Progress) -> str:
    """Return a pull as HTML.

    Args:
        model: What is pulled. This and the state may have been written by others.
        state: How far it is, in words.
        progress: How far it is.
    """
    done = f'<progress max="{max(1, progress.bytes_total)}" value="{progress.bytes_done}">'
    texts = [html.escape(plain(text)) for text in (model, state)]
    return f"<div><code>{texts[0]}</code> {done}</progress> {texts[1]}</div>"


def watched(pull: Pull, wait: Callable[[float], T], timeout_s: float | None) -> T:
    """Show a bar of a pull while waiting for its end.

    Args:
        pull: The pull.
        wait: Waits for so many seconds at most, and raises TimeoutError after them.
        timeout_s: How long to wait at all; None: without a limit.

    Returns:
        What `wait` returns.

    Raises:
        TimeoutError: The pull still runs after `timeout_s`.
        MxError: The error that ended the pull.
    """
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    bar = sys.modules["IPython"].display.display(pull, display_id=True)
    try:
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                return wait(min(INTERVAL_S, left_s))
            except TimeoutError:
                if left_s <= INTERVAL_S:
                    raise
                bar.update(pull)
    finally:
        bar.update(pull)
