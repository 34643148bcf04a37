"""Connections without a network: a discrete-event simulation around the transfer machine.

A connection carries its parts in order, `streams` at a time, which share its speed. Speeds change
at given times; a connection may die, and is given up when it stalls. Time is the simulation's own,
so that a pull of minutes takes milliseconds. The machine's commands are carried out and checked as
they come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mx.core.digest import DIGEST_BYTES
from mx.core.grid import ChunkGrid
from mx.core.striping import MOST_READS, Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    Command,
    DropConnection,
    Fail,
    LayerReady,
)
from mx.errors import ClosedError, MxError, PeerLostError

TICK_S = 0.25
#: A transport gives a connection up from which nothing has come for so long.
STALL_S = 4.0
#: What is less than this is rounding.
_EPSILON_NBYTES = 1e-3


@dataclass
class SimulatedConnection:
    """`speeds` are (from when, bytes per second), in order, from 0 on; `estimate` is what the plan
    expects of it; it is lost at `dies_at_s`."""

    speeds: Sequence[tuple[float, float]]
    estimate: float = 1.25e9
    streams: int = 2
    dies_at_s: float = math.inf
    source: str = "s"
    round_trip_s: float = 0.0  # from a request to its first byte

    queue: list[Part] = field(default_factory=list)
    left: dict[Part, float] = field(default_factory=dict)  # bytes yet to come
    begins_s: dict[Part, float] = field(default_factory=dict)  # when its first byte may come
    most_nbytes: int = 0  # that were under way at once
    nbytes: int = 0  # of parts that landed
    wasted_nbytes: float = 0.0  # came, but of parts that did not end well
    last_s: float = 0.0
    stalled_s: float = 0.0
    gone: bool = False

    @property
    def depth(self) -> int:
        return 2 * self.streams

    def speed(self, now_s: float) -> float:
        return [rate for since_s, rate in self.speeds if since_s <= now_s][-1]

    def under_way(self, now_s: float) -> list[Part]:
        begun = [part for part in self.queue if self.begins_s[part] <= now_s]
        return begun[: self.streams]

    def next_event_s(self, now_s: float) -> float:
        """Return when a part will be complete or the speed changes."""
        found = [since_s for since_s, _ in self.speeds if since_s > now_s]
        found += [self.dies_at_s] if not self.gone else []
        found += [at_s for at_s in self.begins_s.values() if at_s > now_s]
        speed, parts = self.speed(now_s), self.under_way(now_s)
        if not speed and parts:
            found.append(now_s + STALL_S - self.stalled_s)
        elif parts:
            found.append(now_s + min(self.left[p] for p in parts) * len(parts) / speed)
        return min(found, default=math.inf)

    def advance(self, now_s: float, until_s: float) -> None:
        parts = self.under_way(now_s)
        stalls = bool(parts) and not self.speed(now_s)
        self.stalled_s = self.stalled_s + until_s - now_s if stalls else 0.0
        for part in parts:
            self.left[part] -= self.speed(now_s) * (until_s - now_s) / len(parts)


class Simulation:
    """One pull of `grid` over `connections`. `run` it; then look at it and at them."""

    def __init__(self, grid: ChunkGrid, connections: Sequence[SimulatedConnection]) -> None:
        self.grid = grid
        self.connections = list(connections)
        self.machine = TransferMachine(
            grid, self._page_of, several_connections=len(connections) > 1
        )
        self.machine.holdings.subscribe(self)
        self.now_s = 0.0
        self.verified: set[int] = set()
        self.ready_s: dict[int, float] = {}
        self.dropped: dict[int, float] = {}
        self.failure: Fail | None = None
        self._blocks: dict[int, set[int]] = {}  # chunk -> blocks requested or landed
        self._closing: list[tuple[int, MxError]] = []

    @property
    def completed(self) -> bool:
        return self.machine.holdings.whole

    def _page_of(self, layer: int) -> bytes:
        return bytes(DIGEST_BYTES * self.grid.layer_blocks[layer])

    def chunk_verified(self, chunk: int) -> None:
        assert len(self._blocks[chunk]) == self.grid.block_count(chunk)
        assert chunk not in self.verified, "verified twice"
        self.verified.add(chunk)

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        raise AssertionError("no chunk is wrong")

    def nbytes(self, part: Part) -> int:
        return self.grid.part_nbytes(part.chunk, part.begin, part.end)

    def run(self, limit_s: float = 1e6) -> Simulation:
        self._do(self.machine.start())
        for number, connection in enumerate(self.connections):
            added = self.machine.add_connection(
                number,
                connection.depth,
                0.0,
                source=connection.source,
                bytes_per_s=connection.estimate,
            )
            self._do(added)
        self._do(self.machine.no_more_connections())
        tick_s = TICK_S
        while not self.completed and self.failure is None:
            at_s = min(
                tick_s, *(connection.next_event_s(self.now_s) for connection in self.connections)
            )
            assert at_s < limit_s, "it does not end"
            for connection in self.connections:
                connection.advance(self.now_s, at_s)
            self.now_s = at_s
            if at_s == tick_s:
                tick_s += TICK_S
                self._tick()
            for number in range(len(self.connections)):
                self._events(number)
        return self

    def _tick(self) -> None:
        landed = {
            part: int(self.nbytes(part) - left)
            for connection in self.connections
            for part, left in connection.left.items()
        }
        self._do(self.machine.tick(self.now_s, landed))

    def _events(self, number: int) -> None:
        connection = self.connections[number]
        stalled = connection.stalled_s > STALL_S - 1e-6
        if (connection.dies_at_s <= self.now_s or stalled) and not connection.gone:
            error = PeerLostError("gone", peer=connection.source)
            self._do(self.machine.connection_lost(number, error, self.now_s))
            self._end_connection(number, error)
            return
        under_way = connection.under_way(self.now_s)
        for part in [p for p in under_way if connection.left[p] <= _EPSILON_NBYTES]:
            connection.queue.remove(part)
            del connection.left[part], connection.begins_s[part]
            connection.nbytes += self.nbytes(part)
            connection.last_s = self.now_s
            digests = bytes(DIGEST_BYTES * (part.end - part.begin))
            round_trip_s = connection.round_trip_s
            self._do(self.machine.landed(number, [(part, digests)], self.now_s, round_trip_s))

    def _end_connection(self, number: int, error: MxError) -> None:
        """Close a connection's session: every read that it has fails."""
        connection = self.connections[number]
        connection.gone = True
        while connection.queue:
            part = connection.queue.pop(0)
            connection.wasted_nbytes += self.nbytes(part) - connection.left.pop(part)
            self._blocks[part.chunk] -= set(range(part.begin, part.end))
            self._do(self.machine.failed(number, [part], error, self.now_s))

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Assign(number, parts):
                    assert not self.connections[number].gone, "requested over a lost connection"
                    for part in parts:
                        self._ask(self.connections[number], part)
                case LayerReady(layer):
                    assert layer not in self.ready_s
                    self.ready_s[layer] = self.now_s
                case DropConnection(number, reason):
                    self.dropped[number] = self.now_s
                    self._end_connection(number, ClosedError(str(reason)))
                case Fail():
                    self.failure = command

    def _ask(self, connection: SimulatedConnection, part: Part) -> None:
        blocks = set(range(part.begin, part.end))
        asked = self._blocks.setdefault(part.chunk, set())
        assert blocks, "a read of nothing"
        assert not blocks & asked, "requested twice"
        most = MOST_READS if connection.round_trip_s else connection.depth
        assert len(connection.queue) < most
        asked |= blocks
        connection.queue.append(part)
        connection.left[part] = float(self.nbytes(part))
        connection.begins_s[part] = self.now_s + connection.round_trip_s
        connection.most_nbytes = max(
            connection.most_nbytes, sum(map(self.nbytes, connection.queue))
        )
