"""A model as a process serves it: through which transports, and its part in a swarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mx.core.types import SourceRecord
from mx.source.model import HeldModel
from mx.swarm.stream import PeerStream
from mx.transport import Exposure, Sending, Witness


class Participant(Protocol):
    """A source's part in a swarm."""

    def watch(
        self, sent: Callable[[str, str], int | None], trades: Callable[[str, int], None]
    ) -> None:
        """From now on `sent(reader id, address or "")` says how many bytes a reader was sent, or
        None where that cannot be seen; `trades(reader id, +1 or -1)` is to hear when a stream
        to a reader that was dialled from here begins and ends."""

    def opened(self, reader_id: str) -> bool:
        """A pull was granted reads. Must it ask first?"""

    def closed(self, reader_id: str) -> None:
        """One of its leases has ended."""

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Talk to one that greets, until the talk ends."""

    def end(self) -> None:
        """Nothing more will come of it."""


@dataclass
class Served:
    """A held model with its exposures, by transport name."""

    held: HeldModel
    exposures: dict[str, Exposure]
    participant: Participant
    #: Earlier ones, that readers have grants of.
    retired: list[Exposure] = field(default_factory=list)
    #: The generation that has taken this one's place; 0: none has.
    newer: int = 0
    #: Are running reads over too?
    cut: bool = False

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(sorted(self.exposures))

    def all_exposures(self) -> list[Exposure]:
        return [*self.exposures.values(), *self.retired]

    def sent_bytes(self) -> int:
        """What was sent so far, by exposures that do; others leave it to readers to fetch."""
        return sum(e.sent_bytes() for e in self.all_exposures() if isinstance(e, Sending))

    def used(self) -> dict[str, tuple[int, bool]]:
        """By grant that its reader has connected with: the bytes sent on it so far, and whether
        that reader may fetch for itself too."""
        found: dict[str, tuple[int, bool]] = {}
        for exposure in self.all_exposures():
            if isinstance(exposure, Witness):
                fetches = not isinstance(exposure, Sending)
                for grant_id, nbytes in exposure.used().items():
                    before = found.get(grant_id, (0, False))
                    found[grant_id] = (before[0] + nbytes, before[1] or fetches)
        return found

    def witnessed(self) -> bool:
        """Return True if every exposure knows which grants are used."""
        return all(isinstance(exposure, Witness) for exposure in self.all_exposures())
