"""The machine behind a pull: events in, commands out, no IO, no clock.

It knows which chunks are missing, in flight, landed; which lanes (one session to one source)
there are and how deep each wants to be; and decides what is read next, from whom, and when a
layer, or everything, is ready. Its caller executes the commands and reports what came of them,
in any order. Chunks are handed out lowest first, so that early layers are ready early.

A chunk that fails goes back and is tried elsewhere if there is an elsewhere. So does one whose
lane is lost, but not before its read has ended: until then that lane's transport may still write
where the chunk lies, and would do so beneath the next one's verified bytes. A chunk whose digest
is wrong is not asked of the same source again while another holds it; a source that sends wrong
bytes `MAX_CORRUPT` times is out. The pull fails when chunks are missing, no lane is left that
may be asked for them, and the caller has said that no further lane will come (`no_more_lanes`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mx.core.types import ChunkGrid
from mx.errors import DigestError, MxError

MAX_CORRUPT = 2
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Assign:
    """Read these chunks through this lane."""

    lane: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerReady:
    layer: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Every layer is ready."""


@dataclass(frozen=True, slots=True)
class DropLane:
    """Close this lane: its source sent wrong bytes too often."""

    lane: int
    reason: MxError


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing is left that could finish the pull. `causes` are the lanes' last errors."""

    causes: tuple[MxError, ...]


Command = Assign | LayerReady | Complete | DropLane | Fail


@dataclass(slots=True)
class _Lane:
    depth: int
    holds: Callable[[int], bool] | None
    in_flight: set[int] = field(default_factory=set)
    corrupt: int = 0


