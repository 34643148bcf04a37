"""A replica as routers see it: its states in a table, and what a change of it means. Pure.

A replica is a process that receives a model, holds it, or both. It is known by what it registers as
a source and by what it reports as a pull, under one id. Whether it takes requests and whether all
of the model is there are two things: an engine may answer while layers still arrive.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mx.core.holdings import ranges_of
from mx.core.types import ModelKey


class ReplicaState(enum.Enum):
    """What may be sent to a replica.

    RECEIVING and LOADED take no requests; ACCEPTING takes them while layers still arrive; SERVING
    has every layer and takes them. LOST is final: the same process may come back as a new replica.
    """

    RECEIVING = "receiving"
    ACCEPTING = "accepting"
    LOADED = "loaded"
    SERVING = "serving"
    LOST = "lost"


class EventKind(enum.Enum):
    """The kind of an event of a watch.

    REPLICA_UP is the first of a replica. SOURCE_UP: it can be read from, maybe in part;
    SOURCE_DOWN: it can't any more. LAYERS_READY names the layers that have become ready.
    LOADS_AGAIN: layers that were there are not any more, since others replace them. DISCONNECTED:
    the coordinator does not answer, and what was told stays true as far as is known. SYNCED: the
    coordinator has told everything that it knows. MISSED: the watch was read too slowly, and tells
    everything again up to the next SYNCED; a replica that it does not tell again is gone.
    """

    REPLICA_UP = "replica_up"
    SOURCE_UP = "source_up"
    SOURCE_DOWN = "source_down"
    LAYERS_READY = "layers_ready"
    ACCEPTS_REQUESTS = "accepts_requests"
    STOPS_REQUESTS = "stops_requests"
    FULLY_LOADED = "fully_loaded"
    LOADS_AGAIN = "loads_again"
    LOST = "lost"
    DISCONNECTED = "disconnected"
    SYNCED = "synced"
    MISSED = "missed"


_S, _E = ReplicaState, EventKind

#: The next state by state and event. Events that are not here change no state.
TRANSITIONS: dict[tuple[ReplicaState, EventKind], ReplicaState] = {
    (_S.RECEIVING, _E.ACCEPTS_REQUESTS): _S.ACCEPTING,
    (_S.RECEIVING, _E.FULLY_LOADED): _S.LOADED,
    (_S.ACCEPTING, _E.STOPS_REQUESTS): _S.RECEIVING,
    (_S.ACCEPTING, _E.FULLY_LOADED): _S.SERVING,
    (_S.LOADED, _E.ACCEPTS_REQUESTS): _S.SERVING,
    (_S.LOADED, _E.LOADS_AGAIN): _S.RECEIVING,
    (_S.SERVING, _E.STOPS_REQUESTS): _S.LOADED,
    (_S.SERVING, _E.LOADS_AGAIN): _S.ACCEPTING,
    **{(state, _E.LOST): _S.LOST for state in ReplicaState if state is not _S.LOST},
}


@dataclass(frozen=True, slots=True, repr=False)
class Replica:
    """One replica at one moment.

    `endpoint` is the HOST:PORT at which others read the weights, "" if they can't. `requests` is
    the HOST:PORT at which it takes requests, as the replica itself says, "" if it takes none.
    `ready` is a bit set: bit i is layer i of `layers`, which is 0 until the model is known;
    `ready_layers` are their numbers.
    `gb_per_s` is the recent rate at which it receives. `origin` is True if it had all layers before
    it was known. `allowed` is False for one at a host that the router's `allow` leaves out: then
    `requests` is "", whatever it says.
    """

    replica_id: str
    model: ModelKey
    host: str
    state: ReplicaState = ReplicaState.RECEIVING
    endpoint: str = ""
    requests: str = ""
    layers: int = 0
    ready: int = 0
    nbytes: int = 0
    done_bytes: int = 0
    gb_per_s: float = 0.0
    origin: bool = False
    allowed: bool = True

    def __repr__(self) -> str:
        """One line: the model, the state, the ready layers, and where it is."""
        runs = ", ".join(
            str(begin) if end == begin + 1 else f"{begin}-{end - 1}"
            for begin, end in ranges_of(self.ready_layers)
        )
        held = f"layers {runs} of {self.layers}" if runs else f"no layer of {self.layers}"
        texts = [
            f"{self.model}: {self.state.value}, {held}",
            f"on {self.host}" if self.host else "",
        ]
        texts += [f"read at {self.endpoint}" if self.endpoint else ""]
        texts += [f"requests at {self.requests}" if self.requests else ""]
        return f"<Replica {', '.join(filter(None, texts))}>"

    @property
    def ready_layers(self) -> tuple[int, ...]:
        """The numbers of the ready layers, ascending."""
        return bits(self.ready)

    @property
    def layers_ready(self) -> int:
        """The number of ready layers."""
        return self.ready.bit_count()

    @property
    def accepts_requests(self) -> bool:
        """True while it takes requests."""
        return self.state in (ReplicaState.ACCEPTING, ReplicaState.SERVING)

    @property
    def fully_loaded(self) -> bool:
        """True while every layer is there."""
        return self.state in (ReplicaState.LOADED, ReplicaState.SERVING)


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """One event of a watch, with the replica as it is from then on (None for those of the watch
    itself).

    `layers` are those of LAYERS_READY, ascending. `known_before` is True for what comes before
    SYNCED, of the watch's beginning or of a new one: it tells what is there, and not that it
    happens now. (LOST always happens now.)
    """

    kind: EventKind
    replica: Replica | None = None
    layers: tuple[int, ...] = ()
    reason: str = ""
    known_before: bool = False


def bits(ready: int) -> tuple[int, ...]:
    """Return the indices of a bit set, ascending."""
    text = bin(ready)[:1:-1]
    return tuple(index for index, bit in enumerate(text) if bit == "1")
