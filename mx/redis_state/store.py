"""The state in Redis, which several coordinators share.

All of the state is in each coordinator's memory, and one script decides each commit: it compares
the last commit with the one that the steps have seen, and writes all or nothing. Commits are
numbered; each is one entry of a stream that every coordinator follows. One that has missed some
begins again with all there is.

If Redis comes back with less than was kept, a new epoch begins, in doubt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mx import counters
from mx.coordinator.stores.draft import Draft
from mx.coordinator.stores.encoding import VERSION
from mx.core.digest import document_digest
from mx.core.memory_store import MemoryStore
from mx.core.progress_board import ProgressBoard
from mx.errors import (
    ConfigError,
    CoordinatorError,
    LocalError,
    MxError,
    UnknownSourceError,
    another,
)
from mx.log import event
from mx.redis_state.leases import LeasedStore
from mx.redis_state.link import ANSWER_S, WRITE_S
from mx.redis_state.macs import Head, StateMac, equal
from mx.redis_state.pulls import SharedPulls
from mx.redis_state.records import (
    Commit,
    commit_in,
    commit_of,
    decode_all,
    named,
    pages_of,
    record_of,
)
from mx.tasks import in_thread, unexpected
from mx.units import count
from mx.wire.audit import write_forged

log = logging.getLogger(__name__)

_HASHES = ("names", "sources", "gone")
_COMMITTED = ("meta", "stream", "documents", "spared", *_HASHES)
#: What there is of a state, but for documents, which prove themselves.
_STATE = ("meta", "stream", "spared", *_HASHES)
#: How long commits of others wait here before all is read anew.
_STUCK_S = 2 * WRITE_S
#: The commits that the stream keeps, about.
_KEPT_COMMITS = 512
_PAGE = 64
_BLOCK_MS = 1000
_RETRY_S = 0.2


class _MissedCommits(Exception):
    """Commits are not in the stream. `lost`: those that this coordinator has seen."""

    def __init__(self, *, lost: bool) -> None:
        super().__init__()
        self.lost = lost


class RedisStore(LeasedStore):
    """State in Redis."""

    def __init__(
        self, url: str, *, lease_s: float, doubt_s: float, mac: StateMac | None = None
    ) -> None:
        """
        Args:
            url: See `RedisLink`.
            lease_s: How long a lease lasts for which nothing has been heard.
            doubt_s: How long names are in doubt after a loss.
            mac: What proves that coordinators have written what is there; None: nothing does.

        Raises:
            ConfigError: As `RedisLink`.
        """
        super().__init__(url, lease_s=lease_s)
        self._doubt_s = doubt_s
        self._mac = mac
        self._number = 0
        self._token = ""
        self._listed_s: dict[str, float] = {}
        self._following = asyncio.Lock()
        self._followed_s = self._read_anew_s = -math.inf  # the last commit, and the last try
        #: The commits of this coordinator that are under way, by token.
        self._own: dict[str, Commit] = {}
        self._pulls: SharedPulls | None = None

    def share_pulls(self, board: ProgressBoard) -> None:
        self._pulls = SharedPulls(self._link, self.clock, board)

    # -- the beginning and the end -----------------------------------------------------------------

    async def open(self) -> None:
        if self._tasks:
            return
        try:
            async with self._link.answering():
                said = await self._link.persistence()
            await super().open()
        except CoordinatorError as error:
            await self.close()
            raise LocalError(
                error.message, hint="start Redis, or name it (a primary) with `state`"
            ) from None
        event(log, "state.redis", at=self._link.name, text=said)
        self._tasks.append(asyncio.create_task(self._follow(), name="mx-state-follow"))
        if self._pulls is not None:
            self._tasks.append(asyncio.create_task(self._pulls.run(), name="mx-state-pulls"))

    async def _load(self) -> None:
        await self._exchange()  # what time is it?
        await self._hear_from_here()
        await self._read_all()
        await self._exchange()  # how long do the leases last?
        self._reached_s = time.monotonic()

    async def _unload(self) -> None:
        await self._link.close()

    async def _read_all(self, *, doubt_until_s: float | None = None) -> None:
        """Begin with what is in Redis, or with nothing there, in doubt if that is given. What no
        coordinator has written is nothing, and in doubt."""
        link = self._link
        found = await self._read(doubt_until_s)
        while (why := self._forged(found)) is not None:
            names = sorted(key.decode(errors="replace") for key in found[1])
            self._say_forged(why, names)
            self.distrusted |= set(names)
            async with link.answering(WRITE_S):
                await self._script["reset"](
                    keys=[link.key(name) for name in _STATE],
                    args=[found[0].get(b"token", b"")],
                )
            found = await self._read(self.clock() + self._doubt_s)
        meta, names, sources, gone, digests = found
        if int(meta[b"version"]) > VERSION:
            raise ConfigError(
                f"the state at {link.name} is of a later version of mx: "
                f"{int(meta[b'version'])}, not {VERSION}",
                hint="use that version, or another database",
            )
        values = await in_thread(decode_all, names, sources, gone)
        await self._fetch(set(digests) - self._documents.keys())
        leases = {
            each: (s.lease_until_s, s.readers, s.gb_per_s) for each, s in self._sources.items()
        }
        for kept in (self._names, self._due, self._sources, self._gone):
            kept.clear()
        self._first_leases.clear()
        self._leases.clear()
        self._listed_s.clear()
        self._entries.clear()
        for state in values[0]:
            MemoryStore.decide(self, state)
        now = self.clock()
        for listed_s, listed in sorted(values[1], key=lambda each: each[0]):
            source_id = listed.record.source_id
            self._sources[source_id], self._listed_s[source_id] = listed, listed_s
            lease = leases.get(source_id, (now, 0, 0.0))  # the next exchange says it
            MemoryStore.renew(self, source_id, *lease, first=source_id not in leases)
        for source_id, each in sorted(values[2].items(), key=lambda each: each[1].until_s):
            self._gone[source_id] = each
        self._number, self._token = int(meta[b"commit"]), meta[b"token"].decode()
        self._followed_s = time.monotonic()
        self._latest = int(meta[b"latest"])
        self.epoch, self.doubt_until_s = meta[b"epoch"].decode(), float(meta[b"doubt"])
        self._count_anew()

    async def _read(self, doubt_until_s: float | None) -> list[Any]:
        """Return what Redis has of the state, once it has begun."""
        link, mac, epoch = self._link, self._mac, uuid.uuid4().hex
        doubt = repr(float("-inf") if doubt_until_s is None else doubt_until_s)
        said = "", ""
        if mac is not None:
            said = mac.of_nothing(Head(epoch, doubt, 0, epoch, self._latest)), mac.check
        async with link.answering(WRITE_S):
            await self._script["begin"](
                keys=[link.key("meta")], args=[epoch, VERSION, doubt, self._latest, *said]
            )
            pipe = link.client.pipeline(transaction=True)
            for name in ("meta", *_HASHES):
                pipe.hgetall(link.key(name))
            pipe.hkeys(link.key("documents"))
            found: list[Any] = await pipe.execute()
        return found

    def _forged(self, found: Sequence[Any]) -> str | None:
        """Return why no coordinator can have written what Redis has; None if one has.

        Raises:
            ConfigError: Coordinators with another key use this state.
        """
        meta, mac = found[0], self._mac
        if mac is None:
            return None
        if not equal(meta.get(b"key"), mac.check):
            raise ConfigError(
                f"the coordinators of the state at {self._link.name} have another receipt key",
                hint="give all of them the same file (`receipt_key`)",
            )
        mac.load(dict(zip(_HASHES, found[1:4], strict=True)))
        signed = b"mac" in meta and meta.get(b"mac_of") == meta[b"token"]
        if not signed and not mac.required:
            return None
        try:
            head = Head(
                meta[b"epoch"].decode(),
                meta[b"doubt"].decode(),
                int(meta[b"commit"]),
                meta[b"token"].decode(),
                int(meta[b"latest"]),
            )
        except (KeyError, ValueError):
            return "it is malformed"
        if signed and equal(meta[b"mac"], mac.of_state(head)):
            return None
        return "its MAC is wrong" if signed else "it has no MAC, and `state_mac` requires one"

    def _say_forged(self, why: str, names: Sequence[str]) -> None:
        counters.add(counters.REFUSED, "ForgedState")
        text = f"what is in {self._link.name} was not written by a coordinator with this key: {why}"
        event(
            log, "state.forged", level=logging.ERROR,
            text=f"{text}; {count(len(names), 'name')} are not used until their owners register",
        )  # fmt: skip
        write_forged(names or [""], text)

    async def _fetch(self, digests: Iterable[bytes]) -> None:
        """Read documents into memory."""
        wanted = [*digests]
        for at in range(0, len(wanted), _PAGE):
            page = wanted[at : at + _PAGE]
            async with self._link.answering(WRITE_S):
                found = await self._link.client.hmget(self._link.key("documents"), page)
            self._documents.update(
                (digest, data)
                for digest, data in zip(page, found, strict=True)
                if data is not None and document_digest(data) == digest
            )

    # -- commits -----------------------------------------------------------------------------------

    async def _keep(self, draft: Draft) -> bool:
        if self._trouble is not None and self._silent_s() > 2 * ANSWER_S:
            raise another(self._trouble)  # it is tried in the background
        return await self._send(draft)

    async def _send(self, draft: Draft) -> bool:
        commit = commit_of(draft, self._listed_s, self.clock())
        token = f"{self._who[:8]}.{uuid.uuid4().hex[:16]}"
        arguments = self._arguments(commit, token)
        self._own[token] = commit  # if it is kept after all, it comes with the stream
        try:
            await self._send_documents()
            async with self._link.answering(WRITE_S):
                answer = await self._script["commit"](
                    keys=[self._link.key(name) for name in _COMMITTED], args=arguments
                )
            said = answer[0].decode()
            if said == "kept":
                async with self._following:
                    if answer[1] == self._number + 1:
                        self._take(answer[1], token, commit)
                if self._number < answer[1]:
                    await self.catch_up()
                return True
        finally:
            del self._own[token]
        if said == "missing":
            # Another coordinator has dropped what it found nothing to name.
            for digest in answer[1:]:
                if digest not in self._documents:
                    raise UnknownSourceError("a document of the manifest is gone: register again")
                self._fresh[digest] = self._documents[digest]
            return False
        if said == "alive":
            self._ended -= draft.expired
        await self.catch_up()
        return False

    async def _send_documents(self) -> None:
        """Keep the documents that are new, in pages, which may take long each."""
        fresh, self._fresh = self._fresh, {}
        try:
            for page in pages_of(fresh):
                async with self._link.answering(WRITE_S):
                    pipe = self._link.client.pipeline(transaction=False)
                    for digest, data in page.items():
                        pipe.hset(self._link.key("documents"), digest, data)
                    await pipe.execute()
        except BaseException:
            # What came meanwhile is newer.
            self._fresh = {
                d: data for d, data in fresh.items() if d in self._documents
            } | self._fresh
            raise

    def _arguments(self, commit: Commit, token: str) -> list[Any]:
        """Return the arguments of the script."""
        draft, now = commit.draft, self.clock()
        documents = self._named(draft)
        leases = [
            (each, self._left_ms(draft.renewals.get(each), now))
            for each in commit.listed_s
            if each not in self._sources
        ]
        record = record_of(commit, leases)
        signed = ["", ""]
        if self._mac is not None:
            head = self._head_after(draft, token)
            signed = self._mac.of_commit(head, self._token, record, commit.writes)
        flat: list[Any] = [
            self.epoch, token, record, len(draft.entries), _KEPT_COMMITS, self._link.key("lease:"),
            self._token, *signed, len(draft.expired), *draft.expired, len(documents), *documents,
        ]  # fmt: skip
        for each in (commit.writes, leases):
            flat.append(len(each))
            for values in each:
                flat += values
        epoch, doubt, latest = draft.epoch or ("", 0.0, 0)
        return [*flat, epoch, repr(doubt), latest]

    def _head_after(self, draft: Draft, token: str) -> Head:
        """Return how far the state has come with the next commit."""
        latest, epoch, doubt = self._latest + len(draft.entries), self.epoch, self.doubt_until_s
        if draft.epoch is not None:
            epoch, doubt, lowest = draft.epoch
            latest = max(latest, lowest)
        return Head(epoch, repr(float(doubt)), self._number + 1, token, latest)

    def _named(self, draft: Draft) -> set[bytes]:
        return named(draft)

    def _take(self, number: int, token: str, commit: Commit) -> None:
        """Apply the next commit to the memory."""
        for kind, key, value in commit.writes:
            if kind == "sources":
                self._ended.discard(key)
                if value:
                    self._listed_s.setdefault(key, commit.listed_s[key])
                else:
                    self._listed_s.pop(key, None)
                    self._renewals.pop(key, None)
        if self._mac is not None:
            self._mac.take(commit.writes)
        self._number, self._token, self._followed_s = number, token, time.monotonic()
        self._apply(commit.draft)

    # -- what other coordinators do ----------------------------------------------------------------

    async def catch_up(self) -> None:
        try:
            try:
                await self._catch_up()
            except _MissedCommits as missed:
                await self._begin_again(lost=missed.lost)
            except ConfigError:
                await self._begin_again(lost=False)
        except ConfigError as error:
            raise CoordinatorError(
                f"the coordinator cannot follow its state at {self._link.name}: {error.message}",
                hint="another coordinator of this state may answer; if that is of a later release, "
                "use it here, too",
            ) from None

    async def _catch_up(self) -> None:
        link = self._link
        while True:
            async with self._following:
                async with link.answering(WRITE_S):
                    pipe = link.client.pipeline(transaction=True)
                    pipe.xrange(link.key("stream"), f"{self._number + 1}-0", count=_PAGE)
                    pipe.hmget(link.key("meta"), "epoch", "commit", "token")
                    records, meta = await pipe.execute()
                await self._take_all(records)
                if self._knows(meta):
                    return
                if not records:
                    raise _MissedCommits(lost=self._is_lost(meta))

    def _knows(self, meta: Sequence[bytes | None]) -> bool:
        """Return True if `epoch`, `commit` and `token` of Redis are those here."""
        mine = (self.epoch, str(self._number), self._token)
        return tuple(each and each.decode() for each in meta) == mine

    def _is_lost(self, meta: Sequence[bytes | None]) -> bool:
        """Return True if Redis does not have what it had."""
        epoch, commit, _ = meta
        return epoch is None or commit is None or int(commit) <= self._number

    async def _take_all(self, records: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        for number, fields in records:
            count = int(number.partition(b"-")[0])
            if count <= self._number:
                continue
            if count > self._number + 1:
                raise _MissedCommits(lost=False)
            if fields[b"before"].decode() != self._token:
                raise _MissedCommits(lost=True)
            token = fields[b"token"].decode()
            own = self._own.get(token)
            commit = own or commit_in(fields[b"record"], self.clock())
            if own is None and not self._is_signed(commit, token, fields):
                # It is in the stream alone: what has been kept is read anew.
                async with self._link.answering(WRITE_S):
                    await self._link.client.xdel(self._link.key("stream"), number)
                self._say_forged("a commit in its stream has a wrong MAC", ())
                raise _MissedCommits(lost=False)
            await self._fetch(self._named(commit.draft) - self._documents.keys())
            self._take(count, token, commit)

    def _is_signed(self, commit: Commit, token: str, fields: Mapping[bytes, bytes]) -> bool:
        """Return True if another coordinator has signed a commit, or need not have."""
        mac, said = self._mac, fields.get(b"mac", b"")
        if mac is None or (not said and not mac.required):
            return True
        head = self._head_after(commit.draft, token)
        record = fields[b"record"].decode()
        return equal(said, mac.of_commit(head, self._token, record, commit.writes)[1])

    async def _begin_again(self, *, lost: bool) -> None:
        """Begin again with all that is in Redis. If that has `lost` some, in doubt."""
        expected, latest = self.epoch, self._latest
        if lost:
            await self._hear_from_here()  # what others say is numbered anew
        async with self._following:
            doubt_until_s = self.clock() + self._doubt_s if lost else None
            await self._read_all(doubt_until_s=doubt_until_s)
        if lost:
            event(
                log, "state.lost", level=logging.ERROR,
                text=f"{self._link.name} came back with less than it had: for "
                f"{self._doubt_s:g} s names bind only to those who had them",
            )  # fmt: skip
        self._wake(begins_again=True)
        if lost and (self.epoch == expected or self.doubt_until_s <= self.clock()):
            doubt_until_s = self.clock() + self._doubt_s
            await self._send(Draft(epoch=(uuid.uuid4().hex, doubt_until_s, latest)))

    async def _follow(self) -> None:
        """Follow the commits and the heartbeats of other coordinators."""
        link = self._link
        while True:
            try:
                streams = {
                    link.key("stream"): f"{self._number}-0",
                    link.key("beats"): self._beats_read,
                }
                async with link.answering(_BLOCK_MS / 1000 + WRITE_S):
                    found = await link.client.xread(streams, count=_PAGE, block=_BLOCK_MS)
                for name, records in found or ():
                    if name.decode() == link.key("beats"):
                        self._hear(records)
                        continue
                    async with self._following:
                        await self._take_all(records)
            except _MissedCommits as missed:
                await self._begin_again_soon(lost=missed.lost)
            except MxError:
                await asyncio.sleep(_RETRY_S)  # the exchange says it
            except Exception as error:  # noqa: BLE001 - it follows whatever happens
                self._in_trouble(unexpected(error))
                await self._begin_again_soon(lost=False)

    async def _begin_again_soon(self, *, lost: bool) -> None:
        try:
            await self._begin_again(lost=lost)
        except MxError:
            await asyncio.sleep(_RETRY_S)
        except Exception as error:  # noqa: BLE001 - it follows whatever happens
            self._in_trouble(unexpected(error))
            await asyncio.sleep(_RETRY_S)

    # -- what need not be kept at once -------------------------------------------------------------

    async def _keep_rest(self) -> None:
        """Exchange leases with Redis, and see whether it still has what it had."""
        meta, refused = await self._exchange()
        await self._check_followed(meta)
        self._reached_s = time.monotonic()
        if self._dropped:
            await self._forget_documents()
        if refused:
            raise self._link.refused(refused)

    async def _check_followed(self, meta: Sequence[bytes | None]) -> None:
        """Catch up if Redis has lost some, or if commits wait here for long.

        Raises:
            MxError: What they are cannot be read.
        """
        now = time.monotonic()
        if self._knows(meta):
            self._followed_s = now
        elif self._is_lost(meta):
            if not self._following.locked():
                await self.catch_up()
        elif now > self._followed_s + _STUCK_S:
            if self._trouble is not None and now < self._read_anew_s + _STUCK_S:
                raise another(self._trouble)
            self._read_anew_s = now
            await self.catch_up()

    async def _forget_documents(self) -> None:
        dropped = [digest for digest in self._dropped if digest not in self._documents]
        link = self._link
        async with link.answering():
            done = await self._script["forget"](
                keys=[link.key("meta"), link.key("documents")], args=[self._token, *dropped]
            )
        if done:
            self._dropped.difference_update(dropped)
