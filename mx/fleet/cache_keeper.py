"""Holds the models of a host's cache: pulls them, evicts them, and says where they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mx import config
from mx.api.arguments import PullArguments
from mx.api.common import transports
from mx.api.options import pull_options
from mx.api.pulling import begin
from mx.api.source import Source
from mx.api.target import Pull
from mx.contexts import Undo
from mx.core.topology import Place
from mx.core.types import Layout, ManifestRef, ModelKey, SourceRecord
from mx.errors import (
    ClosedError,
    ConfigError,
    LocalError,
    MxError,
    UnknownModelError,
    another,
)
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths, target_place
from mx.fetching.resolver import describe
from mx.fleet.cache_table import CacheTable
from mx.fleet.collapsing import Collapser
from mx.log import event
from mx.runtime import in_thread, uncut
from mx.users import process_start_ticks
from mx.wire.address import each_address, is_local, split_address
from mx.wire.cache import CachedModel, CachedModelAddress, CacheStatus, WantedModel
from mx.wire.locate import Locator

log = logging.getLogger(__name__)

#: How many models a cache pulls at a time; others wait.
MOST_PULLS = 4
#: How long readers that copy a model have to finish when it is evicted.
_DRAIN_S = 1.0
#: How the kernel names the memory files of mx in the list of a process's maps.
_MEMFD_NAME = b"/memfd:mx:"


@dataclass(frozen=True, slots=True)
class Id:
    """What the cache holds once: these weights and files under this name, and whether a process
    of this host lent them."""

    model: ModelKey
    pin: bytes
    offered: bool


@dataclass(frozen=True, slots=True)
class _KeptModel:
    """A model in memory. `inode` is the number of its memory file, `let_go` ends what gives it huge
    pages."""

    pull: Pull
    source: Source
    held: CachedModelAddress
    nbytes: int
    inode: int
    let_go: Callable[[], None]

    def close(self) -> None:
        """Stop serving it, and let go of the memory. Blocks."""
        self.let_go()
        with contextlib.suppress(MxError):  # its memory is let go in any case
            self.source.drain(_DRAIN_S)
        self.pull.close()


@dataclass(frozen=True, slots=True)
class _WantedPull:
    """A model that is to be held: its identity here, and the options to pull it with."""

    id: Id
    options: PullOptions
    ref: ManifestRef
    layout: Layout
    sources: Sequence[SourceRecord]


class Keeper:
    """The models of a cache; on the loop. `close` it."""

    def __init__(self, settings: config.Settings, coordinator: str, budget_bytes: int) -> None:
        """
        Args:
            settings: The settings of the process.
            coordinator: Where models are looked up and registered, HOST:PORT.
            budget_bytes: What all models together may have.
        """
        self._settings = settings
        self._coordinator = coordinator
        self._table: CacheTable[Id] = CacheTable(budget_bytes)
        self._kept: dict[Id, _KeptModel] = {}
        self._arriving: dict[Id, asyncio.Task[CachedModelAddress]] = {}
        self._pulls: dict[Id, Pull] = {}
        self._slots = asyncio.Semaphore(MOST_PULLS)
        self._collapser = Collapser()
        self._evictions = 0
        self._closed = False

    # -- holding ----------------------------------------------------------------------------------

    async def hold(
        self, wanted: WantedModel, progress: list[tuple[int, int]]
    ) -> CachedModelAddress:
        """See `mx.fleet.cache_service.CacheServicer`."""
        if wanted.only_if_held:
            return self._offered(wanted)
        found = await self._find(wanted)
        if self._table.use(found.id, time.monotonic()):
            return self._kept[found.id].held
        arriving = self._arriving.get(found.id)
        if arriving is None:
            self._check_needed(found)
            if self._closed:
                raise ClosedError("the cache was closed")
            arriving = asyncio.create_task(self._arrive(found), name="mx-cache-arrive")
            self._arriving[found.id] = arriving
            arriving.add_done_callback(lambda task: self._ended(found.id, task))
        while not arriving.done():
            pull = self._pulls.get(found.id)
            if pull is not None:
                now = pull.progress()
                progress[0] = now.bytes_done, now.bytes_total
            await asyncio.wait((arriving,), timeout=0.2)
        try:
            return arriving.result()
        except asyncio.CancelledError:
            raise ClosedError("the cache was closed") from None
        except MxError as error:
            raise another(error) from None  # each client that waited gets one of its own

    def _ended(self, model: Id, task: asyncio.Task[CachedModelAddress]) -> None:
        del self._arriving[model]
        if not task.cancelled() and (error := task.exception()) is not None:
            event(log, "cache.refused", model=str(model.model), reason=str(error))

    def _offered(self, wanted: WantedModel) -> CachedModelAddress:
        name = wanted.name.partition("@")[0]
        for each, kept in self._kept.items():
            key = each.model
            if (
                each.offered
                and (key.name, key.variant) == (name, wanted.variant)
                and wanted.revision in ("", key.revision)
                and self._table.use(each, time.monotonic())
            ):
                return kept.held
        raise UnknownModelError(f"no process has lent {wanted.name}[{wanted.variant}]")

    async def _find(self, wanted: WantedModel) -> _WantedPull:
        offered = bool(wanted.offered_at)
        if offered and not is_local(wanted.offered_at):
            raise ConfigError(f"{wanted.offered_at} is not on this host")
        others = set(each_address(wanted.coordinator)) ^ set(each_address(self._coordinator))
        if not offered and others:
            raise ConfigError(
                f"it asks the coordinator at {self._coordinator}, not at {wanted.coordinator}"
            )
        asked = PullArguments(revision=wanted.revision, variant=wanted.variant, hold=True)
        if offered:
            asked |= {"peer": wanted.offered_at, "wait_s": 0.0}
        else:
            asked["coordinator"] = self._coordinator
        options = pull_options(wanted.name, self._settings, asked)
        async with Locator(options) as locator:
            located, manifest = await describe(locator)
        key, ref = located.model, located.ref
        options = replace(
            options,
            name=f"{key.name}@{ref.pin.hex()}",
            revision=key.revision,
            variant=key.variant,
        )
        model = Id(key, ref.pin, offered)
        return _WantedPull(model, options, ref, manifest.layout, located.sources)

    def _check_needed(self, found: _WantedPull) -> None:
        """Raise LocalError if a pull can attach to another process of this host anyway."""
        if found.id.offered:
            return
        options = replace(found.options, hold=False)
        place = target_place(options)
        alive = [source for source in found.sources if not _has_ended(source.place, place)]
        paths = plan_paths(options, place, transports(), alive)
        for path in paths.paths:
            if path.attach:
                raise LocalError(f"{path.source.endpoint} on this host holds it, and is attached")

    async def _arrive(self, found: _WantedPull) -> CachedModelAddress:
        async with self._slots:
            nbytes = found.layout.arena_nbytes
            in_use = await self._in_use()
            evicted = self._table.reserve(found.id, nbytes, in_use)
            # At once: one of them may be asked for, and arrive anew, while others are let go.
            leaving = [(each, self._kept.pop(each)) for each in evicted]
            try:
                for each, left in leaving:
                    await uncut(self._evict(each, left))
                if self._closed:
                    raise ClosedError("the cache was closed")
                kept = await uncut(in_thread(self._pulled, found, nbytes))
            except BaseException:
                self._table.remove(found.id)
                raise
            finally:
                self._pulls.pop(found.id, None)
            self._kept[found.id] = kept
            self._table.arrived(found.id, time.monotonic())
            event(log, "cache.holds", model=str(found.id.model), nbytes=nbytes)
            return kept.held

    def _pulled(self, found: _WantedPull, nbytes: int) -> _KeptModel:
        """Pull a model, and serve it. Blocks."""
        pull = begin(found.options, self._settings, time.monotonic())
        self._pulls[found.id] = pull
        with Undo(pull.close):
            if self._closed:
                raise ClosedError("the cache was closed")
            source = pull.hold()
            held = CachedModelAddress(pull.model, found.ref, source.endpoint)
            memfd = source.memfd
            if memfd is None:
                return _KeptModel(pull, source, held, nbytes, 0, lambda: None)
            let_go = self._collapser.add(memfd, nbytes)
            return _KeptModel(pull, source, held, nbytes, os.fstat(memfd).st_ino, let_go)

    # -- evicting ---------------------------------------------------------------------------------

    async def _in_use(self) -> dict[Id, int]:
        """Return the models that processes use, and how many map each; forget evicted ones that
        none maps any more."""
        inodes = {kept.inode for kept in self._kept.values()} | {*self._table.lingering}
        mapped = await in_thread(mapped_elsewhere, inodes)
        for inode in self._table.lingering:
            if inode not in mapped:
                self._table.gone(inode)
        return {
            each: mapped[kept.inode]
            for each, kept in self._kept.items()
            if kept.inode in mapped or kept.source.stats().readers
        }

    async def _evict(self, model: Id, kept: _KeptModel) -> None:
        self._evictions += 1
        event(log, "cache.evicts", model=str(model.model), nbytes=kept.nbytes)
        with contextlib.suppress(MxError):
            await in_thread(kept.close)
        if kept.inode in await in_thread(mapped_elsewhere, (kept.inode,)):
            self._table.linger(kept.inode, kept.nbytes)

    # -- what is held -----------------------------------------------------------------------------

    async def status(self) -> CacheStatus:
        """See `mx.fleet.cache_service.CacheServicer`."""
        in_use = await self._in_use()
        now_s, models = time.monotonic(), []
        for each in self._table.held:
            kept = self._kept.get(each)
            if kept is not None:
                models.append(
                    CachedModel(
                        kept.held.model,
                        kept.held.ref,
                        kept.held.endpoint,
                        kept.nbytes,
                        each in in_use,
                        each.offered,
                        self._table.idle_s(each, now_s),
                        in_use.get(each, 0),
                    )
                )
        table = self._table
        return CacheStatus(
            table.budget_bytes,
            sum(each.nbytes for each in models),
            table.lingering_bytes,
            self._evictions,
            tuple(models),
        )

    def figures(self) -> dict[str, int]:
        """Return the counts, without a look at other processes; on the loop."""
        return {
            "held_bytes": sum(each.nbytes for each in self._kept.values()),
            "budget_bytes": self._table.budget_bytes,
            "lingering_bytes": self._table.lingering_bytes,
            "models": len(self._kept),
            "arriving": len(self._arriving),
            "evictions": self._evictions,
        }

    async def close(self) -> None:
        """Stop all pulls, and let go of everything."""
        self._closed = True
        closing: list[Callable[[], None]] = [pull.close for pull in self._pulls.values()]
        await _all_in_threads(closing)
        if self._arriving:
            await asyncio.wait([*self._arriving.values()])
        kept, self._kept = [*self._kept.values()], {}
        await _all_in_threads([each.let_go for each in kept])
        await _all_in_threads([each.pull.close for each in kept])
        await in_thread(self._collapser.close)


def _has_ended(there: Place, here: Place) -> bool:
    """Return True if a source's process has certainly ended, though it is still listed."""
    ours = (here.boot_id, here.pid_namespace)
    return (there.boot_id, there.pid_namespace) == ours and (
        process_start_ticks(there.pid) != there.pid_start_ticks
    )


