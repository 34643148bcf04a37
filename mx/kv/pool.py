"""Lists an engine's KV blocks where they are: readers that hold the name's key read its slots."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mx import config, namekey, runtime
from mx.api.closing import Closable, Step
from mx.api.common import transports as all_transports
from mx.api.serving import source_options
from mx.errors import ClosedError, LocalError, PeerBusyError, PeerProtocolError
from mx.kv import proof, service
from mx.kv.index import KvEntry, KvIndex
from mx.kv.layout import KvMemory, Rows
from mx.kv.names import ID_BYTES, KvKey
from mx.log import event
from mx.source.exposures import expose, withdraw
from mx.source.requests import answer as write_first
from mx.source.requests import first_message
from mx.source.server import SourceServer
from mx.tasks import end_tasks, in_thread
from mx.transport import Authenticating, ExposedRegion, Exposure
from mx.wire.address import address_of_peer, join_address, split_address
from mx.wire.place import place_to_wire
from mx.wire.v1 import kv_pb2 as pb
from mx.wire.v1 import peer_pb2

log = logging.getLogger(__name__)

#: How long a reader's lease lasts after each renewal.
LEASE_S = 2.0
#: How long a slot waits for a reader that renews and does not confirm that its block is withdrawn:
#: it reads that over a slow link, or lies.
PATIENCE_S = 10.0
#: The most readers of one pool, and of one principal.
MOST_READERS, MOST_OF_ONE = 256, 64
#: The most blocks of one renewal that are hashed again.
_MOST_WRONG = 64
#: The most bytes of one message about the index.
_MESSAGE_BYTES = 256 << 10


class _KvStream:
    """One reader's stream; on the loop. `told` is set when there is something to tell it."""

    def __init__(self, principal: str, seal: proof.Seal, until_s: float) -> None:
        self._seal, self.until_s = seal, until_s  # until when its lender key counts
        self.grant_id = secrets.token_hex(16)
        self.principal = principal
        self.told = asyncio.Event()
        self.told.set()
        self.why = ""  # it is cut
        self._task = asyncio.current_task()
        #: Since when a slot waits for it; None: none does.
        self.waited_for_s: float | None = None

    def sealed(self, event: pb.KvEvent) -> pb.KvEvent:
        """Return the next event as it is sent."""
        return pb.KvEvent(sealed=self._seal.close(event.SerializeToString()))

    def cut(self, why: str) -> None:
        """End it with an error: of a call that is cancelled gRPC says nothing to its client."""
        self.why = why
        if self._task is not None:
            self._task.cancel()


