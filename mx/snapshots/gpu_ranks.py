"""Ranks on one host that each fill a GPU of their own with one model: a rank reads its share of the
chunks from the store, and takes the others from the memory of ranks that have them, by the paths
between their GPUs. Its own GPU hashes all that comes, so that no rank takes another's word.

Each shows the others in shared memory which chunks it has verified. What a rank does not bring that
has ended, is silent, or lies, the others may read from the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToJson

from mx.contexts import Undo
from mx.core.digest import document_digest
from mx.core.grid import ChunkGrid
from mx.core.holdings import members
from mx.core.json_bounds import check_json
from mx.core.local_ranks import LocalRanks
from mx.core.paths import Path
from mx.core.topology import Place
from mx.core.wanted import WantedBlocks
from mx.errors import MxError, PeerLostError
from mx.fetching.attempt import Context
from mx.fetching.chain import NoLease
from mx.fetching.exchange import Fellow
from mx.fetching.paths import path_or_reason
from mx.fetching.ranks import meet
from mx.fetching.reads import Connection, StorePath, StoreSource
from mx.fetching.transfer import Transfer
from mx.snapshots.device import DiskSession
from mx.source.exposures import withdraw
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, Exposure, Grant, Viable
from mx.wire.place import place_from_json, place_to_wire

log = logging.getLogger(__name__)

#: How often what the others have is looked at.
_POLL_S = 0.01
#: A rank to which no byte comes for so many times as long as it may be silent is left.
_PATIENCE = 4
_MESSAGE_BYTES = 1 << 17
#: What a rank shows before the chunks that it has: how often it has looked, and how many bytes have
#: come to it.
_STATE = struct.Struct("<QQ")
_GENERATION = 1


class _RankLease(NoLease):
    """What a rank gives is checked by its digests alone."""

    lease_s = 2.0  # a trip takes a quarter of it at most


def shares_of(grid: ChunkGrid, ranks: Iterable[int]) -> dict[int, int]:
    """Return the chunks that each rank reads, as a bit set: they are dealt in the order of layers,
    each to the rank that has the fewest bytes."""
    nbytes = dict.fromkeys(sorted(ranks), 0)
    found = dict.fromkeys(nbytes, 0)
    for chunk, size in enumerate(grid.sizes):
        rank = min(nbytes, key=nbytes.__getitem__)
        nbytes[rank] += size
        found[rank] |= 1 << chunk
    return found


class _Other:
    """Another rank, the chunks that it reads, the connection to its memory while it is read from,
    and what it has shown."""

    def __init__(self, fellow: Fellow, share: int, shown: memoryview) -> None:
        self.fellow, self.share, self.shown = fellow, share, shown
        self.number = -1
        self.connection: Connection | None = None
        self.chunks, self.has_ended = 0, False
        self._beats = self._came_nbytes = 0
        self._heard_s = self._moved_s = time.monotonic()

    def look(self) -> int:
        """Take what it shows. Returns the chunks that it has verified since the last time."""
        now_s, before = time.monotonic(), self.chunks
        beats, nbytes = _STATE.unpack_from(self.shown)
        if beats != self._beats:
            self._beats, self._heard_s = beats, now_s
        if nbytes != self._came_nbytes:
            self._came_nbytes, self._moved_s = nbytes, now_s
        self.chunks = int.from_bytes(self.shown[_STATE.size :], "little")
        return self.chunks & ~before

    def gone(self, silent_s: float) -> str:
        """Return why nothing is to be expected from it any more; "" if something is."""
        try:
            self.has_ended = not self.fellow.sock.recv(1)  # it says nothing any more
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.has_ended = True
        now_s = time.monotonic()
        if self.has_ended:
            return "it has ended"
        if now_s - self._heard_s > silent_s:
            self.has_ended = True  # and is not waited for
            return "it does not answer"
        stuck = now_s - self._moved_s > _PATIENCE * silent_s
        return "it makes no progress" if stuck and self.share & ~self.chunks else ""


class GpuRanks:
    """One rank's part; it owns what it exposes, and a thread. `session` begins, `close` ends it."""

    def __init__(self, context: Context, transfer: Transfer, ranks: LocalRanks) -> None:
        """
        Args:
            context: The pull's.
            transfer: What fills the GPU's memory, until after `close`.
            ranks: Which rank this is.
        """
        self._context, self._transfer, self._me = context, transfer, ranks
        self._silent_s = context.options.stall_timeout_s
        keys = [f"{store.step} {store.place}" for store in context.options.stores]
        #: What is read by shares, and what is read freely once that has failed.
        self._store, self._next_stores = keys[0], frozenset(keys[1:])
        self._ends = contextlib.ExitStack()
        self._others: dict[int, _Other] = {}  # those that have not gone
        self._again: deque[int] = deque()  # chunks that came wrong
        self._begun = False
        self._closing = threading.Event()

    def session(self, make: Callable[..., DiskSession], *arguments: Any) -> DiskSession:
        """Return what reads a store; with the first one, the ranks meet. Blocks.

        Args:
            make: Makes it.
            *arguments: Its arguments.

        Raises:
            MxError: As `make`, and as `meet`.
        """
        found = make(*arguments)
        found.awaits = self._awaits
        with Undo(found.join), Undo(found.close):
            if not self._begun:
                self._begun = True
                self._begin()
        return found

    def _awaits(self) -> bool:
        """Return True while the store may not be read for what another rank may bring."""
        return bool(self._again) or any(each.connection for each in list(self._others.values()))

    # -- the beginning ----------------------------------------------------------------------------

    def _begin(self) -> None:
        transfer, grid = self._transfer, self._transfer.grid
        shown_nbytes = _STATE.size + -(-len(grid) // 8)
        phase, self._context.log.phase = self._context.log.phase, "waiting for ranks"
        exchange = meet(
            self._me,
            document_digest(b"GPUs" + transfer.manifest.ref.content),
            grid,
            WantedBlocks(grid, {}),  # by its slots
            self._context.closed.is_set,
            table_nbytes=shown_nbytes,
        )
        self._context.log.phase = phase
        if exchange is None:
            return
        self._ends.callback(exchange.close)
        self._shown = exchange.ring.shown[-shown_nbytes:]
        shares = shares_of(grid, [self._me.rank, *(each.rank for each in exchange.fellows)])
        self._share = shares[self._me.rank]
        for each in exchange.fellows:
            shown = each.ring.shown[-shown_nbytes:]
            self._others[each.rank] = _Other(each, shares[each.rank], shown)
        for chunk in members(transfer.subscribe(self)):  # of weights that are reused
            self.chunk_verified(chunk)
        transfer.coordinate()
        transfer.exempt(self._next_stores)
        self._allow(self._share)
        self._connect()
        thread = threading.Thread(target=self._run, name="mx-gpu-ranks", daemon=True)
        thread.start()
        self._ends.callback(thread.join)

    def _connect(self) -> None:
        """Let the others read from the memory here, and connect to that of each."""
        here = self._context.place.result()
        said = self._trade(dict.fromkeys(self._others, MessageToJson(place_to_wire(here))))
        paths = {rank: self._paths(here, place) for rank, place in said.items()}
        exposures = self._expose(here, {path.transport for each in paths.values() for path in each})
        tickets = {
            rank: {name: each.grant(_named(rank)).hex() for name, each in exposures.items()}
            for rank in self._others
        }
        given = self._trade({rank: json.dumps(each) for rank, each in tickets.items()})
        for rank in list(self._others):
            why: object = "no path leads from its GPU"
            try:
                check_json((text := given.get(rank, "{}")).encode())
                theirs = json.loads(text)
                for path in paths.get(rank, ()):
                    if path.transport in theirs and self._others[rank].connection is None:
                        self._open(rank, path, bytes.fromhex(theirs[path.transport]), here)
            except (ValueError, TypeError, MxError) as error:
                why = error
            if self._others[rank].connection is None:
                self._leave(rank, why)

    def _trade(self, said: Mapping[int, str]) -> dict[int, str]:
        """Tell each of the others something. Returns what those say that do so in time."""
        until_s, found = time.monotonic() + self._me.wait_s, {}
        for rank, text in said.items():
            with contextlib.suppress(OSError):
                self._others[rank].fellow.sock.send(text.encode())
        for rank in said:
            sock = self._others[rank].fellow.sock
            sock.settimeout(max(0.0, until_s - time.monotonic()))
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found[rank] = sock.recv(_MESSAGE_BYTES).decode()
            sock.setblocking(False)
        return found

    def _paths(self, here: Place, said: str) -> list[Path]:
        """Return the paths from the GPU of another rank, whose place is said, the fastest first."""
        options, found = self._context.options, []
        try:
            there = place_from_json(said)
        except ValueError:
            return []
        for name, transport in self._context.transports.items():
            path = path_or_reason(transport, here, there, trusted_fabric=options.trusted_fabric)
            if not isinstance(path, Path) or path.staged or options.transport not in (None, name):
                continue
            if isinstance(transport.probe(), Viable):
                found.append(path)
        return sorted(found, key=lambda path: -path.gb_per_s)

    def _expose(self, here: Place, names: Iterable[str]) -> dict[str, Exposure]:
        """Return what lets the others read from the memory here, by transport."""
        options, view = self._context.options, self._transfer.arena
        address = view.address if isinstance(view, DeviceView) else 0
        found: dict[str, Exposure] = {}
        self._ends.callback(lambda: withdraw([*found.values()], _PATIENCE * self._silent_s))
        settings = ExposeOptions(
            stall_timeout_s=self._silent_s,
            place=here,
            trusted_fabric=options.trusted_fabric,
            setting=options.transport_context.setting,
        )
        for name in names:
            try:
                region = ExposedRegion(0, view, address, here.device)
                found[name] = self._context.transports[name].expose([region], settings)
                found[name].set_generation(_GENERATION)
            except MxError as error:
                log.info("other ranks can't read by %s: %s", name, str(error))
        return found

    def _open(self, rank: int, path: Path, ticket: bytes, here: Place) -> None:
        """Read from the memory of another rank from now on. Raises MxError."""
        options, name = self._context.options, _named(rank)
        grant = Grant(
            grant_id=_named(self._me.rank),
            ticket=ticket,
            generation=_GENERATION,
            region_nbytes=(len(self._transfer.arena),),
            peer=name,
            stall_timeout_s=self._silent_s,
            place=here,
            trusted_fabric=options.trusted_fabric,
            setting=options.transport_context.setting,
        )
        session = self._context.transports[path.transport].open(grant)
        source = StorePath(
            StoreSource(name, name), path.transport, path.gb_per_s, medium=path.medium
        )
        connection = Connection(source, _RankLease(), session, opened_at_s=time.monotonic())
        self._others[rank].number = self._transfer.add_connection(connection)
        self._others[rank].connection = connection

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            beats = 0
            while not self._over():
                beats += 1
                _STATE.pack_into(self._shown, 0, beats, self._transfer.landed_nbytes())
                self._look()
                time.sleep(_POLL_S)
        except BaseException as error:  # noqa: BLE001 - it ends the pull
            self._transfer.raised(error)

    def _over(self) -> bool:
        """Return True once nothing is to be done, nor to be given, any more."""
        if not self._closing.is_set():
            return False
        takes = any(self._share & ~each.chunks for each in self._others.values())
        return not (takes and self._transfer.holdings.whole) or self._context.closed.is_set()

    def _look(self) -> None:
        """Read what the others have from them, and from the store what they do not bring."""
        for rank, other in list(self._others.items()):
            news, why = other.look(), other.gone(self._silent_s)
            if other.connection is not None:
                if other.connection.lost:
                    why = why or "its memory can't be read, or is wrong"
                if why:
                    self._leave(rank, why)
                for chunk in () if why else members(news):
                    self._transfer.allow(_named(rank), chunk)
            if other.has_ended:
                del self._others[rank]
        while self._again:
            self._transfer.allow(self._store, self._again[0])
            self._again.popleft()

    def _leave(self, rank: int, why: object) -> None:
        """Read the share of another rank from the store, and nothing from its memory any more."""
        other = self._others[rank]
        if other.share & ~self._transfer.holdings.bits:
            log.warning("rank %d is not read from (%s): its share is read here too", rank, why)
        self._allow(other.share)
        if other.connection is not None:
            lost = PeerLostError(f"{_named(rank)}: {why}", peer=_named(rank))
            self._transfer.connection_lost(other.number, lost)
        other.connection = None  # from here on the store alone has what is missing

    def _allow(self, chunks: int) -> None:
        """Read from the store what is not here of these chunks."""
        for chunk in members(chunks):
            self._transfer.allow(self._store, chunk)

    # -- from the transfer, under its lock --------------------------------------------------------

    def chunk_verified(self, chunk: int) -> None:
        """See `mx.core.holdings.HoldingsListener`."""
        self._shown[_STATE.size + chunk // 8] |= 1 << chunk % 8

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        """See `mx.core.holdings.HoldingsListener`."""
        self._again.append(chunk)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End it, once the others have the share that was read here, or this pull fails. After that
        none reads from its memory. Idempotent."""
        self._closing.set()
        self._ends.close()


def _named(rank: int) -> str:
    return f"rank {rank}"
