"""Counts models by where they came from."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from mx.log import Event

log = logging.getLogger(__name__)

#: Attached to the memory of this host's cache, converted already; attached there, as the checkpoint
#: has it; attached to another process of this host; received from peers; read from disk.
PLACES = ("converted", "cache", "host", "peer", "disk")

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def served(name: str, place: str, *, reason: str = "", **fields: object) -> None:
    """Count a model, and log where it came from.

    Args:
        name: The model, as the program names it.
        place: One of `PLACES`.
        reason: Why it came from no better place.
        fields: Further fields of the log's event.
    """
    with _lock:
        _counts[place] += 1
    more = {"reason": reason} if reason else {}
    log.info(Event("from_pretrained", {"model": name, "source": place, **more, **fields}))


def counts() -> dict[str, int]:
    """Return how many models of this process came from each of `PLACES`."""
    with _lock:
        return {place: _counts[place] for place in PLACES}
