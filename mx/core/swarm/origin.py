"""What an origin hands out in a swarm (`Seeder`). Events in, answers out; no IO, no clock. Sets of
chunks are bit sets and readers are numbers, see `mx.core.swarm.receiver`; who reads at a time is in
`mx.core.swarm.slots`.

Super-seeding (as in BitTorrent's BEP 16, with offers in the place of false holdings): an origin
sends no chunk a second time while one has never gone out. It says over the stream that each
reader has open with it "take chunk 17 from me next", to one reader at a time, so that nobody has
to be asked who sends what, and all else comes from the readers. A reader that does not take what
it is offered is offered nothing more while others are there, and neither are others from its
address that have taken nothing so far.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.core.swarm.slots import WIDTH
from mx.core.swarm.standing import Standing

#: Offers that an origin has open: those under way, and one that is on its way or waits.
SUGGESTIONS = WIDTH + 1
#: An offer is late after this many times what one usually takes, and not before `LATE_S`.
LATE_FACTOR = 4.0
LATE_S = 1.0
#: A reader that takes this many times as long as the median one gets no offers.
SLOW_FACTOR = 2.0
_KEPT = 0.7


class Suggest(NamedTuple):
    """Tell the reader: take this chunk from me next."""

    reader: int
    chunk: int


@dataclass(slots=True)
class _Reader:
    have: int  # by its own word
    sent: int = 0  # bit set of what it had from us
    suggestions: dict[int, float] = field(default_factory=dict)  # chunk -> when
    missed: int = 0  # bit set of what it was late with, or failed to read
    lapsed: int = 0  # offers that it was late with, since it last took one
    turn: int = 0  # when it was last offered anything
    seconds: float = 0.0  # from offer to done, averaged over the latest


class Seeder:
    """What the origin hands out: each chunk once before any twice."""

    def __init__(
        self, chunks: int, *, suggestions: int = SUGGESTIONS, standing: Standing | None = None
    ) -> None:
        """`offers`: how many are open at a time, over all readers: enough to fill the link.
        `standing` knows the readers' addresses, and which of them come last."""
        self._suggestions = suggestions
        self._standing = standing or Standing()
        self._lapsed: Counter[str] = Counter()  # offers by address
        self._unsent = (1 << chunks) - 1  # nobody has it or was offered it
        self._readers: dict[int, _Reader] = {}
        self._open = 0
        self._turn = 0
        self.forced = 0  # chunks offered again because the first reader was late

    @property
    def all_out(self) -> bool:
        """Is each chunk with somebody who lives, or offered to one? Then readers may be told that
        the origin holds everything, and asks are answered as they come."""
        return not self._unsent

    def may_request(self, reader: int, chunk: int) -> bool:
        """May the reader have the chunk if there is room? What was offered it: always. Anything
        else: once all is out."""
        return self.suggested(reader, chunk) or not self._unsent

    def suggested(self, reader: int, chunk: int) -> bool:
        """Was it offered to this reader?"""
        state = self._readers.get(reader)
        return state is not None and chunk in state.suggestions

    def joined(self, reader: int, have: int, now_s: float) -> list[Suggest]:
        """A reader with a stream open, which holds `have`."""
        given = self.gone(reader, now_s)  # it may have come back
        self._readers[reader] = _Reader(have)
        self._unsent &= ~have
        return given + self._hand_out(now_s)

    def gone(self, reader: int, now_s: float) -> list[Suggest]:
        """The reader is dead: what it alone is known to have had goes out again."""
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
        """The reader holds these: they need not come from us."""
        state = self._readers.get(reader)
        if state is not None:
            state.have |= chunks
            self._unsent &= ~chunks

    def done(self, reader: int, chunk: int, now_s: float) -> list[Suggest]:
        """The reader has taken the chunk."""
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
        """The reader does not take the offer: it has the chunk, or asks another for it."""
        state = self._readers.get(reader)
        if state is None or state.suggestions.pop(chunk, None) is None:
            return []
        self._open -= 1
        state.have |= 1 << chunk
        return self._hand_out(now_s)

    def failed(self, reader: int, chunk: int, now_s: float) -> list[Suggest]:
        """The read of an offered chunk failed: it goes to another, if there is one."""
        state = self._readers.get(reader)
        if state is None or state.suggestions.pop(chunk, None) is None:
            return []
        self._open -= 1
        state.missed |= 1 << chunk
        self._take_up(chunk)
        return self._hand_out(now_s)

    def tick(self, now_s: float) -> list[Suggest]:
        """Time has passed: offers that are late go to others too."""
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
        """It goes out again, unless somebody has it."""
        for state in self._readers.values():
            if (state.have | state.sent) >> chunk & 1 or chunk in state.suggestions:
                return False
        self._unsent |= 1 << chunk
        return True

    def _usual_s(self) -> float:
        # Of those that take what they are offered: the others would make waiting usual.
        took = [each for each in self._readers.values() if each.sent and not each.lapsed]
        paces = [state.seconds for state in took if state.seconds]
        return statistics.median_low(paces) if paces else 0.0

    def _hand_out(self, now_s: float) -> list[Suggest]:
        """The lowest chunk that has never gone out, to the reader whose turn is longest ago."""
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

    def _comes_last(self, number: int, state: _Reader) -> bool:
        """Offer it nothing that another may take?"""
        if not self._lapsed and self._standing.clean:
            return False
        new = not state.sent and self._lapsed[self._standing.reader(number).address] > 0
        return bool(state.lapsed) or new or self._standing.last(number)
