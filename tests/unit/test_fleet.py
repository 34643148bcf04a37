"""The fleet of replicas: what its events say leads to what it shows, in any order of news."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mx.core.pull_status import PullPhase, PullStatus
from mx.core.replicas import TRANSITIONS, EventKind, FleetEvent, Replica, ReplicaState, bits
from mx.core.types import ModelKey, SourceRecord, SourceRole, SourceState
from mx.fleet.known_replicas import RETURN_S, Fleet
from tests.support.records import make_record

LAYERS = 4
IDS = tuple(str(uuid.UUID(int=n)) for n in range(1, 5))


def source(
    source_id: str, held: tuple[tuple[int, int], ...] = ((0, LAYERS),), port: int = 0
) -> SourceRecord:
    whole = held == ((0, LAYERS),)
    record = make_record(
        [b"identity", b"layout"],
        source_id=source_id,
        held=held,
        role=SourceRole.ORIGIN if whole else SourceRole.RELAY,
        endpoint="10.0.0.7:7700",
    )
    return replace(record, requests_port=port)


def pull(pull_id: str, ready: int = 0, port: int = 0, **more: object) -> PullStatus:
    status = PullStatus(
        pull_id=pull_id,
        model=ModelKey("llama"),
        host="host-1",
        pid=7,
        phase=PullPhase.RUNNING,
        layers=LAYERS,
        ready=ready,
        nbytes=1000,
        done_bytes=250 * ready.bit_count(),
        seconds=1.0,
        requests_port=port,
        requests_host="10.0.0.8" if port else "",
    )
    return status._replace(**more)  # type: ignore[arg-type]


def kinds(events: list[FleetEvent]) -> list[str]:
    return [event.kind.value for event in events]


def test_what_is_there_first_is_known_before() -> None:
    fleet = Fleet()
    for again in (False, True):  # the watch begins, and begins again
        fleet.connected()
        there = fleet.source(source(IDS[0], ((0, 2 if again else 1),)))
        there += fleet.pull(pull(IDS[2 if again else 1], ready=0b11))
        assert len(there) >= 3 and all(event.known_before for event in there)
        assert not any(event.known_before for event in fleet.synced(0.0))
        now = fleet.pull(pull(IDS[3], ready=0b1)) + fleet.pull_gone(IDS[3])
        assert len(now) >= 3 and not any(event.known_before for event in now)
    fleet.connected()
    (lost,) = fleet.pull(pull(IDS[2], phase=PullPhase.FAILED))
    assert lost.kind is EventKind.LOST and not lost.known_before


def test_a_replica_answers_before_it_is_loaded_and_is_lost_when_its_pull_fails() -> None:
    fleet = Fleet()
    assert kinds(fleet.pull(pull(IDS[0]))) == ["replica_up"]
    events = fleet.pull(pull(IDS[0], 0b11, 8000))
    assert kinds(events) == ["layers_ready", "accepts_requests"]
    assert events[0].layers == (0, 1)
    assert events[-1].replica is not None
    assert events[-1].replica.requests == "10.0.0.8:8000"
    assert events[-1].replica.state is ReplicaState.ACCEPTING
    assert kinds(fleet.pull(pull(IDS[0], 0b1111, 8000))) == ["layers_ready", "fully_loaded"]
    assert fleet.replicas[0].state is ReplicaState.SERVING
    lost = fleet.pull(pull(IDS[0], 0b1111, phase=PullPhase.FAILED))
    assert kinds(lost) == ["lost"] and lost[0].reason == "its pull failed"
    assert fleet.replicas == ()


def test_a_source_with_a_port_serves_at_its_endpoints_host() -> None:
    fleet = Fleet()
    assert kinds(fleet.source(source(IDS[0], port=9000))) == [
        "replica_up", "source_up", "layers_ready", "accepts_requests", "fully_loaded",
    ]  # fmt: skip
    replica = fleet.replicas[0]
    assert (replica.requests, replica.endpoint) == ("10.0.0.7:9000", "10.0.0.7:7700")
    assert replica.origin and replica.fully_loaded and replica.accepts_requests


def test_a_held_pull_is_one_replica_whose_death_shows_before_its_lease_ends() -> None:
    fleet = Fleet()
    fleet.pull(pull(IDS[0], 0b1111, 8000))
    fleet.source(source(IDS[0], port=8000))
    assert len(fleet.replicas) == 1 and fleet.replicas[0].requests == "10.0.0.7:8000"
    # The stream of a process that dies ends at once.
    ended = pull(IDS[0], 0b1111, 0, phase=PullPhase.COMPLETE)
    assert kinds(fleet.pull(ended)) == ["stops_requests"]
    assert fleet.source(source(IDS[0], port=8000)) == []  # what its lease still says
    assert fleet.pull_gone(IDS[0]) == []
    assert kinds(fleet.source_gone(IDS[0], "lease expired")) == ["lost"]


def test_layers_that_are_replaced_are_not_ready_any_more() -> None:
    fleet = Fleet()
    fleet.pull(pull(IDS[0], 0b1111, 8000))
    other = ModelKey("llama", "main.2")
    events = fleet.pull(pull(IDS[0], 0b1, 8000, model=other))
    assert kinds(events) == ["loads_again", "layers_ready"]
    assert fleet.replicas[0].state is ReplicaState.ACCEPTING and fleet.replicas[0].model == other


def test_a_coordinator_that_restarts_loses_none_that_come_back_in_time() -> None:
    fleet = Fleet()
    fleet.connected()
    fleet.source(source(IDS[0]))
    fleet.pull(pull(IDS[1], 0b1))
    assert kinds(fleet.synced(0.0)) == ["synced"]
    fleet.connected()  # to one that knows nothing yet
    assert kinds(fleet.synced(100.0)) == ["synced"] and len(fleet.replicas) == 2
    assert fleet.source(source(IDS[0])) == []
    assert fleet.tick(100.0 + RETURN_S - 0.1) == []
    lost = fleet.tick(100.0 + RETURN_S)
    assert kinds(lost) == ["lost"] and lost[0].replica is not None
    assert lost[0].replica.replica_id == IDS[1]
    assert [replica.replica_id for replica in fleet.replicas] == [IDS[0]]


def test_pulls_of_files_and_more_replicas_than_the_limit_are_left_out() -> None:
    fleet = Fleet(limit=1)
    assert fleet.pull(pull(IDS[0], layers=0)) == []
    fleet.pull(pull(IDS[0]))
    assert fleet.pull(pull(IDS[1])) == [] and fleet.source(source(IDS[2])) == []
    assert len(fleet.replicas) == 1 and fleet.left_out == 2
    fleet.pull_gone(IDS[0])
    assert kinds(fleet.pull(pull(IDS[1]))) == ["replica_up"]


def test_ipv6_hosts_are_written_in_brackets() -> None:
    fleet = Fleet()
    fleet.pull(pull(IDS[0], 1, 8000, requests_host="fd00::1"))
    assert fleet.replicas[0].requests == "[fd00::1]:8000"


def test_ten_times_the_replicas_take_ten_times_the_work() -> None:
    def calls_for(count: int) -> int:
        fleet, ids = Fleet(), [str(uuid.UUID(int=n)) for n in range(count)]
        calls = 0

        def called(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(called)
        try:
            for each in ids:
                fleet.pull(pull(each, 0b11, 8000))
                fleet.source(source(each, ((0, 2),), 8000))
            told = fleet.told()
            for each in ids:
                fleet.pull_gone(each)
                fleet.source_gone(each, "deregistered")
        finally:
            sys.setprofile(None)
        assert len(told) == 4 * count and not fleet.replicas
        return calls

    small, large = calls_for(50), calls_for(500)
    assert large < 10.5 * small


@given(st.integers(0, 1 << 300))
def test_bits_are_the_indices_of_a_bit_set(ready: int) -> None:
    assert sum(1 << index for index in bits(ready)) == ready


def test_no_state_follows_the_last_one() -> None:
    assert not any(state is ReplicaState.LOST for state, _ in TRANSITIONS)
    for (state, kind), after in TRANSITIONS.items():
        assert state is not after and kind in EventKind


class Machine(RuleBasedStateMachine):
    """A watcher that believes the events alone knows at each time what the fleet shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.now = 0.0
        self.known: dict[str, Replica] = {}
        self.state: dict[str, ReplicaState] = {}
        self.ready: dict[str, int] = {}

    def take(self, events: list[FleetEvent]) -> None:
        for event in events:
            replica = event.replica
            if replica is None:
                assert event.kind is EventKind.SYNCED
                continue
            key = replica.replica_id
            if event.kind is EventKind.REPLICA_UP:
                assert key not in self.state
                self.state[key] = ReplicaState.RECEIVING
            self.state[key] = TRANSITIONS.get((self.state[key], event.kind), self.state[key])
            assert replica.state is self.state[key]
            self.known[key] = replica
            if event.kind is EventKind.LOST:
                del self.state[key], self.known[key]

    @rule(
        replica=st.sampled_from(IDS),
        held=st.sampled_from([((0, LAYERS),), ((0, 2),), ((1, 3),), ()]),
        port=st.sampled_from([0, 8000, 8001]),
        draining=st.booleans(),
    )
    def a_source(
        self, replica: str, held: tuple[tuple[int, int], ...], port: int, draining: bool
    ) -> None:
        state = SourceState.DRAINING if draining else SourceState.SERVING
        self.take(self.fleet.source(replace(source(replica, held, port), state=state)))

    @rule(replica=st.sampled_from(IDS))
    def a_source_goes(self, replica: str) -> None:
        self.take(self.fleet.source_gone(replica, "deregistered"))

    @rule(
        replica=st.sampled_from(IDS),
        ready=st.integers(0, (1 << LAYERS) - 1),
        port=st.sampled_from([0, 8000, 8001]),
        phase=st.sampled_from(PullPhase),
        revision=st.sampled_from(["main", "main.2"]),
    )
    def a_pull(self, replica: str, ready: int, port: int, phase: PullPhase, revision: str) -> None:
        model = ModelKey("llama", revision)
        self.take(self.fleet.pull(pull(replica, ready, port, phase=phase, model=model)))

    @rule(replica=st.sampled_from(IDS))
    def a_pull_goes(self, replica: str) -> None:
        self.take(self.fleet.pull_gone(replica))

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.fleet.connected()
        self.take(self.fleet.synced(self.now))

    @rule(seconds=st.floats(0.1, 2 * RETURN_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.fleet.tick(self.now))

    @invariant()
    def the_events_say_what_it_shows(self) -> None:
        shown = {replica.replica_id: replica for replica in self.fleet.replicas}
        assert shown.keys() == self.known.keys()
        for key, replica in shown.items():
            told = self.known[key]
            assert (told.state, told.requests, told.endpoint, told.ready) == (
                replica.state, replica.requests, replica.endpoint, replica.ready,
            )  # fmt: skip
            assert replica.accepts_requests == bool(replica.requests)
            assert replica.fully_loaded == (replica.layers_ready == replica.layers > 0)

    @invariant()
    def a_new_watcher_is_told_the_same(self) -> None:
        told: dict[str, Replica] = {}
        for event in self.fleet.told():
            assert event.known_before and event.replica is not None
            told[event.replica.replica_id] = event.replica
        assert tuple(told.values()) == self.fleet.replicas


TestFleetMachine = Machine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_replica_shows_the_numbers_of_its_layers() -> None:
    replica = Replica("id", ModelKey("llama"), "host-1", layers=8, ready=0b10010111)
    assert replica.ready_layers == (0, 1, 2, 4, 7)
    shown = repr(replace(replica, endpoint="10.0.0.7:7700"))
    assert shown == (
        "<Replica llama: receiving, layers 0-2, 4, 7 of 8, on host-1, read at 10.0.0.7:7700>"
    )
    assert "no layer of 8" in repr(replace(replica, ready=0))