class PullMachine:
    """One pull. Not thread-safe; every method returns the commands that follow, in order."""

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self._missing = list(range(len(grid)))  # a heap: ascending is one
        self._lanes: dict[int, _Lane] = {}
        self._lost: dict[int, _Lane] = {}  # those of which reads are yet to end
        self._refused: dict[int, set[int]] = {}  # chunk -> lanes that sent it wrong
        self._attempts: dict[int, int] = {}
        self._landed = bytearray(len(grid))
        self._left_in_layer = [len(grid.of_layer(i)) for i in range(len(grid.layout.layers))]
        self._left = len(grid)
        self._causes: list[MxError] = []
        self._ended = False
        self._expecting = True
        self.retries = 0

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def chunks_left(self) -> int:
        return self._left

    def landed(self, chunk: int) -> bool:
        return bool(self._landed[chunk])

    def start(self) -> list[Command]:
        """Layers without bytes are ready at once; so is a model without any."""
        commands: list[Command] = [
            LayerReady(layer) for layer, left in enumerate(self._left_in_layer) if not left
        ]
        if not self._left:
            self._ended = True
            commands.append(Complete())
        return commands

    def already_landed(self, chunks: Iterable[int]) -> list[Command]:
        """Chunks that were verified before the pull (resumed, or attached)."""
        commands: list[Command] = []
        for chunk in chunks:
            if not self._landed[chunk]:
                self._missing.remove(chunk)
                commands += self._land(chunk)
        heapq.heapify(self._missing)
        return commands

    def add_lane(
        self, lane: int, depth: int, holds: Callable[[int], bool] | None = None
    ) -> list[Command]:
        """A session is open; it wants `depth` chunks outstanding. `holds` says of a layer index
        whether its source has that layer (None: all of them)."""
        if lane in self._lanes or lane in self._lost:
            raise ValueError(f"lane {lane} is there already")
        self._lanes[lane] = _Lane(max(1, depth), holds)
        return self._assign()

    def lane_lost(self, lane: int, error: MxError) -> list[Command]:
        """The session or its source is gone: nothing more is asked of it. How each of its reads
        ends is still to be reported; those that failed then go back."""
        gone = self._lanes.pop(lane, None)
        if gone is None or self._ended:
            return []
        self._causes.append(error)
        if gone.in_flight:
            self._lost[lane] = gone
        return self._assign() + self._check_hopeless()

    def no_more_lanes(self) -> list[Command]:
        """Every candidate was tried: what the present lanes can't give will not come."""
        self._expecting = False
        return self._check_hopeless()

    def abort(self, cause: MxError) -> list[Command]:
        """End the pull for a reason of the caller's own."""
        if self._ended:
            return []
        self._ended = True
        return [Fail((cause,))]

    def chunk_verified(self, lane: int, chunk: int) -> list[Command]:
        """All bytes landed and the digest holds."""
        if not self._take_back(lane, chunk):
            return []
        return self._land(chunk) + self._assign() + self._check_hopeless()

    def chunk_failed(self, lane: int, chunk: int, error: MxError) -> list[Command]:
        """The read failed but the session may live. A wrong digest is a `DigestError`."""
        if not self._take_back(lane, chunk):
            return []
        self.retries += 1
        heapq.heappush(self._missing, chunk)
        if lane not in self._lanes:
            return self._assign() + self._check_hopeless()
        self._attempts[chunk] = self._attempts.get(chunk, 0) + 1
        commands: list[Command] = []
        if isinstance(error, DigestError):
            self._refused.setdefault(chunk, set()).add(lane)
            state = self._lanes[lane]
            state.corrupt += 1
            if state.corrupt >= MAX_CORRUPT:
                commands.append(DropLane(lane, error))
                return commands + self.lane_lost(lane, error)
        if self._attempts[chunk] >= MAX_ATTEMPTS:
            commands.append(DropLane(lane, error))
            self._attempts[chunk] = 0
            return commands + self.lane_lost(lane, error)
        self._causes.append(error)
        return commands + self._assign() + self._check_hopeless()

    def _take_back(self, lane: int, chunk: int) -> bool:
        state = self._lanes.get(lane) or self._lost.get(lane)
        if state is None or self._ended or chunk not in state.in_flight:
            return False
        state.in_flight.discard(chunk)
        if not state.in_flight:
            self._lost.pop(lane, None)
        return True

    def _land(self, chunk: int) -> list[Command]:
        self._landed[chunk] = 1
        self._left -= 1
        commands: list[Command] = []
        layer = self._grid.layer_of[chunk]
        self._left_in_layer[layer] -= 1
        if not self._left_in_layer[layer]:
            commands.append(LayerReady(layer))
        if not self._left:
            self._ended = True
            commands.append(Complete())
        return commands

    def _may_read(self, lane: int, state: _Lane, chunk: int) -> bool:
        refused = self._refused.get(chunk)
        if refused and lane in refused and len(refused & self._lanes.keys()) < len(self._lanes):
            return False  # somebody else is left to ask
        return state.holds is None or state.holds(self._grid.layer_of[chunk])

    def _assign(self) -> list[Command]:
        """Fill each lane up to its depth, lowest chunks first, the emptiest lane first."""
        if self._ended or not self._missing:
            return []
        given: dict[int, list[int]] = {}
        open_lanes = {n: s for n, s in self._lanes.items() if len(s.in_flight) < s.depth}
        skipped: list[int] = []
        while open_lanes and self._missing:
            chunk = heapq.heappop(self._missing)
            able = [n for n, s in open_lanes.items() if self._may_read(n, s, chunk)]
            if not able:
                skipped.append(chunk)
                continue
            lane = min(able, key=lambda n: len(open_lanes[n].in_flight) / open_lanes[n].depth)
            state = open_lanes[lane]
            state.in_flight.add(chunk)
            given.setdefault(lane, []).append(chunk)
            if len(state.in_flight) >= state.depth:
                del open_lanes[lane]
        for chunk in skipped:
            heapq.heappush(self._missing, chunk)
        return [Assign(lane, tuple(chunks)) for lane, chunks in given.items()]

    def _check_hopeless(self) -> list[Command]:
        if self._ended or self._expecting:
            return []
        if self._lost or any(state.in_flight for state in self._lanes.values()):
            return []
        # Nothing is in flight: whatever could be assigned has been. Chunks are left over.
        if self._missing and not any(
            self._may_read(n, s, self._missing[0]) for n, s in self._lanes.items()
        ):
            self._ended = True
            return [Fail(tuple(self._causes))]
        return []
