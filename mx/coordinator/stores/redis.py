"""The state in Redis, which several coordinators share.

All of the state is in each coordinator's memory, and one script decides each commit: it compares
the versions of what the steps have read, and writes all or nothing. Commits are numbered; each is
one entry of a stream that every coordinator follows. One that has missed some begins again with all
there is. A lease is a key with a time to live, which heartbeats renew in batches: a source is gone
when Redis says so, whatever clocks and coordinators do. The clock is that of Redis.

If Redis comes back with less than was kept, a new epoch begins, in doubt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mx.coordinator.stores.draft import Draft, Renewal
from mx.coordinator.stores.encoding import VERSION, decode, encode
from mx.coordinator.stores.kept import PERIOD_S, KeptStore
from mx.coordinator.stores.redis_link import ANSWER_S, WRITE_S, RedisLink
from mx.coordinator.stores.redis_scripts import BEGIN, COMMIT, EXCHANGE, FORGET
from mx.core.answers import Listed
from mx.core.changes import Answered, Change, ChangeKind
from mx.core.memory_store import MemoryStore
from mx.errors import (
    ConfigError,
    CoordinatorError,
    LocalError,
    MxError,
    UnknownSourceError,
    another,
)
from mx.log import event
from mx.tasks import in_thread, unexpected

log = logging.getLogger(__name__)

_HASHES = ("names", "sources", "gone")
#: The commits that the stream keeps, about.
_KEPT_COMMITS = 512
_PAGE = 64
_BLOCK_MS = 1000
_RETRY_S = 0.2
#: By how much the clock may be put back in one exchange.
_SLEW_S = 0.01
#: How long questions are answered without Redis.
READS_S = 60.0


class _Missed(Exception):
    """Commits are not in the stream. `lost`: those that this coordinator has seen."""

    def __init__(self, *, lost: bool) -> None:
        super().__init__()
        self.lost = lost


class RedisStore(KeptStore):
    """State in Redis."""

    keeps_leases = True

    def __init__(self, url: str, *, lease_s: float) -> None:
        """
        Args:
            url: See `RedisLink`.
            lease_s: How long a lease lasts for which nothing has been heard; and a doubt.

        Raises:
            ConfigError: As `RedisLink`.
        """
        super().__init__(self._time)
        self._link = RedisLink(url)
        redis = self._link.client
        self._script = {
            name: redis.register_script(text)
            for name, text in (
                ("commit", COMMIT), ("exchange", EXCHANGE), ("begin", BEGIN), ("forget", FORGET),
            )
        }  # fmt: skip
        self._lease_s = lease_s
        # Several times in the shortest lease: a third of this one.
        self._period_s = min(PERIOD_S, lease_s / 12)
        self._who = uuid.uuid4().hex
        self._ahead_s = time.time() - time.monotonic()  # of this process's clock
        self._last_s = 0.0
        self._reached_s = time.monotonic()
        self._began = False  # no exchange yet: leases that ended meanwhile get a full period
        self._number = 0
        self._token = ""
        self._versions: dict[str, str] = {}
        self._listed_s: dict[str, float] = {}
        self._renewals: dict[str, Renewal] = {}
        self._ended: set[str] = set()  # sources whose leases have ended in Redis
        self._beats_read = "0-0"
        self._following = asyncio.Lock()
        #: The commits of this coordinator that are under way, by token.
        self._own: dict[str, tuple[Draft, list[tuple[str, str, str]]]] = {}

    def _time(self) -> float:
        self._last_s = max(self._last_s, time.monotonic() + self._ahead_s)
        return self._last_s

    # -- the beginning and the end -----------------------------------------------------------------

    async def open(self) -> None:
        if self._tasks:
            return
        try:
            async with self._link.answering():
                seconds, micros = await self._link.client.time()
                said = await self._link.persistence()
                beats = await self._link.client.xrevrange(self._link.key("beats"), count=1)
            self._beats_read = beats[0][0].decode() if beats else "0-0"
            self._ahead_s = seconds + micros / 1e6 - time.monotonic()
            self._last_s = 0.0
            await super().open()
        except CoordinatorError as error:
            await self.close()
            raise LocalError(error.message, hint="start Redis, or correct `state`") from None
        event(log, "state.redis", at=self._link.name, text=said)
        self._tasks.append(asyncio.create_task(self._follow(), name="mx-state-follow"))

    async def _load(self) -> None:
        await self._read_all()

    async def _unload(self) -> None:
        await self._link.close()

    async def _read_all(self, *, doubt_until_s: float | None = None) -> None:
        """Begin with what is in Redis, or with nothing there, in doubt if that is given."""
        link, redis = self._link, self._link.client
        doubt = repr(float("-inf") if doubt_until_s is None else doubt_until_s)
        async with link.answering(WRITE_S):
            await self._script["begin"](
                keys=[link.key("meta")], args=[uuid.uuid4().hex, VERSION, doubt]
            )
            pipe = redis.pipeline(transaction=True)
            for name in ("meta", *_HASHES, "versions"):
                pipe.hgetall(link.key(name))
            pipe.hkeys(link.key("documents"))
            meta, names, sources, gone, versions, digests = await pipe.execute()
        if int(meta[b"version"]) > VERSION:
            raise ConfigError(
                f"the state at {link.name} is of a later version of mx: "
                f"{int(meta[b'version'])}, not {VERSION}",
                hint="use that version, or another database",
            )
        found = await in_thread(_decode_all, names, sources, gone)
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
        for state in found[0]:
            self.decide(state)
        now = self.clock()
        for listed_s, listed in sorted(found[1], key=lambda each: each[0]):
            source_id = listed.record.source_id
            self._sources[source_id], self._listed_s[source_id] = listed, listed_s
            lease = leases.get(source_id, (now + self._lease_s, 0, 0.0))
            MemoryStore.renew(self, source_id, *lease, first=source_id not in leases)
        for source_id, each in sorted(found[2].items(), key=lambda each: each[1].until_s):
            self._gone[source_id] = each
        self._versions = {field.decode(): token.decode() for field, token in versions.items()}
        self._number, self._token = int(meta[b"commit"]), meta[b"token"].decode()
        self._latest = int(meta[b"latest"])
        self.epoch, self.doubt_until_s = meta[b"epoch"].decode(), float(meta[b"doubt"])
        self._count_anew()

    async def _fetch(self, digests: Iterable[bytes]) -> None:
        """Read documents into memory."""
        wanted = [*digests]
        for at in range(0, len(wanted), _PAGE):
            page = wanted[at : at + _PAGE]
            async with self._link.answering(WRITE_S):
                found = await self._link.client.hmget(self._link.key("documents"), page)
            self._documents.update(
                (digest, data) for digest, data in zip(page, found, strict=True) if data is not None
            )

    # -- commits -----------------------------------------------------------------------------------

    async def _keep(self, draft: Draft) -> bool:
        if self._trouble is not None and self._silent_s() > 2 * ANSWER_S:
            raise another(self._trouble)  # it is tried in the background
        return await self._send(draft)

    async def _send(self, draft: Draft) -> bool:
        writes, arguments = self._arguments(draft)
        link = self._link
        fresh, self._fresh = self._fresh, {}
        token = arguments[1]
        self._own[token] = draft, writes
        try:
            async with link.answering(WRITE_S):
                if fresh:
                    pipe = link.client.pipeline(transaction=False)
                    for digest, data in fresh.items():
                        pipe.hset(link.key("documents"), digest, data)
                    await pipe.execute()
                answer = await self._script["commit"](
                    keys=[
                        link.key(name)
                        for name in ("meta", "versions", "stream", "documents", *_HASHES)
                    ],
                    args=arguments,
                )
        except MxError:
            # What came meanwhile is newer.
            self._fresh = {
                d: data for d, data in fresh.items() if d in self._documents
            } | self._fresh
            del self._own[token]  # if it is kept after all, it comes with the stream
            raise
        said = answer[0].decode()
        if said == "kept":
            async with self._following:
                if answer[1] == self._number + 1:
                    self._take(answer[1], token, draft, writes)
            if self._number < answer[1]:
                await self.catch_up()
            del self._own[token]
            return True
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

    def _arguments(self, draft: Draft) -> tuple[list[tuple[str, str, str]], list[Any]]:
        """Return what a draft writes, and the arguments of the script."""
        names, sources = draft.written_names(), draft.written_sources()
        now = self.clock()
        writes = [("names", name, encode(each) if each else "") for name, each in names.items()]
        fresh = [each for each, s in sources.items() if s and each not in self._sources]
        for source_id, listed in sources.items():
            kept = (self._listed_s.get(source_id, now), listed)
            writes.append(("sources", source_id, encode(kept) if listed else ""))
        writes += [("gone", each, encode(g) if g else "") for each, g in draft.gone.items()]
        read = [f"names:{name}" for name in {*draft.names, *names}]
        read += [f"sources:{each}" for each in {*draft.sources, *sources}]
        read += [f"gone:{each}" for each in {*draft.gone_read, *draft.gone}]
        documents = self._named(draft)
        leases = [(each, self._left_ms(draft.renewals.get(each), now)) for each in fresh]
        record = json.dumps(
            [
                writes,
                encode(tuple(draft.entries)),
                [[kind.value, address, by] for (kind, address), by in draft.counts.items()],
                leases,
                draft.epoch,
            ],
            separators=(",", ":"),
        )
        epoch, doubt = draft.epoch or ("", 0.0)
        flat: list[Any] = [
            self.epoch, f"{self._who[:8]}.{uuid.uuid4().hex[:16]}", record, len(draft.entries),
            _KEPT_COMMITS, self._link.key("lease:"), len(read),
        ]  # fmt: skip
        for field in read:
            flat += [field, self._versions.get(field, "")]
        flat += [len(draft.expired), *draft.expired, len(documents), *documents, len(writes)]
        for write in writes:
            flat += write
        flat.append(len(leases))
        for lease in leases:
            flat += lease
        return writes, [*flat, epoch, repr(doubt)]

    def _named(self, draft: Draft) -> set[bytes]:
        """Return the documents that a draft's entries come to name."""
        named: list[tuple[bytes, int]] = []
        for entry in draft.entries:
            if isinstance(entry, Answered):
                named += entry.ref.documents if entry.held else []
            elif isinstance(entry, Change) and entry.kind in (ChangeKind.UP, ChangeKind.CHANGED):
                named += entry.record.documents
        return {digest for digest, _ in named}

    def _left_ms(self, said: Renewal | None, now: float) -> int:
        left_s = self._lease_s if said is None else said.until_s - now
        return max(1, int(left_s * 1000))

    def _take(
        self, number: int, token: str, draft: Draft, writes: Sequence[tuple[str, str, str]]
    ) -> None:
        """Let a commit take effect in memory, the next one."""
        for kind, key, value in writes:
            field = f"{kind}:{key}"
            if value:
                self._versions[field] = token
            else:
                self._versions.pop(field, None)
            if kind == "sources":
                self._ended.discard(key)
                if value:
                    self._listed_s.setdefault(key, self.clock())
                else:
                    self._listed_s.pop(key, None)
                    self._renewals.pop(key, None)
        self._number, self._token = number, token
        self._apply(draft)

    # -- what other coordinators do ----------------------------------------------------------------

    async def catch_up(self) -> None:
        try:
            await self._catch_up()
        except _Missed as missed:
            await self._begin_again(lost=missed.lost)

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
                    raise _Missed(lost=self._is_lost(meta))

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
                raise _Missed(lost=False)
            if fields[b"before"].decode() != self._token:
                raise _Missed(lost=True)
            token = fields[b"token"].decode()
            draft, writes = self._own.get(token) or self._draft_of(fields[b"record"])
            await self._fetch(self._named(draft) - self._documents.keys())
            self._take(count, token, draft, writes)

    def _draft_of(self, record: bytes) -> tuple[Draft, list[tuple[str, str, str]]]:
        """Return what a commit of another coordinator writes."""
        writes, entries, counts, leases, epoch = json.loads(record)
        draft = Draft(now=self.clock(), entries=[*decode(entries)])
        for kind, key, text in writes:
            value = decode(text) if text else None
            if kind == "names":
                draft.names[key] = value
                draft.decided[key] = None
            elif kind == "sources":
                draft.sources[key] = value and value[1]
                if value:
                    self._listed_s.setdefault(key, value[0])
                draft.put[key] = None
            else:
                draft.gone[key] = value
        kinds = {kind.value: kind for kind in self._counts}
        for kind, address, by in counts:
            draft.counts[kinds[kind], address] = by
        for source_id, ttl_ms in leases:
            draft.renewals[source_id] = Renewal(draft.now + ttl_ms / 1000, 0, 0.0, True)
        draft.epoch = None if epoch is None else (epoch[0], float(epoch[1]))
        return draft, [(kind, key, text) for kind, key, text in writes]

    async def _begin_again(self, *, lost: bool) -> None:
        """Begin again with all that is in Redis. If that has `lost` some, in doubt."""
        expected = self.epoch
        async with self._following:
            doubt_until_s = self.clock() + self._lease_s if lost else None
            await self._read_all(doubt_until_s=doubt_until_s)
        if lost:
            event(
                log, "state.lost", level=logging.ERROR,
                text=f"{self._link.name} came back with less than it had: for "
                f"{self._lease_s:g} s names bind only to those who had them",
            )  # fmt: skip
        self._wake(begins_again=True)
        if lost and (self.epoch == expected or self.doubt_until_s <= self.clock()):
            await self._send(Draft(epoch=(uuid.uuid4().hex, self.clock() + self._lease_s)))

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
            except _Missed as missed:
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

    def _hear(self, records: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        for number, fields in records:
            self._beats_read = number.decode()
            if fields[b"who"].decode() == self._who:
                continue
            now = self.clock()
            for source_id, ttl_ms, readers, gb_per_s, first in json.loads(fields[b"said"]):
                if source_id in self._sources:
                    until_s = now + ttl_ms / 1000
                    MemoryStore.renew(
                        self, source_id, until_s, readers, gb_per_s, first=bool(first)
                    )

    # -- leases ------------------------------------------------------------------------------------

    def _silent_s(self) -> float:
        """Return for how long Redis has not answered."""
        return time.monotonic() - self._reached_s

    def check(self) -> None:
        silent_s = self._silent_s()
        if self._tasks and silent_s > READS_S:
            raise CoordinatorError(
                f"the coordinator has not reached its state for {silent_s:.0f} s: what it knows is "
                "too old",
                hint="another coordinator of this state may answer",
            )

    def renew(
        self, source_id: str, until_s: float, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        # A coordinator that is cut off lets sources go on to another one while their leases last.
        if self._draft is not None and self._trouble is not None and self._silent_s() > ANSWER_S:
            self._draft.refused = True
        else:
            super().renew(source_id, until_s, readers, gb_per_s, first=first)

    def _renew_kept(self, source_id: str, said: Renewal) -> None:
        super()._renew_kept(source_id, said)
        self._ended.discard(source_id)
        self._renewals[source_id] = said

    def _has_ended(self, source_id: str) -> bool:
        return source_id in self._ended

    async def _keep_rest(self) -> None:
        """Exchange leases with Redis, and see whether it still has what it had."""
        link, now = self._link, self.clock()
        renewals, self._renewals = self._renewals, {}
        overdue = [each for each in MemoryStore.due_sources(self, now) if each not in self._ended]
        # What was heard before that is old: sources may have gone on elsewhere since then.
        late = self._silent_s() > ANSWER_S
        silent = self._trouble is not None or late or not self._began
        arguments: list[Any] = [link.key("lease:"), self._who]
        said = [
            (each, self._left_ms(r, now), r.readers, r.gb_per_s, int(r.first))
            for each, r in renewals.items()
            if each in self._sources and not (late and r.until_s <= now)
        ]
        arguments.append(json.dumps(said) if said and not late else "")
        arguments.append(len(said) + len(self._sources) * silent)
        for source_id, ttl_ms, *_ in said:
            arguments += [source_id, ttl_ms, "late" if late else ""]
        if silent:
            # Leases could not be renewed: each one that has ended meanwhile gets a full period.
            for source_id in self._sources:
                arguments += [source_id, int(self._lease_s * 1000), "missing"]
        arguments += [len(overdue), *overdue]
        sent_s = time.monotonic()
        try:
            async with link.answering():
                answer = await self._script["exchange"](
                    keys=[link.key("meta"), link.key("beats")], args=arguments
                )
        except MxError:
            self._renewals = renewals | self._renewals
            raise
        (seconds, micros), full, meta, left_ms = answer
        self._reached_s, self._began = time.monotonic(), True
        ahead_s = int(seconds) + int(micros) / 1e6 - (sent_s + self._reached_s) / 2
        # Where the clock of Redis goes back, this one goes on, a little slower.
        self._ahead_s = max(ahead_s, self._ahead_s - _SLEW_S)
        for source_id, ttl_ms in zip(overdue, left_ms, strict=True):
            listed = self._sources.get(source_id)
            if ttl_ms == -2:
                self._ended.add(source_id)
            elif listed is not None:
                until_s = self.clock() + ttl_ms / 1000
                MemoryStore.renew(self, source_id, until_s, listed.readers, listed.gb_per_s)
        self._ended &= self._sources.keys()
        if not self._knows(meta) and self._is_lost(meta) and not self._following.locked():
            await self.catch_up()
        if self._dropped:
            await self._forget_documents()
        if full:
            raise link.full()

    async def _forget_documents(self) -> None:
        dropped = [digest for digest in self._dropped if digest not in self._documents]
        link = self._link
        async with link.answering():
            done = await self._script["forget"](
                keys=[link.key("meta"), link.key("documents")], args=[self._token, *dropped]
            )
        if done:
            self._dropped.difference_update(dropped)


def _decode_all(
    names: Mapping[bytes, bytes], sources: Mapping[bytes, bytes], gone: Mapping[bytes, bytes]
) -> tuple[list[Any], list[tuple[float, Listed]], dict[str, Any]]:
    return (
        [decode(each) for each in names.values()],
        [decode(each) for each in sources.values()],
        {key.decode(): decode(each) for key, each in gone.items()},
    )