async def _all_in_threads(work: list[Callable[[], None]]) -> None:
    await asyncio.gather(*(in_thread(each) for each in work), return_exceptions=True)


def require_free_port(settings: config.Settings) -> None:
    """Check that each model of a cache can listen on a port of its own.

    Raises:
        ConfigError: The settings name one port.
    """
    if split_address(settings.listen)[1]:
        raise ConfigError(
            f"each model of a cache listens on a port of its own, not all on {settings.listen}",
            hint="give `listen` with port 0",
        )


def mapped_elsewhere(inodes: Collection[int], proc: Path = Path("/proc")) -> Counter[int]:
    """Return which memory files processes other than this one and its children map, and how many.

    Processes that this one may not look into, such as those of another container, are not seen.

    Args:
        inodes: The numbers of the files, as `os.fstat` has them.
        proc: Where procfs is mounted.

    Returns:
        The number of processes that map a file, for each that any does.
    """
    own, found = os.getpid(), Counter[int]()
    if not inodes:
        return found
    for entry in os.listdir(proc):
        if not entry.isdigit() or int(entry) == own:
            continue
        try:
            listed = _mapped(proc / entry / "maps", inodes)
            if listed and _parent_of(proc / entry / "stat") != own:
                found.update(listed)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _mapped(maps: Path, inodes: Collection[int]) -> set[int]:
    # The fields: addresses, permissions, offset, device, inode, name.
    lines = [line for line in maps.read_bytes().splitlines() if _MEMFD_NAME in line]
    return {inode for line in lines if (inode := int(line.split(maxsplit=5)[4])) in inodes}


def _parent_of(stat: Path) -> int:
    # The command's name is in brackets, and may itself contain spaces and brackets.
    return int(stat.read_bytes().rpartition(b")")[2].split()[1])
