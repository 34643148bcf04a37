"""A model that a process serves: its exposures, and its part in a swarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mx.core.types import SourceRecord
from mx.source.model import SourceModel
from mx.swarm.stream import PeerStream
from mx.transport import Exposure, Sending, Witness


class Participant(Protocol):
    """A source's part in a swarm."""

    def watch(
        self, sent: Callable[[str, str], int | None], trades: Callable[[str, int], None]
    ) -> None:
        """Connect the participant to the source. Called before any other method.

        Args:
            sent: sent(reader id, address or "") returns the bytes sent to a reader so far, or None
                if the source cannot see them.
            trades: The participant calls trades(reader id, +1 or -1) when a stream to a reader that
                it dialled begins or ends.
        """

    @property
    def slots(self) -> int:
        """How many slots are in use."""

    def opened(self, reader_id: str) -> bool:
        """Record that a pull was granted reads. Return True if it must request each chunk."""

    def closed(self, reader_id: str) -> None:
        """Record that one of the pull's leases has ended."""

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Trade chunks with a peer that has opened a stream, until the stream ends.

        Args:
            record: The peer, as it describes itself.
            have: The chunks that it holds, as a bit set.
            stream: The stream.

        Raises:
            PeerProtocolError: The peer has sent what it must not.
        """

    def gives(self, chunk: int) -> bool:
        """Return True if readers may have the chunk from here."""

    def withdrawn(self) -> None:
        """Stop serving. A pull that has yet to receive goes on with that. Idempotent."""

    def end(self) -> None:
        """End all streams: the source is no longer served. Idempotent."""


@dataclass(frozen=True, slots=True)
class MemoryFaults:
    """What is wrong with memory, "" for nothing. `moved` says which tensors are elsewhere by now;
    `wrong` names those that are not what was registered."""

    moved: str = ""
    wrong: str = ""


class Watchman(Protocol):
    """What looks after memory that is lent."""

    @property
    def lends(self) -> bool:
        """True while it is lent."""

    @property
    def why(self) -> str:
        """Why it was withdrawn, until it is lent again; else ""."""

    async def check(self) -> bool:
        """Withdraw the memory if its owner no longer uses it. Return True if it is lent."""

    async def doubt(self, look: Callable[[], MemoryFaults]) -> bool:
        """Hash some of the memory again with `look`, which blocks, and withdraw all of it if that
        is not what was registered. Return True if it is right."""


@dataclass
class ExposedModel:
    """A held model with its exposures, by transport name."""

    held: SourceModel
    exposures: dict[str, Exposure]
    participant: Participant
    #: Earlier exposures that readers still have grants of.
    retired: list[Exposure] = field(default_factory=list)
    #: The generation that has replaced this one; 0: none has.
    newer: int = 0
    #: True if nothing replaces it: this process has written to its memory.
    changed: bool = False
    #: True when running reads have been cut off too.
    cut: bool = False
    #: True while its name stands for other weights at the coordinator.
    pin_only: bool = False
    #: Looks after the memory if it is lent.
    watchman: Watchman | None = None

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of the transports that expose it, sorted."""
        return tuple(sorted(self.exposures))

    @property
    def listed(self) -> bool:
        """True unless it is withdrawn, for good or for a change, or about to be."""
        return not self.newer and (self.watchman is None or self.watchman.lends)

    def all_exposures(self) -> list[Exposure]:
        """Return the current and the retired exposures."""
        return [*self.exposures.values(), *self.retired]

    def sent_bytes(self) -> int:
        """Return the bytes sent so far; readers of other exposures fetch for themselves."""
        return sum(e.sent_bytes() for e in self.all_exposures() if isinstance(e, Sending))

    def used(self) -> dict[str, tuple[int, bool]]:
        """Return the use of each grant with which a reader has connected.

        Returns:
            By grant id: (bytes sent on it so far, True if its reader may fetch for itself too).
        """
        found: dict[str, tuple[int, bool]] = {}
        for exposure in self.all_exposures():
            if isinstance(exposure, Witness):
                fetches = not isinstance(exposure, Sending)
                for grant_id, nbytes in exposure.used().items():
                    before = found.get(grant_id, (0, False))
                    found[grant_id] = (before[0] + nbytes, before[1] or fetches)
        return found

    def witnessed(self) -> bool:
        """Return True if every exposure knows which of its grants are used."""
        return all(isinstance(exposure, Witness) for exposure in self.all_exposures())
