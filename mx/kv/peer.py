"""One reader's connection to one KV pool: its lease, its index, and the session that reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from mx.core.paths import Path
from mx.errors import (
    ConfigError,
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerProtocolError,
    PeerTimeoutError,
)
from mx.fetching.options import PullOptions
from mx.fetching.paths import path_or_reason, target_place
from mx.kv import proof
from mx.kv.index import KvChange, KvEntry
from mx.kv.layout import MOST_LAYERS, KvMemory, Rows, copies
from mx.kv.mirror import MOST_BLOCKS, KvMirror
from mx.kv.names import ID_BYTES
from mx.log import event
from mx.namekey import NameKey
from mx.runtime import LoopThread
from mx.tasks import end_tasks, in_thread, set_by, unexpected
from mx.transport import Grant, Read, Session, Transport, Unavailable
from mx.wire.address import resolve
from mx.wire.channel import Remote, Role, cut, dial, translating
from mx.wire.place import place_from_wire, place_to_wire
from mx.wire.rpc import Stub
from mx.wire.v1 import kv_pb2 as pb

log = logging.getLogger(__name__)

#: As `mx.kv.layout.copies` returns them.
Copies = tuple[tuple[int, int, int], ...]
#: The first and the longest time between two attempts to reach a pool.
AGAIN_S, MOST_AGAIN_S = 0.5, 15.0
#: A pool that has given so many wrong blocks is asked no more.
MOST_WRONG = 3
_NOT_YET = "it was not reached yet"
#: The most wrong blocks that one renewal names.
_MOST_TOLD = 256
#: The most memory of one pool's index.
_INDEX_BYTES = 256 << 20


@dataclass(frozen=True)
class KvReading:
    """What all connections of a reader share.

    Attributes:
        name: The model's name.
        key: The key of that name, or a lender key for KV.
        form: The form of the blocks, as `KvKey.encode` returns it; empty for any.
        heads: Which of the model's KV heads are read.
        memory: Where blocks are read into; None: they are only found.
        options: How pools are reached; of a pull.
        transports: The transports by name.
        on_change: Called on the loop when a pool's index has changed, or a pool is lost.
    """

    name: str
    key: NameKey
    form: bytes
    heads: range
    memory: KvMemory | None
    options: PullOptions
    transports: Mapping[str, Transport]
    on_change: Callable[[], None]


class KvReads(Protocol):
    """Reads blocks; as the method of `Session`."""

    def read(self, reads: Sequence[Read]) -> None:
        """Begin reads."""


@dataclass(frozen=True, eq=False)
class KvLink:
    """What can be read: how, and which heads there are. `rows` are where they are there, `own_rows`
    where they are in the reader's memory, `copies` for each layer what is copied between them."""

    session: KvReads | None
    rows: tuple[Rows, ...]
    own_rows: tuple[Rows, ...]
    copies: tuple[Copies, ...]
    heads: range
    transport: str


@dataclass(frozen=True, eq=False)
class PoolLink(KvLink):
    """A connection to a pool that works, and the form of its blocks."""

    session: Session | None
    mirror: KvMirror
    form: bytes


class KvListing(NamedTuple):
    """What a pool lists: the form of its blocks, which heads it has, the size of a block's part in
    each layer, and the names of the blocks, those of use last first."""

    endpoint: str
    form: bytes
    heads: range
    part_nbytes: tuple[int, ...]
    blocks: list[bytes]


class KvGiver(Protocol):
    """What blocks are read from. Thread-safe, but for `close`."""

    @property
    def endpoint(self) -> str:
        """Return where it is."""

    @property
    def transport(self) -> str:
        """Return how it is read."""

    @property
    def why(self) -> str:
        """Return why it is not."""

    @property
    def wrong(self) -> int:
        """Return how many blocks were wrong."""

    def forked(self) -> None:
        """Have nothing in a forked child."""

    def heads(self) -> range:
        """Return which heads it has; none while it can't be read."""

    def has(self, block: bytes) -> bool:
        """Return True if a block can be read."""

    def begin(self, block: bytes) -> tuple[KvLink, KvEntry] | None:
        """Begin to read a block: return where it is until `end`, None if it is not listed."""

    def end(self, live: Any, block: bytes, entry: KvEntry, *, wrong: bool = False) -> None:
        """Note that a block was read.

        Args:
            live: What `begin` returned.
            block: The block.
            entry: What `begin` returned.
            wrong: Its bytes were not those of its digests.
        """

    async def close(self) -> None:
        """End the reads."""


