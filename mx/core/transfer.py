"""Which part is read next over which connection, and which chunks are verified: events in, commands
out.

The machine does no IO and has no clock. It owns the set of verified chunks (`holdings`), knows
which chunks are missing or in flight, which connections there are and how fast each is, and
decides what each reads next and when a layer is ready. Its caller carries out the commands and
reports their results, in any order.

A read is of a *part*: a chunk, or near the end a piece of one in whole blocks. `mx.core.striping`
computes how much a connection takes, and how far ahead. When all parts of a chunk have landed, the
digests of their blocks decide whether the chunk is right.

A part that fails is missing again, and is read from another source if possible. So is a part whose
connection is lost, but not before its read has ended: until then that transport may still write
there, over bytes that another connection has brought and that are verified. A connection that is
so late that the others could do its work twice is dropped (`tick`). A chunk with a wrong digest is
not read from the same source again while another may give it; a source that sends wrong bytes
`MAX_CORRUPT` times is dropped. A chunk is read only from a source that allows it
(`mx.core.rights`). The pull fails when chunks are missing, no open connection may read them, and
the caller has reported that no further connection will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mx.core import striping
from mx.core.digest import digest_of_blocks
from mx.core.holdings import Holdings
from mx.core.missing import Missing
from mx.core.pace import Pace
from mx.core.rights import ReadRights
from mx.core.striping import ConnectionLoad, Part
from mx.core.transfer_commands import Assign, Command, DropConnection, Fail, LayerReady
from mx.core.types import BLOCK_BYTES, ChunkGrid
from mx.errors import DigestError, MxError, PathSlowError

MAX_CORRUPT = 2
MAX_ATTEMPTS = 5


class _Landed(NamedTuple):
    """A part that has landed, and waits for the others of its chunk."""

    load: ConnectionLoad  # of the connection that brought it
    block_digests: bytes
    nbytes: int  # of payload


class TransferMachine:
    """One pull. Not thread-safe. Methods return commands in the order in which they are to be
    carried out. `now_s` are readings of one monotonic clock."""

    def __init__(
        self,
        grid: ChunkGrid,
        digest_of: Callable[[int], bytes],
        *,
        several_connections: bool = False,
    ) -> None:
        """
        Args:
            grid: How the model is cut into chunks.
            digest_of: Returns the digest that a chunk must have.
            several_connections: True if others will follow the first connection at once.
        """
        self.holdings = Holdings(grid)
        self.retries = 0
        self._grid = grid
        self._digest_of = digest_of
        self._several_connections = several_connections
        self._missing = Missing(grid)  # neither verified nor being read
        self._connections: dict[int, ConnectionLoad] = {}  # all that ever were
        self._open: dict[int, ConnectionLoad] = {}
        self._unverified: dict[int, dict[Part, _Landed]] = {}
        self._corrupt: dict[str, int] = {}  # source -> how often
        # Chunks to read in one part, to know which source is at fault.
        self._in_one_part: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._landed_in_layer = [0] * len(grid.layout.layers)
        self._causes: list[MxError] = []
        self._ended = False
        self._expecting = True
        self._rights = ReadRights(len(grid))

    @property
    def ended(self) -> bool:
        return self._ended

    def landed_nbytes(self) -> list[int]:
        """Return the payload bytes of each layer that have landed, in completed parts."""
        return list(self._landed_in_layer)

    # -- events ---------------------------------------------------------------------------------

    def start(self) -> list[Command]:
        """Return the commands for layers without bytes, which are ready at once. A model without
        bytes ends with this."""
        self._ended = not self.holdings.left
        layers = range(len(self._grid.layout.layers))
        return [LayerReady(layer) for layer in layers if self.holdings.has_layer(layer)]

    def already_landed(self, chunks: Iterable[int]) -> tuple[list[int], list[Command]]:
        """Count chunks as verified that were resumed or reused.

        Returns:
            Those that were not verified before, without any that a connection reads now; and the
            commands.
        """
        news: list[int] = []
        commands: list[Command] = []
        for chunk in chunks:
            if not self._ended and self._missing.untouched(chunk):
                self._missing.remove(chunk)
                self._landed_in_layer[self._grid.layer_of[chunk]] += self._payload_nbytes(chunk)
                commands += self._verified(chunk)
                news.append(chunk)
        return news, commands

    def add_connection(
        self,
        connection: int,
        depth: int,
        now_s: float,
        *,
        source: str = "",
        peer: str = "",
        bytes_per_s: float = 0.0,
    ) -> list[Command]:
        """Read through a new connection; `load` returns its state.

        Args:
            connection: Its number, which was not used before.
            depth: The most parts to have in flight through it.
            now_s: The time.
            source: The id of its source, which counts wrong chunks for all its connections; "" for
                a source of its own.
            peer: Names the source in errors.
            bytes_per_s: Its expected bandwidth; 0: not known.
        """
        if connection in self._connections:
            raise ValueError(f"connection {connection} is there already")
        pace = Pace(bytes_per_s, BLOCK_BYTES)  # soon outweighed by what is seen
        load = ConnectionLoad(source or f"connection {connection}", max(1, depth), pace, peer)
        self._connections[connection] = self._open[connection] = load
        return self._assign(now_s)

    def load(self, connection: int) -> ConnectionLoad:
        return self._connections[connection]

    def connection_lost(self, connection: int, error: MxError, now_s: float) -> list[Command]:
        """Read nothing more through a connection that is lost. The caller still reports how each of
        its reads ends; the parts of failed ones are missing again then."""
        if not self._forget(connection, error):
            return []
        return self._assign(now_s) + self._check_hopeless()

    def no_more_connections(self) -> list[Command]:
        """Fail once no open connection can read what is missing: no other connection will come."""
        self._expecting = False
        return self._check_hopeless()

    def expect_connections(self) -> None:
        """Do not fail for want of connections: another one may come."""
        self._expecting = True

    def landed(
        self, connection: int, part: Part, block_digests: bytes, nbytes: int, now_s: float
    ) -> list[Command]:
        """Record that all bytes of a part are in place, read under a lease that held.

        Args:
            connection: The connection that brought it.
            part: The part.
            block_digests: The digests of its blocks, one after the other, 16 bytes each.
            nbytes: Its payload bytes, without padding.
            now_s: The time.
        """
        load = self._take_back(connection, part)
        if load is None:
            return []
        load.pace.completed(self._missing.nbytes_of(part), now_s)
        self._landed_in_layer[self._grid.layer_of[part.chunk]] += nbytes
        parts = self._unverified.setdefault(part.chunk, {})
        parts[part] = _Landed(load, block_digests, nbytes)
        # The next reads are issued before the digest is computed.
        commands = self._assign(now_s)
        if sum(each.end - each.begin for each in parts) == self._missing.blocks(part.chunk):
            commands += self._verify(part.chunk, now_s)
        return commands + self._check_hopeless()

    def failed(self, connection: int, part: Part, error: MxError, now_s: float) -> list[Command]:
        """Record that the read of a part failed; its session may still work."""
        if self._take_back(connection, part) is None:
            return []
        self.retries += 1
        self._missing.give_back(part)
        if connection not in self._open:
            return self._assign(now_s) + self._check_hopeless()
        self._attempts[part.chunk] = self._attempts.get(part.chunk, 0) + 1
        if self._attempts[part.chunk] >= MAX_ATTEMPTS:
            self._attempts[part.chunk] = 0
            return self._drop([connection], error, now_s)
        self._causes.append(error)
        return self._assign(now_s) + self._check_hopeless()

    def tick(self, now_s: float, landed: Mapping[Part, int] | None = None) -> list[Command]:
        """Drop connections that are late (`mx.core.striping.is_late`). To be called a few times a
        second. `landed` has the bytes of each part in flight that have landed."""
        so_far = landed or {}

        def landed_nbytes(load: ConnectionLoad) -> int:
            return sum(so_far.get(part, 0) for part in load.in_flight)

        commands: list[Command] = []
        for number, load in list(self._open.items()):
            others = [
                other
                for other in self._open.values()
                if other is not load
                and all(self._may_read(other, part.chunk) for part in load.in_flight)
            ]
            if striping.is_late(load, others, self._missing.nbytes, now_s, landed_nbytes):
                reason = PathSlowError("it has become far slower than the other paths")
                commands += self._drop([number], reason, now_s)
        return commands

    def abort(self, cause: MxError) -> list[Command]:
        """Fail, for a reason of the caller's."""
        if self._ended:
            return []
        self._ended = True
        return [Fail((cause,))]

    # -- which source may be read from ------------------------------------------------------------

    def coordinate(self) -> None:
        """From now on read a chunk only from a source that allows it."""
        self._rights.coordinate()

    def read_freely(self, now_s: float) -> list[Command]:
        """From now on read every chunk from every source."""
        self._rights.read_freely()
        return self._assign(now_s)

    def allow(self, source: str, chunk: int, now_s: float) -> list[Command] | None:
        """Let the chunk be read from this source: now, or when the connections that read it have
        failed. Returns None if it is verified already, or reading is not coordinated."""
        if not self._rights.coordinated or self.holdings.has(chunk) or self._ended:
            return None
        self._rights.allow(source, chunk)
        return self._assign(now_s)

    def withdraw(self, source: str, chunk: int) -> list[int]:
        """Read the chunk no longer from this source. Returns the connections that read it now."""
        self._rights.withdraw(source, chunk)
        return [
            number
            for number, load in self._open.items()
            if load.source == source and any(part.chunk == chunk for part in load.in_flight)
        ]

    # -- parts that ended -----------------------------------------------------------------------

    def _payload_nbytes(self, chunk: int) -> int:
        return sum(segment.nbytes for segment in self._grid.segments(self._grid[chunk]))

    def _take_back(self, connection: int, part: Part) -> ConnectionLoad | None:
        load = self._connections.get(connection)
        if load is None or self._ended or load.in_flight.pop(part, None) is None:
            return None
        load.nbytes -= self._missing.nbytes_of(part)
        return load

    def _verify(self, chunk: int, now_s: float) -> list[Command]:
        """Compare the digest of a chunk all of whose parts have landed; if it is wrong, read the
        chunk again."""
        parts = self._unverified.pop(chunk)
        ordered = sorted(parts, key=lambda part: part.begin)
        digest = digest_of_blocks(b"".join(parts[part].block_digests for part in ordered))
        if digest == self._digest_of(chunk):
            for each in parts.values():
                each.load.verified_nbytes += each.nbytes
                each.load.verified_at_s = now_s
            return self._verified(chunk)
        senders = [each.load for each in parts.values()]
        self.retries += 1
        self._landed_in_layer[self._grid.layer_of[chunk]] -= self._payload_nbytes(chunk)
        self._missing.give_back(Part(chunk, 0, self._missing.blocks(chunk)))
        self.holdings.corrupt(chunk, dict.fromkeys(load.source for load in senders))
        return self._refuse(chunk, senders, now_s)

    def _refuse(self, chunk: int, senders: list[ConnectionLoad], now_s: float) -> list[Command]:
        """Record that these connections brought wrong bytes."""
        sources = list(dict.fromkeys(load.source for load in senders))
        for source in sources:
            self.withdraw(source, chunk)
        if len(sources) > 1:
            self._in_one_part.add(chunk)
            return self._assign(now_s)
        (source,) = sources
        error = self._digest_error(chunk, senders)
        self._rights.refuse(source, chunk)
        self._corrupt[source] = self._corrupt.get(source, 0) + 1
        connections = [number for number, load in self._open.items() if load.source == source]
        if self._corrupt[source] < MAX_CORRUPT or not connections:
            self._causes.append(error)
            return self._assign(now_s)
        return self._drop(connections, error, now_s)

    def _digest_error(self, chunk: int, senders: list[ConnectionLoad]) -> DigestError:
        place = self._grid[chunk]
        layer = self._grid.layout.layers[place.layer].name
        peers = dict.fromkeys(load.peer for load in senders)
        return DigestError(
            f"chunk {chunk} (layer {layer}, {place.nbytes} bytes at {place.offset}) "
            f"from {' and '.join(peers)} does not match its digest",
            peer=next(iter(peers)),
            hint="its memory or the path to it is faulty",
        )

    def _verified(self, chunk: int) -> list[Command]:
        self._rights.verified(chunk)
        layer_complete = self.holdings.add(chunk)
        self._ended = not self.holdings.left
        return [LayerReady(self._grid.layer_of[chunk])] if layer_complete else []

    def _drop(self, connections: list[int], reason: MxError, now_s: float) -> list[Command]:
        for connection in connections:
            self._forget(connection, reason)
        drops: list[Command] = [DropConnection(number, reason) for number in connections]
        return drops + self._assign(now_s) + self._check_hopeless()

    def _forget(self, connection: int, error: MxError) -> bool:
        gone = self._open.pop(connection, None)
        if gone is None or self._ended:
            return False
        self._causes.append(error)
        return True

    # -- which connection reads which part ------------------------------------------------------

    def _may_read(self, load: ConnectionLoad, chunk: int) -> bool:
        return self._rights.may_read(load.source, chunk, self._open_sources)

    def _open_sources(self) -> set[str]:
        return {load.source for load in self._open.values()}

    def _assign(self, now_s: float) -> list[Command]:
        """Give parts to connections that want more, first to the one that would be done first."""
        if self._ended:
            return []
        given: dict[int, list[Part]] = {}
        chunk_nbytes = self._grid.chunk_nbytes
        for load in self._open.values():
            if load.in_flight:
                load.pace.doubt(load.nbytes, now_s)
        able = {n: x for n, x in self._open.items() if striping.wants_more(x, chunk_nbytes)}
        while able and self._missing:
            number = next(iter(able))
            if len(able) > 1:
                number = min(able, key=lambda n: (striping.through_s(able[n], chunk_nbytes), n))
            load = able[number]
            part = self._next(load)
            if part is None:
                del able[number]
                continue
            if not load.in_flight:
                load.pace.busy_from(now_s)
            load.in_flight[part] = now_s
            load.nbytes += self._missing.nbytes_of(part)
            given.setdefault(number, []).append(part)
            if not striping.wants_more(load, chunk_nbytes):
                del able[number]
        return [Assign(connection, tuple(parts)) for connection, parts in given.items()]

    def _next(self, load: ConnectionLoad) -> Part | None:
        """Take the part that this connection should read next; None: nothing, for now."""
        chunk_nbytes, rivals = self._grid.chunk_nbytes, list(self._open.values())
        among: int | None = None  # the chunks that it may read; None: all
        if self._rights.coordinated:
            # Only those that may read some of the same chunks share the work.
            among = allowed = self._rights.allowed(load.source)
            rivals = [each for each in rivals if self._rights.allowed(each.source) & allowed]
        chunk = self._choose(load, among, rivals) if rivals else None
        if chunk is None:
            return None
        nbytes = striping.part_nbytes(load, chunk_nbytes)
        if len(rivals) > 1:
            able = [other for other in rivals if self._may_read(other, chunk)]
            left_nbytes = self._missing.nbytes_in(among)
            budget = striping.budget(load, rivals, left_nbytes)
            piece = striping.piece_nbytes(load, chunk_nbytes)
            if budget < piece and not striping.is_first(load, able, chunk_nbytes):
                return None  # another connection will be done sooner, and takes it then
            nbytes = min(nbytes, max(int(budget * striping.TAKEN), piece))
        if not load.pace.measured_nbytes and (self._several_connections or len(rivals) > 1):
            nbytes = min(nbytes, striping.PROBE_NBYTES)
        return self._missing.cut(chunk, None if chunk in self._in_one_part else nbytes)

    def _choose(
        self, load: ConnectionLoad, among: int | None, rivals: list[ConnectionLoad]
    ) -> int | None:
        """Return the chunk that the connection should read next: the lowest missing one that it may
        read, after as many as the others will have read by the time that it is done."""
        rank = 0
        if len(rivals) > 1:
            rank = striping.rank(load, rivals, self._grid.chunk_nbytes)
        chosen = None
        for chunk in self._missing.chunks(among):
            if self._may_read(load, chunk):
                chosen = chunk
                if rank <= 0:
                    break
                rank -= 1
        return chosen

    # -- ends -----------------------------------------------------------------------------------

    def _check_hopeless(self) -> list[Command]:
        if self._ended or self._expecting:
            return []
        if any(load.in_flight for load in self._connections.values()):
            return []
        # Nothing is in flight, so all that could be assigned has been. Chunks are left over.
        if self._missing and not any(
            self._may_read(load, self._missing.first) for load in self._open.values()
        ):
            self._ended = True
            return [Fail(tuple(self._causes))]
        return []
