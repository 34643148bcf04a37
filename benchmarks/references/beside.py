"""Runs a reference beside as much Python as mx's control work takes, in the same process.

A pull asks a coordinator and a source, checks the manifest and block digests, and renews leases
while bytes come; its event loop takes some 0.13 s of CPU time for 2.6 GB. On two cores that the
bytes keep busy no program can move them as fast as before with that beside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: What the event loop's thread of a pull of 2.6 GB over tcp or ucx takes.
CONTROL_S = 0.13
#: What its event loop and the caller's thread take until the first layer is ready.
FIRST_LAYER_S = 0.01


def beside_control(run: Callable[[], float], cpu_s: float = CONTROL_S) -> float:
    """Return what `run` returns, while a thread of this process takes `cpu_s` of CPU time for
    Python code."""
    thread = threading.Thread(target=_work, args=(cpu_s,))
    thread.start()
    try:
        return run()
    finally:
        thread.join()


def _work(cpu_s: float) -> None:
    began_s = time.thread_time()
    while time.thread_time() - began_s < cpu_s:
        sum(range(2_000))
