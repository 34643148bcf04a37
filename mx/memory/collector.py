"""Pauses Python's garbage collector while many objects are made that all stay.

Descriptions of tens of thousands of tensors are such objects. The collector would look at them, and
at every other object of the process, again and again while they are made: that took half of the
time that a pull into 50,000 tensors needs before its first read. What was made counts as old after
the pause, as it would after a few collections.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_resumes = False  # the collector ran before the first of the pauses
_frozen = False  # objects were seen that the caller has frozen


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector inside, in all threads. Pauses nest; a collector that was disabled
    before stays so."""
    global _pauses, _resumes, _frozen
    with _lock:
        if not _pauses:
            _resumes = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _resumes:
                # Else these two would undo the caller's own `freeze`, or Python 3.12's of what it
                # has made at its start. It counts one by one: hundreds of thousands take 40 ms.
                _frozen = _frozen or gc.get_freeze_count() > 0
                if not _frozen:
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


def _in_child() -> None:
    """Resume the collector in a child that was forked during a pause: it has no other thread."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _resumes:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_in_child)
