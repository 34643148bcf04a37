"""Which sources have sent wrong bytes, and which of them are asked whether they lie. Events in,
answers out; no IO, and time is an argument.

The process of a source may have written to what it serves. So a source that sends a wrong part is
*asked*: it hashes the chunk again in its memory. If the chunk is not right there the source ends
all reads, and has not lied. While a source is asked nothing more is read from it. If it answers
that the chunk is right there, or answers nothing in time, the part counts, and a source of which
`MAX_CORRUPT` parts count is a liar.
"""

from __future__ import annotations

import math

from mx.errors import MxError

MAX_CORRUPT = 2
#: A source that is asked has so long to answer. It may hash for other readers first.
ANSWER_S = 4.0


class Suspects:
    """One pull's."""

    def __init__(self) -> None:
        self._wrong: dict[str, int] = {}  # source -> how many parts were
        #: Sources that are asked -> until when, and the error to give if they lie.
        self.asked: dict[str, tuple[float, MxError]] = {}

    def wrong(self, source: str, error: MxError, now_s: float) -> bool:
        """Record that the source has sent a wrong part. Returns True if it is to be asked."""
        self._wrong[source] = self._wrong.get(source, 0) + 1
        until_s, _ = self.asked.get(source, (0.0, None))
        self.asked[source] = until_s or now_s + ANSWER_S, error
        return not until_s

    def answered(self, source: str) -> MxError | None:
        """End the question: what the source has sent counts. Returns the error of the last wrong
        part; None if the source was not asked."""
        _, error = self.asked.pop(source, (0.0, None))
        return error

    def lies(self, source: str) -> bool:
        """Return True if so many parts count that the source is a liar."""
        return self._wrong.get(source, 0) >= MAX_CORRUPT

    @property
    def due_s(self) -> float:
        """When the next source will be overdue."""
        return min((until_s for until_s, _ in self.asked.values()), default=math.inf)

    def overdue(self, now_s: float) -> list[str]:
        """Return the sources that have not answered in time."""
        return [source for source, (until_s, _) in self.asked.items() if now_s >= until_s]
