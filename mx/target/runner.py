"""Runs the transfer machine: events go in under one lock, and the commands that follow are carried
out by the thread that brought the event. So the thread that finished a read issues the next one,
without an event loop."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mx.core.grid import ChunkGrid
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Ask,
    Assign,
    Command,
    CopyOut,
    DropConnection,
    Fail,
    HandOut,
    LayerReady,
)
from mx.errors import MxError
from mx.memory.arena import MakeHasher
from mx.runtime import unexpected
from mx.target.destination import Destination
from mx.target.exchange import Exchange
from mx.target.reads import CONNECTION_ERRORS, Connection
from mx.target.report import VerifiedBy
from mx.target.sink import PartSink, vouched_of
from mx.transport import Read, View, host_view

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


class MachineRunner:
    """The machine of one transfer, its connections and its reads.

    One lock guards the machine, and with it what must agree with it: the connections by number, the
    sinks of parts in flight, and what functions that are given to `react` and `call` use. Commands
    are carried out after it is released.
    """

    def __init__(
        self,
        machine: TransferMachine,
        grid: ChunkGrid,
        destination: Destination,
        listener: TransferListener,
        make_hasher: MakeHasher,
        *,
        shortcut: bool,
        exchange: Exchange | None,
    ) -> None:
        """
        Args:
            machine: The machine, which nothing else calls.
            grid: How the model is cut into chunks.
            destination: The memory to fill.
            listener: What is called with events.
            make_hasher: Makes hashers for parts in this memory.
            shortcut: Whether what sources vouch for is used.
            exchange: With other ranks on this host, to which it hands parts; None: there are none.
        """
        self._machine = machine
        self._grid = grid
        self._destination = destination
        self._listener = listener
        self._make_hasher = make_hasher
        self._shortcut = shortcut
        self._exchange = exchange
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._in_flight: dict[Part, PartSink] = {}

    def react(self, event: Callable[[TransferMachine], Sequence[Command]]) -> None:
        """Call a function that reports an event to the machine, and carry out its commands."""
        self.run(self.call(event))

    def call(self, function: Callable[[TransferMachine], Answer]) -> Answer:
        """Call a function of the machine under the lock, and return what it returns."""
        with self._lock:
            return function(self._machine)

    # -- connections ------------------------------------------------------------------------------

    @property
    def connections(self) -> list[Connection]:
        """All that ever were, by number."""
        with self._lock:
            return list(self._connections)

    def add_connection(self, connection: Connection) -> int:
        """Begin reading through a session. Returns the connection's number."""
        with self._lock:
            number = len(self._connections)
            self._connections.append(connection)
            commands = self._machine.add_connection(
                number,
                connection.session.depth,
                time.monotonic(),
                source=connection.path.source.key,
                peer=connection.peer,
                bytes_per_s=connection.path.gb_per_s * 1e9,
                answers=connection.lease.answers,
            )
            connection.load = self._machine.load(number)
        self.run(commands)
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
        self.run(commands)
        self._listener.connection_lost(number, error)

    # -- parts in flight --------------------------------------------------------------------------

    def layer_nbytes(self) -> list[int]:
        """Return the payload bytes of each layer that have landed, also of running reads."""
        with self._lock:
            layers = self._machine.landed_nbytes()
            sinks = list(self._in_flight.values())
        for sink in sinks:
            layers[self._grid.layer_of[sink.part.chunk]] += sink.landed_nbytes
        return layers

    def tick(self) -> None:
        """Give up connections that are too slow to wait for."""
        with self._lock:
            landed = {part: sink.landed_nbytes for part, sink in self._in_flight.items()}
            commands = self._machine.tick(time.monotonic(), landed)
        self.run(commands)

    def forget(self) -> None:
        """Drop the references to memory, once no session calls a sink any more."""
        with self._lock:
            self._in_flight.clear()
            for connection in self._connections:
                connection.vouched = None
        self._destination.forget()

    # -- from the sinks, on the transports' threads -----------------------------------------------

    def raised(self, error: BaseException) -> None:
        """Report an unexpected exception of a sink."""
        self._listener.broken(unexpected(error))

    def part_done(self, sink: PartSink) -> None:
        """Judge a part that has landed."""
        # Lease first, then generation, then digest: bytes read after the lease prove nothing.
        error = self._connections[sink.connection].lease.check()
        if error is not None:
            self.connection_lost(sink.connection, error)
            self.part_failed(sink, error)
            return
        digests = sink.block_digests()
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.landed(sink.connection, sink.part, digests, time.monotonic())
        self.run(commands, sink)
        self._destination.free(sink.landing)

    def part_failed(self, sink: PartSink, error: MxError) -> None:
        """Read a part again that has not landed."""
        if isinstance(error, CONNECTION_ERRORS):
            self.connection_lost(sink.connection, error)
        with self._lock:
            self._in_flight.pop(sink.part, None)
            commands = self._machine.failed(sink.connection, sink.part, error, time.monotonic())
        self._destination.free(sink.landing)
        self.run(commands)

    # -- commands ---------------------------------------------------------------------------------

    def run(self, commands: Sequence[Command], sink: PartSink | None = None) -> None:
        """Carry out commands; `sink` has what has landed just now."""
        for command in commands:
            match command:
                case Assign(connection, parts):
                    self._assign(connection, parts)
                case Ask(connection, chunk):
                    asked = self._connections[connection]
                    answered = functools.partial(self._answered, asked.path.source.key)
                    asked.lease.ask(chunk, answered)
                case CopyOut():
                    assert sink is not None  # it is judged when it lands
                    self._copy_out(sink)
                case HandOut(part):
                    self._hand_out(part, sink)
                case LayerReady(layer, shortcut, given):
                    by = VerifiedBy.SHORTCUT if shortcut else VerifiedBy.DIGEST
                    by = VerifiedBy.RANK if given else by
                    self._listener.layer_ready(layer, self._destination.arena, by)
                case DropConnection(connection, reason):
                    self.connection_lost(connection, reason)
                case Fail(causes):
                    self._listener.failed(causes)

    def _answered(self, source: str) -> None:
        self.react(lambda machine: machine.answered(source, time.monotonic()))

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

    def _read(self, connection: int, part: Part) -> tuple[PartSink, Read]:
        landing = self._destination.land(part)
        vouched = None
        if self._shortcut:
            vouched = vouched_of(self._connections[connection].vouched, self._grid, part)
        sink = PartSink(self, connection, landing, self._make_hasher, vouched)
        with self._lock:
            self._in_flight[part] = sink
        return sink, Read(f"chunk {part.chunk}", landing.pieces, sink)

    def _copy_out(self, sink: PartSink) -> None:
        self._destination.copy_out(sink.landing)
        self.react(lambda machine: machine.copied_out(sink.part))

    def _hand_out(self, part: Part, sink: PartSink | None) -> None:
        assert self._exchange is not None
        if sink is not None and sink.part == part:
            blocks = sink.landing.blocks
        else:  # it landed earlier, in its place
            blocks = self._destination.blocks(part)
        self._exchange.hand_out(part, [host_view(block) for block in blocks])
        self.react(lambda machine: machine.handed_out(part))
