"""The pull machine: any order of events, with losses, duplicates and liars."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.pull import (
    MAX_CORRUPT,
    Assign,
    Command,
    Complete,
    DropLane,
    Fail,
    LayerReady,
    PullMachine,
)
from mx.core.types import ChunkGrid, Layer, Layout
from mx.errors import ClosedError, DigestError, PeerLostError, PeerProtocolError
from mx.units import MIB, align_up


def grid_of(layer_mib: Sequence[int]) -> ChunkGrid:
    layers, base = [], 0
    for index, mib in enumerate(layer_mib):
        nbytes = mib * MIB
        runs = ((0, nbytes),) if nbytes else ()
        layers.append(Layer(index, f"layer.{index}", nbytes, base, runs))
        base += align_up(nbytes, 4096)
    return ChunkGrid(Layout(layers, []), MIB)


class Driver:
    """Plays the shell: keeps the books of what was commanded and checks them on the way."""

    def __init__(self, machine: PullMachine, n_chunks: int) -> None:
        self.machine = machine
        self.in_flight: dict[int, int] = {}  # chunk -> lane
        self.done: set[int] = set()
        self.ready: list[int] = []
        self.dropped: list[int] = []
        self.lost: set[int] = set()
        self.completed = 0
        self.failed: Fail | None = None
        self.n_chunks = n_chunks

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Assign(lane, chunks):
                    for chunk in chunks:
                        assert chunk not in self.in_flight, "read twice at once"
                        assert chunk not in self.done, "read again"
                        assert lane not in self.lost
                        self.in_flight[chunk] = lane
                case LayerReady(layer):
                    assert layer not in self.ready
                    self.ready.append(layer)
                case Complete():
                    self.completed += 1
                    assert len(self.done) == self.n_chunks
                case DropLane(lane, _):
                    self.lost.add(lane)
                    self.dropped.append(lane)
                case Fail():
                    assert self.failed is None
                    self.failed = command

    def verified(self, chunk: int) -> None:
        lane = self.in_flight.pop(chunk)
        self.done.add(chunk)
        self.take(self.machine.chunk_verified(lane, chunk))


@given(
    layers=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    depths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_every_chunk_lands_once_whatever_happens(
    layers: list[int], depths: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    grid = grid_of(layers)
    machine = PullMachine(grid)
    driver = Driver(machine, len(grid))
    driver.take(machine.start())
    alive = set()
    for lane, depth in enumerate(depths):
        driver.take(machine.add_lane(lane, depth))
        alive.add(lane)
    driver.take(machine.no_more_lanes())
    survivor = 0  # never lost and never lies, so the pull must end well
    lies = dict.fromkeys(alive, 0)
    while driver.in_flight:
        assert not driver.completed
        chunk = rng.choice(sorted(driver.in_flight))
        lane = driver.in_flight[chunk]
        event = rng.random()
        if event < 0.5 or lane == survivor:
            driver.verified(chunk)
        elif lane in driver.lost:
            driver.in_flight.pop(chunk)
            driver.take(machine.chunk_failed(lane, chunk, ClosedError("closed")))
        elif event < 0.8:
            driver.in_flight.pop(chunk)
            driver.take(machine.chunk_failed(lane, chunk, PeerProtocolError("no")))
        elif event < 0.9:
            driver.in_flight.pop(chunk)
            lies[lane] += 1
            driver.take(machine.chunk_failed(lane, chunk, DigestError("wrong")))
            assert (lies[lane] >= MAX_CORRUPT) == (lane in driver.dropped)
        else:
            # Its reads end one by one: until then nobody else may be asked for those chunks.
            driver.lost.add(lane)
            driver.take(machine.lane_lost(lane, PeerLostError("gone")))
            assert machine.lane_lost(lane, PeerLostError("gone")) == []
        for number in alive:
            held = [c for c, n in driver.in_flight.items() if n == number]
            assert len(held) <= depths[number]
    assert driver.failed is None
    assert driver.done == set(range(len(grid)))
    assert driver.completed == 1
    assert sorted(driver.ready) == list(range(len(layers)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_chunks_are_asked_for_in_order_and_layers_become_ready_in_order(layers: list[int]) -> None:
    grid = grid_of(layers)
    machine = PullMachine(grid)
    driver = Driver(machine, len(grid))
    driver.take(machine.start())
    driver.take(machine.add_lane(0, 1))
    asked = []
    while driver.in_flight:
        (chunk,) = driver.in_flight
        asked.append(chunk)
        driver.verified(chunk)
    assert asked == list(range(len(grid)))
    with_bytes = [layer for layer in driver.ready if layers[layer]]
    assert with_bytes == sorted(with_bytes)
    assert driver.completed == 1


def test_a_wrong_chunk_is_asked_of_another_source() -> None:
    machine = PullMachine(grid_of([1]))
    machine.start()
    (first,) = machine.add_lane(0, 1)
    assert first == Assign(0, (0,))
    assert machine.add_lane(1, 1) == []
    commands = machine.chunk_failed(0, 0, DigestError("wrong"))
    assert commands == [Assign(1, (0,))]
    assert machine.retries == 1


def test_the_only_source_is_asked_again_and_dropped_at_the_second_lie() -> None:
    machine = PullMachine(grid_of([1]))
    machine.start()
    machine.add_lane(0, 1)
    machine.no_more_lanes()
    lie = DigestError("wrong")
    assert machine.chunk_failed(0, 0, lie) == [Assign(0, (0,))]
    dropped, failed = machine.chunk_failed(0, 0, lie)
    assert dropped == DropLane(0, lie)
    assert isinstance(failed, Fail)
    assert lie in failed.causes
    assert machine.ended


def test_loss_of_the_last_lane_waits_while_another_may_come() -> None:
    machine = PullMachine(grid_of([2]))
    machine.start()
    machine.add_lane(0, 2)
    gone = PeerLostError("gone")
    assert machine.lane_lost(0, gone) == []
    assert machine.add_lane(1, 2) == []  # the lost lane may still write where the chunks lie
    assert machine.chunk_failed(0, 1, gone) == [Assign(1, (1,))]
    assert machine.chunk_failed(0, 0, gone) == [Assign(1, (0,))]
    machine.no_more_lanes()
    assert machine.lane_lost(1, gone) == []
    assert machine.chunk_verified(1, 0) == []
    assert machine.chunk_failed(1, 1, gone) == [Fail((gone, gone))]
    assert machine.retries == 3


def test_the_last_read_of_a_lost_lane_may_complete_the_pull() -> None:
    machine = PullMachine(grid_of([1]))
    machine.start()
    machine.add_lane(0, 1)
    machine.no_more_lanes()
    assert machine.lane_lost(0, PeerLostError("gone")) == []
    assert machine.chunk_verified(0, 0) == [LayerReady(0), Complete()]


def test_what_is_left_when_a_lost_lane_has_ended_is_not_waited_for() -> None:
    machine = PullMachine(grid_of([2]))
    machine.start()
    machine.add_lane(0, 1)
    machine.no_more_lanes()
    gone = PeerLostError("gone")
    assert machine.lane_lost(0, gone) == []
    assert machine.chunk_verified(0, 0) == [Fail((gone,))]


def test_a_read_that_keeps_failing_ends_its_lane() -> None:
    machine = PullMachine(grid_of([1]))
    machine.start()
    machine.add_lane(0, 1)
    machine.no_more_lanes()
    commands: list[Command] = []
    for _ in range(10):
        commands = machine.chunk_failed(0, 0, PeerProtocolError("no"))
        if machine.ended:
            break
    assert isinstance(commands[-1], Fail)


def test_a_model_without_bytes_is_complete_at_once() -> None:
    machine = PullMachine(grid_of([0, 0]))
    assert machine.start() == [LayerReady(0), LayerReady(1), Complete()]
    assert machine.add_lane(0, 4) == []


def test_lanes_that_hold_only_some_layers_get_only_those() -> None:
    machine = PullMachine(grid_of([1, 1]))
    machine.start()
    assert machine.add_lane(0, 4, holds=lambda layer: layer == 1) == [Assign(0, (1,))]
    assert machine.add_lane(1, 4, holds=lambda layer: layer == 0) == [Assign(1, (0,))]


def test_abort_ends_it_once() -> None:
    machine = PullMachine(grid_of([1]))
    machine.start()
    cause = PeerLostError("enough")
    assert machine.abort(cause) == [Fail((cause,))]
    assert machine.abort(cause) == []
    assert machine.add_lane(0, 1) == []


def test_one_number_is_one_lane() -> None:
    machine = PullMachine(grid_of([1]))
    machine.add_lane(0, 1)
    with pytest.raises(ValueError, match="there already"):
        machine.add_lane(0, 1)
