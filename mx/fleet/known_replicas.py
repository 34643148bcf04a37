"""The replicas of a model, from what the coordinator says of sources and pulls. Pure; `now` is an
argument.

Both kinds of news come in any order. A replica is known while either is there. Which port it takes
requests at is what was said last: a process that dies is missed as a pull at once, and as a source
only when its lease ends.

A coordinator that restarts knows nothing at first. What was known before stays until the sources
and pulls have had the time to come back (`RETURN_S`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mx.core.pull_status import PullPhase, PullStatus
from mx.core.replicas import TRANSITIONS, EventKind, FleetEvent, Replica, ReplicaState, bits
from mx.core.types import SourceRecord, SourceRole, SourceState
from mx.fleet.allowed import AllowedHosts

#: How long replicas have to come back after the coordinator did.
RETURN_S = 10.0
#: The most replicas; what comes beyond is left out.
MAX_REPLICAS = 20_000


@dataclass(slots=True)
class _KnownReplica:
    """What is known of one replica. `source_seen` and `pull_seen` are the numbers of the
    connections to the coordinator over which the record and the status came."""

    shown: Replica
    source: SourceRecord | None = None
    pull: PullStatus | None = None
    source_seen: int = 0
    pull_seen: int = 0


class Fleet:
    """The machine. Not thread-safe. Each method returns the events that follow, in order."""

    def __init__(self, limit: int = MAX_REPLICAS, allow: AllowedHosts | None = None) -> None:
        self._limit = limit
        self._allow = allow
        self._known: dict[str, _KnownReplica] = {}
        self._connection = 0
        self._syncing = False
        self._returned_s = math.inf
        #: How many replicas were left out, since there are too many.
        self.left_out = 0

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that are not lost, the one that came first at first."""
        return tuple(known.shown for known in self._known.values())

    def told(self) -> list[FleetEvent]:
        """Return the events that tell a new watcher what is there."""
        return [event for known in self._known.values() for event in _story(known.shown)]

    # -- the connection -------------------------------------------------------------------------

    def connected(self) -> None:
        """Begin to take a snapshot from a new connection to the coordinator."""
        self._connection += 1
        self._syncing = True
        self._returned_s = math.inf

    def synced(self, now: float) -> list[FleetEvent]:
        """Record the end of the snapshot: what is not in it may still come back for a while."""
        self._returned_s = now + RETURN_S
        self._syncing = False
        return [*self.tick(now), FleetEvent(EventKind.SYNCED)]

    def tick(self, now: float) -> list[FleetEvent]:
        """Advance the clock: replicas that have not come back are lost."""
        if now < self._returned_s:
            return []
        self._returned_s = math.inf
        events = []
        for replica_id, known in list(self._known.items()):
            source = known.source if known.source_seen == self._connection else None
            pull = known.pull if known.pull_seen == self._connection else None
            if (source, pull) != (known.source, known.pull):
                why = "it did not come back to the coordinator"
                events += self._changed(replica_id, known, source, pull, why)
        return events

    @property
    def due_s(self) -> float:
        """When `tick` has something to do."""
        return self._returned_s

    # -- news -----------------------------------------------------------------------------------

    def source(self, record: SourceRecord) -> list[FleetEvent]:
        """Record what a source registers now."""
        known = self._get(record.source_id, _of_source(record))
        if known is None:
            return []
        known.source_seen = self._connection
        return self._changed(record.source_id, known, record, known.pull)

    def source_gone(self, source_id: str, reason: str) -> list[FleetEvent]:
        """Record that a source is no longer listed."""
        known = self._known.get(source_id)
        if known is None:
            return []
        return self._changed(source_id, known, None, known.pull, reason)

    def pull(self, status: PullStatus) -> list[FleetEvent]:
        """Record what a pull reports now."""
        if status.phase is PullPhase.FAILED:
            return self.pull_gone(status.pull_id, "its pull failed")
        if not status.layers:  # of files only, or not known yet
            return []
        known = self._get(status.pull_id, _of_pull(status))
        if known is None:
            return []
        known.pull_seen = self._connection
        return self._changed(status.pull_id, known, known.source, status)

    def pull_gone(self, pull_id: str, reason: str = "") -> list[FleetEvent]:
        """Record that a pull reports no more."""
        known = self._known.get(pull_id)
        if known is None or known.pull is None:
            return []
        if not reason:
            complete = known.pull.phase is PullPhase.COMPLETE
            reason = "its process has closed the pull" if complete else "it reports no more"
        return self._changed(pull_id, known, known.source, None, reason)

    # -- inside ---------------------------------------------------------------------------------

    def _get(self, replica_id: str, new: Replica) -> _KnownReplica | None:
        known = self._known.get(replica_id)
        if known is None:
            if len(self._known) >= self._limit:
                self.left_out += 1
                return None
            known = self._known[replica_id] = _KnownReplica(new)
        return known

    def _changed(
        self,
        replica_id: str,
        known: _KnownReplica,
        source: SourceRecord | None,
        pull: PullStatus | None,
        reason: str = "",
    ) -> list[FleetEvent]:
        before, is_new = known.shown, known.source is None and known.pull is None
        requests, allowed = _requests(known, source, pull), True
        if self._allow is not None:
            endpoint = "" if source is None else source.endpoint
            allowed = all(map(self._allow.allows_endpoint, (endpoint, requests)))
        known.source, known.pull = source, pull
        if source is None and pull is None:
            del self._known[replica_id]
            lost = replace(before, state=ReplicaState.LOST, endpoint="", requests="")
            return [FleetEvent(EventKind.LOST, lost, reason=reason)]
        after = _merged(before, source, pull, requests if allowed else "")
        after = replace(after, allowed=allowed)
        first = replace(_bare(after), state=ReplicaState.RECEIVING)
        events = list(_steps(first if is_new else before, after, is_new=is_new))
        known.shown = events[-1].replica or after if events else after
        return [replace(each, known_before=self._syncing) for each in events]


