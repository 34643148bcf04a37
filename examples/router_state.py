"""What examples/router.py knows of the replicas: whom to send a request, the timeline, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mx

#: A replica that did not take a request is left alone for so long.
REST_S = 2.0
#: Replicas that are lost stay on the page; the oldest make room.
MAX_LOST = 32
#: A browser that has so many unread events is told to connect again.
MAX_QUEUE = 1024
#: The most requests and answers that a timeline shows.
MAX_MARKS = 200
_COUNTED = ("accepted_early", "answered", "failed")


@dataclass
class Known:
    """One replica, with the times of its layers and events in seconds since the router began."""

    replica: mx.Replica
    began_s: float
    layers: dict[int, float] = field(default_factory=dict)
    marks: list[tuple[str, float]] = field(default_factory=list)
    in_flight: int = 0
    rests_until_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


class Replicas:
    """Follows a watch's events; everything is called on one event loop."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._started_s = time.monotonic()
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._untold: set[str] = set()  # known before events were missed, and not told again
        self._connected = False
        self._events: Counter[str] = Counter()

    def now_s(self) -> float:
        """Return the seconds since the router began."""
        return round(time.monotonic() - self._started_s, 3)

    # -- events ---------------------------------------------------------------------------------

    def take(self, event: mx.FleetEvent) -> None:
        """Take up one event, and pass it on to the browsers."""
        now_s, kind = self.now_s(), event.kind.value
        self._events[kind] += 1
        if event.kind is mx.EventKind.SYNCED:
            self._connected = True
            self._lose_untold()
        elif event.kind is mx.EventKind.MISSED:
            self._untold = {key for key, known in self._known.items() if not _is_lost(known)}
        elif event.kind is mx.EventKind.DISCONNECTED:
            self._connected = False
        replica = event.replica
        if replica is None:
            self._publish({"kind": kind, "at_s": now_s, "reason": event.reason})
            return
        self._untold.discard(replica.replica_id)
        known = self._known.get(replica.replica_id)
        if known is None or event.kind is mx.EventKind.REPLICA_UP:
            known = self._known[replica.replica_id] = Known(replica, now_s)
        known.replica = replica
        for layer in event.layers:
            known.layers.setdefault(layer, now_s)
        if event.kind is mx.EventKind.LOADS_AGAIN:
            known.layers = {}
        elif event.kind is not mx.EventKind.LAYERS_READY:
            known.marks.append((kind, now_s))
            del known.marks[: -2 * MAX_MARKS]
        if event.kind is mx.EventKind.LOST:
            self._forget()
        self._publish({"kind": kind, "at_s": now_s, "replica": self._object(known)})

    def _lose_untold(self) -> None:
        """Lose what is gone without an event: it was among those that were missed."""
        for key in sorted(self._untold & self._known.keys()):
            gone = replace(self._known[key].replica, state=mx.ReplicaState.LOST, requests="")
            self.take(mx.FleetEvent(mx.EventKind.LOST, gone, reason="it is not there any more"))
        self._untold = set()

    def _forget(self) -> None:
        lost = [key for key, known in self._known.items() if _is_lost(known)]
        for key in lost[: max(0, len(lost) - MAX_LOST)]:
            del self._known[key]

    def _publish(self, message: dict[str, object]) -> None:
        text = json.dumps(message)
        for queue in list(self._queues):
            if queue.qsize() >= MAX_QUEUE:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(text)

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[str | None]]:
        """Yield a queue of JSON texts: what is there first, then every event; None: no more."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        queue.put_nowait(json.dumps({"kind": "all", "at_s": self.now_s(), **self.objects()}))
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    # -- requests -------------------------------------------------------------------------------

    def choose(self, tried: set[str]) -> mx.Replica | None:
        """Return the replica to send a request to: one that is fully loaded rather than one that
        loads, then the one with the fewest requests, then the one with the most layers."""
        now_s = time.monotonic()
        candidates = [
            known
            for key, known in self._known.items()
            if known.replica.accepts_requests and key not in tried and known.rests_until_s <= now_s
        ]
        if not candidates:
            return None
        best = min(
            candidates,
            key=lambda known: (
                not known.replica.fully_loaded,
                known.in_flight,
                -known.replica.layers_ready,
            ),
        )
        return best.replica

    @contextlib.contextmanager
    def in_flight(self, replica: mx.Replica) -> Iterator[None]:
        """Count a request to a replica while the block runs."""
        known = self._known[replica.replica_id]
        known.in_flight += 1
        self._mark(known, "sent")
        try:
            yield
        finally:
            known.in_flight -= 1

    def answered(self, replica: mx.Replica) -> None:
        """Record an answer; `replica` is as it was when the request was sent."""
        known = self._known.get(replica.replica_id)
        if known is not None:
            known.counts["answered"] += 1
            if not replica.fully_loaded:
                known.counts["accepted_early"] += 1
            self._mark(known, "answered")

    def _mark(self, known: Known, kind: str) -> None:
        at_s = self.now_s()
        known.marks.append((kind, at_s))
        requests = [mark for mark in known.marks if mark[0] in ("sent", "answered")]
        for mark in requests[:-MAX_MARKS]:
            known.marks.remove(mark)
        self._publish({"kind": kind, "at_s": at_s, "replica": self._object(known)})

    def failed(self, replica: mx.Replica) -> None:
        """Record that a replica did not answer: it rests for a while."""
        known = self._known.get(replica.replica_id)
        if known is not None:
            known.counts["failed"] += 1
            known.rests_until_s = time.monotonic() + REST_S

    # -- what is shown --------------------------------------------------------------------------

    def objects(self) -> dict[str, object]:
        """Return all replicas for JSON."""
        return {
            "model": self.model,
            "connected": self._connected,
            "now_s": self.now_s(),
            "replicas": [self._object(known) for known in self._known.values()],
        }

    @staticmethod
    def _object(known: Known) -> dict[str, object]:
        replica = known.replica
        return {
            "id": replica.replica_id,
            "model": str(replica.model),
            "host": replica.host,
            "state": replica.state.value,
            "origin": replica.origin,
            "endpoint": replica.endpoint,
            "requests": replica.requests,
            "accepts_requests": replica.accepts_requests,
            "fully_loaded": replica.fully_loaded,
            "layers": replica.layers,
            "layers_ready": replica.layers_ready,
            "nbytes": replica.nbytes,
            "done_bytes": replica.done_bytes,
            "began_s": known.began_s,
            "layer_s": known.layers,
            "marks": known.marks,
            "in_flight": known.in_flight,
            **{name: known.counts[name] for name in _COUNTED},
        }

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        lines = [
            "# HELP mx_router_connected Whether the coordinator answers.",
            "# TYPE mx_router_connected gauge",
            f"mx_router_connected {int(self._connected)}",
            "# HELP mx_router_events_total Events of the watch.",
            "# TYPE mx_router_events_total counter",
            *(f'mx_router_events_total{{kind="{kind}"}} {count}'
              for kind, count in sorted(self._events.items())),
        ]  # fmt: skip
        gauges = {
            "mx_replica_layers": "Layers of the model.",
            "mx_replica_layers_ready": "Layers that are there.",
            "mx_replica_accepts_requests": "Whether it takes requests.",
            "mx_replica_fully_loaded": "Whether every layer is there.",
            "mx_replica_in_flight": "Requests that it has now.",
        }
        there = [known for known in self._known.values() if not _is_lost(known)]
        for name, text in gauges.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            key = name.removeprefix("mx_replica_")
            for known in there:
                value = self._object(known)[key]
                lines.append(f"{name}{_labels(known)} {int(value)}")  # type: ignore[call-overload]
        for name in _COUNTED:
            lines.append(f"# TYPE mx_replica_requests_{name}_total counter")
            for known in self._known.values():
                lines.append(
                    f"mx_replica_requests_{name}_total{_labels(known)} {known.counts[name]}"
                )
        return "\n".join(lines) + "\n"


def _is_lost(known: Known) -> bool:
    return known.replica.state is mx.ReplicaState.LOST


def _labels(known: Known) -> str:
    replica = known.replica
    texts = {"replica": replica.replica_id, "host": replica.host, "model": str(replica.model)}
    quoted = (f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in texts.items())
    return "{" + ",".join(quoted) + "}"