class KvPeer:
    """The pool at one address, connected again whenever it is lost. Its index and reads are
    thread-safe, the rest is on the loop."""

    def __init__(self, endpoint: str, reading: KvReading, loop: LoopThread) -> None:
        """
        Args:
            endpoint: HOST:PORT of the pool, or of a source of its process.
            reading: What it is read for.
            loop: The loop.
        """
        self.endpoint = endpoint
        self._reading, self._loop = reading, loop
        self._lock = threading.Lock()  # of all below
        self._live: PoolLink | None = None
        self._wrong: list[bytes] = []
        self.wrong = 0
        self.why = _NOT_YET
        self._renewed = 0  # how often the pool has renewed this lease
        self._hurry = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name="mx-kv-peer")

    def forked(self) -> None:
        """Have nothing of the pool in a forked child."""
        self._lock, self._live = threading.Lock(), None

    @property
    def is_live(self) -> bool:
        """True while the pool can be read."""
        return self._live is not None

    @property
    def transport(self) -> str:
        """The transport that reads it; "" for none."""
        live = self._live
        return live.transport if live is not None else ""

    def heads(self) -> range:
        """Return which heads the pool has; none while it can't be read."""
        live = self._live
        return live.heads if live is not None else range(0)

    def has(self, block: bytes) -> bool:
        """Return True if the pool lists a block."""
        with self._lock:
            live = None if self._distrusted else self._live
            return live is not None and block in live.mirror.entries

    def listing(self) -> KvListing | None:
        """Return what the pool lists; None before all of that has come, and if it is lost."""
        with self._lock:
            live = self._live
            # A pool sends what it lists once it has answered a renewal: it was sent with the first.
            if live is None or self._renewed < 2:
                return None
            sizes = tuple(each.nbytes for each in live.rows)
            blocks = list(live.mirror.entries)[::-1]
            return KvListing(self.endpoint, live.form, live.heads, sizes, blocks)

    @property
    def is_awaited(self) -> bool:
        """True until the pool was reached and has said what it lists, or could not be reached."""
        with self._lock:
            return self.why == _NOT_YET or (self._live is not None and self._renewed < 2)

    @property
    def _distrusted(self) -> bool:
        return self.wrong >= MOST_WRONG

    # -- reading ----------------------------------------------------------------------------------

    def begin(self, block: bytes) -> tuple[PoolLink, KvEntry] | None:
        """Begin to read a block: return where it is until `end`, None if it is not listed."""
        with self._lock:
            if self._live is None or self._distrusted:
                return None
            entry = self._live.mirror.begin(block)
            return (self._live, entry) if entry is not None else None

    def end(self, live: PoolLink, block: bytes, entry: KvEntry, *, wrong: bool = False) -> None:
        """Note that a block was read; on any thread.

        Args:
            live: What `begin` returned.
            block: The block.
            entry: What `begin` returned.
            wrong: Its bytes were not those of its digests.
        """
        with self._lock:
            mirror = live.mirror
            was = mirror.confirmed
            # Of a lease that has ended the slot may hold something else by now.
            if wrong and live is self._live and mirror.lists_still(block, entry):
                self.wrong += 1
                self._wrong.append(block)
            mirror.end(entry.slot)
            hurry = mirror.confirmed != was or wrong
        if hurry:
            with contextlib.suppress(RuntimeError, MxError):  # the loop has ended, or a child
                self._loop.call_soon(self._hurry.set)

    # -- the connection; on the loop --------------------------------------------------------------

    async def close(self) -> None:
        """End the connection; reads fail."""
        await end_tasks(self._task)

    async def _keep(self) -> None:
        again_s = AGAIN_S
        while True:
            began_s = time.monotonic()
            try:
                await self._connected()
            except (ConfigError, NotAllowedError, PeerProtocolError) as error:
                self._lost(error)
                again_s = MOST_AGAIN_S
            except Exception as error:  # noqa: BLE001 - whatever a pool brings about, it is told
                self._lost(unexpected(error))
                again_s = min(2 * again_s, MOST_AGAIN_S)
            if self._distrusted:
                event(log, "kv.distrusted", level=logging.WARNING, peer=self.endpoint)
                self.why = "it gave wrong blocks"
                return
            if time.monotonic() - began_s > MOST_AGAIN_S:
                again_s = AGAIN_S
            await asyncio.sleep(again_s)

    def _lost(self, error: MxError) -> None:
        if str(error) != self.why:
            self.why = str(error)
            event(log, "kv.lost", peer=self.endpoint, text=self.why)
        self._reading.on_change()

    async def _connected(self) -> None:
        """Connect, and follow the pool until it is lost. Raises MxError."""
        options, remote = self._reading.options, Remote(Role.SOURCE, self.endpoint)
        channel = dial(self.endpoint, tls=options.tls, insecure=options.insecure)
        call: Any = None
        try:
            with translating(remote):
                stub = Stub(channel, pb.DESCRIPTOR.services_by_name["Kv"], remote)
                call = stub.Open()
                async with asyncio.timeout(options.connect_timeout_s + 2.0):
                    seal, granted, until_s = await self._greet(call)
                await self._follow(call, seal, granted, until_s)
        except TimeoutError as error:
            text = f"the KV pool at {self.endpoint} does not answer"
            raise PeerTimeoutError(text, peer=self.endpoint) from error
        finally:
            if call is not None:
                cut(call)
            await channel.close(None)

    async def _greet(self, call: Any) -> tuple[proof.Seal, pb.KvGranted, float]:
        """Show who this is, check who it is, and return what is granted, and until when who it is
        counts."""
        reading, own = self._reading, proof.nonce()
        place = await in_thread(target_place, reading.options)
        hello = pb.KvHello(
            name=reading.name,
            nonce=own,
            transports=sorted(reading.transports),
            place=place_to_wire(place),
        )
        await call.write(pb.KvRequest(hello=hello))
        challenge = (await self._next(call, None, "challenge")).challenge
        nonces = own, challenge.nonce
        until_s = proof.check(challenge.proof, reading.key, reading.name, proof.POOL, nonces)
        shown = proof.prove(reading.key, reading.name, proof.READER, nonces)
        await call.write(pb.KvRequest(proof=shown))
        seal = proof.Seal(reading.key, reading.name, nonces)
        return seal, (await self._next(call, seal, "granted")).granted, until_s

    async def _next(self, call: Any, seal: proof.Seal | None, wanted: str = "") -> Any:
        found = await anext(call, None)
        if found is None:
            raise PeerLostError(f"the KV pool at {self.endpoint} ended", peer=self.endpoint)
        if seal is not None:
            found = pb.KvEvent.FromString(seal.open(found.sealed))
        if wanted and found.WhichOneof("event") != wanted:
            raise PeerProtocolError(
                f"the KV pool at {self.endpoint} did not send a {wanted}", peer=self.endpoint
            )
        return found

    async def _follow(
        self, call: Any, seal: proof.Seal, granted: pb.KvGranted, until_s: float
    ) -> None:
        """Open a session, mirror the index, and renew the lease, until one of them ends."""
        live = await self._opened(granted)
        lease_s = min(60.0, max(0.2, granted.lease_s))  # in this order also of no number
        with self._lock:
            self._live, self._wrong, self._renewed, self.why = live, [], 0, ""
        event(log, "kv.connected", peer=self.endpoint, transport=live.transport)
        renewing = asyncio.create_task(self._renew(call, live.mirror, lease_s), name="mx-kv-renew")
        leaves_at_s = 0.0
        try:
            while True:
                async with asyncio.timeout(2 * lease_s):  # each renewal is answered
                    found = await self._next(call, seal)
                if renewing.done():
                    renewing.result()
                if time.time() >= until_s:
                    raise NotAllowedError(f"the lender key of {self.endpoint} has expired")
                if found.WhichOneof("event") == "changes":
                    with self._lock:
                        live.mirror.hear(_changes(found.changes, live.mirror), found.changes.number)
                    self._hurry.set()
                    self._reading.on_change()
                else:
                    self._renewed += 1
                    if self._renewed == 2:
                        self._reading.on_change()
                if self._distrusted and not leaves_at_s:
                    leaves_at_s = time.monotonic() + lease_s
                if leaves_at_s and time.monotonic() > leaves_at_s:  # it should have ended by now
                    raise PeerProtocolError(f"{self.endpoint} gave wrong KV blocks")
        finally:
            with self._lock:
                self._live = None
            await end_tasks(renewing)
            if live.session is not None:
                live.session.close()
                timeout_s = 2 * self._reading.options.stall_timeout_s
                if not await in_thread(live.session.join, timeout_s):
                    log.warning("a session of KV blocks has not ended: %r", live.session)
            self._reading.on_change()

    async def _renew(self, call: Any, mirror: KvMirror, lease_s: float) -> None:
        """Renew the lease; end it once the pool was told that what it gave was wrong. (To cancel
        this in a write would end the call before what was written has gone.)"""
        while not (self._distrusted and not self._wrong and not mirror.reading):
            await self._write_renewal(call, mirror)
            await set_by(self._hurry, time.monotonic() + lease_s / 4)
            self._hurry.clear()
        await call.done_writing()

    async def _write_renewal(self, call: Any, mirror: KvMirror) -> None:
        with self._lock:
            wrong, confirmed = self._wrong[:_MOST_TOLD], mirror.confirmed
        renewal = pb.KvRenewal(confirmed=confirmed, wrong=wrong)
        await call.write(pb.KvRequest(renewal=renewal))
        with self._lock:
            del self._wrong[: len(wrong)]

    async def _opened(self, granted: pb.KvGranted) -> PoolLink:
        """Return what reads the pool. Raises MxError: it is another one, or can't be reached."""
        reading = self._reading
        if reading.form and granted.key != reading.form:
            raise ConfigError(
                f"the KV blocks at {self.endpoint} have another form: {granted.key[:500]!r}, and "
                f"those of this process {reading.form!r}",
                hint="run the same release of the engine with the same settings on both",
            )
        heads = range(granted.first_head, granted.first_head + granted.heads)
        if not reading.heads.start <= heads.start < heads.stop <= reading.heads.stop:
            raise ConfigError(f"the KV pool at {self.endpoint} has other heads")
        rows = tuple(
            Rows(each.region, each.begin, each.stride, tuple(each.offsets), each.run_nbytes)
            for each in granted.layers
        )
        digest_nbytes, own = ID_BYTES * len(rows), reading.memory
        most = min(MOST_BLOCKS, granted.slots, _INDEX_BYTES // (digest_nbytes + 256))
        mirror = KvMirror(granted.slots, digest_nbytes, most)
        for each in rows:
            each.check(granted.region_nbytes, granted.slots)
        if own is None:
            return PoolLink(None, rows, (), (), heads, "index only", mirror, granted.key)
        # It may be many copies.
        mine, copied = await in_thread(fitted, own, rows, heads, self.endpoint)
        name, session = await in_thread(self._session, granted)
        return PoolLink(session, rows, mine, copied, heads, name, mirror, granted.key)

    def _session(self, granted: pb.KvGranted) -> tuple[str, Session]:
        """Open a session by the best transport that works. Blocks."""
        reading, options = self._reading, self._reading.options
        here, there = target_place(options), place_from_wire(granted.place)
        tickets = {each.transport: each.ticket for each in granted.tickets}
        paths: list[tuple[float, str, Path]] = []
        reasons = []
        for name in sorted(tickets.keys() & reading.transports.keys()):
            if options.transport not in (None, name):
                continue
            transport = reading.transports[name]
            path = path_or_reason(transport, here, there, trusted_fabric=options.trusted_fabric)
            viable = transport.probe() if isinstance(path, Path) else None
            if isinstance(viable, Unavailable):
                path = viable.reason
            if isinstance(path, Path):
                paths.append((path.gb_per_s, name, path))
            else:
                reasons.append(f"{name}: {path}")
        grant = Grant(
            grant_id=granted.grant_id,
            ticket=b"",
            generation=1,
            region_nbytes=tuple(granted.region_nbytes),
            peer=self.endpoint,
            tls=options.data_tls,
            stall_timeout_s=options.stall_timeout_s,
            place=here,
            trusted_fabric=options.trusted_fabric,
            peer_addresses=resolve(self.endpoint),
            setting=options.transport_context.setting,
        )
        for _, name, path in sorted(paths, key=lambda each: each[:2], reverse=True):
            own = replace(grant, ticket=tickets[name])
            try:
                if path.staged:  # it fills memory of the host, from which mx copies
                    own = replace(own, place=replace(here, device="cpu"), device=here.device)
                    session = reading.transports[name].open(own)
                    timeout_s = 2 * options.stall_timeout_s
                    return name, _staged(session, reading.memory, timeout_s)
                return name, reading.transports[name].open(own)
            except MxError as error:
                reasons.append(f"{name}: {error}")
        raise PeerLostError(
            f"no path leads to the KV pool at {self.endpoint}: " + "; ".join(reasons),
            peer=self.endpoint,
        )


def _staged(inner: Session, memory: KvMemory | None, timeout_s: float) -> Session:
    """Return a session that fills the GPU of this memory through one that fills the host's."""
    if getattr(inner, "fills_device", False) or memory is None or memory.gpu is None:
        return inner
    from mx.cuda.staged import StagedSession

    try:
        return StagedSession(inner, memory.gpu.device)
    except BaseException:
        inner.close()
        inner.join(timeout_s)
        raise


def fitted(
    own: KvMemory, rows: Sequence[Rows], heads: range, giver: str
) -> tuple[tuple[Rows, ...], tuple[Copies, ...]]:
    """Return where heads of this memory are, and what is copied there.

    Args:
        own: The memory.
        rows: Where they are elsewhere.
        heads: Which of the model's heads these are; the memory has them.
        giver: Where that is, for errors.

    Raises:
        PeerProtocolError: They do not have the sizes of this memory.
    """
    if not len(rows) == len(own.rows) <= MOST_LAYERS:
        raise PeerProtocolError(f"the KV blocks at {giver} have other layers")
    first = heads.start - own.first_head
    mine = tuple(each.heads(first, len(heads), own.heads) for each in own.rows)
    if any(one.nbytes != other.nbytes for one, other in zip(mine, rows, strict=True)):
        raise PeerProtocolError(f"the KV blocks at {giver} have parts of another size")
    return mine, tuple(map(copies, rows, mine))


def _changes(message: pb.KvChanges, mirror: KvMirror) -> list[KvChange]:
    """Return the changes in a message. Raises PeerProtocolError."""
    blocks, digests, size = message.blocks, message.digests, mirror.digest_nbytes
    listed = sum(1 for slot in message.slots if slot)
    if len(blocks) != ID_BYTES * len(message.slots) or len(digests) != size * listed:
        raise PeerProtocolError("a KV pool sent an index that does not fit together")
    found, at = [], 0
    for index, slot in enumerate(message.slots):
        block = blocks[index * ID_BYTES : (index + 1) * ID_BYTES]
        entry = KvEntry(slot - 1, digests[at : at + size]) if slot else None
        at += size if slot else 0
        found.append(KvChange(block, entry))
    return found
