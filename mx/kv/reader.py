"""Reads KV blocks of other processes into slots of this one's memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mx import config, namekey, runtime
from mx.api.arguments import PullArguments
from mx.api.closing import Closable, Step
from mx.api.common import client_of, transports
from mx.api.options import pull_options
from mx.errors import ClosedError, ConfigError, MxError
from mx.kv import proof
from mx.kv.fetch import KvFetch, Taken
from mx.kv.layout import KvMemory
from mx.kv.names import KvKey
from mx.kv.peer import KvGiver, KvListing, KvPeer, KvReading
from mx.kv.segments import KvShelf, shelves
from mx.tasks import end_tasks, in_thread

log = logging.getLogger(__name__)

#: How often folders of files are looked at.
LOOK_S = 1.0
#: How often the coordinator is asked which sources of the model there are.
LIST_S = 5.0
#: The most pools that one reader reads.
MOST_PEERS = 64
#: More than any model has.
_MOST_HEADS = 1 << 31


class KvReader(Closable):
    """Reads KV blocks of one model from the pools of other processes. Made by `open`; close it:
    what is on its way fails, and nothing is written to its memory any more.

    Methods are thread-safe.
    """

    def __init__(self, loop: runtime.LoopThread) -> None:
        """Use `open`."""
        self._loop = loop
        self._changed = threading.Condition()  # of an index, for `wait_for`
        self._peers: dict[str, KvGiver] = {}  # replaced, never changed
        self._shut_down = False
        self._reading: KvReading
        self._listing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    def open(
        cls,
        name: str,
        form: KvKey | None,
        memory: KvMemory | None,
        *,
        peers: Collection[str] = (),
        files: Sequence[str | Path] = (),
        coordinator: str | None = None,
        transport: str | None = None,
        settings: config.Settings | None = None,
    ) -> KvReader:
        """Connect to the pools of a model's KV blocks.

        Args:
            name: The model's name.
            form: The form of the blocks; None for any, where they are only found.
            memory: Where blocks are read into: it must stay until the reader is closed. None for
                one that only finds blocks, all heads of which are somewhere.
            peers: HOST:PORT of pools, or of sources of their processes.
            files: Folders that `KvFiles` writes to, or has written to; they are looked at before
                this returns, and every second.
            coordinator: HOST:PORT; the sources of the model that it lists are asked for their KV
                blocks. None: no coordinator is asked.
            transport: The only transport to use.
            settings: As for `mx.pull`.

        Raises:
            ConfigError: The key is not for KV blocks of this name, or files are to be read into a
                GPU's memory.
        """
        settings = settings or config.load()
        key = namekey.load(settings)
        proof.secret_of(key, name)
        arguments = PullArguments(transport=transport)
        options = pull_options(name, settings, arguments)
        if memory is not None:
            options = replace(options, device=memory.device)
            if files and memory.gpu is not None:
                raise ConfigError(
                    "KV blocks in files are read into memory of the host",
                    hint="leave out `files`, or give a `memory` of the host",
                )

        async def make(loop: runtime.LoopThread) -> KvReader:
            reader = cls(loop)
            heads = range(form.heads if form is not None else _MOST_HEADS)
            if memory is not None:
                heads = range(memory.first_head, memory.first_head + memory.heads)
            reader._reading = KvReading(
                name,
                key,
                form.encode() if form is not None else b"",
                heads,
                memory,
                options,
                transports(),
                reader._tell,
            )
            if files:  # first: nothing is left of it if this is cancelled
                roots = [Path(each) for each in files]
                await reader._look(roots)
                looking = reader._look_again(roots)
                reader._looking = asyncio.create_task(looking, name="mx-kv-files")
            reader._add(peers)
            if coordinator is not None:
                listing = reader._list(settings, coordinator)
                reader._listing = asyncio.create_task(listing, name="mx-kv-sources")
            super(KvReader, reader).__init__(loop)
            return reader

        return runtime.made(make)

    # -- the engine's side ------------------------------------------------------------------------

    def add(self, endpoint: str) -> None:
        """Read from the pool at HOST:PORT, too."""
        self._require_open()
        self._loop.call_soon(lambda: self._add([endpoint]))

    def found(self, blocks: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first one on, can be read now."""
        for at, block in enumerate(blocks):
            if not self._has(block):
                return at
        return len(blocks)

    def wait_for(self, blocks: Sequence[bytes], timeout_s: float) -> int:
        """Return `found` once that is all of them, or the time has passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._shut_down or self.found(blocks) == len(blocks), timeout_s
            )
        return self.found(blocks)

    def fetch(self, wanted: Sequence[tuple[bytes, int]]) -> KvFetch:
        """Begin to read blocks, layer by layer.

        Args:
            wanted: Names of blocks, each with the slot that it is read into. The slots must not be
                used until the fetch is done.

        Raises:
            ClosedError: The reader is closed.
            ValueError: There is no such slot.
        """
        self._require_open()
        memory = self._reading.memory
        if memory is None:
            raise ConfigError("this KV reader only finds blocks", hint="open it with a `memory`")
        if not all(0 <= slot < memory.slots for _, slot in wanted):
            raise ValueError(f"the reader's memory has slots 0 to {memory.slots - 1}")
        layers, taken, missing = len(memory.rows), list[Taken](), list[bytes]()
        load: dict[KvGiver, int] = {}
        for block, slot in wanted:
            parts = self._begin(block, slot, load)
            if parts:
                taken += parts
            else:
                missing.append(block)
        fetch = KvFetch(taken, missing, layers)
        fetch.begin(memory)
        return fetch

    def listings(self, timeout_s: float) -> list[KvListing]:
        """Return what each pool lists, once all are reached or can't be, or the time has passed."""
        pools = [each for each in self._peers.values() if isinstance(each, KvPeer)]
        with self._changed:
            self._changed.wait_for(
                lambda: self._shut_down or not any(each.is_awaited for each in pools), timeout_s
            )
        return [found for each in pools if (found := each.listing()) is not None]

    def peers(self) -> dict[str, str]:
        """Return how each pool is read: the transport by its address, or why it is not."""
        found = list(self._peers.values())
        return {each.endpoint: each.transport or each.why for each in found}

    def _closing_steps(self) -> list[Step]:
        return [self._shut, self._awaiting(self._stop)]

    def _shut(self) -> None:
        with self._changed:
            self._shut_down = True
            self._changed.notify_all()

    def forked(self) -> None:
        """Count as closed in a forked child."""
        super().forked()
        self._shut_down, self._changed = True, threading.Condition()  # the parent's may be held
        for peer in self._peers.values():
            peer.forked()

    # ---------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._shut_down:
            raise ClosedError("the KV reader is closed")

    def _has(self, block: bytes) -> bool:
        wanted = set(self._reading.heads)
        for peer in self._peers.values():
            if peer.has(block):
                wanted.difference_update(peer.heads())
                if not wanted:
                    return True
        return False

    def _begin(self, block: bytes, slot: int, load: dict[KvGiver, int]) -> list[Taken]:
        """Begin to read one block from pools that together have all heads, those first that read
        least, and files last; return [] if there are none."""
        wanted = set(self._reading.heads)
        taken: list[Taken] = []
        for peer in sorted(
            self._peers.values(), key=lambda each: (each.transport == "files", load.get(each, 0))
        ):
            begun = peer.begin(block) if wanted else None
            if begun is None:
                continue
            link, entry = begun
            if wanted.isdisjoint(link.heads):
                peer.end(link, block, entry)
                continue
            wanted.difference_update(link.heads)
            load[peer] = load.get(peer, 0) + len(link.heads)
            taken.append(Taken(block, slot, peer, link, entry))
        if wanted:
            for each in taken:
                each.peer.end(each.link, block, each.entry)
            return []
        return taken

    # -- on the loop ------------------------------------------------------------------------------

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _add(self, endpoints: Collection[str]) -> None:
        for endpoint in endpoints:
            if (
                endpoint not in self._peers
                and len(self._peers) < MOST_PEERS
                and not self._shut_down
            ):
                self._peers = self._peers | {endpoint: KvPeer(endpoint, self._reading, self._loop)}

    async def _look(self, roots: Sequence[Path]) -> None:
        """See which blocks there are in files."""
        reading, form = self._reading, self._reading.form
        try:
            found = await in_thread(lambda: list(shelves(roots, form)))
        except OSError as error:
            log.debug("which KV blocks are in files is not known: %s", error)
            return
        for folder, heads in found:
            fits = reading.heads.start <= heads.start < heads.stop <= reading.heads.stop
            if fits and str(folder) not in self._peers:
                self._peers = self._peers | {str(folder): KvShelf(folder, heads, reading)}
        for each in self._peers.values():
            if isinstance(each, KvShelf) and await in_thread(each.look):
                self._tell()

    async def _look_again(self, roots: Sequence[Path]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(roots)

    async def _list(self, settings: config.Settings, coordinator: str) -> None:
        """Read from all sources of the model that the coordinator lists, as they come and go."""
        listed: set[str] = set()
        while True:
            try:
                async with client_of(settings, coordinator) as client:
                    found = await client.list_sources(self._reading.name)
                now = {each.record.endpoint for each in found}
            except MxError as error:
                log.debug("which sources have KV blocks is not known: %s", error)
            else:
                for endpoint in listed - now:
                    gone, self._peers = (
                        self._peers.get(endpoint),
                        {each: peer for each, peer in self._peers.items() if each != endpoint},
                    )
                    if gone is not None:
                        await gone.close()
                new = now - self._peers.keys()  # what was named stays when it is not listed
                self._add(new)
                listed = listed & now | new
            await asyncio.sleep(LIST_S)

    async def _stop(self) -> None:
        await end_tasks(self._listing, self._looking)
        await asyncio.gather(*(each.close() for each in self._peers.values()))
