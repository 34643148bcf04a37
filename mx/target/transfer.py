"""The data side of a pull: what its helpers on the loop, the swarm and the ranks on this host tell
the transfer machine, and ask it.

`mx.target.runner` carries out the machine's commands, `mx.target.sink` hashes parts as they land,
`mx.target.destination` has the memory in which they do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from mx.core.holdings import Holdings, HoldingsListener
from mx.core.local_ranks import Shares
from mx.core.pages import Pages
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import Command
from mx.core.types import Manifest
from mx.core.wanted import Wanted
from mx.errors import ClosedError, MxError, PathSlowError, another
from mx.memory.arena import MakeHasher, host_hasher
from mx.memory.subset import SubsetMemory
from mx.target.account import PathAccount
from mx.target.destination import Destination
from mx.target.exchange import Exchange
from mx.target.reads import Connection
from mx.target.report import PathReport
from mx.target.runner import MachineRunner, TransferListener
from mx.transport import View


class Transfer:
    """Reads one model into `arena` (writable, `layout.arena_nbytes` long, each tensor in one piece;
    the caller keeps it until `join` has returned).

    Thread-safe. The runner's lock guards the machine, and with it `pages`, `started` and the
    account of paths, which change with it. `_put` guards the count of pages that are being used.

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
        self.started = False
        self._grid = manifest.grid
        self._destination = Destination(self._grid, arena, subset)
        self._account = PathAccount()
        machine = TransferMachine(
            self._grid,
            pages.get,
            several_connections=several_connections,
            wanted=None if subset is None else subset[1],
            shares=None if exchange is None else exchange[1],
        )
        self.holdings: Holdings = machine.holdings
        self._runner = MachineRunner(
            machine,
            self._grid,
            self._destination,
            listener,
            make_hasher,
            shortcut=shortcut,
            exchange=None if exchange is None else exchange[0],
        )
        self._excluded: dict[str, MxError] = {}
        self._put = threading.Condition()
        self._putting = 0

    @property
    def arena(self) -> View:
        """The memory that is filled; empty once the transfer is joined."""
        return self._destination.arena

    @property
    def retries(self) -> int:
        return self._runner.call(lambda machine: machine.retries)

    @property
    def connections(self) -> list[Connection]:
        return self._runner.connections

    def paths(self) -> list[PathReport]:
        """Return what came over each path that brought anything."""
        connections = self._runner.connections
        return self._runner.call(lambda _: self._account.reports(connections))

    def progress(self) -> tuple[int, list[int]]:
        """Return the payload bytes that have landed, in all and by layer, also of running reads."""
        layers = self._runner.layer_nbytes()
        return sum(layers), layers

    def start(self) -> None:
        """Begin: layers without bytes are ready. The first connection calls it too. Idempotent."""

        def begin(machine: TransferMachine) -> Sequence[Command]:
            if self.started:
                return ()
            self.started = True
            return machine.start()

        self._runner.react(begin)

    def subscribe(self, listener: HoldingsListener) -> int:
        """Report every chunk that is verified from now on to `listener`, under the transfer's lock.
        Returns the chunks that are verified now, as a bit set."""
        return self._runner.call(lambda machine: machine.holdings.subscribe(listener))

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
                self._account.prefilled(label, source, nbytes, seconds)
            return nbytes, commands

        nbytes, commands = self._runner.call(count)
        self._runner.run(commands)
        return nbytes

    def add_connection(self, connection: Connection) -> int:
        """Begin reading through a session. Returns the connection's number. Raises the error for
        which its source was excluded."""
        if connection.path.source.key in self._excluded:
            raise another(self._excluded[connection.path.source.key])
        self.start()
        return self._runner.add_connection(connection)

    def connection_lost(self, number: int, error: MxError) -> None:
        """Give a connection up; its parts are missing again when its reads have ended."""
        self._runner.connection_lost(number, error)

    def put_page(self, layer: int, page: bytes) -> None:
        """Use a page that `check_page` found right. Reports the layer if that makes it ready, so
        the caller may take long; `join` waits for it."""

        def use(machine: TransferMachine) -> Sequence[Command]:
            self.pages.put(layer, page)
            return machine.page_known(layer, time.monotonic())

        with self._put:
            self._putting += 1
        try:
            self._runner.react(use)
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
        self._runner.react(lambda machine: machine.abort(error))

    def tick(self) -> None:
        """Give up connections that are too slow to wait for. To be called a few times a second."""
        self._runner.tick()

    def no_more_connections(self) -> None:
        """Fail once the open connections can't read what is missing."""
        self._runner.react(TransferMachine.no_more_connections)

    @property
    def causes(self) -> tuple[MxError, ...]:
        """Why reads and connections failed so far."""
        return self._runner.call(lambda machine: machine.causes)

    @property
    def hopeless(self) -> bool:
        """True if nothing is in flight, and no open connection can read what is missing."""
        return self._runner.call(lambda machine: machine.hopeless)

    def expect_connections(self) -> None:
        """Do not fail for want of connections: another one may come."""
        self._runner.call(TransferMachine.expect_connections)

    # -- which source may be read from ------------------------------------------------------------

    def coordinate(self) -> None:
        """From now on read chunks only from sources that allow them."""
        self._runner.call(TransferMachine.coordinate)

    def read_freely(self) -> None:
        """From now on read every chunk from every source."""
        self._runner.react(lambda machine: machine.read_freely(time.monotonic()))

    def allow(self, source: str, chunk: int) -> bool:
        """Let the chunk be read from this source. Returns False if it is verified already."""
        commands = self._runner.call(lambda machine: machine.allow(source, chunk, time.monotonic()))
        self._runner.run(commands or ())
        return commands is not None

    def withdraw(self, source: str, chunk: int) -> None:
        """Stop reading the chunk from this source: give up the connections that do."""
        for number in self._runner.call(lambda machine: machine.withdraw(source, chunk)):
            self.connection_lost(number, PathSlowError("the chunk was requested elsewhere"))

    # -- parts that ranks on this host hand each other --------------------------------------------

    def write_given(self, part: Part, data: memoryview) -> None:
        """Copy what is wanted of a part, whose blocks lie one after the other, to its place."""
        self._destination.write(part, data)

    def given(self, rank: int, part: Part) -> None:
        """Count a part as verified that another rank has read, and that is in its place."""
        nbytes = self._grid.part_nbytes(part.chunk, part.begin, part.end)

        def count(machine: TransferMachine) -> Sequence[Command]:
            self._account.given(rank, nbytes)
            return machine.given(part)

        self._runner.react(count)

    def landed_nbytes(self) -> int:
        """Return how many bytes have landed."""
        return self.progress()[0]

    def expects(self, rank: int) -> bool:
        """Return True if this rank has yet to hand over something."""
        return self._runner.call(lambda machine: machine.expects(rank))

    def take_up(self, rank: int) -> bool:
        """Read what was expected from another rank. Returns True if anything was."""

        def take(machine: TransferMachine) -> tuple[bool, Sequence[Command]]:
            return machine.expects(rank), machine.take_up(rank, time.monotonic())

        expected, commands = self._runner.call(take)
        self._runner.run(commands)
        return expected

    def raised(self, error: BaseException) -> None:
        """Report an unexpected exception of the thread that hands parts over."""
        self._runner.raised(error)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every session: reads are aborted, and the listener gets no `failed` any more."""
        self._runner.call(lambda machine: machine.abort(ClosedError("the pull was closed")))
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
            self._runner.forget()
        return joined
