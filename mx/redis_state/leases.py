"""Leases in Redis, and its clock.

A lease is a key with a time to live, which heartbeats renew in batches: a source is gone when Redis
says so, whatever coordinators do. The clock is that of Redis; where that is set, it goes on.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mx.coordinator.stores.draft import Renewal
from mx.coordinator.stores.kept import PERIOD_S, KeptStore
from mx.core.memory_store import MemoryStore
from mx.errors import CoordinatorError, MxError
from mx.redis_state.link import ANSWER_S, RedisLink
from mx.redis_state.scripts import BEGIN, COMMIT, EXCHANGE, FORGET, RESET

#: Where no coordinator has reached Redis for longer, leases could not be renewed; for short ones
#: it is a part of a lease.
_OUTAGE_S, _OUTAGE_PART = 1.0, 6
#: By how much the clock may be put back in one exchange.
_SLEW_S = 0.01
#: How long questions are answered without Redis.
READS_S = 60.0


class LeasedStore(KeptStore):
    """The part of a store in Redis that has the leases and the clock."""

    def __init__(self, url: str, *, lease_s: float) -> None:
        """
        Args:
            url: See `RedisLink`.
            lease_s: How long a lease lasts for which nothing has been heard.

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
                ("reset", RESET),
            )
        }  # fmt: skip
        self._lease_s = lease_s
        # Several times in the shortest lease: a third of this one.
        self._period_s = min(PERIOD_S, lease_s / 12)
        self._outage_s = min(_OUTAGE_S, lease_s / _OUTAGE_PART)
        self._who = uuid.uuid4().hex
        self._ahead_s = -math.inf  # of this process's clock
        self._last_s = 0.0
        self._reached_s = time.monotonic()
        self._exchanged_s: float | None = None  # when Redis was asked last, and could write
        self._renewals: dict[str, Renewal] = {}
        self._ended: set[str] = set()  # sources whose leases have ended in Redis
        self._beats_read = "0-0"

    def _time(self) -> float:
        self._last_s = max(self._last_s, time.monotonic() + self._ahead_s)
        return self._last_s

    async def _hear_from_here(self) -> None:
        """Heed what other coordinators say from here on."""
        async with self._link.answering():
            beats = await self._link.client.xrevrange(self._link.key("beats"), count=1)
        self._beats_read = beats[0][0].decode() if beats else "0-0"

    def _silent_s(self) -> float:
        """Return for how long Redis has not answered, or could not be followed."""
        return time.monotonic() - self._reached_s

    def check(self) -> None:
        silent_s = self._silent_s()
        if self._tasks and silent_s > READS_S:
            raise CoordinatorError(
                f"the coordinator has not followed its state for {silent_s:.0f} s: what it knows "
                "is too old",
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

    def resume(self, until_s: float) -> None:
        pass  # others may have renewed them; else the first exchange has extended them

    def _renew_kept(self, source_id: str, said: Renewal) -> None:
        super()._renew_kept(source_id, said)
        self._ended.discard(source_id)
        self._renewals[source_id] = said

    def _has_ended(self, source_id: str) -> bool:
        return source_id in self._ended

    def _left_ms(self, said: Renewal | None, now: float) -> int:
        left_s = self._lease_s if said is None else said.until_s - now
        return max(1, int(left_s * 1000))

    def _hear(self, records: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Heed the heartbeats that other coordinators say."""
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

    async def _exchange(self) -> tuple[Sequence[bytes | None], str]:
        """Exchange leases with Redis, and learn its time.

        Returns:
            The epoch, the number and the token of its last commit; and why it cannot be written,
            "" if it can.
        """
        link, now = self._link, self.clock()
        renewals, self._renewals = self._renewals, {}
        overdue = [each for each in MemoryStore.due_sources(self, now) if each not in self._ended]
        # What was heard before that is old: sources may have gone on elsewhere since then.
        late = self._silent_s() > ANSWER_S
        said = [
            (each, self._left_ms(r, now), r.readers, r.gb_per_s, int(r.first))
            for each, r in renewals.items()
            if each in self._sources and not (late and r.until_s <= now)
        ]
        sent_s = time.monotonic()
        since_ms = here_ms = -1
        if self._exchanged_s is not None:
            since_ms = int((sent_s - self._exchanged_s) * 1000) + 1
            here_ms = int(now * 1000)
        arguments: list[Any] = [
            link.key("lease:"), self._who, json.dumps(said) if said and not late else "",
            int(self._lease_s * 1000), since_ms, here_ms, int(self._outage_s * 1000), len(said),
        ]  # fmt: skip
        for source_id, ttl_ms, *_ in said:
            arguments += [source_id, ttl_ms, "late" if late else ""]
        arguments += [len(overdue), *overdue]
        try:
            async with link.answering():
                answer = await self._script["exchange"](
                    keys=[link.key(name) for name in ("meta", "beats", "sources", "spared")],
                    args=arguments,
                )
        except MxError:
            self._renewals = renewals | self._renewals
            raise
        clock_ms, refused, meta, left_ms = answer
        ahead_s = clock_ms / 1000 - (sent_s + time.monotonic()) / 2
        if not refused:
            self._exchanged_s = sent_s
        # An answer that took long seems to go back: this clock goes on, a little slower.
        self._ahead_s = max(ahead_s, self._ahead_s - _SLEW_S)
        for source_id, ttl_ms in sorted(
            zip(overdue, left_ms, strict=True), key=lambda each: int(each[1])
        ):
            listed = self._sources.get(source_id)
            if ttl_ms == -2:
                self._ended.add(source_id)
            elif listed is not None:
                until_s = self.clock() + ttl_ms / 1000
                MemoryStore.renew(self, source_id, until_s, listed.readers, listed.gb_per_s)
        self._ended &= self._sources.keys()
        return meta, refused.decode(errors="replace")
