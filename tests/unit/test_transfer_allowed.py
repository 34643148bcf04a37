"""In coordinated reading a pull reads chunks only from sources that allow them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mx.core.transfer import TransferMachine
from mx.errors import ClosedError, DigestError, PeerLostError
from tests.support.transfer_machine import Driver, grid_of, machine_of

SOURCES = ("a", "b", "c")


def coordinated(layers: int = 6) -> tuple[TransferMachine, Driver]:
    """A connection for each source, whose number is the source's place in SOURCES."""
    grid = grid_of([1] * layers)
    machine = machine_of(grid)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    machine.coordinate()
    for number, source in enumerate(SOURCES):
        driver.take(machine.add_connection(number, 4, 0.0, source=source))
    return machine, driver


def allow(machine: TransferMachine, driver: Driver, source: str, chunk: int) -> bool:
    commands = machine.allow(source, chunk, 0.0)
    driver.take(commands or [])
    return commands is not None


def test_a_chunk_that_no_source_allows_is_not_read() -> None:
    machine, driver = coordinated()
    assert not driver.in_flight
    assert allow(machine, driver, "b", 3)
    ((part, connection),) = driver.in_flight.items()
    assert (part.chunk, connection) == (3, 1)


def test_all_is_read_from_an_exempt_source_and_nothing_ends_that() -> None:
    machine, driver = coordinated(layers=20)
    driver.take(machine.exempt(frozenset({"a"}), 0.0))
    assert driver.in_flight and set(driver.in_flight.values()) == {0}
    read = {part.chunk for part in driver.in_flight}
    assert machine.withdraw("a", min(read)) == []
    assert allow(machine, driver, "b", 5)  # beside it
    for part in list(driver.in_flight):
        driver.landed(part)
    driver.take(machine.exempt(frozenset(), 0.0))
    while driver.in_flight:
        driver.landed(next(iter(driver.in_flight)))
    assert not machine.ended  # it allows nothing by itself any more
    driver.take(machine.exempt(frozenset({"a"}), 0.0))
    while driver.in_flight:
        driver.landed(next(iter(driver.in_flight)))
    assert machine.ended


def test_a_chunk_allowed_by_a_source_without_a_connection_waits_for_one() -> None:
    machine, driver = coordinated()
    assert allow(machine, driver, "d", 2)
    assert not driver.in_flight
    driver.take(machine.add_connection(9, 4, 0.0, source="d"))
    assert [(part.chunk, connection) for part, connection in driver.in_flight.items()] == [(2, 9)]


def test_a_verified_chunk_is_not_allowed_again() -> None:
    machine, driver = coordinated()
    allow(machine, driver, "a", 0)
    (part,) = driver.in_flight
    driver.landed(part)
    assert not allow(machine, driver, "b", 0)


def test_another_source_takes_over_once_the_late_read_has_ended() -> None:
    machine, driver = coordinated()
    allow(machine, driver, "a", 0)
    (part,) = driver.in_flight
    allow(machine, driver, "b", 0)
    assert list(driver.in_flight.values()) == [0]  # two can't write to one place
    assert machine.withdraw("a", 0) == [0]
    driver.lost.add(0)
    driver.take(machine.connection_lost(0, PeerLostError("slow", peer="a"), 0.0))
    driver.failed(part, ClosedError("closed"))
    assert [(part.chunk, connection) for part, connection in driver.in_flight.items()] == [(0, 1)]


def test_a_source_that_sends_wrong_bytes_allows_the_chunk_no_longer() -> None:
    machine, driver = coordinated()
    allow(machine, driver, "a", 0)
    (part,) = driver.in_flight
    driver.landed(part, right=False)
    assert not driver.in_flight
    assert allow(machine, driver, "b", 0)
    assert list(driver.in_flight.values()) == [1]


def test_in_free_reading_every_source_is_read_from() -> None:
    machine, driver = coordinated(3)
    driver.take(machine.read_freely(0.0))
    assert {part.chunk for part in driver.in_flight} == {0, 1, 2}


def test_a_coordinated_pull_fails_when_no_source_will_allow_what_is_missing() -> None:
    machine, driver = coordinated()
    allow(machine, driver, "a", 0)
    driver.take(machine.no_more_connections())
    assert driver.failure is None  # a chunk is being read
    (part,) = driver.in_flight
    driver.landed(part)
    assert driver.failure is not None


@given(st.integers(0, 1 << 32))
def test_any_order_of_allows_and_losses_ends_with_every_chunk_once(seed: int) -> None:
    rng = random.Random(seed)
    machine, driver = coordinated(rng.randrange(1, 8))
    connections = 3
    for _ in range(2000):
        if driver.completed:
            break
        choice = rng.random()
        if choice < 0.4:
            allow(machine, driver, rng.choice(SOURCES), rng.randrange(len(driver.grid)))
        elif choice < 0.8 and driver.in_flight:
            driver.landed(rng.choice(list(driver.in_flight)), right=rng.random() < 0.9)
        elif choice < 0.9 and driver.in_flight:
            driver.failed(rng.choice(list(driver.in_flight)), DigestError("short"))
        elif choice < 0.94:
            source = rng.choice(SOURCES)
            for connection in machine.withdraw(source, rng.randrange(len(driver.grid))):
                driver.lost.add(connection)
                driver.take(
                    machine.connection_lost(connection, PeerLostError("late", peer=source), 0.0)
                )
                driver.take(machine.add_connection(connections, 4, 0.0, source=source))
                connections += 1
        for number in set(driver.dropped):  # a liar comes back under another number
            driver.dropped.remove(number)
            driver.take(machine.add_connection(connections, 4, 0.0, source=rng.choice(SOURCES)))
            connections += 1
    assert driver.completed
    assert driver.failure is None