class KvPool(Closable):
    """The KV blocks of one process under one model's name. Made by `open`; close it: then no reader
    reads its memory any more.

    Methods are thread-safe. The memory is the engine's: it writes a slot only while no block is
    listed in it and it has been `taken`.
    """

    generation = 1
    growing = False
    live = True

    def __init__(
        self, name: str, key: namekey.NameKey, form: KvKey, memory: KvMemory, loop: Any
    ) -> None:
        """Use `open`."""
        self.name, self.form, self.memory = name, form, memory
        self.device = memory.device
        self._key, self._loop = key, loop
        self._lock = threading.Lock()  # of all below
        self._index: KvIndex[_KvStream] = KvIndex(free=list(range(memory.slots))[::-1])
        self._freed = threading.Condition(self._lock)
        self._shut_down = False
        self._reserve = 0  # how many slots are to be free before they are taken
        self.wrong = 0  # blocks that readers found wrong, and that were
        # On the loop.
        self._server: SourceServer | None = None
        self._exposures: dict[str, Exposure] = {}
        self._streams: set[_KvStream] = set()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls,
        name: str,
        form: KvKey,
        memory: KvMemory,
        *,
        listen: str = "",
        settings: config.Settings | None = None,
    ) -> KvPool:
        """Register the memory of KV blocks, and let holders of the name's key read what is listed.

        Args:
            name: The model's name.
            form: The form of the blocks.
            memory: Where they are. It must stay until the pool is closed.
            listen: HOST:PORT for readers that know the pool's address; "" for any port of the host
                in the settings. Readers find it at the address of each source of this process, too.
            settings: As for `mx.serve`.

        Raises:
            ConfigError: The key is not for KV blocks, or the process has a pool of that name.
            LocalError: The address can't be listened on, or no transport serves the memory.
        """
        settings = settings or config.load()
        key = namekey.load(settings)
        proof.secret_of(key, name)
        host, _ = split_address(settings.listen)
        options = source_options(settings, settings.coordinator, live=True)
        options = replace(options, listen=listen or join_address(host, 0), advertise="")

        async def make(loop: runtime.LoopThread) -> KvPool:
            pool = cls(name, key, form, memory, loop)
            try:
                await pool._start(SourceServer(options, all_transports()))
            except BaseException:
                await runtime.uncut(pool._stop())
                raise
            super(KvPool, pool).__init__(loop)  # what has failed to start is never closed
            return pool

        return runtime.made(make)

    @property
    def endpoint(self) -> str:
        """The HOST:PORT of the pool itself."""
        return self._server.endpoint if self._server is not None else ""

    def regions(self) -> list[ExposedRegion]:
        """Return the memory that is exposed."""
        return self.memory.regions()

    # -- the engine's side ------------------------------------------------------------------------

    def take(self, count: int, wait_s: float = 0.0) -> list[int]:
        """Return slots that may be written, up to so many. Where too few are free, blocks that were
        not of use for longest are withdrawn; and so that the next call has as many at once: readers
        take a moment to let go of them.

        Args:
            count: How many.
            wait_s: How long to wait for readers to let go of what is withdrawn.
        """
        until_s = time.monotonic() + wait_s
        with self._freed:
            while not self._shut_down:
                self._make_room(count)  # others may have taken what left
                if len(self._index.free) >= count:
                    break
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not self._freed.wait(left_s):
                    break
            taken = self._index.free[-count:] if count else []
            del self._index.free[len(self._index.free) - len(taken) :]
            if not self._shut_down:
                self._reserve = max(self._reserve, min(count, self.memory.slots // 2))
                self._make_room(self._reserve)
            return taken[::-1]

    def _make_room(self, count: int) -> None:
        """Withdraw blocks, so that so many slots are free soon; under the lock."""
        lacking = count - len(self._index.free) - self._index.leaving
        for block in self._index.oldest(lacking):
            self._index.withdraw(block)
        if lacking > 0:
            self._tell()

    def give_back(self, slots: Sequence[int]) -> None:
        """Return slots that were taken and in which no block is listed."""
        with self._freed:
            self._index.free += slots
            self._freed.notify_all()

    def publish(
        self, block: bytes, slot: int, digests: bytes | None = None, after: bytes = b""
    ) -> None:
        """List a block, which is in a slot that was taken: its bytes do not change until it is
        withdrawn.

        Args:
            block: Its name.
            slot: The slot.
            digests: The blake3 digests of its layers' parts; None: they are computed here.
            after: The block that comes before it in its prompt, without which it is of no use.

        Raises:
            ClosedError: The pool is closed.
        """
        self.publish_all([(block, slot, digests or self.memory.digests(slot), after)])

    def publish_all(self, blocks: Sequence[tuple[bytes, int, bytes, bytes]]) -> None:
        """List blocks at once, as `publish` does.

        Args:
            blocks: The name of each, its slot, the digests of its layers' parts, and the name of
                the block that comes before it.

        Raises:
            ClosedError: The pool is closed.
        """
        if any(len(block) != ID_BYTES for block, *_ in blocks):
            raise ValueError(f"the name of a KV block has {ID_BYTES} bytes")
        with self._freed:
            if self._shut_down:
                raise ClosedError("the KV pool is closed")
            for block, slot, digests, after in blocks:
                if not self._index.publish(block, KvEntry(slot, digests), after):
                    self._freed.notify_all()  # it is listed already: the slot is free
            for block in {block for block, *_ in blocks} - {after for *_, after in blocks}:
                self._index.used(block)
            self._tell()

    def withdraw(self, blocks: Sequence[bytes]) -> None:
        """List blocks no more. Their slots may be taken once no reader reads them."""
        with self._freed:
            for block in blocks:
                self._index.withdraw(block)
            self._freed.notify_all()
            self._tell()

    def clear(self) -> None:
        """List nothing that is listed now."""
        with self._lock:
            listed = list(self._index.listed)
        self.withdraw(listed)

    def used(self, blocks: Iterable[bytes]) -> None:
        """Note that the prompts up to these blocks are of use: what is not makes room first."""
        with self._lock:
            for block in blocks:
                self._index.used(block)

    def slot_of(self, block: bytes) -> int | None:
        """Return where a block is that is listed; None if it is not."""
        entry = self.entry_of(block)
        return entry.slot if entry is not None else None

    def entry_of(self, block: bytes) -> KvEntry | None:
        """Return where a block is and its digests; None if it is not listed."""
        with self._lock:
            return self._index.listed.get(block)

    def newest(self) -> list[bytes]:
        """Return all blocks, those of use last first."""
        with self._lock:
            return list(self._index.listed)[::-1]

    def counts(self) -> dict[str, int]:
        """Return how many slots are listed, free and leaving, and how many readers there are."""
        with self._lock:
            index = self._index
            found = {"listed": len(index.listed), "free": len(index.free)}
            return found | {"leaving": index.leaving, "readers": len(self._streams)}

    def _closing_steps(self) -> list[Step]:
        return [self._shut, self._awaiting(self._stop)]

    def _shut(self) -> None:
        with self._freed:
            self._shut_down = True
            self._freed.notify_all()

    def forked(self) -> None:
        """Count as closed in a forked child."""
        super().forked()
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._shut_down, self._freed = True, threading.Condition(self._lock)

    # -- readers; on the loop ---------------------------------------------------------------------

    async def _start(self, server: SourceServer) -> None:
        self._server = server
        await server.start()
        options = replace(server.expose_options(self.device), background=True)
        self._exposures = await in_thread(expose, self, server.transports, options)
        if service.pools.setdefault(self.name, self) is not self:
            raise LocalError(
                f"this process has a KV pool of {self.name} already",
                hint="close that first, or publish the blocks in it",
            )
        self._watching = asyncio.create_task(self._watch(), name="mx-kv-readers")

    async def _stop(self) -> None:
        if service.pools.get(self.name) is self:
            del service.pools[self.name]
        await end_tasks(self._watching)
        for stream in list(self._streams):
            stream.cut("the KV pool is closed")
        if self._server is not None:
            await self._server.close()
        left = await in_thread(withdraw, list(self._exposures.values()), 2 * LEASE_S)
        if left:
            log.warning("%d readers still read the KV pool of %s", len(left), self.name)

    def _tell(self) -> None:
        """Have each reader told what there is to tell; under the lock, from any thread."""
        told = [each.told for each in self._streams if self._index.has_changes(each)]
        if told:

            def tell() -> None:
                for each in told:
                    each.set()

            self._loop.call_soon(tell)

    async def answer(
        self, hello: pb.KvHello, requests: AsyncIterator[pb.KvRequest], context: Any, principal: str
    ) -> None:
        """Serve one reader until its stream ends.

        Args:
            hello: Its first message.
            requests: The further ones.
            context: The call's servicer context.
            principal: Whom its certificate names; "" without one.

        Raises:
            NotAllowedError: It does not hold the name's key.
            PeerBusyError: There are as many readers as may be.
            PeerProtocolError: It does not keep to the protocol.
        """
        nonces = hello.nonce, proof.nonce()
        own = proof.prove(self._key, self.name, proof.POOL, nonces)
        challenge = pb.KvChallenge(nonce=nonces[1], proof=own)
        await write_first(context, pb.KvEvent(challenge=challenge))
        shown = await first_message(requests)
        if shown is None or shown.WhichOneof("request") != "proof":
            raise PeerProtocolError("the second message of a KV stream must be a proof")
        until_s = proof.check(shown.proof, self._key, self.name, proof.READER, nonces, principal)
        seal = proof.Seal(self._key, self.name, nonces)
        stream = _KvStream(principal or address_of_peer(context.peer()), seal, until_s)
        self._admit(stream)
        try:
            await self._serve(hello, requests, context, stream, bool(principal))
        except asyncio.CancelledError:
            if not stream.why:
                raise
            raise ClosedError(stream.why) from None
        finally:
            self._end(stream)

    def _admit(self, stream: _KvStream) -> None:
        same = sum(each.principal == stream.principal for each in self._streams)
        if len(self._streams) >= MOST_READERS or same >= MOST_OF_ONE:
            raise PeerBusyError("the KV pool has as many readers as it may", retry_after_s=LEASE_S)
        with self._lock:
            if self._shut_down:
                raise ClosedError("the KV pool is closed")
            self._streams.add(stream)
            self._index.join(stream)

    def _end(self, stream: _KvStream) -> None:
        for exposure in self._exposures.values():
            exposure.revoke(stream.grant_id)
        with self._freed:
            self._streams.discard(stream)
            self._index.leave(stream)
            self._freed.notify_all()

    async def _serve(
        self,
        hello: pb.KvHello,
        requests: AsyncIterator[pb.KvRequest],
        context: Any,
        stream: _KvStream,
        certified: bool,
    ) -> None:
        wanted, tickets = set(hello.transports), []
        for name, exposure in self._exposures.items():
            if not wanted or name in wanted:
                ticket = exposure.grant(stream.grant_id)
                if certified and isinstance(exposure, Authenticating):
                    exposure.bind(stream.grant_id, stream.principal)
                tickets.append(peer_pb2.Ticket(transport=name, ticket=ticket))
        assert self._server is not None
        granted = pb.KvGranted(
            grant_id=stream.grant_id,
            lease_s=LEASE_S,
            tickets=tickets,
            region_nbytes=list(map(len, self.memory.views)),
            place=place_to_wire(self._server.place(self.device)),
            key=self.form.encode(),
            slots=self.memory.slots,
            first_head=self.memory.first_head,
            heads=self.memory.heads,
            layers=map(_to_wire, self.memory.rows),
        )
        await write_first(context, stream.sealed(pb.KvEvent(granted=granted)))
        event(log, "kv.reader", level=logging.DEBUG, model=self.name, peer=context.peer())
        renewed = asyncio.Event()
        writing = asyncio.create_task(self._write(context, stream, renewed), name="mx-kv-index")
        try:
            while True:
                async with asyncio.timeout(2 * LEASE_S):
                    request = await anext(requests, None)
                if request is None:
                    return
                if request.WhichOneof("request") != "renewal":
                    raise PeerProtocolError("a KV reader sent what has no place in its stream")
                if writing.done():
                    return
                self._renew(stream, request.renewal)
                await self._judge(request.renewal.wrong)
                renewed.set()
                stream.told.set()
        except TimeoutError:
            event(log, "kv.expired", model=self.name, peer=context.peer())
        finally:
            await end_tasks(writing)

    def _renew(self, stream: _KvStream, renewal: pb.KvRenewal) -> None:
        with self._freed:
            if not self._index.confirm(stream, renewal.confirmed):
                raise PeerProtocolError("a KV reader confirmed what it was not told")
            self._freed.notify_all()

    async def _judge(self, blocks: Sequence[bytes]) -> None:
        """Withdraw those of the blocks that a reader found wrong which are wrong here, too: it may
        have got them wrong, or lie."""
        for block in list(dict.fromkeys(blocks))[:_MOST_WRONG]:
            entry = self._index.listed.get(block)
            if entry is None:
                continue
            if await in_thread(self.memory.digests, entry.slot) == entry.digests:
                continue
            with self._freed:
                if self._index.listed.get(block) != entry:
                    continue  # the slot was written again meanwhile
                self.wrong += 1
                self._index.withdraw(block)
                self._freed.notify_all()
                self._tell()
            event(log, "kv.wrong", level=logging.WARNING, model=self.name, block=block.hex()[:16])

    async def _write(self, context: Any, stream: _KvStream, renewed: asyncio.Event) -> None:
        """Tell a reader of all changes, and that its renewals have come."""
        layers = len(self.memory.rows)
        most = max(1, _MESSAGE_BYTES // (ID_BYTES * (1 + layers)))
        while True:
            await stream.told.wait()
            stream.told.clear()
            if renewed.is_set():
                renewed.clear()
                told = pb.KvRenewed(lease_s=LEASE_S)
                await context.write(stream.sealed(pb.KvEvent(renewed=told)))
            more = True
            while more:
                with self._lock:
                    changes, number = self._index.changes(stream, most)
                    more = self._index.has_changes(stream)
                if changes:
                    message = pb.KvChanges(
                        number=number,
                        blocks=b"".join(each.block for each in changes),
                        slots=[each.entry.slot + 1 if each.entry else 0 for each in changes],
                        digests=b"".join(each.entry.digests for each in changes if each.entry),
                    )
                    await context.write(stream.sealed(pb.KvEvent(changes=message)))

    async def _watch(self) -> None:
        """Cut off readers for whom a slot has waited too long."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            now_s = time.monotonic()
            with self._lock:
                waiting = set(self._index.waits_for())
            for stream in list(self._streams):
                why = ""
                if time.time() >= stream.until_s:
                    why = f"the lender key of {self.name} has expired"
                elif stream not in waiting:
                    stream.waited_for_s = None
                elif stream.waited_for_s is None:
                    stream.waited_for_s = now_s
                elif now_s - stream.waited_for_s > PATIENCE_S:
                    why = f"slots of the KV pool wait for this reader for {PATIENCE_S:g} s"
                if why:
                    event(log, "kv.cut", model=self.name, principal=stream.principal, text=why)
                    self._end(stream)  # now: a call that is cancelled may take its time
                    stream.cut(why)


def _to_wire(rows: Rows) -> pb.KvRows:
    return pb.KvRows(
        region=rows.region,
        begin=rows.begin,
        stride=rows.stride,
        offsets=rows.offsets,
        run_nbytes=rows.run_nbytes,
    )
