"""Which part is read next over which connection: events in, commands out.

The machine does no IO and has no clock. It knows which chunks are missing or in flight, which
connections there are and how fast each is, and decides what each reads next. Its caller carries out
the commands and reports their results, in any order.

A read is of a *part*: a chunk, or near the end a piece of one in whole blocks. `mx.core.striping`
computes how much a connection takes, and how far ahead. Where a copy engine moves the bytes, a
read is a *trip*: a run of parts, one after the other; the first trip is of the first layer alone.
Whether what has landed is right, and which chunks are verified and which layers ready,
`mx.core.verification` decides.

A part that fails is missing again, and is read from another source if possible. So is a part whose
connection is lost, but not before its read has ended: until then that transport may still write
there, over bytes that another connection has brought and that are verified. A connection that is
so late that the others could do its work twice is dropped (`tick`). A part with a wrong block is
read again, its chunk not from the same source while another may serve it; its source is asked for
the reason, and dropped if it lies (`mx.core.suspects`). A chunk is read only from a source that
allows it (`mx.core.rights`).

A pull of some tensors has *wanted* blocks; the others count as right from the start. Of those whose
bytes do not go to their place as they are, parts of their own are *read aside*, into a buffer, and
copied from there once they are right. Such a part is only read once its layer's page is known, so
that it is judged when it lands, and buffers are as few as reads in flight. Where ranks on one host
share what they want, a block that another one reads is *expected*: it is missing only once that
rank is gone (`mx.core.local_ranks`).

The pull fails when chunks are missing, no open connection may read them, and the caller has
reported that no further connection will come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from mx.core import striping
from mx.core.grid import BLOCK_BYTES, ChunkGrid
from mx.core.local_ranks import ExpectedBlocks, Shares
from mx.core.missing import MissingChunks
from mx.core.reasons import Why
from mx.core.rights import ReadRights
from mx.core.striping import ConnectionLoad, Pace, Part
from mx.core.suspects import Suspects
from mx.core.transfer_commands import Ask, Assign, Command, DropConnection, Fail
from mx.core.verification import Verification
from mx.core.wanted import WantedBlocks
from mx.errors import DigestError, MxError, PathSlowError, StaleGenerationError

#: The parts of a read, each with the digests of its blocks.
Trip = Sequence[tuple[Part, bytes | None]]

MAX_ATTEMPTS = 5
#: Pause between looks for connections that are late.
TICK_S = 0.25


class TransferMachine:
    """One pull. Not thread-safe. Methods return commands in the order in which they are to be
    carried out. `now_s` are readings of one monotonic clock."""

    def __init__(
        self,
        grid: ChunkGrid,
        page_of: Callable[[int], bytes | None],
        *,
        several_connections: bool = False,
        wanted: WantedBlocks | None = None,
        shares: Shares | None = None,
    ) -> None:
        """
        Args:
            grid: How the model is cut into chunks.
            page_of: Returns the digests that a layer's blocks must have, None while they are not
                known; `page_known` reports when they are.
            several_connections: True if others will follow the first connection at once.
            wanted: The blocks to read; None: all.
            shares: Which of these other ranks on this host read; None: none.
        """
        self._verification = Verification(grid, page_of, wanted, shares)
        self.holdings = self._verification.holdings
        self.retries = 0
        self.wrong = 0  # parts that did not match their digests
        self._grid = grid
        self._several_connections = several_connections
        self._wanted = wanted
        # Neither verified, nor being read, nor expected.
        self._missing = MissingChunks(grid, wanted, None if shares is None else shares.mine)
        self._expected = ExpectedBlocks(shares)
        self._connections: dict[int, ConnectionLoad] = {}  # all that ever were
        self._open: dict[int, ConnectionLoad] = {}
        self._suspects = Suspects()
        self._ticked_s = 0.0
        self._attempts: dict[int, int] = {}
        self._causes: list[MxError] = []
        self._ended = False
        self._expecting = True
        self._rights = ReadRights(len(grid))
        #: The first layer with bytes, where trips are read, and how many they are.
        self._first_layer, self._first_nbytes = 0, 0

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def causes(self) -> tuple[MxError, ...]:
        """Why reads and connections failed so far."""
        return tuple(self._causes)

    def landed_nbytes(self) -> list[int]:
        """Return the payload bytes of each layer that have landed, in completed parts."""
        return list(self._verification.landed_nbytes)

    # -- events ---------------------------------------------------------------------------------

    def start(self) -> list[Command]:
        """Return the commands for layers without bytes, which are ready at once. A model without
        bytes ends with this."""
        self._ended = self.holdings.whole
        return self._verification.start()

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
                commands += self._settled(chunk, self._verification.prefilled(chunk))
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
        answers: bool = False,
        trip_s: float = 0.0,
    ) -> list[Command]:
        """Read through a new connection; `load` returns its state.

        Args:
            connection: Its number, which was not used before.
            depth: How many parts to have in flight through it, unless its way is long; 1: one at a
                time, however long it is.
            now_s: The time.
            source: The id of its source, which counts wrong chunks for all its connections; "" for
                a source of its own.
            peer: Names the source in errors.
            bytes_per_s: Its expected bandwidth; 0: not known.
            answers: True if its source can be asked whether a chunk is right in its memory.
            trip_s: How long a trip takes at most; 0: each part is a read of its own.
        """
        if connection in self._connections:
            raise ValueError(f"connection {connection} is there already")
        pace = Pace(bytes_per_s, BLOCK_BYTES)  # soon outweighed by what is seen
        if trip_s and not self._first_nbytes and self._grid.layer_of:
            self._first_layer = self._grid.layer_of[0]
            first = self._grid.of_layer(self._first_layer)
            self._first_nbytes = sum(self._grid.sizes[first.start : first.stop])
        name = source or f"connection {connection}"
        load = ConnectionLoad(name, max(1, depth), pace, peer, answers, trip_s=trip_s)
        if depth > 1:  # else one at a time is meant
            load.most = striping.MOST_READS if self._wanted is None else striping.MOST_READS_ASIDE
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
        self, connection: int, trip: Trip, now_s: float, round_trip_s: float = 0.0, depth: int = 0
    ) -> list[Command]:
        """Record that all bytes of the parts of a read are in place, read under a lease that held.

        Args:
            connection: The connection that brought them.
            trip: Each part, and the digests of its blocks, one after the other, 32 bytes each;
                None: the shortcut has found them right.
            now_s: The time.
            round_trip_s: How long the connection's first bytes take to come, as last seen; 0: not
                known.
            depth: How many parts to have in flight from now on, if that is more than before.
        """
        load = self._connections.get(connection)
        if load is None or self._ended:
            return []
        if load.depth > 1:  # else one at a time is meant
            load.depth = max(load.depth, depth)
        # In coordinated reading who reads what is agreed upon: nothing is taken early.
        load.round_trip_s = 0.0 if self._rights.coordinated else round_trip_s
        begins = load.trip_s > 0 and self._reads_first_layer()
        verdicts, total = [], 0
        for part, block_digests in trip:
            nbytes = self._grid.part_nbytes(*part)
            if self._take_back(connection, part, nbytes) is not None:
                total += nbytes
                right = self._verification.landed(part, nbytes, load, block_digests)
                verdicts.append((part, nbytes, right))
        if not verdicts:
            return []
        load.pace.completed(total, now_s)
        # The next reads are issued first, but after the first layer's, which is to be early.
        commands = [] if begins else self._assign(now_s)
        for part, nbytes, right in verdicts:
            if right:
                commands += self._right(part, nbytes, load, now_s)
            elif right is not None:
                commands += self._wrong(part, load, now_s)
        if begins:
            commands += self._assign(now_s)
        return commands if self._expecting else commands + self._check_hopeless()

    def _reads_first_layer(self) -> bool:
        """Return True while bytes of the first layer have not landed."""
        return self._verification.landed_nbytes[self._first_layer] < self._first_nbytes

    def page_known(self, layer: int, now_s: float) -> list[Command]:
        """Verify what has landed of a layer whose page is known from now on."""
        commands = self._judge(layer, now_s)
        if self._wanted is not None:  # what is read aside has waited for it
            commands += self._assign(now_s)
        return commands + self._check_hopeless()

    def copied_out(self, part: Part) -> list[Command]:
        """Record that the wanted bytes of a part that was read aside are in their place."""
        return [] if self._ended else self._settled(part.chunk, self._verification.copied_out(part))

    def handed_out(self, part: Part) -> list[Command]:
        """Record that other ranks have what they want of a part, or need it no more."""
        return [] if self._ended else self._settled(part.chunk, self._verification.handed_out(part))

    def given(self, part: Part) -> list[Command]:
        """Record that another rank has handed over a part that was expected from it: it is right,
        and in its place."""
        if self._ended or not self._expected.take(part):
            return []
        commands = self._settled(part.chunk, self._verification.given(part))
        return commands + self._check_hopeless()

    def take_up(self, rank: int, now_s: float) -> list[Command]:
        """Read what was expected from another rank, which is gone."""
        if self._ended:
            return []
        for part in self._expected.take_all(rank):
            self._missing.give_back(part)
        return self._assign(now_s) + self._check_hopeless()

    def expects(self, rank: int) -> bool:
        """Return True if that rank has yet to hand over something."""
        return not self._ended and self._expected.any_of(rank)

    def failed(
        self, connection: int, parts: Sequence[Part], error: MxError, now_s: float
    ) -> list[Command]:
        """Record that the read of some parts failed; its session may still work."""
        part_nbytes = self._grid.part_nbytes
        missing = [
            part
            for part in parts
            if self._take_back(connection, part, part_nbytes(*part)) is not None
        ]
        if not missing:
            return []
        self.retries += len(missing)
        for part in missing:
            self._missing.give_back(part)
        if connection not in self._open:
            return self._assign(now_s) + self._check_hopeless()
        for chunk in {part.chunk for part in missing}:
            self._attempts[chunk] = self._attempts.get(chunk, 0) + 1
            if self._attempts[chunk] >= MAX_ATTEMPTS:
                self._attempts[chunk] = 0
                return self._drop([connection], error, now_s)
        self._causes.append(error)
        return self._assign(now_s) + self._check_hopeless()

    @property
    def due_s(self) -> float:
        """When `tick` is to be called next: a source is overdue, or one of several connections may
        be late by then."""
        watched = self._ticked_s + TICK_S if len(self._open) > 1 else math.inf
        return min(watched, self._suspects.due_s)

    def tick(self, now_s: float, landed: Mapping[Part, int] | None = None) -> list[Command]:
        """Drop connections that are late (`mx.core.striping.is_late`). To be called when `due_s`
        has come. `landed` has the bytes of each part in flight that have landed."""
        self._ticked_s = now_s
        so_far = landed or {}

        def landed_nbytes(load: ConnectionLoad) -> int:
            return sum(so_far.get(part, 0) for part in load.in_flight)

        commands: list[Command] = []
        for source in self._suspects.overdue(now_s):
            commands += self.answered(source, now_s)
        for number, load in list(self._open.items()):
            others = [
                other
                for other in self._usable().values()
                if other is not load
                and all(self._may_read(other, part.chunk) for part in load.in_flight)
            ]
            if striping.is_late(load, others, self._missing.nbytes, now_s, landed_nbytes):
                reason = PathSlowError(Why.SLOWER())
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
        """Read a chunk only from a source that allows it, from now on."""
        self._rights.coordinate()
        for load in self._open.values():
            load.round_trip_s = 0.0

    def read_freely(self, now_s: float) -> list[Command]:
        """Read every chunk from every source from now on."""
        self._rights.read_freely()
        return self._assign(now_s)

    def exempt(self, sources: frozenset[str], now_s: float) -> list[Command]:
        """Read every chunk from these sources, also in coordinated reading, and from no others."""
        self._rights.exempt = sources
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
        if source in self._rights.exempt:
            return []
        self._rights.withdraw(source, chunk)
        return [
            number
            for number, load in self._open.items()
            if load.source == source and any(part.chunk == chunk for part in load.in_flight)
        ]

    # -- parts that ended -----------------------------------------------------------------------

    def _take_back(self, connection: int, part: Part, nbytes: int) -> ConnectionLoad | None:
        load = self._connections.get(connection)
        if load is None or self._ended or load.in_flight.pop(part, None) is None:
            return None
        load.nbytes -= nbytes
        return load

    def _judge(self, layer: int, now_s: float) -> list[Command]:
        """Act on the parts of a layer that wait for its page, if it is known."""
        commands: list[Command] = []
        if self._ended:
            return commands
        for part, load, right in self._verification.judge(layer):
            if right:
                commands += self._right(part, self._grid.part_nbytes(*part), load, now_s)
            else:
                commands += self._wrong(part, load, now_s)
        return commands

    def _right(self, part: Part, nbytes: int, load: ConnectionLoad, now_s: float) -> list[Command]:
        load.verified_nbytes += nbytes
        load.verified_at_s = now_s
        return self._settled(part.chunk, self._verification.right(part))

    def _settled(self, chunk: int, commands: list[Command]) -> list[Command]:
        """Return the commands, after noting whether the chunk is verified now."""
        if self._rights.coordinated and self.holdings.has(chunk):
            self._rights.verified(chunk)
        if commands:  # as where a layer is ready
            self._ended = self.holdings.whole
        return commands

    def _wrong(self, part: Part, load: ConnectionLoad, now_s: float) -> list[Command]:
        """Read a part again, and blame its sender."""
        chunk, source = part.chunk, load.source
        self.retries += 1
        self.wrong += 1
        load.wrong_parts += 1
        self._verification.wrong(part, source)
        self._missing.give_back(part)
        self.withdraw(source, chunk)
        self._rights.refuse(source, chunk)
        ask = self._suspects.wrong(source, self._digest_error(part, load), now_s)
        connections = self._connections_of(source)
        if not load.answers or not connections:
            return self.answered(source, now_s)
        question: list[Command] = [Ask(connections[0], chunk)] if ask else []
        return question + self._assign(now_s)

    def answered(self, source: str, now_s: float) -> list[Command]:
        """Count what the source has sent wrong, which is right in its memory as it says. (If it is
        not, the source ends its lease.)"""
        error = None if self._ended else self._suspects.answered(source)
        if error is None:
            return []
        connections = self._connections_of(source)
        if connections and self._suspects.lies(source):
            return self._drop(connections, error, now_s)
        self._causes.append(error)
        return self._assign(now_s) + self._check_hopeless()

    def _connections_of(self, source: str) -> list[int]:
        """Return the open connections to a source."""
        return [number for number, each in self._open.items() if each.source == source]

    def _digest_error(self, part: Part, load: ConnectionLoad) -> DigestError:
        place = self._grid.part(part.chunk, part.begin, part.end)
        layer = self._grid.layers[place.layer].name
        return DigestError(
            f"blocks of layer {layer} (bytes {place.begin} to {place.end}) from {load.peer} do not "
            "match the model's identity",
            peer=load.peer,
            hint="the source lies, or its memory or the path to it is faulty",
        )

    def _drop(self, connections: list[int], reason: MxError, now_s: float) -> list[Command]:
        for connection in connections:
            self._forget(connection, reason)
        drops: list[Command] = [DropConnection(number, reason) for number in connections]
        return drops + self._assign(now_s) + self._check_hopeless()

    def _forget(self, connection: int, error: MxError) -> bool:
        gone = self._open.pop(connection, None)
        if gone is None or self._ended:
            return False
        if not self._connections_of(gone.source):
            unanswered = self._suspects.answered(gone.source)
            # A transport may notice before the lease says why.
            if unanswered is not None and not isinstance(error, StaleGenerationError):
                self._causes.append(unanswered)
        self._causes.append(error)
        return True

    # -- which connection reads which part ------------------------------------------------------

    def _may_read(self, load: ConnectionLoad, chunk: int) -> bool:
        return self._rights.may_read(load.source, chunk, self._open_sources)

    def _usable(self) -> dict[int, ConnectionLoad]:
        """Return the open connections to sources that are not being asked."""
        asked = self._suspects.asked
        if not asked:
            return self._open
        return {n: x for n, x in self._open.items() if x.source not in asked}

    def _open_sources(self) -> set[str]:
        return {load.source for load in self._open.values()}

    def _assign(self, now_s: float) -> list[Command]:
        """Give parts to connections that want more, first to the one that would be done first."""
        if self._ended:
            return []
        given: dict[int, list[Part]] = {}
        missing, chunk_nbytes = self._missing, self._grid.chunk_nbytes
        usable = self._usable()
        able: dict[int, ConnectionLoad] = {}
        for number, load in self._open.items():
            if load.in_flight and not load.pace.measured_nbytes:
                load.pace.doubt(load.nbytes, now_s)
            if number in usable and striping.wants_more(load, chunk_nbytes, begins=True):
                able[number] = load
        while able and (left_nbytes := missing.nbytes):
            number = next(iter(able))
            if len(able) > 1:
                number = min(able, key=lambda n: (striping.through_s(able[n], chunk_nbytes), n))
            load = able[number]
            part = self._next(load, usable)
            if part is None:
                del able[number]
                continue
            if not load.in_flight:
                load.pace.busy_from(now_s)
            load.in_flight[part] = now_s
            load.nbytes += left_nbytes - missing.nbytes
            given.setdefault(number, []).append(part)
            if not striping.wants_more(load, chunk_nbytes):
                del able[number]
        commands: list[Command] = []
        for number, parts in given.items():
            load = self._open[number]
            if load.trip_s:
                most = striping.trip_nbytes(load, chunk_nbytes)
                commands += (Assign(number, trip) for trip in self._trips(parts, most))
            else:
                commands.append(Assign(number, tuple(parts)))
        return commands

    def _trips(self, parts: Sequence[Part], most_nbytes: int) -> Iterator[tuple[Part, ...]]:
        """Yield runs of parts, each of which begins where the one before ends."""
        grid, trip, nbytes = self._grid, list[Part](), 0
        for part in parts:
            size = grid.part_nbytes(*part)
            if trip and (nbytes + size > most_nbytes or not grid.follows(trip[-1], part)):
                yield tuple(trip)
                trip, nbytes = [], 0
            trip.append(part)
            nbytes += size
        yield tuple(trip)

    def _next(self, load: ConnectionLoad, usable: dict[int, ConnectionLoad]) -> Part | None:
        """Take the part that this connection should read next; None: nothing, for now."""
        chunk_nbytes = self._grid.chunk_nbytes
        rivals: Collection[ConnectionLoad] = usable.values()
        among: int | None = None  # the chunks that it may read; None: all
        if self._rights.coordinated:
            # Only those that may read some of the same chunks share the work.
            among = allowed = self._rights.allowed(load.source)
            rivals = [each for each in rivals if self._rights.allowed(each.source) & allowed]
        left_nbytes = self._missing.nbytes_in(among) if len(rivals) > 1 else 0
        chunk = self._choose(load, among, rivals, left_nbytes) if rivals else None
        if chunk is None:
            return None
        if (
            load.trip_s
            and load.in_flight
            and self._grid.layer_of[chunk] != self._first_layer  # which is read alone
            and (self._reads_first_layer() or striping.has_its_part(load, rivals, left_nbytes))
        ):
            return None
        nbytes = striping.part_nbytes(load, chunk_nbytes)
        if len(rivals) > 1:
            able = [other for other in rivals if self._may_read(other, chunk)]
            budget = striping.budget(load, rivals, left_nbytes)
            piece = striping.piece_nbytes(load, chunk_nbytes)
            if budget < piece and not striping.is_first(load, able, chunk_nbytes):
                return None  # another connection will be done sooner, and takes it then
            nbytes = min(nbytes, max(int(budget * striping.TAKEN), piece))
        several = self._several_connections or len(rivals) > 1
        if several and not load.pace.measured_nbytes and not load.trip_s:
            nbytes = min(nbytes, striping.PROBE_NBYTES)
        return self._missing.cut(chunk, nbytes)

    def _choose(
        self,
        load: ConnectionLoad,
        among: int | None,
        rivals: Collection[ConnectionLoad],
        left_nbytes: int,
    ) -> int | None:
        """Return the chunk that the connection should read next: that with which its trip goes on,
        else the lowest missing one that it may read, after as many as the others will have read by
        the time that it is done."""
        rank = 0
        if len(rivals) > 1:
            if load.trip_s and load.in_flight:
                last, _, end = next(reversed(load.in_flight))
                following = last + (end == self._missing.blocks(last))
                if following in self._missing and self._may_read(load, following):
                    return following
            rank = striping.rank(load, rivals, self._grid.chunk_nbytes, left_nbytes)
        chosen, wanted, can_judge = None, self._wanted, self._verification.can_judge
        may_read, source, sources = self._rights.may_read, load.source, self._open_sources
        for chunk in self._missing.chunks(among):
            aside = wanted is not None and wanted.needs_aside(chunk)
            if aside and not can_judge(self._grid.layer_of[chunk]):
                continue
            if may_read(source, chunk, sources):
                chosen = chunk
                if rank <= 0:
                    break
                rank -= 1
        return chosen

    # -- ends -----------------------------------------------------------------------------------

    def _check_hopeless(self) -> list[Command]:
        if self._ended or self._expecting or not self.hopeless:
            return []
        self._ended = True
        return [Fail(tuple(self._causes))]

    @property
    def hopeless(self) -> bool:
        """True if nothing is in flight, and no open connection can read what is missing."""
        if self._ended or any(load.in_flight for load in self._connections.values()):
            return False
        if self._suspects.asked:  # a source that is asked may be read from again
            return False
        # Nothing is in flight, so all that could be assigned has been. Chunks are left over.
        if self._missing:
            first = self._missing.first
            return not any(self._may_read(load, first) for load in self._open.values())
        if self._expected:
            return False
        # A source that serves bytes serves pages too.
        return self._verification.waits and not self._open
