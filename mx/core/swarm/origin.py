"""The chunks that an origin suggests in a swarm (`Seeder`). Events in, answers out; no IO, no
clock. Sets of chunks are bit sets and readers are numbers, see `mx.core.swarm.receiver`;
`mx.core.swarm.slots` decides how many readers read at a time.

Super-seeding (as in BitTorrent's BEP 16, with suggestions in place of false holdings): an origin
sends no chunk twice while there is a chunk that it has never sent. It suggests each chunk to one
reader, over the stream that the reader has open with it ("read chunk 17 from me next"), so that
the readers need not agree on who reads what, and everything else comes from other readers. A
reader that does not take a suggested chunk gets no more suggestions while there are other readers,
and neither do readers at its address that have taken nothing so far.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.core.swarm.slots import WIDTH
from mx.core.swarm.standing import Standing

#: Open suggestions of an origin: those being read, and one that is in transit or waits.
SUGGESTIONS = WIDTH + 1
#: A suggestion is late after this many times the usual time, and not before `LATE_S`.
LATE_FACTOR = 4.0
LATE_S = 1.0
#: A reader that takes this many times as long as the median reader comes after the others.
SLOW_FACTOR = 2.0
_KEPT = 0.7


class Suggest(NamedTuple):
    """Tell the reader to read this chunk from the origin next."""

    reader: int
    chunk: int


@dataclass(slots=True)
class _SeededReader:
    have: int  # the chunks that it reports to hold
    sent: int = 0  # the chunks that it has read from this origin
    suggestions: dict[int, float] = field(default_factory=dict)  # open ones: chunk -> since when
    missed: int = 0  # the chunks that it was late with, or failed to read
    lapsed: int = 0  # late suggestions since it last took one
    turn: int = 0  # the number of the last suggestion to it
    seconds: float = 0.0  # from suggestion to done, a moving average


class Seeder:
    """Decides which reader reads which chunk from the origin: each chunk once before any twice."""

    def __init__(
        self, chunks: int, *, suggestions: int = SUGGESTIONS, standing: Standing | None = None
    ) -> None:
        """
        Args:
            chunks: The number of chunks.
            suggestions: The number of open suggestions over all readers: enough to fill the link.
            standing: Knows the readers' addresses, and which readers come last.
        """
        self._suggestions = suggestions
        self._standing = standing or Standing()
        self._lapsed: Counter[str] = Counter()  # late suggestions by address
        self._unsent = (1 << chunks) - 1  # chunks that no reader has or was suggested
        self._readers: dict[int, _SeededReader] = {}
        self._open = 0
        self._turn = 0
        self.forced = 0  # chunks suggested again because the first reader was late

    @property
    def all_out(self) -> bool:
        """True if a connected reader has, or was suggested, each chunk.

        Then readers may learn that the origin holds everything, and it answers all requests.
        """
        return not self._unsent

    def may_request(self, reader: int, chunk: int) -> bool:
        """Return True if the reader may have the chunk when a slot is free: if it was suggested
        to this reader, or `all_out`."""
        return self.suggested(reader, chunk) or not self._unsent

    def suggested(self, reader: int, chunk: int) -> bool:
        """Return True if the chunk is suggested to this reader."""
        state = self._readers.get(reader)
        return state is not None and chunk in state.suggestions

    def joined(self, reader: int, have: int, now_s: float) -> list[Suggest]:
        """Add a reader that has opened a stream and holds `have`; it may have been here before."""
        given = self.gone(reader, now_s)
        self._readers[reader] = _SeededReader(have)
        self._unsent &= ~have
        return given + self._hand_out(now_s)

    def gone(self, reader: int, now_s: float) -> list[Suggest]:
        """Remove a reader that is lost: chunks that no other reader has are suggested again."""
        state = self._readers.pop(reader, None)
        if state is None:
            return []
        self._open -= len(state.suggestions)
        lost = state.sent | state.have
        for chunk in state.suggestions:
            lost |= 1 << chunk
        for other in self._readers.values():
            lost &= ~(other.have | other.sent)
            for chunk in other.suggestions:
                lost &= ~(1 << chunk)
        self._unsent |= lost
        return self._hand_out(now_s)

    def announced(self, reader: int, chunks: int) -> None:
        """Record that a reader holds these chunks, which so need not come from the origin."""
        state = self._readers.get(reader)
        if state is not None:
            state.have |= chunks
            self._unsent &= ~chunks

    def done(self, reader: int, chunk: int, now_s: float) -> list[Suggest]:
        """Record that a reader has read a chunk from the origin."""
        state = self._readers.get(reader)
        if state is None:
            return []
        state.sent |= 1 << chunk
        self._unsent &= ~(1 << chunk)
        offered_s = state.suggestions.pop(chunk, None)
        if offered_s is not None:
            self._open -= 1
            state.lapsed = 0
            kept = _KEPT if state.seconds else 0.0
            state.seconds = kept * state.seconds + (1 - kept) * (now_s - offered_s)
        return self._hand_out(now_s)

    def declined(self, reader: int, chunk: int, now_s: float) -> list[Suggest]:
        """Record that a reader declines a suggestion: it has the chunk, or reads it elsewhere."""
        state = self._readers.get(reader)
        if state is None or state.suggestions.pop(chunk, None) is None:
            return []
        self._open -= 1
        state.have |= 1 << chunk
        return self._hand_out(now_s)

    def failed(self, reader: int, chunk: int, now_s: float) -> list[Suggest]:
        """Record that the read of a suggested chunk failed: another reader gets it, if there is
        one."""
        state = self._readers.get(reader)
        if state is None or state.suggestions.pop(chunk, None) is None:
            return []
        self._open -= 1
        state.missed |= 1 << chunk
        self._take_up(chunk)
        return self._hand_out(now_s)

    def tick(self, now_s: float) -> list[Suggest]:
        """Suggest late chunks to other readers too. Call this a few times a second."""
        usual_s = self._usual_s()
        limit_s = max(LATE_S, LATE_FACTOR * usual_s) if usual_s else 4 * LATE_S
        for number, state in self._readers.items():
            late = [c for c, offered_s in state.suggestions.items() if now_s - offered_s > limit_s]
            for chunk in late if len(self._readers) > 1 else ():
                state.seconds = max(state.seconds, now_s - state.suggestions.pop(chunk))
                state.missed |= 1 << chunk
                state.lapsed += 1
                self._lapsed[self._standing.reader(number).address] += 1
                self._open -= 1
                self.forced += self._take_up(chunk)
        return self._hand_out(now_s)

    def _take_up(self, chunk: int) -> bool:
        """Make a chunk unsent again, and return True, unless it is with a reader or suggested."""
        for state in self._readers.values():
            if (state.have | state.sent) >> chunk & 1 or chunk in state.suggestions:
                return False
        self._unsent |= 1 << chunk
        return True

    def _usual_s(self) -> float:
        # Only of readers that take suggested chunks: the others would raise the usual time.
        took = [each for each in self._readers.values() if each.sent and not each.lapsed]
        paces = [state.seconds for state in took if state.seconds]
        return statistics.median_low(paces) if paces else 0.0

    def _hand_out(self, now_s: float) -> list[Suggest]:
        """Suggest unsent chunks, the lowest first, each to the best reader. Among equals that is
        the reader whose last suggestion is the oldest."""
        given: list[Suggest] = []
        if not self._unsent or self._open >= self._suggestions:
            return given
        limit_s = SLOW_FACTOR * self._usual_s() or float("inf")
        while self._unsent and self._open < self._suggestions and self._readers:
            low = self._unsent & -self._unsent
            chunk = low.bit_length() - 1
            number, state = min(
                self._readers.items(),
                key=lambda item: (
                    item[1].missed & low,
                    self._comes_last(*item),
                    item[1].seconds > limit_s,
                    len(item[1].suggestions),
                    item[1].turn,
                ),
            )
            self._turn += 1
            state.turn = self._turn
            state.suggestions[chunk] = now_s
            self._open += 1
            self._unsent &= ~low
            given.append(Suggest(number, chunk))
        return given

    def _comes_last(self, number: int, state: _SeededReader) -> bool:
        """Return True if a chunk is suggested to this reader only if there is no other."""
        if not self._lapsed and self._standing.clean:
            return False
        new = not state.sent and self._lapsed[self._standing.reader(number).address] > 0
        return bool(state.lapsed) or new or self._standing.last(number)
