"""The pull machine: any order of events, with losses, duplicates and liars."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    Check,
    Command,
    Complete,
    DropConnection,
    Fail,
    LayerReady,
)
from mx.core.types import ChunkGrid, Layer, Layout
from mx.errors import (
    ClosedError,
    DigestError,
    MxError,
    PathSlowError,
    PeerLostError,
    PeerProtocolError,
)
from mx.units import MIB, align_up


def grid_of(layer_mib: Sequence[int], chunk_mib: int = 1) -> ChunkGrid:
    layers, base = [], 0
    for index, mib in enumerate(layer_mib):
        nbytes = mib * MIB
        runs = ((0, nbytes),) if nbytes else ()
        layers.append(Layer(index, f"layer.{index}", nbytes, base, runs))
        base += align_up(nbytes, 4096)
    return ChunkGrid(Layout(layers, []), chunk_mib * MIB)


class Driver:
    """Plays the shell: keeps the books of what was commanded and checks them on the way."""

    def __init__(self, machine: TransferMachine, grid: ChunkGrid) -> None:
        self.machine = machine
        self.grid = grid
        self.in_flight: dict[Part, int] = {}  # -> lane
        self.covered: dict[int, set[int]] = {}  # chunk -> blocks in flight or landed
        self.to_check: list[int] = []
        self.done: set[int] = set()
        self.ready: list[int] = []
        self.dropped: list[int] = []
        self.lost: set[int] = set()
        self.completed = 0
        self.failure: Fail | None = None
        self.now_s = 0.0

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Assign(connection, parts):
                    assert connection not in self.lost
                    for part in parts:
                        self._asked(part, connection)
                case Check(chunk):
                    assert len(self.covered[chunk]) == -(-self.grid[chunk].nbytes // MIB)
                    assert chunk not in [part.chunk for part in self.in_flight]
                    self.to_check.append(chunk)
                case LayerReady(layer):
                    assert layer not in self.ready
                    self.ready.append(layer)
                case Complete():
                    self.completed += 1
                    assert len(self.done) == len(self.grid)
                case DropConnection(connection, _):
                    self.lost.add(connection)
                    self.dropped.append(connection)
                case Fail():
                    assert self.failure is None
                    self.failure = command

    def _asked(self, part: Part, connection: int) -> None:
        assert part.chunk not in self.done, "read again"
        blocks = set(range(part.begin, part.end))
        covered = self.covered.setdefault(part.chunk, set())
        assert blocks and not blocks & covered, "read twice at once"
        covered |= blocks
        self.in_flight[part] = connection

    def landed(self, part: Part) -> None:
        self.take(self.machine.landed(self.in_flight.pop(part), part, self.now_s))

    def failed(self, part: Part, error: MxError) -> None:
        self.covered[part.chunk] -= set(range(part.begin, part.end))
        self.take(self.machine.failed(self.in_flight.pop(part), part, error, self.now_s))

    def check(self, *, right: bool = True) -> None:
        chunk = self.to_check.pop(0)
        if right:
            self.done.add(chunk)
            self.take(self.machine.verified(chunk))
        else:
            self.covered[chunk].clear()
            self.take(self.machine.corrupt(chunk, DigestError("wrong"), self.now_s))


@given(
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    depths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chunk_mib=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_chunk_lands_once_whatever_happens(
    layers: list[int], depths: list[int], chunk_mib: int, seed: int
) -> None:
    rng = random.Random(seed)
    grid = grid_of(layers, chunk_mib)
    machine = TransferMachine(grid)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    for connection, depth in enumerate(depths):
        rate = rng.choice((0.0, 1e6, 1e9, 1e11))
        driver.take(
            machine.add_connection(connection, depth, source=f"s{connection}", bytes_per_s=rate)
        )
    driver.take(machine.no_more_connections())
    survivor = 0  # never lost and never lies, so the pull must end well
    while driver.in_flight or driver.to_check:
        assert not driver.completed
        driver.now_s += rng.random() * 0.01
        if driver.to_check:
            driver.check()
            continue
        part = rng.choice(sorted(driver.in_flight, key=lambda part: (part.chunk, part.begin)))
        connection = driver.in_flight[part]
        event = rng.random()
        if event < 0.5 or connection == survivor:
            driver.landed(part)
        elif connection in driver.lost:
            driver.failed(part, ClosedError("closed"))
        elif event < 0.8:
            driver.failed(part, PeerProtocolError("no"))
        else:
            # Its reads end one by one: until then nobody else may be asked for those parts.
            driver.lost.add(connection)
            driver.take(machine.connection_lost(connection, PeerLostError("gone"), driver.now_s))
            assert machine.connection_lost(connection, PeerLostError("gone"), driver.now_s) == []
        for number, depth in enumerate(depths):
            assert sum(n == number for n in driver.in_flight.values()) <= depth
    assert driver.failure is None
    assert driver.done == set(range(len(grid)))
    assert driver.completed == 1
    assert sorted(driver.ready) == list(range(len(layers)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_chunks_are_asked_for_in_order_and_layers_become_ready_in_order(layers: list[int]) -> None:
    grid = grid_of(layers)
    machine = TransferMachine(grid)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1))
    asked = []
    while driver.in_flight:
        (part,) = driver.in_flight
        asked.append(part.chunk)
        driver.landed(part)
        driver.check()
    assert asked == list(range(len(grid)))
    with_bytes = [layer for layer in driver.ready if layers[layer]]
    assert with_bytes == sorted(with_bytes)
    assert driver.completed == 1


def whole(chunk: int) -> Part:
    return Part(chunk, 0, 1)


def test_a_wrong_chunk_is_asked_of_another_source() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.start()
    assert machine.add_connection(0, 1, source="a") == [Assign(0, (whole(0),))]
    assert machine.add_connection(1, 1, source="a") == []
    assert machine.add_connection(2, 1, source="b") == []
    assert machine.landed(0, whole(0)) == [Check(0)]
    assert machine.corrupt(0, DigestError("wrong")) == [Assign(2, (whole(0),))]
    assert machine.retries == 1


def test_the_only_source_is_asked_again_and_all_its_lanes_dropped_at_the_second_lie() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1, source="a")
    machine.add_connection(1, 1, source="a")
    machine.no_more_connections()
    lie = DigestError("wrong")
    assert machine.landed(0, whole(0)) == [Check(0)]
    assert machine.corrupt(0, lie) == [Assign(0, (whole(0),))]
    assert machine.landed(0, whole(0)) == [Check(0)]
    first, *between, failed = machine.corrupt(0, lie)
    assert first == DropConnection(0, lie)
    assert DropConnection(1, lie) in between
    assert isinstance(failed, Fail)
    assert lie in failed.causes
    assert machine.ended


def test_a_chunk_of_two_senders_that_is_wrong_is_asked_of_one_to_know_whose_fault() -> None:
    grid = grid_of([2], chunk_mib=2)
    machine = TransferMachine(grid)
    machine.start()
    driver = Driver(machine, grid)
    driver.take(machine.add_connection(0, 1, source="a", bytes_per_s=1e6))
    (part,) = driver.in_flight
    # Two lanes of one speed share the chunk when it comes back.
    machine.connection_lost(0, PeerLostError("gone"))
    driver.lost.add(0)
    driver.take(machine.add_connection(1, 1, source="b", bytes_per_s=1e6))
    driver.take(machine.add_connection(2, 1, source="c", bytes_per_s=1e6))
    driver.failed(part, ClosedError("closed"))
    assert sorted(driver.in_flight.values()) == [1, 2]
    for part in list(driver.in_flight):
        driver.landed(part)
    driver.check(right=False)
    assert list(driver.in_flight) == [Part(0, 0, 2)]  # whole now, of one of them
    assert driver.dropped == []
    (part,) = driver.in_flight
    driver.landed(part)
    driver.check()
    assert driver.completed == 1


def test_loss_of_the_last_lane_waits_while_another_may_come() -> None:
    machine = TransferMachine(grid_of([2]))
    machine.start()
    machine.add_connection(0, 4)  # half of its depth until it was seen to be fast
    gone = PeerLostError("gone")
    assert machine.connection_lost(0, gone) == []
    assert machine.add_connection(1, 4) == []  # the lost lane may still write where the chunks lie
    assert machine.failed(0, whole(1), gone) == [Assign(1, (whole(1),))]
    assert machine.failed(0, whole(0), gone) == [Assign(1, (whole(0),))]
    machine.no_more_connections()
    assert machine.connection_lost(1, gone) == []
    assert machine.landed(1, whole(0)) == [Check(0)]
    assert machine.verified(0) == []
    assert machine.failed(1, whole(1), gone) == [Fail((gone, gone))]
    assert machine.retries == 3


def test_the_last_read_of_a_lost_lane_may_complete_the_pull() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1)
    machine.no_more_connections()
    assert machine.connection_lost(0, PeerLostError("gone")) == []
    assert machine.landed(0, whole(0)) == [Check(0)]
    assert machine.verified(0) == [LayerReady(0), Complete()]


def test_what_is_left_when_a_lost_lane_has_ended_is_not_waited_for() -> None:
    machine = TransferMachine(grid_of([2]))
    machine.start()
    machine.add_connection(0, 1)
    machine.no_more_connections()
    gone = PeerLostError("gone")
    assert machine.connection_lost(0, gone) == []
    assert machine.landed(0, whole(0)) == [Check(0), Fail((gone,))]


def test_a_read_that_keeps_failing_ends_its_lane() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1)
    machine.no_more_connections()
    commands: list[Command] = []
    for _ in range(10):
        commands = machine.failed(0, whole(0), PeerProtocolError("no"))
        if machine.ended:
            break
    assert isinstance(commands[-1], Fail)


def test_a_lane_that_stops_gives_its_chunks_back_once_the_others_would_be_sooner() -> None:
    machine = TransferMachine(grid_of([4]))
    machine.start()
    machine.add_connection(0, 1, 0.0, bytes_per_s=1e9)
    (other,) = machine.add_connection(1, 1, 0.0, bytes_per_s=1e9)
    assert isinstance(other, Assign)
    now_s = 0.0
    part = other.parts[0]
    while True:
        now_s += 0.001
        following = machine.landed(1, part, now_s)
        machine.verified(part.chunk)
        if not any(isinstance(command, Assign) for command in following):
            break
        part = next(c for c in following if isinstance(c, Assign)).parts[0]
    assert machine.chunks_left == 1  # lane 0's, which never came
    assert machine.tick(now_s + 0.5) == []
    (dropped,) = machine.tick(now_s + 5.0)
    assert isinstance(dropped, DropConnection)
    assert dropped.connection == 0
    assert isinstance(dropped.reason, PathSlowError)
    assert machine.failed(0, whole(0), ClosedError("closed"), now_s + 5.0) == [
        Assign(1, (whole(0),))
    ]


def test_a_lane_that_has_slowed_down_is_not_waited_for_by_early_layers() -> None:
    machine = TransferMachine(grid_of([1000]))
    machine.start()
    driver = Driver(machine, machine._grid)
    driver.take(machine.add_connection(0, 1, 0.0, bytes_per_s=1e8))
    driver.take(machine.add_connection(1, 1, 0.0, bytes_per_s=1e8))
    for _ in range(40):  # both do 100 MB/s
        driver.now_s += 0.0105
        for part in list(driver.in_flight):
            driver.landed(part)
        while driver.to_check:
            driver.check()
    slow = next(part for part, connection in driver.in_flight.items() if connection == 0)
    for _ in range(90):  # lane 0 stops: all the rest of the model would be sooner than a redo
        driver.now_s += 0.0105
        driver.landed(
            next(part for part, connection in driver.in_flight.items() if connection == 1)
        )
        driver.check()
    assert machine.tick(driver.now_s, {slow: 1000}) == []
    driver.now_s += 0.2
    driver.take(machine.tick(driver.now_s, {slow: 1000}))
    assert driver.dropped == [0]
    driver.failed(slow, ClosedError("closed"))
    driver.landed(next(part for part, connection in driver.in_flight.items() if connection == 1))
    assert slow in driver.in_flight  # the lowest that is missing: at once


def test_the_only_lane_is_never_late() -> None:
    machine = TransferMachine(grid_of([4]))
    machine.start()
    machine.add_connection(0, 1, 0.0, bytes_per_s=1e9)
    assert machine.tick(1000.0) == []


def test_a_model_without_bytes_is_complete_at_once() -> None:
    machine = TransferMachine(grid_of([0, 0]))
    assert machine.start() == [LayerReady(0), LayerReady(1), Complete()]
    assert machine.add_connection(0, 4) == []


def test_lanes_that_hold_only_some_layers_get_only_those() -> None:
    machine = TransferMachine(grid_of([1, 1]))
    machine.start()
    assert machine.add_connection(0, 4, holds=lambda layer: layer == 1) == [Assign(0, (whole(1),))]
    assert machine.add_connection(1, 4, holds=lambda layer: layer == 0) == [Assign(1, (whole(0),))]


def test_what_is_there_already_is_not_read() -> None:
    machine = TransferMachine(grid_of([1, 1]))
    machine.start()
    assert machine.already_landed([0]) == [LayerReady(0)]
    assert machine.add_connection(0, 4) == [Assign(0, (whole(1),))]
    assert machine.already_landed([0]) == []
    assert machine.already_landed([1]) == []  # it is being read
    assert machine.landed(0, whole(1)) == [Check(1)]
    assert machine.already_landed([1]) == []  # it is being checked
    assert machine.verified(1) == [LayerReady(1), Complete()]
    assert machine.already_landed([1]) == []


def test_abort_ends_it_once() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.start()
    cause = PeerLostError("enough")
    assert machine.abort(cause) == [Fail((cause,))]
    assert machine.abort(cause) == []
    assert machine.add_connection(0, 1) == []


def test_one_number_is_one_lane() -> None:
    machine = TransferMachine(grid_of([1]))
    machine.add_connection(0, 1)
    with pytest.raises(ValueError, match="there already"):
        machine.add_connection(0, 1)
