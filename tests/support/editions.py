"""Logs of editions, for tests of what reports to them."""

from __future__ import annotations

from mx.fetching.edition import EditionLog
from mx.fetching.events import EventLog
from mx.fetching.report import no_edition


def edition_log() -> EditionLog:
    """Return the log of an edition without tensors; call it on a loop."""
    pull = EventLog(0.0)
    return EditionLog(pull, pull.begin_anew(), no_edition)
