"""The data side of a pull: the core machine, the sessions, and the sinks between them.

Sinks are called on the transports' threads; each reports to the machine under one lock and
carries out what it answers, so that the next read is issued from the thread that finished the
last one and no event loop stands in a chunk's way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mx.core.digest import ChunkHasher
from mx.core.pull import Assign, Command, Complete, DropLane, Fail, LayerReady, PullMachine
from mx.core.types import Manifest
from mx.errors import (
    ClosedError,
    DigestError,
    MxError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.puller.report import PathReport, Telling
from mx.transport import Piece, Read, Session

#: Errors of a read after which its session is given up: the peer, not the chunk, is the problem.
_LANE_ERRORS = (
    PeerLostError,
    PeerTimeoutError,
    PeerRefusedError,
    StaleGenerationError,
    ClosedError,
)


class ReadLease(Protocol):
    """What a sink asks before it believes a read's bytes."""

    def check(self) -> MxError | None:
        """None while the lease runs and the generation stands; else why not."""


class Listener(Protocol):
    """Hears of progress, on any thread; must not block."""

    def layer_ready(self, layer: int) -> None: ...
    def lane_lost(self, lane: int, error: MxError) -> None: ...
    def complete(self) -> None: ...
    def failed(self, causes: Sequence[MxError]) -> None: ...
    def broken(self, error: MxError) -> None: ...


@dataclass(slots=True)
class Lane:
    """A session to one source, and what went through it."""

    transport: str
    peer: str
    session: Session
    lease: ReadLease
    opened_at_s: float
    nbytes: int = 0
    last_at_s: float = 0.0
    lost: bool = False


class _ChunkSink:
    """Hashes one chunk as it lands and tells the engine how it ended."""

    __slots__ = ("engine", "lane", "chunk", "hasher", "landed_nbytes")

    def __init__(self, engine: Engine, lane: int, chunk: int, hasher: ChunkHasher) -> None:
        self.engine = engine
        self.lane = lane
        self.chunk = chunk
        self.hasher = hasher
        self.landed_nbytes = 0

    def landed(self, nbytes: int) -> None:
        self.hasher.landed(nbytes)
        self.landed_nbytes = nbytes

    def done(self) -> None:
        with self.engine.telling:
            self.engine.chunk_done(self)

    def failed(self, error: MxError) -> None:
        with self.engine.telling:
            self.engine.chunk_failed(self, error)


