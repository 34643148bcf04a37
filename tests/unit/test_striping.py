"""How the machine divides work among connections: simulated ones, of any speed and fate.

The simulation asserts that no block is read twice at once, that nothing is read through a lost
connection, that every chunk is checked once and whole, and every layer reported once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mx.core.grid import MOST_CHUNK_BYTES as CHUNK_BYTES
from mx.units import MIB
from tests.support.simulated_connections import (
    STALL_S,
    TICK_S,
    SimulatedConnection,
    Simulation,
)
from tests.support.transfer_machine import grid_of as grid_in

grid_of = functools.partial(grid_in, chunk_mib=CHUNK_BYTES // MIB)
EXAMPLES = settings(max_examples=50)
#: A connection's expected bandwidth is wrong by no more than this factor, up or down.
WRONG = 2.0


@st.composite
def speeds(draw: st.DrawFn, at_least: int = 1, at_most: int = 8, factor: float = 20) -> list[float]:
    """Bytes per second; the slowest is no slower than the planner would choose."""
    top = 10 ** draw(st.floats(7.5, 10))
    parts = st.one_of(st.just(1.0), st.floats(1 / factor, 1))
    return [top * draw(parts) for _ in range(draw(st.integers(at_least, at_most)))]


class Steady(NamedTuple):
    """A connection whose speed never changes."""

    bytes_per_s: float
    estimate_bytes_per_s: float
    streams: int

    def connection(self) -> SimulatedConnection:
        return SimulatedConnection(
            [(0.0, self.bytes_per_s)], self.estimate_bytes_per_s, streams=self.streams
        )


@st.composite
def steady(draw: st.DrawFn, at_least: int = 1) -> list[Steady]:
    return [
        Steady(
            speed,
            estimate_bytes_per_s=speed * draw(st.floats(1 / WRONG, WRONG)),
            streams=draw(st.sampled_from((1, 2, 4))),
        )
        for speed in draw(speeds(at_least))
    ]


@st.composite
def steady_pulls(draw: st.DrawFn) -> tuple[list[Steady], list[int]]:
    """Connections, and the layers in MiB of a model that keeps them busy for long."""
    connections = draw(steady())
    return connections, draw(layers(len(connections), 640))


@st.composite
def troubled(
    draw: st.DrawFn, connection: SimulatedConnection, ends_s: float
) -> SimulatedConnection:
    """The same connection, which may die, stop, slow down or pause before `ends_s`."""
    ((_, speed),) = connection.speeds
    at_s = draw(st.floats(0, ends_s))
    match draw(st.sampled_from(("dies", "stops", "slows", "pauses", "nothing"))):
        case "dies":
            connection.dies_at_s = at_s
        case "stops":
            connection.speeds = [(0, speed), (at_s, 0)]
        case "slows":
            connection.speeds = [(0, speed), (at_s, speed * draw(st.floats(0.001, 0.5)))]
        case "pauses":
            until_s = at_s + draw(st.floats(0.01, STALL_S / 2))
            connection.speeds = [(0, speed), (at_s, 0), (until_s, speed)]
    return connection


def layers(connections: int, mib_per_connection: int) -> st.SearchStrategy[list[int]]:
    """Sizes in MiB: a model that keeps so many connections busy for so long."""
    count = 24
    least = max(1, connections * mib_per_connection // count)
    return st.lists(st.integers(least, 3 * least), min_size=count, max_size=count)


def total_nbytes(layer_mib: Sequence[int]) -> int:
    return sum(layer_mib) * MIB


def speed_of(connection: SimulatedConnection) -> float:
    return connection.speeds[0][1]


BURST_LAYERS_MIB = [
    202, 258, 212, 531, 372, 440, 322, 435, 504, 332, 211, 317,
    434, 421, 261, 257, 417, 186, 202, 518, 322, 225, 419, 186,
]  # fmt: skip
#: Four streams side by side looked 22% faster than they were: their connection took 2.3 chunks too
#: many, and ended last.
BURSTS = (
    [
        Steady(2697098537.016598, 2932514550.2206297, 2),
        Steady(2099793819.9842553, 2708861780.511999, 2),
        Steady(9442126290.079212, 9108460415.570116, 4),
        Steady(2099793819.9842553, 2978570013.4557385, 2),
        Steady(1e10, 8e9, 2),
        Steady(1e10, 11071947466.72878, 1),
        Steady(1e10, 11013151263.18902, 4),
    ],
    BURST_LAYERS_MIB,
)


@pytest.mark.timeout(150)  # up to 20 s of one core, of which others may use both
@EXAMPLES
@given(steady_pulls())
@example(BURSTS)
def test_connections_carry_their_shares_end_together_and_keep_nearly_to_the_order(
    pull: tuple[list[Steady], list[int]],
) -> None:
    steadies, layer_mib = pull
    connections = [each.connection() for each in steadies]
    run = Simulation(grid_of(layer_mib), connections).run()
    assert run.completed
    nbytes, together = total_nbytes(layer_mib), sum(map(speed_of, connections))
    assert sum(connection.nbytes for connection in connections) == nbytes
    # A chunk, and what it was given when its speed and the others' were only estimates.
    allowed = 2 * CHUNK_BYTES
    for connection in connections:
        assert connection.nbytes <= nbytes * speed_of(connection) / together + allowed
    slowest = min(map(speed_of, connections))
    assert run.now_s <= nbytes / together + allowed / slowest
    # Layers wait for no more than all connections hold, and a slow one's parts far ahead.
    held = sum(connection.depth for connection in connections) * CHUNK_BYTES
    before = 0
    for layer, mib in enumerate(layer_mib):
        before += mib * MIB
        assert run.ready_s[layer] <= (before + held) / together + 3 * CHUNK_BYTES / slowest
    assert run.ready_s[0] <= sorted(run.ready_s.values())[len(layer_mib) // 2]


def test_a_slow_connection_with_four_streams_keeps_early_layers_early() -> None:
    """Found at random; by the first small parts alone, the slow one took eight early chunks."""
    fast, slow = 1e10, 1009849710.7294092
    connections = [
        Steady(slow, 1253212524.5468307, 4).connection(),
        Steady(fast, 12166455314.551056, 4).connection(),
    ]
    layer_mib = [
        113, 84, 112, 79, 85, 132, 112, 64, 59, 133, 115, 134,
        122, 152, 67, 152, 142, 132, 123, 81, 86, 117, 150, 54,
    ]  # fmt: skip
    run = Simulation(grid_of(layer_mib), connections).run()
    held = sum(connection.depth for connection in connections) * CHUNK_BYTES
    before = 0
    for layer, mib in enumerate(layer_mib):
        before += mib * MIB
        allowed_s = (before + held) / (fast + slow) + 3 * CHUNK_BYTES / slow
        assert run.ready_s[layer] <= allowed_s, layer


@EXAMPLES
@given(st.data(), st.integers(2, 8), st.floats(7.5, 10), st.sampled_from((1, 2, 4)))
def test_equal_connections_end_within_a_few_percent(
    data: st.DataObject, count: int, magnitude: float, streams: int
) -> None:
    speed = 10**magnitude
    layer_mib = data.draw(layers(count, 640))
    connections = [SimulatedConnection([(0.0, speed)], speed, streams) for _ in range(count)]
    run = Simulation(grid_of(layer_mib), connections).run()
    assert total_nbytes(layer_mib) / (speed * count) >= 0.95 * run.now_s


@EXAMPLES
@given(st.data(), st.floats(7.5, 8.5))
def test_interfaces_that_promise_far_too_much_are_seen_through(
    data: st.DataObject, magnitude: float
) -> None:
    """As limited links do that report 10 Gbit/s. Pulls over such links found it: a measured
    connection waited for unmeasured ones, and the slowest was late before it was measured."""
    parts = data.draw(st.lists(st.floats(1 / 8, 1), min_size=2, max_size=8))
    connections = [SimulatedConnection([(0.0, part * 10**magnitude)], 1.25e9) for part in parts]
    layer_mib = data.draw(layers(len(connections), 96))
    run = Simulation(grid_of(layer_mib), connections).run()
    assert run.dropped == {}
    ideal_s = total_nbytes(layer_mib) / sum(map(speed_of, connections))
    assert run.now_s <= ideal_s + 0.75 * CHUNK_BYTES / min(map(speed_of, connections))


@EXAMPLES
@given(st.data())
def test_faults_of_connections_cost_no_more_than_those_connections(data: st.DataObject) -> None:
    first, *others = (each.connection() for each in data.draw(steady(at_least=2)))
    layer_mib = data.draw(layers(1 + len(others), 96))
    nbytes = total_nbytes(layer_mib)
    ends_s = nbytes / sum(map(speed_of, (first, *others)))
    alone_s = nbytes / speed_of(first)
    connections = [first, *(data.draw(troubled(connection, ends_s)) for connection in others)]
    run = Simulation(grid_of(layer_mib), connections).run()
    assert run.completed
    for connection in connections:
        # Only what it had in flight is read again.
        assert connection.wasted_nbytes <= connection.depth * CHUNK_BYTES
    # The first connection could have done it alone: at worst it waits for the others' end.
    assert run.now_s <= 1.1 * alone_s + STALL_S + 2 * TICK_S


@EXAMPLES
@given(st.data())
def test_when_all_connections_die_the_pull_fails_and_names_each(data: st.DataObject) -> None:
    connections = [each.connection() for each in data.draw(steady())]
    layer_mib = data.draw(layers(len(connections), 96))
    ends_s = total_nbytes(layer_mib) / sum(map(speed_of, connections))
    for connection in connections:
        connection.dies_at_s = data.draw(st.floats(0, 0.9 * ends_s / len(connections)))
    run = Simulation(grid_of(layer_mib), connections).run()
    assert not run.completed
    assert run.failure is not None
    assert len(run.failure.causes) >= len(connections)
    assert run.now_s == max(connection.dies_at_s for connection in connections)


def test_a_connection_that_dies_at_once_costs_nothing_else() -> None:
    connections = [
        SimulatedConnection([(0, 1e9)]),
        SimulatedConnection([(0, 1e9)], dies_at_s=0.001),
    ]
    run = Simulation(grid_of([64] * 10), connections).run()
    assert run.completed
    assert run.machine.retries == 2  # its first parts
    assert math.isclose(run.now_s, 640 * MIB / 1e9, rel_tol=0.02)


def test_a_connection_that_slows_to_a_trickle_near_the_end_of_a_part_is_late() -> None:
    """Found by these tests: the few bytes yet to come seemed to be near for ever."""
    slow = SimulatedConnection(
        [(0, 1e8), (0.0419, 1.0)], estimate=1e8, streams=1
    )  # after 3.996 MiB
    run = Simulation(grid_of([97] * 10), [SimulatedConnection([(0, 1e8)], 1e8), slow]).run()
    assert 1 in run.dropped
    assert run.now_s <= 1.01 * 970 * MIB / 1e8  # what the other takes for all of it
