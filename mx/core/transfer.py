"""The machine behind a pull: events in, commands out, no IO, no clock.

It knows which chunks are missing, in flight, landed; which lanes (one session over one path)
there are and how fast each is; and decides what is read next, over which, and when a layer, or
everything, is ready. Its caller executes the commands and reports what came of them, in any
order.

What is read is a *part*: a chunk, or near the end a piece of one in whole blocks. How much a
lane takes, and from how far ahead, is in `mx.core.striping`.

A part that fails goes back and is tried elsewhere if there is an elsewhere. So does one whose
lane is lost, but not before its read has ended: until then that lane's transport may still write
where the part lies, and would do so beneath the next one's verified bytes. A lane that will be
through so late that the others could do its work twice over is dropped (`tick`). A chunk whose
digest is wrong is not asked of the same source again while another holds it; a source that sends
wrong bytes `MAX_CORRUPT` times is out. In coordinated reading a chunk is read only from the source
that allows it (`allow`), and which peer it is requested from is up to `mx.core.swarm.receiver`. The
pull fails when chunks are missing, no connection is left that may read them, and the caller has
said that no further one will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mx.core import striping
from mx.core.missing import Missing
from mx.core.pace import Pace
from mx.core.striping import Connection, Part
from mx.core.transfer_commands import (
    Assign,
    Check,
    Command,
    Complete,
    DropConnection,
    Fail,
    LayerReady,
)
from mx.core.types import BLOCK_BYTES, ChunkGrid
from mx.errors import DigestError, MxError, PathSlowError

MAX_CORRUPT = 2
MAX_ATTEMPTS = 5


class TransferMachine:
    """One pull. Not thread-safe; every method returns the commands that follow, in order.
    `now_s` are readings of one monotonic clock."""

    def __init__(self, grid: ChunkGrid, *, several_connections: bool = False) -> None:
        """`several_lanes`: the first one is to be joined by others at once."""
        self._grid = grid
        self._several_connections = several_connections
        self._missing = Missing(grid)  # what nobody was asked for
        self._connections: dict[int, Connection] = {}
        self._lost: dict[int, Connection] = {}  # those of which reads are yet to end
        self._pending: dict[int, int] = {}  # chunk -> blocks yet to land
        self._senders: dict[int, set[str]] = {}  # chunk -> sources of what has landed of it
        self._refused: dict[int, set[str]] = {}  # chunk -> sources that sent it wrong
        self._corrupt: dict[str, int] = {}  # source -> how often
        self._whole: set[int] = set()  # chunks to be asked of one source, to know whose fault
        self._attempts: dict[int, int] = {}
        self._landed = bytearray(len(grid))
        self._left_in_layer = [len(grid.of_layer(i)) for i in range(len(grid.layout.layers))]
        self._left = len(grid)
        self._causes: list[MxError] = []
        self._ended = False
        self._expecting = True
        self._allowed: dict[str, set[int]] | None = None  # source -> chunks; None: all of all
        self.retries = 0

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def chunks_left(self) -> int:
        return self._left

    def landed_chunk(self, chunk: int) -> bool:
        return bool(self._landed[chunk])

    # -- events ---------------------------------------------------------------------------------

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
        """Chunks that were verified before the pull (resumed, or attached); those of which a lane
        was asked are passed over."""
        commands: list[Command] = []
        for chunk in chunks:
            if not self._ended and self._missing.untouched(chunk):
                self._missing.remove(chunk)
                commands += self._land(chunk)
        return commands

    def add_connection(
        self,
        connection: int,
        depth: int,
        now_s: float = 0.0,
        *,
        source: str | None = None,
        bytes_per_s: float = 0.0,
        holds: Callable[[int], bool] | None = None,
    ) -> list[Command]:
        """A session is open; it wants up to `depth` parts outstanding, and is expected to do
        `bytes_per_s` (0: not known). Lanes of one `source` share its reputation. `holds` says of
        a layer index whether the source has that layer (None: all of them)."""
        if connection in self._connections or connection in self._lost:
            raise ValueError(f"lane {connection} is there already")
        pace = Pace(bytes_per_s, BLOCK_BYTES)  # soon outweighed by what is seen
        self._connections[connection] = Connection(
            f"lane {connection}" if source is None else source, max(1, depth), pace, holds
        )
        return self._assign(now_s)

    def connection_lost(self, connection: int, error: MxError, now_s: float = 0.0) -> list[Command]:
        """The session or its source is gone: nothing more is asked of it. How each of its reads
        ends is still to be reported; those that failed then go back."""
        if not self._forget(connection, error):
            return []
        return self._assign(now_s) + self._check_hopeless()

    def no_more_connections(self) -> list[Command]:
        """Every candidate was tried: what the present lanes can't give will not come."""
        self._expecting = False
        return self._check_hopeless()

    def expect_connections(self) -> None:
        """Another candidate has come up after all: wait for it."""
        self._expecting = True

    def gate(self) -> None:
        """From now on a chunk is read only from a source that permits it."""
        if self._allowed is None:
            self._allowed = {}

    def read_freely(self, now_s: float = 0.0) -> list[Command]:
        """There is nobody to ask: read whatever the lanes hold."""
        self._allowed = None
        return self._assign(now_s)

    def allow(self, source: str, chunk: int, now_s: float = 0.0) -> list[Command] | None:
        """The chunk may be read from this source: now, or once those that read it have failed. None
        if it has landed."""
        if self._allowed is None or self._landed[chunk] or self._ended:
            return None
        self._allowed.setdefault(source, set()).add(chunk)
        return self._assign(now_s)

    def withdraw(self, source: str, chunk: int) -> list[int]:
        """It may not any more. Returns the lanes that read it now."""
        if self._allowed is not None:
            self._allowed.get(source, set()).discard(chunk)
        return [
            number
            for number, connection in self._connections.items()
            if connection.source == source
            and any(part.chunk == chunk for part in connection.in_flight)
        ]

    def abort(self, cause: MxError) -> list[Command]:
        """End the pull for a reason of the caller's own."""
        if self._ended:
            return []
        self._ended = True
        return [Fail((cause,))]

    def landed(self, connection: int, part: Part, now_s: float = 0.0) -> list[Command]:
        """All bytes of the part are in place, read under a lease that held."""
        state = self._take_back(connection, part)
        if state is None:
            return []
        state.pace.completed(self._missing.nbytes_of(part), now_s)
        self._senders.setdefault(part.chunk, set()).add(state.source)
        left = self._pending.get(part.chunk, self._missing.blocks(part.chunk)) - (
            part.end - part.begin
        )
        self._pending[part.chunk] = left
        check: list[Command] = [] if left else [Check(part.chunk)]
        return self._assign(now_s) + check + self._check_hopeless()

    def verified(self, chunk: int) -> list[Command]:
        """The answer to `Check`: the digest holds."""
        if self._ended or self._pending.pop(chunk, None) is None:
            return []
        self._senders.pop(chunk, None)
        return self._land(chunk) + self._check_hopeless()

    def corrupt(self, chunk: int, error: DigestError, now_s: float = 0.0) -> list[Command]:
        """The answer to `Check`: it does not."""
        if self._ended or self._pending.pop(chunk, None) is None:
            return []
        self.retries += 1
        self._missing.give_back(Part(chunk, 0, self._missing.blocks(chunk)))
        senders = self._senders.pop(chunk, set())
        for each in senders:
            self.withdraw(each, chunk)
        if len(senders) > 1:
            self._whole.add(chunk)
            return self._assign(now_s) + self._check_hopeless()
        (source,) = senders
        self._refused.setdefault(chunk, set()).add(source)
        self._corrupt[source] = self._corrupt.get(source, 0) + 1
        connections = [
            number
            for number, connection in self._connections.items()
            if connection.source == source
        ]
        if self._corrupt[source] < MAX_CORRUPT or not connections:
            self._causes.append(error)
            return self._assign(now_s) + self._check_hopeless()
        return self._drop(connections, error, now_s)

    def failed(
        self, connection: int, part: Part, error: MxError, now_s: float = 0.0
    ) -> list[Command]:
        """The read failed but the session may live."""
        if self._take_back(connection, part) is None:
            return []
        self.retries += 1
        self._missing.give_back(part)
        if connection not in self._connections:
            return self._assign(now_s) + self._check_hopeless()
        self._attempts[part.chunk] = self._attempts.get(part.chunk, 0) + 1
        if self._attempts[part.chunk] >= MAX_ATTEMPTS:
            self._attempts[part.chunk] = 0
            return self._drop([connection], error, now_s)
        self._causes.append(error)
        return self._assign(now_s) + self._check_hopeless()

    def tick(self, now_s: float, landed: Mapping[Part, int] | None = None) -> list[Command]:
        """Time has passed: drop lanes that the others would be through long before. To be called
        a few times a second. `landed` says how many bytes of each part in flight have."""
        so_far = landed or {}

        def landed_nbytes(connection: Connection) -> int:
            return sum(so_far.get(part, 0) for part in connection.in_flight)

        commands: list[Command] = []
        for number, connection in list(self._connections.items()):
            others = [
                other
                for other in self._connections.values()
                if other is not connection
                and all(self._may_read(other, part.chunk) for part in connection.in_flight)
            ]
            if striping.is_late(connection, others, self._missing.nbytes, now_s, landed_nbytes):
                reason = PathSlowError("it has become far slower than the other paths")
                commands += self._drop([number], reason, now_s)
        return commands

    # -- books ----------------------------------------------------------------------------------

    def _take_back(self, connection: int, part: Part) -> Connection | None:
        state = self._connections.get(connection) or self._lost.get(connection)
        if state is None or self._ended or state.in_flight.pop(part, None) is None:
            return None
        state.nbytes -= self._missing.nbytes_of(part)
        if not state.in_flight:
            self._lost.pop(connection, None)
        return state

    def _land(self, chunk: int) -> list[Command]:
        self._landed[chunk] = 1
        self._left -= 1
        for allowed in (self._allowed or {}).values():
            allowed.discard(chunk)
        commands: list[Command] = []
        layer = self._grid.layer_of[chunk]
        self._left_in_layer[layer] -= 1
        if not self._left_in_layer[layer]:
            commands.append(LayerReady(layer))
        if not self._left:
            self._ended = True
            commands.append(Complete())
        return commands

    def _drop(self, connections: list[int], reason: MxError, now_s: float) -> list[Command]:
        for connection in connections:
            self._forget(connection, reason)
        drops: list[Command] = [DropConnection(connection, reason) for connection in connections]
        return drops + self._assign(now_s) + self._check_hopeless()

    def _forget(self, connection: int, error: MxError) -> bool:
        gone = self._connections.pop(connection, None)
        if gone is None or self._ended:
            return False
        self._causes.append(error)
        if gone.in_flight:
            self._lost[connection] = gone
        return True

    # -- who reads what -------------------------------------------------------------------------

    def _may_read(self, state: Connection, chunk: int) -> bool:
        if self._allowed is not None:
            return chunk in self._allowed.get(state.source, ())
        refused = self._refused.get(chunk, ())
        if state.source in refused and any(
            connection.source not in refused for connection in self._connections.values()
        ):
            return False  # somebody else is left to ask
        return state.holds is None or state.holds(self._grid.layer_of[chunk])

    def _assign(self, now_s: float) -> list[Command]:
        """Give parts to lanes with room, the one first that would be through first."""
        if self._ended:
            return []
        given: dict[int, list[Part]] = {}
        chunk_nbytes = self._grid.chunk_nbytes
        for connection in self._connections.values():
            if connection.in_flight:
                connection.pace.doubt(connection.nbytes, now_s)
        able = {n: x for n, x in self._connections.items() if striping.has_room(x, chunk_nbytes)}
        while able and self._missing:
            number = next(iter(able))
            if len(able) > 1:
                number = min(able, key=lambda n: (striping.through_s(able[n], chunk_nbytes), n))
            connection = able[number]
            part = self._next(connection)
            if part is None:
                del able[number]
                continue
            if not connection.in_flight:
                connection.pace.busy_from(now_s)
            connection.in_flight[part] = now_s
            connection.nbytes += self._missing.nbytes_of(part)
            given.setdefault(number, []).append(part)
            if not striping.has_room(connection, chunk_nbytes):
                del able[number]
        return [Assign(connection, tuple(parts)) for connection, parts in given.items()]

    def _next(self, connection: Connection) -> Part | None:
        """Take from the missing what this lane should read next; None: nothing, for now."""
        chunk_nbytes = self._grid.chunk_nbytes
        chunk = self._choose(connection)
        if chunk is None:
            return None
        nbytes = striping.part_nbytes(connection, chunk_nbytes)
        if self._allowed is not None:
            nbytes = max(
                nbytes // sum(x.source == connection.source for x in self._connections.values()), 1
            )
        elif len(self._connections) > 1:
            able = [other for other in self._connections.values() if self._may_read(other, chunk)]
            budget = striping.budget(connection, self._connections.values(), self._missing.nbytes)
            piece = striping.piece_nbytes(connection, chunk_nbytes)
            if budget < piece and not striping.is_first(connection, able, chunk_nbytes):
                return None  # one of the others will be through sooner, and take it then
            nbytes = min(nbytes, max(int(budget * striping.TAKEN), piece))
        if not connection.pace.measured_nbytes and (
            self._several_connections or len(self._connections) > 1
        ):
            nbytes = min(nbytes, striping.PROBE_NBYTES)
        return self._missing.cut(chunk, None if chunk in self._whole else nbytes)

    def _choose(self, connection: Connection) -> int | None:
        """The lowest missing chunk that the lane may read, after as many as the faster lanes will
        have read by the time it is through with it."""
        rank = 0
        if self._allowed is not None:
            able = [c for c in self._allowed.get(connection.source, ()) if c in self._missing]
            return min(able, default=None)
        if len(self._connections) > 1:
            rank = striping.rank(connection, self._connections.values(), self._grid.chunk_nbytes)
        chosen = None
        for chunk in self._missing:
            if self._may_read(connection, chunk):
                chosen = chunk
                if rank <= 0:
                    break
                rank -= 1
        return chosen

    # -- ends -----------------------------------------------------------------------------------

    def _check_hopeless(self) -> list[Command]:
        if self._ended or self._expecting:
            return []
        if self._lost or any(connection.in_flight for connection in self._connections.values()):
            return []
        # Nothing is in flight: whatever could be assigned has been. Chunks are left over.
        if self._missing and not any(
            self._may_read(connection, self._missing.first)
            for connection in self._connections.values()
        ):
            self._ended = True
            return [Fail(tuple(self._causes))]
        return []
