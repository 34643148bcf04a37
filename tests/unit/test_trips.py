"""Reads of copy engines are trips: runs of chunks that begin with the first layer alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mx.core.grid import ChunkGrid
from mx.core.striping import MOST_TRIP_NBYTES, TRIPS, Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import Assign, Command, LayerReady
from mx.errors import PathError, PeerLostError
from mx.units import MIB
from tests.support.transfer_machine import Known, blocks_of, grid_of, machine_of

Trip = tuple[Part, ...]


class Trips:
    """Carries out a machine's commands, trip by trip, and checks them."""

    def __init__(self, grid: ChunkGrid, *, at_once: bool = True) -> None:
        self.grid = grid
        self.known = Known(grid, at_once=at_once)
        self.machine: TransferMachine = machine_of(grid, self.known)
        self.in_flight: list[tuple[int, Trip]] = []
        self.ready: list[int] = []
        self.lost: set[int] = set()
        self.now_s = 0.0
        self.take(self.machine.start())

    def connect(self, number: int, bytes_per_s: float = 1e11, trip_s: float = 1.0) -> None:
        self.take(
            self.machine.add_connection(
                number, 2, self.now_s, bytes_per_s=bytes_per_s, trip_s=trip_s, source=f"s{number}"
            )
        )

    def take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, LayerReady):
                self.ready.append(command.layer)
            elif isinstance(command, Assign):
                assert command.connection not in self.lost
                if self.machine.load(command.connection).trip_s:
                    self._assigned(command.connection, command.parts)
                else:
                    for part in command.parts:
                        self._assigned(command.connection, (part,))

    def _assigned(self, connection: int, trip: Trip) -> None:
        rows = [(self.grid.row(c, b), self.grid.row(c, e)) for c, b, e in trip]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(rows)), "not a run"
        read = {part for _, other in self.in_flight for part in other}
        assert not read & set(trip), "read twice at once"
        self.in_flight.append((connection, trip))

    def nbytes(self, trip: Trip) -> int:
        return sum(self.grid.part_nbytes(*part) for part in trip)

    def lands(self, at: int = 0, *, wrong: Sequence[Part] = ()) -> None:
        connection, trip = self.in_flight.pop(at)
        self.now_s += self.nbytes(trip) / 1e11
        digests = [(p, blocks_of(self.grid, p, right=p not in wrong)) for p in trip]
        self.take(self.machine.landed(connection, digests, self.now_s))

    def fails(self, at: int = 0) -> None:
        connection, trip = self.in_flight.pop(at)
        error = PathError("no", peer="p")
        self.take(self.machine.failed(connection, trip, error, self.now_s))

    def loses(self, connection: int) -> None:
        """A connection is lost; its reads end after that."""
        self.lost.add(connection)
        error = PeerLostError("gone", peer="p")
        self.take(self.machine.connection_lost(connection, error, self.now_s))
        while any(number == connection for number, _ in self.in_flight):
            self.fails([number for number, _ in self.in_flight].index(connection))


def test_nothing_beyond_the_first_layer_is_requested_before_it_is_ready() -> None:
    trips = Trips(grid_of([40] * 30, chunk_mib=16))
    trips.connect(0)
    ((_, trip),) = trips.in_flight
    assert {trips.grid.layer_of[part.chunk] for part in trip} == {0}
    trips.lands()
    assert trips.ready == [0]
    assert [trips.nbytes(trip) > 200 * MIB for _, trip in trips.in_flight] == [True] * TRIPS


def test_the_next_trip_is_requested_after_the_first_layer_s_event() -> None:
    grid = grid_of([16] * 40, chunk_mib=16)
    trips = Trips(grid)
    trips.connect(0)
    connection, trip = trips.in_flight.pop()
    digests = [(part, blocks_of(grid, part)) for part in trip]
    commands = trips.machine.landed(connection, digests, 0.1)
    assert isinstance(commands[0], LayerReady) and isinstance(commands[1], Assign)


def test_a_first_layer_without_its_page_holds_nothing_up() -> None:
    trips = Trips(grid_of([16] * 40, chunk_mib=16), at_once=False)
    trips.connect(0)
    trips.lands()
    assert not trips.ready and len(trips.in_flight) == TRIPS


def test_trips_of_a_slow_connection_are_short() -> None:
    trips = Trips(grid_of([16] * 200, chunk_mib=16))
    trips.connect(0, bytes_per_s=100e6, trip_s=0.5)
    trips.now_s = 16 * MIB / 100e6
    trips.lands()
    assert [len(trip) for _, trip in trips.in_flight] == [2] * TRIPS


def test_a_trip_has_no_more_than_its_bound() -> None:
    trips = Trips(grid_of([160] * 30, chunk_mib=16))
    trips.connect(0)
    seen = []
    while trips.in_flight:
        seen.append(trips.nbytes(trips.in_flight[0][1]))
        trips.lands()
    assert max(seen) == MOST_TRIP_NBYTES and len(seen) == 1 + -(-29 * 160 // 256)
    assert trips.machine.holdings.whole


def test_only_the_wrong_chunk_of_a_trip_is_read_again() -> None:
    trips = Trips(grid_of([16] * 20, chunk_mib=16))
    trips.connect(0)
    trips.lands()
    wrong = trips.in_flight[0][1][2]
    trips.lands(wrong=[wrong])
    while trips.in_flight:
        trips.lands()
    assert trips.machine.holdings.whole and trips.machine.retries == 1


@given(data=st.data())
def test_every_block_comes_once_whatever_fails(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    trips = Trips(grid_of(layers, chunk_mib=data.draw(st.sampled_from([1, 4, 16]))))
    for number in range(data.draw(st.integers(1, 3))):
        rate, trip_s = data.draw(st.sampled_from([(1e7, 0.1), (1e9, 0.02), (1e11, 2.5)]))
        trips.connect(number, rate, trip_s if number != 2 else 0.0)
    spare = 90
    trips.connect(spare)
    for _ in range(60):
        if not trips.in_flight:
            break
        at = data.draw(st.integers(0, len(trips.in_flight) - 1))
        match data.draw(st.sampled_from(["lands", "lands", "wrong", "fails", "loses"])):
            case "wrong" if trips.in_flight[at][0] != spare:
                trips.lands(at, wrong=[data.draw(st.sampled_from(trips.in_flight[at][1]))])
            case "fails" if trips.in_flight[at][0] != spare:
                trips.fails(at)
            case "loses" if trips.in_flight[at][0] != spare:
                trips.loses(trips.in_flight[at][0])
            case _:
                trips.lands(at)
    for _ in range(500):
        if not trips.in_flight:
            break
        trips.lands()
    assert trips.machine.holdings.whole
    assert sorted(trips.ready) == list(range(len(layers)))
