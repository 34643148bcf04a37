"""Over long and wide ways requests go out as far ahead as the way is long: the transfer machine
over simulated connections with round trips, and what must stay as it is nearby."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core import striping
from mx.core.grid import BLOCK_BYTES
from mx.core.striping import MOST_READS, MOST_READS_ASIDE, Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import Assign, Command
from mx.errors import PeerLostError
from mx.units import MIB
from tests.support.simulated_connections import (
    STALL_S,
    TICK_S,
    SimulatedConnection,
    Simulation,
)
from tests.support.transfer_machine import Known, grid_of, land

EXAMPLES = settings(max_examples=25)
LAYERS = 16
RATES = st.floats(7, 9).map(lambda magnitude: 10**magnitude)
ROUND_TRIPS_S = st.one_of(st.just(0.0), st.floats(1e-4, 0.4))
CHUNKS_MIB = st.sampled_from((1, 4, 16))
STREAMS = st.sampled_from((1, 2, 4))


def far(
    bytes_per_s: float, round_trip_s: float, streams: int = 2, source: str = "s"
) -> SimulatedConnection:
    """A connection of which the plan says nothing but what it says of every network."""
    return SimulatedConnection(
        [(0.0, bytes_per_s)], 3e9, streams=streams, round_trip_s=round_trip_s, source=source
    )


def pulled(
    connections: list[SimulatedConnection], seconds: float, chunk_mib: int = 16
) -> tuple[Simulation, float]:
    """Pull what these connections carry in about so many seconds. Returns the simulation, which has
    run, and how long they take at least."""
    together = sum(each.speed(0.0) for each in connections)
    mib = max(1, int(seconds * together / MIB / LAYERS))
    run = Simulation(grid_of([mib] * LAYERS, chunk_mib), connections).run()
    return run, mib * LAYERS * MIB / together


@EXAMPLES
@given(RATES, ROUND_TRIPS_S, STREAMS, CHUNKS_MIB)
def test_a_way_of_any_length_is_nearly_full_and_no_more_under_way_than_it_holds_a_few_times(
    rate: float, round_trip_s: float, streams: int, chunk_mib: int
) -> None:
    connection = far(rate, round_trip_s, streams)
    run, least_s = pulled([connection], 6.0, chunk_mib)
    assert run.completed
    assert run.dropped == {}
    # What is not worth more requests, and some round trips until rate and way are known.
    assert run.now_s <= least_s * (1 + striping.WORTH / 2 / streams) + 6 * round_trip_s
    held = connection.depth * chunk_mib * MIB
    assert connection.most_nbytes <= held + 2 * striping.way_nbytes(rate, round_trip_s)


@pytest.mark.parametrize("round_trip_s", [0.002, 0.04, 0.2])
def test_100_gbit_per_s_are_nearly_full(round_trip_s: float) -> None:
    run, least_s = pulled([far(12.5e9, round_trip_s)], 4.0)
    assert run.now_s <= least_s + 5 * round_trip_s


@EXAMPLES
@given(RATES, RATES, st.floats(0.01, 0.4))
def test_a_near_source_does_not_wait_for_a_far_one_at_the_end(
    near: float, distant: float, round_trip_s: float
) -> None:
    connections = [far(near, 0.0, source="near"), far(distant, round_trip_s, source="far")]
    run, least_s = pulled(connections, 6.0)
    assert run.dropped == {}
    slowest_s = 16 * MIB / min(near, distant)
    assert run.now_s <= least_s * 1.02 + 2 * slowest_s + 7 * round_trip_s


@EXAMPLES
@given(RATES, st.floats(0.01, 0.4), st.floats(0.1, 3.0), st.sampled_from(("dies", "stops")))
def test_a_far_source_that_is_lost_costs_what_was_coming_from_it(
    rate: float, round_trip_s: float, at_s: float, how: str
) -> None:
    first, lost = far(rate, round_trip_s, source="a"), far(rate, round_trip_s, source="b")
    if how == "dies":
        lost.dies_at_s = at_s
    else:
        lost.speeds = [(0.0, rate), (at_s, 0.0)]
    run, least_s = pulled([first, lost], 5.0)
    assert run.completed
    # Only what its streams were bringing has come in vain, however much was requested.
    assert lost.wasted_nbytes <= lost.streams * 16 * MIB
    assert run.now_s <= 2 * least_s * 1.02 + STALL_S + 2 * TICK_S + 8 * round_trip_s


# --- what stays as it is


def assigned(commands: list[Command]) -> list[Part]:
    return [part for each in commands if isinstance(each, Assign) for part in each.parts]


def most_in_flight(
    machine: TransferMachine, waiting: list[Part], round_trip_s: float, reads: int = 40
) -> int:
    """Land so many reads of connection 0, one each 10 ms. Returns the most that were in flight."""
    most = len(waiting)
    for number in range(1, reads + 1):
        part = waiting.pop(0)
        digests = bytes(32 * (part.end - part.begin))
        waiting += assigned(machine.landed(0, [(part, digests)], number / 100, round_trip_s))
        most = max(most, len(waiting))
    return most


def machine_of(layers: int = 200) -> TransferMachine:
    """A machine that has yet to learn what is right, so that nothing ends."""
    grid = grid_of([4] * layers, 4)
    machine = TransferMachine(grid, Known(grid, at_once=False).get)
    machine.start()
    return machine


@pytest.mark.parametrize(("round_trip_s", "at_least", "at_most"), [(0, 2, 4), (0.5, 40, 200)])
def test_reads_in_flight_follow_the_round_trip(
    round_trip_s: float, at_least: int, at_most: int
) -> None:
    machine = machine_of()
    waiting = assigned(machine.add_connection(0, 4, 0.0))
    assert at_least <= most_in_flight(machine, waiting, round_trip_s) <= at_most


def test_reads_in_flight_are_bounded() -> None:
    machine = machine_of(1000)
    waiting = assigned(machine.add_connection(0, 4, 0.0))
    assert most_in_flight(machine, waiting, 1000.0) == MOST_READS
    assert MOST_READS_ASIDE < MOST_READS


def test_where_parts_share_memory_one_is_read_at_a_time_however_long_the_way_is() -> None:
    machine = machine_of()
    waiting = assigned(machine.add_connection(0, 1, 0.0))
    assert most_in_flight(machine, waiting, 10.0) == 1


def test_in_coordinated_reading_nothing_is_requested_early() -> None:
    machine = machine_of()
    waiting = assigned(machine.add_connection(0, 4, 0.0, source="a"))
    most_in_flight(machine, waiting, 10.0, reads=1)
    held = len(waiting)
    assert held > 4
    machine.coordinate()
    for chunk in range(200):
        waiting += assigned(machine.allow("a", chunk, 0.0) or [])
    assert len(waiting) == held  # what was under way stays so
    most_in_flight(machine, waiting, 10.0, reads=held)
    assert len(waiting) <= 4


@given(RATES, st.floats(0, 1), st.integers(1, 16))
def test_what_is_requested_ahead_grows_with_rate_and_way(
    rate: float, round_trip_s: float, times: int
) -> None:
    once = striping.way_nbytes(rate, round_trip_s)
    assert once >= int(rate * round_trip_s)
    assert abs(striping.way_nbytes(times * rate, round_trip_s) - times * once) <= times
    assert abs(striping.way_nbytes(rate, times * round_trip_s) - times * once) <= times


def test_a_lost_connection_s_reads_beyond_its_depth_are_read_elsewhere() -> None:
    machine = machine_of()
    waiting = assigned(machine.add_connection(0, 4, 0.0))
    most_in_flight(machine, waiting, 0.5)
    held = list(machine.load(0).in_flight)
    assert len(held) > 4
    error = PeerLostError("gone")
    machine.connection_lost(0, error, 1.0)
    for part in held:
        machine.failed(0, [part], error, 1.0)
    first = assigned(machine.add_connection(1, 4, 1.0))
    assert first[0].chunk == min(part.chunk for part in held)
    assert machine.load(1).nbytes >= BLOCK_BYTES
    land(machine, 1, first[0], 1.1)