class Engine:
    """Drives one pull into `arena` (writable, `layout.arena_nbytes` long; the caller keeps it
    until `close` and `join` are through)."""

    def __init__(self, manifest: Manifest, arena: memoryview, listener: Listener) -> None:
        self._manifest = manifest
        self._grid = manifest.grid
        self._arena = arena
        self._listener = listener
        self.telling = Telling(listener.broken)
        self._lock = threading.Lock()
        self._machine = PullMachine(self._grid)
        self._lanes: dict[int, Lane] = {}
        self._in_flight: dict[int, _ChunkSink] = {}
        self._done_in_layer = [0] * len(manifest.layout.layers)
        self.reads_issued = 0

    @property
    def retries(self) -> int:
        return self._machine.retries

    @property
    def lanes(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())

    @property
    def chunks_left(self) -> int:
        return self._machine.chunks_left

    def paths(self) -> list[PathReport]:
        """What came over each lane that brought anything."""
        return [
            PathReport(lane.transport, lane.peer, lane.nbytes, lane.last_at_s - lane.opened_at_s)
            for lane in self.lanes
            if lane.nbytes
        ]

    def progress(self) -> tuple[int, list[int]]:
        """Payload bytes landed in all, and layer by layer (those in flight counted)."""
        with self._lock:
            layers = list(self._done_in_layer)
            sinks = list(self._in_flight.values())
        for sink in sinks:
            layers[self._grid.layer_of[sink.chunk]] += sink.landed_nbytes
        return sum(layers), layers

    def start(self) -> None:
        with self._lock:
            commands = self._machine.start()
        self._run(commands)

    def add_lane(self, lane: Lane) -> int:
        """Begin reading through a session. Returns the lane's number."""
        with self._lock:
            number = len(self._lanes)
            self._lanes[number] = lane
            commands = self._machine.add_lane(number, lane.session.depth)
        self._run(commands)
        return number

    def lane_lost(self, number: int, error: MxError) -> None:
        """Give a lane up; its chunks go back as its reads end."""
        with self._lock:
            lane = self._lanes[number]
            if lane.lost:
                return
            lane.lost = True
            commands = self._machine.lane_lost(number, error)
        lane.session.close()
        self._run(commands)
        self._listener.lane_lost(number, error)

    def no_more_lanes(self) -> None:
        with self._lock:
            commands = self._machine.no_more_lanes()
        self._run(commands)

    def close(self) -> None:
        """Close every session; outstanding reads are aborted, and the listener hears of no
        outcome any more."""
        with self._lock:
            self._machine.abort(ClosedError("the pull was closed"))
        for lane in self.lanes:
            lane.session.close()

    def join(self, timeout_s: float) -> bool:
        """Wait until no session touches the arena any more, and let go of it.

        Without that the arena would live until the garbage collector finds the cycle that the
        engine is in with its listener and its sinks: gigabytes, for who knows how long.
        """
        deadline_s = time.monotonic() + timeout_s
        joined = all(
            [lane.session.join(max(0.0, deadline_s - time.monotonic())) for lane in self.lanes]
        )
        if joined:
            with self._lock:
                self._in_flight.clear()
                self._arena = memoryview(b"")
        return joined

    # -- from the sinks, on the transports' threads ------------------------------------------

    def chunk_done(self, sink: _ChunkSink) -> None:
        lane = self._lanes[sink.lane]
        # Lease first, then generation, then digest: bytes read past a lease prove nothing.
        error = lane.lease.check()
        if error is not None:
            self.lane_lost(sink.lane, error)
        elif sink.hasher.digest() != self._manifest.chunking.digest(sink.chunk):
            error = DigestError(
                f"{self._tag(sink.chunk)} from {lane.peer} does not match its digest",
                peer=lane.peer,
                hint="its memory or the way to it is faulty",
            )
        if error is not None:
            self.chunk_failed(sink, error)
            return
        layer = self._grid.layer_of[sink.chunk]
        with self._lock:
            self._in_flight.pop(sink.chunk, None)
            lane.nbytes += sink.landed_nbytes
            lane.last_at_s = time.monotonic()
            self._done_in_layer[layer] += sink.landed_nbytes
            commands = self._machine.chunk_verified(sink.lane, sink.chunk)
        self._run(commands)

    def chunk_failed(self, sink: _ChunkSink, error: MxError) -> None:
        if isinstance(error, _LANE_ERRORS):
            self.lane_lost(sink.lane, error)
        with self._lock:
            self._in_flight.pop(sink.chunk, None)
            commands = self._machine.chunk_failed(sink.lane, sink.chunk, error)
        self._run(commands)

    # ----------------------------------------------------------------------------------------

    def _tag(self, chunk_index: int) -> str:
        chunk = self._grid[chunk_index]
        layer = self._manifest.layout.layers[chunk.layer]
        return f"chunk {chunk_index} (layer {layer.name}, {chunk.nbytes} bytes at {chunk.offset})"

    def _read(self, lane: int, chunk_index: int) -> tuple[_ChunkSink, Read]:
        chunk = self._grid[chunk_index]
        segments = self._grid.segments(chunk)
        views = [self._arena[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
        sink = _ChunkSink(self, lane, chunk_index, ChunkHasher(segments, views))
        with self._lock:
            self._in_flight[chunk_index] = sink
        # A contiguous source's region is laid out as this arena is.
        pieces = [
            Piece(0, segment.arena_offset, view)
            for segment, view in zip(segments, views, strict=True)
        ]
        return sink, Read(f"chunk {chunk_index}", pieces, sink)

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Assign(lane, chunks):
                    self._assign(lane, chunks)
                case LayerReady(layer):
                    self._listener.layer_ready(layer)
                case DropLane(lane, reason):
                    self.lane_lost(lane, reason)
                case Complete():
                    self._listener.complete()
                case Fail(causes):
                    self._listener.failed(causes)

    def _assign(self, lane: int, chunks: Sequence[int]) -> None:
        sinks, reads = zip(*(self._read(lane, chunk) for chunk in chunks), strict=True)
        self.reads_issued += len(reads)
        try:
            self._lanes[lane].session.read(reads)
        except MxError as error:
            # Its traceback holds on to the reads, and they to the arena.
            refused = error.with_traceback(None)
            self.lane_lost(lane, refused)
            for sink in sinks:
                self.chunk_failed(sink, refused)