def _requests(known: _KnownReplica, source: SourceRecord | None, pull: PullStatus | None) -> str:
    """Return where requests go: what has changed last counts, of both what a source registers."""
    found = known.shown.requests
    if _at(pull) != _at(known.pull):
        found = _at(pull)
    if _at(source) != _at(known.source):
        found = _at(source) or _at(pull)
    return found


def _at(known: SourceRecord | PullStatus | None) -> str:
    return "" if known is None else known.requests


def _of_source(record: SourceRecord) -> Replica:
    host = record.place.hostname or record.endpoint.rpartition(":")[0]
    return Replica(record.source_id, record.model, host)


def _of_pull(status: PullStatus) -> Replica:
    return Replica(status.pull_id, status.model, status.host)


def _merged(
    before: Replica, source: SourceRecord | None, pull: PullStatus | None, requests: str
) -> Replica:
    """Return the replica without its state, which `_steps` finds."""
    layers = ready = 0
    after = replace(before, requests=requests)
    if source is not None:
        layers = _layers_of(source)
        ready = sum((1 << end) - (1 << begin) for begin, end in source.table.held)
        whole = source.role is SourceRole.ORIGIN or (pull is None and source.whole)
        nbytes = source.table.nbytes
        after = replace(
            after,
            model=source.model,
            endpoint=source.endpoint if source.state is SourceState.SERVING else "",
            origin=source.role is SourceRole.ORIGIN,
            nbytes=nbytes,
            done_bytes=nbytes if whole else before.done_bytes,
        )
    else:
        after = replace(after, endpoint="")
    if pull is not None:
        layers, ready = max(layers, pull.layers), ready | pull.ready
        after = replace(
            after,
            model=pull.model if source is None else after.model,
            nbytes=pull.nbytes,
            done_bytes=pull.done_bytes,
            gb_per_s=pull.gb_per_s,
        )
    else:
        after = replace(after, gb_per_s=0.0)
    return replace(after, layers=layers, ready=ready)


def _layers_of(source: SourceRecord) -> int:
    spans = [region.layers for region in source.table.regions if region.layers]
    held = source.table.held[-1][1] if source.table.held else 0
    return source.table.layer_count or max([held, *(end for _, end in spans)])


def _bare(replica: Replica) -> Replica:
    return replace(replica, endpoint="", requests="", ready=0)


def _story(after: Replica) -> Iterator[FleetEvent]:
    """Yield the events that lead to what a replica is, for a watcher that knows nothing of it."""
    before = replace(_bare(after), state=ReplicaState.RECEIVING)
    for event in _steps(before, after, is_new=True):
        yield replace(event, known_before=True)


def _steps(before: Replica, after: Replica, *, is_new: bool) -> Iterator[FleetEvent]:
    """Yield the events between two moments of a replica, each with its state from then on."""
    state = before.state
    loaded = 0 < after.layers == after.layers_ready

    def event(kind: EventKind, layers: tuple[int, ...] = ()) -> FleetEvent:
        nonlocal state
        state = TRANSITIONS.get((state, kind), state)
        return FleetEvent(kind, replace(after, state=state), layers)

    if is_new:
        yield event(EventKind.REPLICA_UP)
    was_loaded = state in (ReplicaState.LOADED, ReplicaState.SERVING)
    if before.ready & ~after.ready or (was_loaded and not loaded):
        yield event(EventKind.LOADS_AGAIN)
    if after.endpoint != before.endpoint:
        yield event(EventKind.SOURCE_UP if after.endpoint else EventKind.SOURCE_DOWN)
    fresh = after.ready & ~before.ready if after.model == before.model else after.ready
    if fresh:
        yield event(EventKind.LAYERS_READY, bits(fresh))
    if after.requests != before.requests:
        if before.requests:
            yield event(EventKind.STOPS_REQUESTS)
        if after.requests:
            yield event(EventKind.ACCEPTS_REQUESTS)
    if loaded and state in (ReplicaState.RECEIVING, ReplicaState.ACCEPTING):
        yield event(EventKind.FULLY_LOADED)
