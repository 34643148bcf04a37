"""Counts of events that no object remembers, for the metrics of the process (`mx.metrics`).

What an object counts anyway is read from it, and counted nowhere else. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter

#: The requests that this process's servers refused, by the name of the error.
REFUSED = "refused"
#: The bytes that readers had on grants that have ended, by transport.
GIVEN_BYTES = "given bytes"

#: The most labels of one count; what comes later is counted as `OTHER`.
MOST_LABELS = 64
OTHER = "other"

_lock = threading.Lock()
_counts: dict[str, Counter[str]] = {}


def add(name: str, label: str, by: int = 1) -> None:
    """Count an event.

    Args:
        name: What is counted, such as `REFUSED`.
        label: The kind of the event.
        by: How much to add.
    """
    with _lock:
        counts = _counts.setdefault(name, Counter())
        if label not in counts and len(counts) >= MOST_LABELS:
            label = OTHER
        counts[label] += by


def totals(name: str) -> Counter[str]:
    """Return a copy of what was counted so far, by label."""
    with _lock:
        return Counter(_counts.get(name, ()))
