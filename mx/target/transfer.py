"""The data side of a pull: the core machine, the sessions, and the sinks between them.

Sinks are called on the transports' threads. Each reports to the machine under one lock and carries
out its commands: the thread that finished a read issues the next one, without an event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from mx.core.digest import SHORTCUT_BYTES, BlockHasher, shortcut_digest
from mx.core.holdings import Holdings, HoldingsListener
from mx.core.local_ranks import Shares
from mx.core.pages import Pages
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    Command,
    CopyOut,
    DropConnection,
    Fail,
    HandOut,
    LayerReady,
)
from mx.core.types import Manifest
from mx.core.wanted import ASIDE_BYTES, Wanted
from mx.errors import ClosedError, MxError, PathSlowError, another
from mx.memory.arena import Hasher, MakeHasher, host_hasher
from mx.memory.subset import SubsetMemory
from mx.runtime import unexpected
from mx.target.exchange import Exchange
from mx.target.reads import CONNECTION_ERRORS, Connection
from mx.target.report import PathReport, VerifiedBy
from mx.transport import Piece, Read, Span, View, contiguous, host_view
from mx.views import cut


class TransferListener(Protocol):
    """Called on any thread with what happens in a transfer; must not block."""

    def layer_ready(self, layer: int, arena: View, by: VerifiedBy) -> None:
        """Every chunk of the layer is in the arena, and verified."""

    def connection_lost(self, connection: int, error: MxError) -> None:
        """The connection was given up."""

    def failed(self, causes: Sequence[MxError]) -> None:
        """No connection is left that could finish the transfer."""

    def broken(self, error: MxError) -> None:
        """A sink raised an unexpected exception."""


class _PartSink:
    """Hashes one part as it lands and reports how it ended.

    `vouched` are the shortcut digests that the blocks should have; without any the hasher computes
    blake3. `buffer` holds a part that is read aside.
    """

    __slots__ = (
        "transfer",
        "connection",
        "part",
        "views",
        "hasher",
        "vouched",
        "landed_nbytes",
        "buffer",
    )

    def __init__(
        self,
        transfer: Transfer,
        connection: int,
        part: Part,
        views: Sequence[Span],
        hasher: Hasher,
        vouched: memoryview | None,
        buffer: bytearray | None = None,
    ) -> None:
        self.transfer = transfer
        self.connection = connection
        self.part = part
        self.views = views  # of the blocks
        self.hasher = hasher
        self.vouched = vouched
        self.landed_nbytes = 0
        self.buffer = buffer

    def landed(self, nbytes: int) -> None:
        self.hasher.landed(nbytes)
        self.landed_nbytes = nbytes

    def done(self) -> None:
        try:
            self.transfer.part_done(self)
        except BaseException as error:  # noqa: BLE001 - the thread is the transport's
            self.transfer.raised(error)

    def failed(self, error: MxError) -> None:
        try:
            self.transfer.part_failed(self, error)
        except BaseException as raised:  # noqa: BLE001 - as above
            self.transfer.raised(raised)


class Transfer:
    """Reads one model into `arena` (writable, `layout.arena_nbytes` long, each tensor in one piece;
    the caller keeps it until `join` has returned)."""

    def __init__(
        self,
        manifest: Manifest,
        pages: Pages,
        arena: View,
        listener: TransferListener,
        make_hasher: MakeHasher = host_hasher,
        *,
        several_connections: bool = False,
        shortcut: bool = False,
        subset: tuple[SubsetMemory, Wanted] | None = None,
        exchange: tuple[Exchange, Shares] | None = None,
    ) -> None:
        """
        Args:
            manifest: The model.
            pages: Its pages that are known; the transfer adds to them.
            arena: The memory to fill.
            listener: What is called with events.
            make_hasher: Makes hashers for parts in this memory.
            several_connections: True if others will follow the first connection at once.
            shortcut: Where the kernel vouches that this user's own process wrote the memory that is
                read, verify by xxh3_128, and by blake3 only what differs. `arena` is host memory.
            subset: The memory of some tensors, whose view `arena` is, and the blocks to read for
                them; None: all.
            exchange: With other ranks on this host, which read some of these blocks, and which. The
                caller begins it and closes it.
        """
        self.manifest = manifest
        self.pages = pages
        self._grid = manifest.grid
        self._arena = arena
        self._listener = listener
        self._make_hasher = make_hasher
        self._lock = threading.Lock()
        self._shortcut = shortcut
        self._machine = TransferMachine(
            self._grid,
            pages.get,
            several_connections=several_connections,
            wanted=None if subset is None else subset[1],
            shares=None if exchange is None else exchange[1],
        )
        self._exchange = None if exchange is None else exchange[0]
        self._subset = None if subset is None else subset[0]
        self._buffers: list[bytearray] = []  # for parts that are read aside, not in use
        self._connections: dict[int, Connection] = {}
        self._excluded: dict[str, MxError] = {}
        self._put = threading.Condition()
        self._putting = 0
        self._in_flight: dict[Part, _PartSink] = {}
        self.started = False
        self._began_s = time.monotonic()
        self._prefilled: dict[tuple[str, str], PathReport] = {}

    @property
    def arena(self) -> View:
        """The memory that is filled; empty once the transfer is joined."""
        return self._arena

    @property
    def holdings(self) -> Holdings:
        """The chunks that are verified. Subscribe by `subscribe`, which takes the lock."""
        return self._machine.holdings

    @property
    def retries(self) -> int:
        return self._machine.retries

    @property
    def connections(self) -> list[Connection]:
        with self._lock:
            return list(self._connections.values())

    def paths(self) -> list[PathReport]:
        """Return what came over each path that brought anything."""
        return [
            PathReport(
                each.path.transport,
                each.peer,
                each.verified_nbytes,
                each.verified_at_s - each.opened_at_s,
                rail=str(each.path.rail or ""),
            )
            for each in self.connections
            if each.verified_nbytes
        ] + list(self._prefilled.values())

    def progress(self) -> tuple[int, list[int]]:
        """Return the payload bytes that have landed, in all and by layer, also of running reads."""
        with self._lock:
            layers = self._machine.landed_nbytes()
            sinks = list(self._in_flight.values())
        for sink in sinks:
            layers[self._grid.layer_of[sink.part.chunk]] += sink.landed_nbytes
        return sum(layers), layers

    def start(self) -> None:
        """Begin: layers without bytes are ready. The first connection calls it too. Idempotent."""
        with self._lock:
            if self.started:
                return
            self.started = True
            commands = self._machine.start()
        self._run(commands)

    def subscribe(self, listener: HoldingsListener) -> int:
        """Report every chunk that is verified from now on to `listener`, under the transfer's lock.
        Returns the chunks that are verified now, as a bit set."""
        with self._lock:
            return self.holdings.subscribe(listener)

    def prefill(self, label: str, source: str, chunks: Iterable[int], seconds: float = 0.0) -> int:
        """Count chunks as verified that are in the arena, hashed and found right. Best called
        before the first connection, since chunks that are being read are skipped.

        Args:
            label: Names the path in the report, with `source`.
            source: Where they came from.
            chunks: Their numbers.
            seconds: How long it took.

        Returns:
            The bytes of those that were not verified before.
        """
        with self._lock:
            before = sum(self._machine.landed_nbytes())
            news, commands = self._machine.already_landed(chunks)
            nbytes = sum(self._machine.landed_nbytes()) - before
            if news:
                earlier = self._prefilled.get((label, source), PathReport(label, source, 0, 0.0))
                self._prefilled[label, source] = PathReport(
                    label, source, earlier.bytes + nbytes, earlier.seconds + seconds
                )
        self._run(commands)
        return nbytes

    def add_connection(self, connection: Connection) -> int:
        """Begin reading through a session. Returns the connection's number. Raises the error for
        which its source was excluded."""
        if connection.path.source.key in self._excluded:
            raise another(self._excluded[connection.path.source.key])
        self.start()
        with self._lock:
            number = len(self._connections)
            self._connections[number] = connection
            commands = self._machine.add_connection(
                number,
                connection.session.depth,
                time.monotonic(),
                source=connection.path.source.key,
                peer=connection.peer,
                bytes_per_s=connection.path.gb_per_s * 1e9,
            )
            connection.load = self._machine.load(number)
        self._run(commands)
        return number

    def connection_lost(self, number: int, error: MxError) -> None:
        """Give a connection up; its parts are missing again when its reads have ended."""
        with self._lock:
            connection = self._connections[number]
            if connection.lost:
                return
            connection.lost = True
            commands = self._machine.connection_lost(number, error, time.monotonic())
        connection.session.close()
        self._run(commands)
        self._listener.connection_lost(number, error)

    def put_page(self, layer: int, page: bytes) -> None:
        """Use a page that `check_page` found right. Reports the layer if that makes it ready, so
        the caller may take long; `join` waits for it."""
        with self._put:
            self._putting += 1
        try:
            with self._lock:
                self.pages.put(layer, page)
                commands = self._machine.page_known(layer, time.monotonic())
            self._run(commands)
        finally:
            with self._put:
                self._putting -= 1
                self._put.notify_all()

    def exclude(self, key: str, error: MxError, *, for_good: bool = False) -> None:
        """Give up all connections to a source; `for_good`: and refuse new ones."""
        if for_good:
            self._excluded[key] = error
        for number, connection in enumerate(self.connections):
            if connection.path.source.key == key:
                self.connection_lost(number, error)

    def excludes(self, key: str) -> bool:
        """Return True if the source was excluded for good."""
        return key in self._excluded

    def abort(self, error: MxError) -> None:
        """Fail, for a reason of the caller's."""
        with self._lock:
            commands = self._machine.abort(error)
        self._run(commands)

    def tick(self) -> None:
        """Give up connections that are too slow to wait for. To be called a few times a second."""
        with self._lock:
            landed = {part: sink.landed_nbytes for part, sink in self._in_flight.items()}
            commands = self._machine.tick(time.monotonic(), landed)
        self._run(commands)

    def no_more_connections(self) -> None:
        """Fail once the open connections can't read what is missing."""
        with self._lock:
            commands = self._machine.no_more_connections()
        self._run(commands)

    @property
    def causes(self) -> tuple[MxError, ...]:
        """Why reads and connections failed so far."""
        with self._lock:
            return self._machine.causes

    @property
    def hopeless(self) -> bool:
        """True if nothing is in flight, and no open connection can read what is missing."""
        with self._lock:
            return self._machine.hopeless

    def expect_connections(self) -> None:
        """Do not fail for want of connections: another one may come."""
        with self._lock:
            self._machine.expect_connections()

    # -- which source may be read from ------------------------------------------------------------

    def coordinate(self) -> None:
        """From now on read chunks only from sources that allow them."""
        with self._lock:
            self._machine.coordinate()

    def read_freely(self) -> None:
        """From now on read every chunk from every source."""
        with self._lock:
            commands = self._machine.read_freely(time.monotonic())
        self._run(commands)

    def allow(self, source: str, chunk: int) -> bool:
        """Let the chunk be read from this source. Returns False if it is verified already."""
        with self._lock:
            commands = self._machine.allow(source, chunk, time.monotonic())
        self._run(commands or ())
        return commands is not None

    def withdraw(self, source: str, chunk: int) -> None:
        """Stop reading the chunk from this source: give up the connections that do."""
        with self._lock:
            connections = self._machine.withdraw(source, chunk)
        for number in connections:
            self.connection_lost(number, PathSlowError("the chunk was requested elsewhere"))

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every session: reads are aborted, and the listener gets no `failed` any more."""
        with self._lock:
            self._machine.abort(ClosedError("the pull was closed"))
        for connection in self.connections:
            connection.session.close()

    def join_sessions(self, timeout_s: float) -> bool:
        """Wait until the sessions, which were closed, call no sink any more."""
        deadline_s = time.monotonic() + timeout_s
        return all(
            [
                each.session.join(max(0.0, deadline_s - time.monotonic()))
                for each in self.connections
            ]
        )

    def join(self, timeout_s: float) -> bool:
        """Wait until no session and no reported layer touches the arena, and drop the references to
        it and to what sources vouch for: else both would live until the garbage collector finds the
        cycle of transfer, listener and sinks."""
        deadline_s = time.monotonic() + timeout_s
        joined = self.join_sessions(timeout_s)
        with self._put:
            left_s = max(0.0, deadline_s - time.monotonic())
            joined &= self._put.wait_for(lambda: not self._putting, left_s)
        if joined:
            with self._lock:
                self._in_flight.clear()
                self._arena = memoryview(b"")
                self._buffers.clear()
                if self._subset is not None:
                    self._subset.forget()
                for connection in self._connections.values():
                    connection.vouched = None
        return joined

    # -- from the sinks, on the transports' threads ------------------------------------------

    def raised(self, error: BaseException) -> None:
        """Report an unexpected exception of a sink."""
        self._listener.broken(unexpected(error))

    def part_done(self, sink: _PartSink) -> None:
        # Lease first, then generation, then digest: bytes read after the lease prove nothing.
        error = self._connections[sink.connection].lease.check()
        if error is not None:
            self.connection_lost(sink.connection, error)
            self.part_failed(sink, error)
            return
        digests: bytes | None = sink.hasher.block_digests()
        if sink.vouched is not None:
            # On a mismatch blake3 has the last word: the shortcut's digests may be the wrong ones.
            right = digests == bytes(sink.vouched)
            sink.vouched = None
            digests = None if right else self._make_hasher(sink.views).block_digests()
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.landed(sink.connection, sink.part, digests, time.monotonic())
        self._run(commands, sink)
        self._free(sink)

    def part_failed(self, sink: _PartSink, error: MxError) -> None:
        if isinstance(error, CONNECTION_ERRORS):
            self.connection_lost(sink.connection, error)
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.failed(sink.connection, sink.part, error, time.monotonic())
        self._free(sink)
        self._run(commands)

    # ----------------------------------------------------------------------------------------

    def _read(self, connection: int, part: Part) -> tuple[_PartSink, Read]:
        grid, arena = self._grid, self._arena
        place = grid.part(part.chunk, part.begin, part.end)
        base = grid.layout.layers[place.layer].arena_offset
        places = grid.blocks(part.chunk)[part.begin : part.end]
        buffer = self._buffer(part)
        blocks: list[Span]
        if buffer is None:
            blocks = [contiguous(block) for block in cut(arena, places, base)]
        else:
            blocks = [*_one_after_another(buffer, (nbytes for _, nbytes in places))]
        vouched = self._vouched(connection, part)
        if vouched is None:
            hasher = self._make_hasher(blocks)
        else:
            hasher = BlockHasher([host_view(block) for block in blocks], shortcut_digest)
        sink = _PartSink(self, connection, part, blocks, hasher, vouched, buffer)
        with self._lock:
            self._in_flight[part] = sink
        # The source's region is laid out as this arena is.
        segments = grid.segments(place)
        views: Sequence[View]
        if buffer is None:
            views = cut(arena, [(at.arena_offset, at.nbytes) for at in segments])
        else:
            views = _one_after_another(buffer, (at.nbytes for at in segments))
        pieces = [Piece(0, at.arena_offset, view) for at, view in zip(segments, views, strict=True)]
        return sink, Read(f"chunk {part.chunk}", pieces, sink)

    def _vouched(self, connection: int, part: Part) -> memoryview | None:
        """Return the shortcut digests of a part's blocks, if the connection's source has any and
        they may be used."""
        digests = self._connections[connection].vouched if self._shortcut else None
        if digests is None or len(digests) != SHORTCUT_BYTES * self._grid.first_of_layer[-1]:
            return None
        grid = self._grid
        first = grid.first_of_layer[grid.layer_of[part.chunk]] + grid.first_block[part.chunk]
        return digests[SHORTCUT_BYTES * (first + part.begin) : SHORTCUT_BYTES * (first + part.end)]

    # -- parts that are read aside ----------------------------------------------------------------

    def _buffer(self, part: Part) -> bytearray | None:
        """Return a buffer for a part that is read aside; None for others."""
        if not self._machine.reads_aside(part):
            return None
        with self._lock:
            return self._buffers.pop() if self._buffers else bytearray(ASIDE_BYTES)

    def _free(self, sink: _PartSink) -> None:
        """Keep the buffer of a part for others: nothing writes there any more."""
        buffer, sink.buffer = sink.buffer, None
        if buffer is not None:
            with self._lock:
                self._buffers.append(buffer)

    def _copy_out(self, sink: _PartSink) -> None:
        grid, part = self._grid, sink.part
        base = grid.layout.layers[grid.layer_of[part.chunk]].arena_offset
        subset = self._subset
        assert subset is not None
        places = grid.blocks(part.chunk)[part.begin : part.end]
        for (offset, _), block in zip(places, sink.views, strict=True):
            subset.write(base + offset, host_view(block))
        with self._lock:
            commands = self._machine.copied_out(part)
        self._run(commands)

    # -- parts that ranks on this host hand each other --------------------------------------------

    def write_given(self, part: Part, data: memoryview) -> None:
        """Copy what is wanted of a part, whose blocks lie one after the other, to its place."""
        subset, at = self._subset, 0
        assert subset is not None
        base = self._grid.layout.layers[self._grid.layer_of[part.chunk]].arena_offset
        for offset, nbytes in self._grid.blocks(part.chunk)[part.begin : part.end]:
            subset.write(base + offset, data[at : at + nbytes])
            at += nbytes

    def given(self, rank: int, part: Part) -> None:
        """Count a part as verified that another rank has read, and that is in its place."""
        nbytes = self._grid.part_nbytes(part.chunk, part.begin, part.end)
        path = ("rank", f"rank {rank}")
        with self._lock:
            commands = self._machine.given(part)
            earlier = self._prefilled.get(path, PathReport(*path, 0, 0.0))
            seconds = time.monotonic() - self._began_s
            self._prefilled[path] = PathReport(*path, earlier.bytes + nbytes, seconds)
        self._run(commands)

    def landed_nbytes(self) -> int:
        """Return how many bytes have landed."""
        return self.progress()[0]

    def expects(self, rank: int) -> bool:
        """Return True if this rank has yet to hand over something."""
        with self._lock:
            return self._machine.expects(rank)

    def take_up(self, rank: int) -> bool:
        """Read what was expected from another rank. Returns True if anything was."""
        with self._lock:
            expected = self._machine.expects(rank)
            commands = self._machine.take_up(rank, time.monotonic())
        self._run(commands)
        return expected

    def _hand_out(self, part: Part, sink: _PartSink | None) -> None:
        assert self._exchange is not None
        if sink is not None and sink.part == part:
            views = sink.views
        else:  # it landed earlier, in its place
            base = self._grid.layout.layers[self._grid.layer_of[part.chunk]].arena_offset
            places = self._grid.blocks(part.chunk)[part.begin : part.end]
            views = [contiguous(block) for block in cut(self._arena, places, base)]
        self._exchange.hand_out(part, [host_view(view) for view in views])
        with self._lock:
            commands = self._machine.handed_out(part)
        self._run(commands)

    def _run(self, commands: Sequence[Command], sink: _PartSink | None = None) -> None:
        """Carry out commands; `sink` has what has landed just now."""
        for command in commands:
            match command:
                case Assign(connection, parts):
                    self._assign(connection, parts)
                case CopyOut():
                    assert sink is not None  # it is judged when it lands
                    self._copy_out(sink)
                case HandOut(part):
                    self._hand_out(part, sink)
                case LayerReady(layer, shortcut, given):
                    by = VerifiedBy.SHORTCUT if shortcut else VerifiedBy.DIGEST
                    by = VerifiedBy.RANK if given else by
                    self._listener.layer_ready(layer, self._arena, by)
                case DropConnection(connection, reason):
                    self.connection_lost(connection, reason)
                case Fail(causes):
                    self._listener.failed(causes)

    def _assign(self, connection: int, parts: Sequence[Part]) -> None:
        sinks, reads = zip(*(self._read(connection, part) for part in parts), strict=True)
        try:
            self._connections[connection].session.read(reads)
        except MxError as error:
            # Its traceback refers to the reads, and they to the arena.
            refused = error.with_traceback(None)
            self.connection_lost(connection, refused)
            for sink in sinks:
                self.part_failed(sink, refused)


def _one_after_another(buffer: bytearray, sizes: Iterable[int]) -> list[memoryview]:
    """Return views of these sizes, from the start of a buffer."""
    whole, at = memoryview(buffer), 0
    found = []
    for nbytes in sizes:
        found.append(whole[at : at + nbytes])
        at += nbytes
    return found
