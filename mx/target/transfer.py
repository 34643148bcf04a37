"""The data side of a pull: the core machine, the sessions, and the sinks between them.

Sinks are called on the transports' threads; each reports to the machine under one lock and
carries out what it answers, so that the next read is issued from the thread that finished the
last one and no event loop stands in a chunk's way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from mx.core.digest import digest_of_blocks
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    Check,
    Command,
    Complete,
    DropConnection,
    Fail,
    LayerReady,
)
from mx.core.types import Manifest
from mx.errors import ClosedError, DigestError, MxError, PathSlowError
from mx.target.reads import (
    CONNECTION_ERRORS,
    ChunkListener,
    Connection,
    Hasher,
    Landed,
    Listener,
    MakeHasher,
    host_hasher,
)
from mx.target.report import PathReport, Reporting
from mx.transport import Piece, Read, Span


class _PartSink:
    """Hashes one part as it lands and tells the engine how it ended."""

    __slots__ = ("transfer", "connection", "part", "hasher", "landed_nbytes")

    def __init__(self, transfer: Transfer, connection: int, part: Part, hasher: Hasher) -> None:
        self.transfer = transfer
        self.connection = connection
        self.part = part
        self.hasher = hasher
        self.landed_nbytes = 0

    def landed(self, nbytes: int) -> None:
        self.hasher.landed(nbytes)
        self.landed_nbytes = nbytes

    def done(self) -> None:
        with self.transfer.telling:
            self.transfer.part_done(self)

    def failed(self, error: MxError) -> None:
        with self.transfer.telling:
            self.transfer.part_failed(self, error)


class Transfer:
    """Drives one pull into `arena` (writable, `layout.arena_nbytes` long; the caller keeps it
    until `close` and `join` are through)."""

    def __init__(
        self,
        manifest: Manifest,
        arena: Span,
        listener: Listener,
        make_hasher: MakeHasher = host_hasher,
        *,
        several_connections: bool = False,
    ) -> None:
        self.manifest = manifest
        self._grid = manifest.grid
        self._arena = arena
        self._listener = listener
        self._make_hasher = make_hasher
        self.telling = Reporting(listener.broken)
        self._lock = threading.Lock()
        self._machine = TransferMachine(self._grid, several_connections=several_connections)
        self._connections: dict[int, Connection] = {}
        self._in_flight: dict[Part, _PartSink] = {}
        self._unverified: dict[int, list[Landed]] = {}
        self._done_in_layer = [0] * len(manifest.layout.layers)
        self.reads_issued = 0
        self._prefilled: dict[tuple[str, str], PathReport] = {}
        self._chunk_listener: ChunkListener | None = None

    @property
    def arena(self) -> Span:
        """What it drives the pull into; nothing once it is joined."""
        return self._arena

    @property
    def retries(self) -> int:
        return self._machine.retries

    @property
    def connections(self) -> list[Connection]:
        with self._lock:
            return list(self._connections.values())

    @property
    def chunks_left(self) -> int:
        return self._machine.chunks_left

    def paths(self) -> list[PathReport]:
        """What came over each path that brought anything."""
        return [
            PathReport(
                connection.transport,
                connection.peer,
                connection.nbytes,
                connection.last_at_s - connection.opened_at_s,
                rail=connection.rail,
            )
            for connection in self.connections
            if connection.nbytes
        ] + list(self._prefilled.values())

    def progress(self) -> tuple[int, list[int]]:
        """Payload bytes landed in all, and layer by layer (those in flight counted)."""
        with self._lock:
            layers = list(self._done_in_layer)
            sinks = list(self._in_flight.values())
        for sink in sinks:
            layers[self._grid.layer_of[sink.part.chunk]] += sink.landed_nbytes
        return sum(layers), layers

    def start(self) -> None:
        with self._lock:
            commands = self._machine.start()
        self._run(commands)

    def subscribe(self, listener: ChunkListener) -> list[int]:
        """Tell this listener of every chunk that lands from now on. There is one at most.

        Returns:
            The chunks that have landed so far: `listener` hears of all others, and of none of
            these.
        """
        with self._lock:
            self._chunk_listener = listener
            return [c for c in range(len(self._grid)) if self._machine.landed_chunk(c)]

    def prefill(self, label: str, source: str, chunks: Iterable[int], seconds: float = 0.0) -> int:
        """These chunks are in the arena already, hashed and found right: nobody is asked for them.
        `label` and `source` are what the report calls where they came from, which took `seconds`.
        Those that had landed are passed over; returns the bytes of the others. Best before the
        first lane, since a chunk of which reads are under way is passed over too."""
        nbytes, news = 0, []
        with self._lock:
            commands: list[Command] = []
            for chunk in chunks:
                if self._machine.landed_chunk(chunk):
                    continue
                commands += self._machine.already_landed([chunk])
                if self._machine.landed_chunk(chunk):
                    news.append(chunk)
                    payload = sum(s.nbytes for s in self._grid.segments(self._grid[chunk]))
                    nbytes += payload
                    self._done_in_layer[self._grid.layer_of[chunk]] += payload
            if nbytes:
                before = self._prefilled.get((label, source), PathReport(label, source, 0, 0.0))
                path = PathReport(label, source, before.bytes + nbytes, before.seconds + seconds)
                self._prefilled[label, source] = path
            listener = self._chunk_listener
        if listener is not None:
            for chunk in news:
                listener.chunk_landed(chunk)
        self._run(commands)
        return nbytes

    def add_connection(self, connection: Connection) -> int:
        """Begin reading through a session. Returns the lane's number."""
        with self._lock:
            number = len(self._connections)
            self._connections[number] = connection
            commands = self._machine.add_connection(
                number,
                connection.session.depth,
                time.monotonic(),
                source=connection.source,
                bytes_per_s=connection.bytes_per_s,
            )
        self._run(commands)
        return number

    def connection_lost(self, number: int, error: MxError) -> None:
        """Give a lane up; its parts go back as its reads end."""
        with self._lock:
            connection = self._connections[number]
            if connection.lost:
                return
            connection.lost = True
            commands = self._machine.connection_lost(number, error, time.monotonic())
        connection.session.close()
        self._run(commands)
        self._listener.connection_lost(number, error)

    def tick(self) -> None:
        """Give up lanes that have become too slow to wait for. A few times a second."""
        with self._lock:
            landed = {part: sink.landed_nbytes for part, sink in self._in_flight.items()}
            commands = self._machine.tick(time.monotonic(), landed)
        self._run(commands)

    # -- in a swarm -----------------------------------------------------------------------------

    def gate(self) -> None:
        """From now on chunks are read only where they are permitted."""
        with self._lock:
            self._machine.gate()

    def read_freely(self) -> None:
        """There is nobody to ask: read whatever the lanes hold."""
        with self._lock:
            commands = self._machine.read_freely(time.monotonic())
        self._run(commands)

    def allow(self, source: str, chunk: int) -> bool:
        """The chunk may be read from this source. False if it is there."""
        with self._lock:
            commands = self._machine.allow(source, chunk, time.monotonic())
        self._run(commands or ())
        return commands is not None

    def withdraw(self, source: str, chunk: int) -> None:
        """Another is to be asked for the chunk: lanes that read it are given up."""
        with self._lock:
            connections = self._machine.withdraw(source, chunk)
        for number in connections:
            self.connection_lost(number, PathSlowError("the chunk was asked of another source"))

    # -------------------------------------------------------------------------------------------

    def no_more_connections(self) -> None:
        with self._lock:
            commands = self._machine.no_more_connections()
        self._run(commands)

    def expect_connections(self) -> None:
        """There may be more after all."""
        with self._lock:
            self._machine.expect_connections()

    def close(self) -> None:
        """Close every session; outstanding reads are aborted, and the listener hears of no
        outcome any more."""
        with self._lock:
            self._machine.abort(ClosedError("the pull was closed"))
        for connection in self.connections:
            connection.session.close()

    def join(self, timeout_s: float) -> bool:
        """Wait until no session touches the arena any more, and let go of it.

        Without that the arena would live until the garbage collector finds the cycle that the
        engine is in with its listener and its sinks: gigabytes, for who knows how long.
        """
        deadline_s = time.monotonic() + timeout_s
        joined = all(
            [
                connection.session.join(max(0.0, deadline_s - time.monotonic()))
                for connection in self.connections
            ]
        )
        if joined:
            with self._lock:
                self._in_flight.clear()
                self._arena = memoryview(b"")
        return joined

    # -- from the sinks, on the transports' threads ------------------------------------------

    def part_done(self, sink: _PartSink) -> None:
        # Lease first, then generation, then digest: bytes read past a lease prove nothing.
        error = self._connections[sink.connection].lease.check()
        if error is not None:
            self.connection_lost(sink.connection, error)
            self.part_failed(sink, error)
            return
        part, nbytes = sink.part, sink.landed_nbytes
        landed = Landed(part.begin, sink.hasher.block_digests(), nbytes, sink.connection)
        with self._lock:
            self._in_flight.pop(part, None)
            self._unverified.setdefault(part.chunk, []).append(landed)
            self._done_in_layer[self._grid.layer_of[part.chunk]] += nbytes
            commands = self._machine.landed(sink.connection, part, time.monotonic())
        self._run(commands)

    def part_failed(self, sink: _PartSink, error: MxError) -> None:
        if isinstance(error, CONNECTION_ERRORS):
            self.connection_lost(sink.connection, error)
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.failed(sink.connection, sink.part, error, time.monotonic())
        self._run(commands)

    def _check(self, chunk: int) -> None:
        """Every part of the chunk is there: believe it, or not."""
        with self._lock:
            parts = sorted(self._unverified.pop(chunk))
        digest = digest_of_blocks(b"".join(part.block_digests for part in parts))
        right = digest == self.manifest.chunking.digest(chunk)
        now_s = time.monotonic()
        with self._lock:
            for part in parts:
                if right:
                    connection = self._connections[part.connection]
                    connection.nbytes += part.nbytes
                    connection.last_at_s = now_s
                else:
                    self._done_in_layer[self._grid.layer_of[chunk]] -= part.nbytes
            if right:
                commands = self._machine.verified(chunk)
            else:
                commands = self._machine.corrupt(chunk, self._digest_error(chunk, parts), now_s)
            # With the machine's step, so that a chunk is in a subscriber's snapshot or told, and
            # before the commands, so that the pull does not end before its last chunk is told.
            listener, landed = self._chunk_listener, self._machine.landed_chunk(chunk)
        if listener is not None and landed:
            listener.chunk_landed(chunk)
        elif listener is not None and not right:
            for source in {self._connections[part.connection].source for part in parts}:
                listener.chunk_failed(chunk, source or "")
        self._run(commands)

    def _digest_error(self, chunk: int, parts: Sequence[Landed]) -> DigestError:
        peers = dict.fromkeys(self._connections[part.connection].peer for part in parts)
        return DigestError(
            f"{self._tag(chunk)} from {' and '.join(peers)} does not match its digest",
            peer=next(iter(peers)),
            hint="its memory or the way to it is faulty",
        )

    # ----------------------------------------------------------------------------------------

    def _tag(self, chunk_index: int) -> str:
        chunk = self._grid[chunk_index]
        layer = self.manifest.layout.layers[chunk.layer]
        return f"chunk {chunk_index} (layer {layer.name}, {chunk.nbytes} bytes at {chunk.offset})"

    def _read(self, connection: int, part: Part) -> tuple[_PartSink, Read]:
        segments = self._grid.segments(self._grid.blocks(part.chunk, part.begin, part.end))
        views = [self._arena[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
        sink = _PartSink(self, connection, part, self._make_hasher(segments, views))
        with self._lock:
            self._in_flight[part] = sink
        # A contiguous source's region is laid out as this arena is.
        pieces = [
            Piece(0, segment.arena_offset, view)
            for segment, view in zip(segments, views, strict=True)
        ]
        return sink, Read(f"chunk {part.chunk}", pieces, sink)

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Assign(connection, parts):
                    self._assign(connection, parts)
                case Check(chunk):
                    self._check(chunk)
                case LayerReady(layer):
                    self._listener.layer_ready(layer)
                case DropConnection(connection, reason):
                    self.connection_lost(connection, reason)
                case Complete():
                    self._listener.complete()
                case Fail(causes):
                    self._listener.failed(causes)

    def _assign(self, connection: int, parts: Sequence[Part]) -> None:
        sinks, reads = zip(*(self._read(connection, part) for part in parts), strict=True)
        self.reads_issued += len(reads)
        try:
            self._connections[connection].session.read(reads)
        except MxError as error:
            # Its traceback holds on to the reads, and they to the arena.
            refused = error.with_traceback(None)
            self.connection_lost(connection, refused)
            for sink in sinks:
                self.part_failed(sink, refused)
