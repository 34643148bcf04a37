"""The data side of a pull: it feeds the transfer machine with what connections, reads, the swarm
and the ranks on this host bring, and carries out its commands.

`mx.fetching.sink` hashes parts as they land, `mx.fetching.destination` has the memory in which they
do.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from mx.core.digest import DIGEST_BYTES
from mx.core.growth import StreamGrowth
from mx.core.holdings import Holdings, HoldingsListener
from mx.core.local_ranks import Shares
from mx.core.pages import Pages
from mx.core.paths import FIRST_STREAMS
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Ask,
    Assign,
    Command,
    CopyOut,
    DropConnection,
    HandOut,
    LayerReady,
)
from mx.core.types import Manifest
from mx.core.wanted import WantedBlocks
from mx.errors import ChunkElsewhereError, ClosedError, MxError, another
from mx.fetching.destination import Destination, PartMemory
from mx.fetching.exchange import Exchange
from mx.fetching.reads import CONNECTION_ERRORS, Connection
from mx.fetching.report import PathReport, VerifiedBy
from mx.fetching.sink import PartSink, ReadSink, TripSink, vouched_of
from mx.memory.arena import MakeHasher, host_hasher
from mx.memory.subset import SubsetMemory
from mx.runtime import unexpected
from mx.transport import Growing, Read, ShowsSource, Span, View, host_view

if TYPE_CHECKING:
    from mx.cuda.digest_table import DigestTable
    from mx.cuda.source_digests import SourceDigests

Answer = TypeVar("Answer")


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


class Transfer:
    """Reads one model into `arena` (writable, `layout.arena_nbytes` long, each tensor in one piece;
    the caller keeps it until `join` has returned).

    Thread-safe. One lock guards the machine, and with it what must agree with it: `pages`,
    `started`, the connections by number, the sinks of parts in flight, and what came by other ways.
    Commands are carried out after it is released, by the thread that brought the event: so the
    thread that finished a read issues the next one, without an event loop. `_put` guards the count
    of pages that are being used.

    `holdings` are the chunks that are verified. Subscribe by `subscribe`, which takes the lock.
    """

    def __init__(
        self,
        manifest: Manifest,
        pages: Pages,
        arena: View,
        listener: TransferListener,
        make_hasher: MakeHasher = host_hasher,
        *,
        several_connections: bool = False,
        in_turn: bool = False,
        shortcut: bool = False,
        subset: tuple[SubsetMemory, WantedBlocks] | None = None,
        exchange: tuple[Exchange, Shares] | None = None,
        table: DigestTable | None = None,
        streams: int | str = FIRST_STREAMS,
    ) -> None:
        """
        Args:
            manifest: The model.
            pages: Its pages that are known; the transfer adds to them.
            arena: The memory to fill.
            listener: What is called with events.
            make_hasher: Makes hashers for parts in this memory.
            several_connections: True if others will follow the first connection at once.
            in_turn: Read one part at a time through a connection: tensors share memory in `arena`,
                and a part must not be overwritten by another while it is hashed.
            shortcut: Where the kernel vouches that this user's own process wrote the memory that is
                read, verify by xxh3_128, and by blake3 only what differs. `arena` is host memory.
            subset: The memory of some tensors, whose view `arena` is, and the blocks to read for
                them; None: all.
            exchange: With other ranks on this host, which read some of these blocks, and which. The
                caller begins it and closes it.
            table: The blocks in `arena`, all of it on one GPU, which `join` closes; None: the GPU
                hashes no run of parts at once, or there is none.
            streams: The setting: how many connections to each source.
        """
        self.manifest = manifest
        self.pages = pages
        self.started = False
        self.grid = manifest.grid
        self._destination = Destination(self.grid, arena, subset)
        self._listener = listener
        self._make_hasher = make_hasher
        self._shortcut = shortcut
        self._in_turn = in_turn
        self._table = table
        self._by = VerifiedBy.DIGEST
        #: Whether a source's GPU may hash what is read from it.
        self._hashes_there = shortcut and table is None and subset is None and not in_turn
        self._exchange = None if exchange is None else exchange[0]
        self._lock = threading.Lock()
        self._machine = TransferMachine(
            self.grid,
            pages.get,
            several_connections=several_connections,
            wanted=None if subset is None else subset[1],
            shares=None if exchange is None else exchange[1],
        )
        self.holdings: Holdings = self._machine.holdings
        self._connections: list[Connection] = []
        self._in_flight: dict[Part, ReadSink] = {}  # by their first parts
        self._others: dict[tuple[str, str], PathReport] = {}  # what no connection brought
        self._began_s = time.monotonic()
        cores = len(os.sched_getaffinity(0))
        self._growth = StreamGrowth.of(streams, cores, self._began_s)
        #: Sources that are read from no more, and why.
        self.excluded: dict[str, MxError] = {}
        self._put = threading.Condition()
        self._putting = 0

    def react(self, event: Callable[[TransferMachine], Sequence[Command]]) -> None:
        """Call a function that reports an event to the machine, and carry out its commands."""
        self._run(self._call(event))

    def _call(self, function: Callable[[TransferMachine], Answer]) -> Answer:
        """Call a function of the machine under the lock, and return what it returns."""
        with self._lock:
            return function(self._machine)

    # -- what there is ----------------------------------------------------------------------------

    @property
    def arena(self) -> View:
        """The memory that is filled; empty once the transfer is joined."""
        return self._destination.arena

    @property
    def retries(self) -> int:
        return self._machine.retries

    @property
    def wrong(self) -> int:
        """How many reads brought bytes that did not match their digests."""
        return self._machine.wrong

    @property
    def causes(self) -> tuple[MxError, ...]:
        """Why reads and connections failed so far."""
        return self._call(lambda machine: machine.causes)

    @property
    def hopeless(self) -> bool:
        """True if nothing is in flight, and no open connection can read what is missing."""
        return self._call(lambda machine: machine.hopeless)

    @property
    def connections(self) -> list[Connection]:
        """All that ever were, by number."""
        with self._lock:
            return list(self._connections)

    def paths(self) -> list[PathReport]:
        """Return what came over each path that brought anything, connections first; those of one
        path, which was left and opened again, as one."""
        found: dict[tuple[str, ...], PathReport] = {}
        with self._lock:
            for each in self._connections:
                if nbytes := each.verified_nbytes:
                    key = (each.path.transport, each.peer, str(each.path.rail or ""))
                    seconds = each.verified_at_s - each.opened_at_s
                    if key in found:
                        nbytes, seconds = nbytes + found[key].bytes, seconds + found[key].seconds
                    detail = getattr(each.session, "detail", "")
                    found[key] = PathReport(*key[:2], nbytes, seconds, rail=key[2], detail=detail)
            return [*found.values(), *self._others.values()]

    def progress(self) -> tuple[int, list[int]]:
        """Return the payload bytes that have landed, in all and by layer, also of running reads."""
        with self._lock:
            layers = self._machine.landed_nbytes()
            sinks = list(self._in_flight.values())
        for sink in sinks:
            for part, nbytes in sink.landed_parts():
                layers[self.grid.layer_of[part.chunk]] += nbytes
        return sum(layers), layers

    def landed_nbytes(self) -> int:
        """Return how many payload bytes have landed."""
        return self.progress()[0]

    def subscribe(self, listener: HoldingsListener) -> int:
        """Report every chunk that is verified from now on to `listener`, under the transfer's lock.
        Returns the chunks that are verified now, as a bit set."""
        return self._call(lambda machine: machine.holdings.subscribe(listener))

    # -- from the pull's helpers ------------------------------------------------------------------

    def start(self) -> None:
        """Begin: layers without bytes are ready. The first connection calls it too. Idempotent."""

        def begin(machine: TransferMachine) -> Sequence[Command]:
            if self.started:
                return ()
            self.started = True
            return machine.start()

        self.react(begin)

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

        def count(machine: TransferMachine) -> tuple[int, Sequence[Command]]:
            before = sum(machine.landed_nbytes())
            news, commands = machine.already_landed(chunks)
            nbytes = sum(machine.landed_nbytes()) - before
            if news:
                self._came(label, source, nbytes, lambda before_s: before_s + seconds)
            return nbytes, commands

        nbytes, commands = self._call(count)
        self._run(commands)
        return nbytes

    def _came(
        self, label: str, source: str, nbytes: int, seconds: Callable[[float], float]
    ) -> None:
        before = self._others.get((label, source), PathReport(label, source, 0, 0.0))
        self._others[label, source] = PathReport(
            label, source, before.bytes + nbytes, seconds(before.seconds)
        )

    def put_page(self, layer: int, page: bytes) -> None:
        """Use a page that `check_page` found right. Reports the layer if that makes it ready, so
        the caller may take long; `join` waits for it."""

        def use(machine: TransferMachine) -> Sequence[Command]:
            self.pages.put(layer, page)
            return machine.page_known(layer, time.monotonic())

        with self._put:
            self._putting += 1
        try:
            self.react(use)
        finally:
            with self._put:
                self._putting -= 1
                self._put.notify_all()

    def abort(self, error: MxError) -> None:
        """Fail, for a reason of the caller's."""
        self.react(lambda machine: machine.abort(error))

    def raised(self, error: BaseException) -> None:
        """Report an unexpected exception of a sink, or of the thread that hands parts over."""
        self._listener.broken(unexpected(error))

    # -- connections ------------------------------------------------------------------------------

    def add_connection(self, connection: Connection) -> int:
        """Begin reading through a session. Returns the connection's number. Raises the error for
        which its source was excluded."""
        path, session = connection.path, connection.session
        if path.source.key in self.excluded:
            raise another(self.excluded[path.source.key])
        if self._hashes_there and isinstance(session, ShowsSource):
            connection.digests = self._source_digests(session)
        hashes = self._table is not None or connection.digests is not None
        self.start()
        with self._lock:
            number = len(self._connections)
            self._connections.append(connection)
            commands = self._machine.add_connection(
                number,
                1 if self._in_turn else session.depth,
                time.monotonic(),
                source=path.source.key,
                peer=connection.peer,
                bytes_per_s=path.gb_per_s * 1e9,
                answers=connection.lease.answers,
                trip_s=0.0 if not hashes or self._in_turn else connection.trip_s,
            )
            connection.load = self._machine.load(number)
        self._run(commands)
        if self._growth.streams > FIRST_STREAMS and isinstance(connection.session, Growing):
            connection.session.grow(self._growth.streams)  # it has come late
        return number

    def _source_digests(self, session: ShowsSource) -> SourceDigests | None:
        """Return what has the source's GPU hash what a session reads, None where it does not."""
        from mx.cuda.source_digests import SourceDigests, is_worth_while

        nbytes = len(self.arena)
        there = session.source_view(0) if is_worth_while(nbytes) else None
        if there is None or len(there) < nbytes:
            return None
        return SourceDigests(self.grid, there, self.pages.get)

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

    def exclude(self, key: str, error: MxError, *, for_good: bool = False) -> None:
        """Give up all connections to a source; `for_good`: and refuse new ones."""
        if for_good:
            self.excluded[key] = error
        for number, connection in enumerate(self.connections):
            if connection.path.source.key == key:
                self.connection_lost(number, error)

    @property
    def due_s(self) -> float:
        """When `tick` is to be called next."""
        return min(self._growth.due_s, self._call(lambda machine: machine.due_s))

    def tick(self) -> None:
        """Give up connections that are too slow to wait for, and open more where that is faster."""
        with self._lock:
            landed = dict(each for sink in self._in_flight.values() for each in sink.landed_parts())
            commands = self._machine.tick(time.monotonic(), landed)
        self._run(commands)
        if self._growth.due_s <= time.monotonic():
            self._grow()

    def _grow(self) -> None:
        """Open more connections to sources that nothing else reads from, if that is faster."""
        own = (each for each in self.connections if not (each.lost or each.lease.coordinated))
        growing = [each.session for each in own if isinstance(each.session, Growing)]
        now_s, processor_s = time.monotonic(), time.process_time()
        streams = [each.open_streams for each in growing]
        self._growth.look(now_s, self.landed_nbytes(), processor_s, streams)
        for session in growing:
            session.grow(self._growth.streams)

    def no_more_connections(self) -> None:
        """Fail once the open connections can't read what is missing."""
        self.react(TransferMachine.no_more_connections)

    def expect_connections(self) -> None:
        """Do not fail for want of connections: another one may come."""
        self._call(TransferMachine.expect_connections)

    # -- which source may be read from ------------------------------------------------------------

    def coordinate(self) -> None:
        """Read chunks only from sources that allow them, from now on."""
        self._call(TransferMachine.coordinate)

    def read_freely(self) -> None:
        """Read every chunk from every source from now on."""
        self.react(lambda machine: machine.read_freely(time.monotonic()))

    def exempt(self, sources: frozenset[str]) -> None:
        """Read every chunk from these sources, also in coordinated reading, and from no others."""
        self.react(lambda machine: machine.exempt(sources, time.monotonic()))

    def allow(self, source: str, chunk: int) -> bool:
        """Let the chunk be read from this source. Returns False if it is verified already."""
        commands = self._call(lambda machine: machine.allow(source, chunk, time.monotonic()))
        self._run(commands or ())
        return commands is not None

    def withdraw(self, source: str, chunk: int) -> None:
        """Stop reading the chunk from this source: give up the connections that do."""
        for number in self._call(lambda machine: machine.withdraw(source, chunk)):
            self.connection_lost(number, ChunkElsewhereError("the chunk was requested elsewhere"))

    # -- parts that other ranks on this host have read --------------------------------------------

    def write_given(self, part: Part, data: memoryview) -> None:
        """Scatter a part's wanted blocks to their destinations."""
        self._destination.write(part, data)

    def given(self, rank: int, part: Part) -> None:
        """Count a part as verified that another rank has read, and that is in its place."""
        nbytes = self.grid.part_nbytes(part.chunk, part.begin, part.end)

        def count(machine: TransferMachine) -> Sequence[Command]:
            passed_s = time.monotonic() - self._began_s
            self._came("rank", f"rank {rank}", nbytes, lambda _: passed_s)
            return machine.given(part)

        self.react(count)

    def expects(self, rank: int) -> bool:
        """Return True if this rank has yet to hand over something."""
        return self._call(lambda machine: machine.expects(rank))

    def take_up(self, rank: int) -> bool:
        """Read what was expected from another rank. Returns True if anything was."""

        def take(machine: TransferMachine) -> tuple[bool, Sequence[Command]]:
            return machine.expects(rank), machine.take_up(rank, time.monotonic())

        expected, commands = self._call(take)
        self._run(commands)
        return expected

    # -- from the sinks, on the transports' threads -----------------------------------------------

    def read_done(self, sink: ReadSink) -> None:
        """Judge what a read has brought."""
        landed_s = time.monotonic()  # a GPU's first digests may wait for a compiler
        # Lease first, then generation, then digest: bytes read after the lease prove nothing.
        connection = self._connections[sink.connection]
        error = connection.lease.check()
        if error is not None:
            self.connection_lost(sink.connection, error)
            self.read_failed(sink, error)
            return
        try:
            digests = sink.digests()
        except MxError as lost:  # the GPU's, which hashes them
            self.read_failed(sink, lost.with_traceback(None))
            return
        number, session = sink.connection, connection.session
        trip_s: float = getattr(session, "round_trip_s", 0.0)
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.landed(number, digests, landed_s, trip_s, session.depth)
        self._run(commands, sink)
        if sink.uses:
            sink.end()

    def read_failed(self, sink: ReadSink, error: MxError) -> None:
        """Read parts again that have not landed: nothing writes to their memory any more."""
        if isinstance(error, CONNECTION_ERRORS):
            self.connection_lost(sink.connection, error)
        parts = [part for part, _ in sink.landed_parts()]
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.failed(sink.connection, parts, error, time.monotonic())
        if sink.uses:
            sink.end()
        self._run(commands)

    def free(self, landing: PartMemory) -> None:
        """Let other parts use the memory in which one was read aside."""
        self._destination.free(landing)

    def blocks(self, part: Part) -> list[Span]:
        """Return the blocks of a part in their place."""
        return self._destination.blocks(part)

    def expected(self, part: Part) -> bytes:
        """Return the digests that a part's blocks must have, by their page, which is known."""
        page, first = self.pages.get(self.grid.layer_of[part.chunk]), self.grid.first_block
        assert page is not None
        begin = DIGEST_BYTES * (first[part.chunk] + part.begin)
        return page[begin : begin + DIGEST_BYTES * (part.end - part.begin)]

    # -- commands ---------------------------------------------------------------------------------

    def _run(self, commands: Sequence[Command], sink: ReadSink | None = None) -> None:
        """Carry out commands; `sink` has what has landed just now."""
        for command in commands:
            # By frequency, and without `match`, which takes ten times as long.
            if isinstance(command, Assign):
                self._assign(command.connection, command.parts)
            elif isinstance(command, LayerReady):
                by = VerifiedBy.SHORTCUT if command.shortcut else self._by
                by = VerifiedBy.RANK if command.given else by
                self._listener.layer_ready(command.layer, self._destination.arena, by)
            elif isinstance(command, Ask):
                asked = self._connections[command.connection]
                answered = functools.partial(self._answered, asked.path.source.key)
                asked.lease.ask(command.chunk, answered)
            elif isinstance(command, CopyOut):
                assert isinstance(sink, PartSink)  # it is judged when it lands
                self._copy_out(sink)
            elif isinstance(command, HandOut):
                self._hand_out(command.part, sink)
            elif isinstance(command, DropConnection):
                self.connection_lost(command.connection, command.reason)
            else:
                self._listener.failed(command.causes)

    def _answered(self, source: str) -> None:
        self.react(lambda machine: machine.answered(source, time.monotonic()))

    def _assign(self, connection: int, parts: Sequence[Part]) -> None:
        through = self._connections[connection]
        sinks: dict[Part, ReadSink] = {}
        reads: list[Read] = []
        table = self._table
        if through.digests is not None and (table := through.digests.table) is not None:
            self._by = VerifiedBy.GPU
        if table is not None:
            assert through.load is not None
            trips = [parts] if through.load.trip_s else [(part,) for part in parts]
            for trip in trips:
                sink = TripSink(self, connection, trip, table, self._make_hasher)
                sinks[sink.part] = sink
                reads.append(Read(sink.tag, self._destination.land_trip(trip), sink))
            parts = ()
        for part in parts:
            landing = self._destination.land(part)
            vouched = vouched_of(through.vouched, self.grid, part) if self._shortcut else None
            sinks[part] = PartSink(self, connection, landing, self._make_hasher, vouched)
            reads.append(Read(f"chunk {part.chunk}", landing.pieces, sinks[part]))
        with self._lock:
            self._in_flight.update(sinks)
        try:
            through.session.read(reads)
        except MxError as error:
            # Its traceback refers to the reads, and they to the arena.
            refused = error.with_traceback(None)
            self.connection_lost(connection, refused)
            for each in sinks.values():
                self.read_failed(each, refused)

    def _copy_out(self, sink: PartSink) -> None:
        self._destination.copy_out(sink.landing)
        self.react(lambda machine: machine.copied_out(sink.part))

    def _hand_out(self, part: Part, sink: ReadSink | None) -> None:
        assert self._exchange is not None
        if isinstance(sink, PartSink) and sink.part == part:
            blocks = sink.landing.blocks
        else:  # it landed earlier, in its place
            blocks = self._destination.blocks(part)
        self._exchange.hand_out(part, [host_view(block) for block in blocks])
        self.react(lambda machine: machine.handed_out(part))

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every session: reads are aborted, and the listener gets no `failed` any more."""
        self._call(lambda machine: machine.abort(ClosedError("the pull was closed")))
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
                connections = list(self._connections)
            for connection in connections:
                connection.vouched = None
                if connection.digests is not None:
                    connection.digests.close()
            self._destination.forget()
            if self._table is not None:
                self._table.close()
        return joined
