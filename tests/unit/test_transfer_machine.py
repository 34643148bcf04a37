"""The pull machine: any order of events, with losses, duplicates and liars."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.striping import Part
from mx.core.suspects import ANSWER_S
from mx.core.transfer import TICK_S, TransferMachine
from mx.core.transfer_commands import (
    Ask,
    Assign,
    Command,
    DropConnection,
    Fail,
    LayerReady,
)
from mx.errors import (
    ClosedError,
    DigestError,
    PathSlowError,
    PeerLostError,
    PeerProtocolError,
    SourceChangedError,
)
from mx.units import MIB
from tests.support.transfer_machine import Driver, Known, grid_of, land, machine_of


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
    known = Known(grid, at_once=rng.random() < 0.5)
    machine = machine_of(grid, known)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    for connection, depth in enumerate(depths):
        rate = rng.choice((0.0, 1e6, 1e9, 1e11))
        driver.take(
            machine.add_connection(
                connection, depth, 0.0, source=f"s{connection}", bytes_per_s=rate
            )
        )
    driver.take(machine.no_more_connections())
    survivor = 0  # never lost and never lies, so the pull must end well
    unknown = [layer for layer in range(len(layers)) if layer not in known.layers]
    while driver.in_flight or unknown:
        driver.now_s += rng.random() * 0.01
        if unknown and (rng.random() < 0.1 or not driver.in_flight):
            known.layers.add(layer := unknown.pop(rng.randrange(len(unknown))))
            driver.take(machine.page_known(layer, driver.now_s))
            continue
        assert not driver.completed
        part = rng.choice(sorted(driver.in_flight, key=lambda part: (part.chunk, part.begin)))
        connection = driver.in_flight[part]
        event = rng.random()
        if event < 0.5 or connection == survivor:
            driver.landed(part)
        elif connection in driver.lost:
            driver.failed(part, ClosedError("closed"))
        elif event < 0.65:
            driver.landed(part, right=False)
        elif event < 0.8:
            driver.failed(part, PeerProtocolError("no"))
        else:
            # Its reads end one by one: until then no other connection may read those parts.
            driver.lost.add(connection)
            driver.take(machine.connection_lost(connection, PeerLostError("gone"), driver.now_s))
            assert machine.connection_lost(connection, PeerLostError("gone"), driver.now_s) == []
        for number, depth in enumerate(depths):
            assert sum(n == number for n in driver.in_flight.values()) <= depth
    assert driver.failure is None
    assert driver.done == set(range(len(grid)))
    assert driver.completed
    assert sorted(driver.ready) == list(range(len(layers)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_chunks_are_read_in_order_and_layers_become_ready_in_order(layers: list[int]) -> None:
    grid = grid_of(layers)
    machine = machine_of(grid)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1, 0.0))
    read = []
    while driver.in_flight:
        (part,) = driver.in_flight
        read.append(part.chunk)
        driver.landed(part)
    assert read == list(range(len(grid)))
    with_bytes = [layer for layer in driver.ready if layers[layer]]
    assert with_bytes == sorted(with_bytes)
    assert driver.completed


def whole(chunk: int) -> Part:
    return Part(chunk, 0, 1)


def test_a_wrong_chunk_is_read_from_another_source() -> None:
    machine = machine_of(grid_of([1]))
    machine.start()
    assert machine.add_connection(0, 1, 0.0, source="a") == [Assign(0, (whole(0),))]
    assert machine.add_connection(1, 1, 0.0, source="a") == []
    assert machine.add_connection(2, 1, 0.0, source="b") == []
    assert land(machine, 0, whole(0), right=False) == [Assign(2, (whole(0),))]
    assert machine.retries == 1


def asking() -> TransferMachine:
    """A machine of one chunk, whose only source can be asked."""
    machine = machine_of(grid_of([1]))
    machine.start()
    assert machine.add_connection(0, 1, 0.0, source="a", answers=True)
    return machine


def test_a_source_that_is_asked_is_not_read_from_until_it_answers() -> None:
    machine = asking()
    assert land(machine, 0, whole(0), right=False) == [Ask(0, 0)]
    machine.no_more_connections()
    assert not machine.ended and not machine.hopeless
    assert machine.answered("a", 1.0) == [Assign(0, (whole(0),))]
    assert [type(cause) for cause in machine.causes] == [DigestError]
    assert machine.answered("a", 1.0) == []  # nothing was asked


def test_a_source_is_a_liar_after_two_wrong_parts_that_are_right_there_as_it_says() -> None:
    machine = asking()
    assert land(machine, 0, whole(0), right=False) == [Ask(0, 0)]
    assert machine.answered("a", 0.0) == [Assign(0, (whole(0),))]
    assert land(machine, 0, whole(0), right=False) == [Ask(0, 0)]
    (drop,) = machine.answered("a", 0.0)
    assert isinstance(drop, DropConnection) and isinstance(drop.reason, DigestError)


def test_a_source_that_does_not_answer_in_time_has_lied() -> None:
    machine = asking()
    assert land(machine, 0, whole(0), right=False) == [Ask(0, 0)]
    assert machine.due_s <= ANSWER_S
    assert machine.tick(ANSWER_S - 0.1) == []
    assert machine.tick(ANSWER_S) == [Assign(0, (whole(0),))]
    assert land(machine, 0, whole(0), right=False) == [Ask(0, 0)]
    machine.no_more_connections()
    drop, failed = machine.tick(2 * ANSWER_S)
    assert isinstance(drop, DropConnection) and isinstance(failed, Fail)
    assert isinstance(failed.causes[-1], DigestError)


@pytest.mark.parametrize("changed", [True, False])
def test_a_source_that_withdraws_what_it_gave_has_not_lied(changed: bool) -> None:
    machine = asking()
    land(machine, 0, whole(0), right=False)
    machine.no_more_connections()
    error = SourceChangedError("changed") if changed else PeerLostError("gone")
    (failed,) = machine.connection_lost(0, error, 0.0)
    assert isinstance(failed, Fail) and failed.causes[-1] is error
    lies = [cause for cause in failed.causes if isinstance(cause, DigestError)]
    assert bool(lies) is not changed


def test_the_only_source_is_read_from_again_and_dropped_after_two_wrong_chunks() -> None:
    machine = machine_of(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1, 0.0, source="a")
    machine.add_connection(1, 1, 0.0, source="a")
    machine.no_more_connections()
    assert land(machine, 0, whole(0), right=False) == [Assign(0, (whole(0),))]
    first, *between, failed = land(machine, 0, whole(0), right=False)
    assert isinstance(first, DropConnection)
    lie = first.reason
    assert isinstance(lie, DigestError)
    assert first == DropConnection(0, lie)
    assert DropConnection(1, lie) in between
    assert isinstance(failed, Fail)
    assert lie in failed.causes
    assert machine.ended


def test_only_the_wrong_part_of_a_chunk_of_two_senders_is_read_again_and_its_sender_blamed() -> (
    None
):
    grid = grid_of([2], chunk_mib=2)
    machine = machine_of(grid)
    machine.start()
    driver = Driver(machine, grid)
    driver.take(machine.add_connection(0, 1, 0.0, source="a", bytes_per_s=1e6))
    (part,) = driver.in_flight
    # Two connections of one speed share the chunk when it comes back.
    machine.connection_lost(0, PeerLostError("gone"), 0.0)
    driver.lost.add(0)
    driver.take(machine.add_connection(1, 1, 0.0, source="b", bytes_per_s=1e6))
    driver.take(machine.add_connection(2, 1, 0.0, source="c", bytes_per_s=1e6))
    driver.failed(part, ClosedError("closed"))
    assert sorted(driver.in_flight.values()) == [1, 2]
    for part in list(driver.in_flight):
        driver.landed(part, right=part.begin > 0)
    assert driver.wrong == [(0, "b")]
    assert driver.in_flight == {Part(0, 0, 1): 2}
    driver.landed(Part(0, 0, 1))
    assert driver.completed


def test_what_lands_before_its_page_waits_for_it_and_reading_goes_on() -> None:
    grid = grid_of([2, 1])
    known = Known(grid, at_once=False)
    machine = machine_of(grid, known)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1, 0.0, source="a"))
    driver.take(machine.no_more_connections())
    while driver.in_flight:
        driver.landed(next(iter(driver.in_flight)))
    assert driver.done == set()
    assert machine.landed_nbytes() == [2 * MIB, MIB]
    assert not machine.ended
    known.layers.add(1)
    driver.take(machine.page_known(1, 0.0))
    assert (driver.done, driver.ready) == ({2}, [1])
    known.layers.add(0)
    driver.take(machine.page_known(0, 0.0))
    assert driver.completed
    assert driver.ready == [1, 0]


def test_what_waited_for_its_page_and_is_wrong_is_read_elsewhere() -> None:
    grid = grid_of([4])
    known = Known(grid, at_once=False)
    machine = machine_of(grid, known)
    driver = Driver(machine, grid)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1, 0.0, source="liar", peer="liar:1"))
    for _ in range(2):
        driver.landed(next(iter(driver.in_flight)), right=False)
    driver.take(machine.add_connection(1, 1, 0.0, source="honest"))
    known.layers.add(0)
    driver.take(machine.page_known(0, 0.0))
    assert driver.dropped == [0]
    assert driver.wrong == [(0, "liar"), (1, "liar")]
    stale = next(part for part, connection in driver.in_flight.items() if connection == 0)
    driver.failed(stale, ClosedError("closed"))
    while driver.in_flight:
        driver.landed(next(iter(driver.in_flight)))
    assert driver.completed
    assert driver.failure is None


def test_a_pull_fails_if_its_last_source_goes_before_it_gave_the_page() -> None:
    grid = grid_of([1])
    machine = machine_of(grid, Known(grid, at_once=False))
    driver = Driver(machine, grid)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1, 0.0))
    driver.landed(whole(0))
    driver.take(machine.connection_lost(0, PeerLostError("gone"), 0.0))
    assert driver.failure is None  # another may come
    driver.take(machine.no_more_connections())
    assert driver.failure is not None


def test_what_the_shortcut_found_right_needs_no_page() -> None:
    grid = grid_of([1, 1])
    known = Known(grid, at_once=False)
    machine = machine_of(grid, known)
    machine.start()
    machine.add_connection(0, 2, 0.0)
    machine.add_connection(1, 2, 0.0)
    assert machine.landed(0, [(whole(0), None)], 0.0) == [LayerReady(0, shortcut=True)]
    assert land(machine, 1, whole(1)) == []
    known.layers.add(1)
    assert machine.page_known(1, 0.0) == [LayerReady(1)]


def test_the_loss_of_the_last_connection_waits_while_another_may_come() -> None:
    machine = machine_of(grid_of([2]))
    machine.start()
    machine.add_connection(0, 4, 0.0)  # half of its depth until it was seen to be fast
    gone = PeerLostError("gone")
    assert machine.connection_lost(0, gone, 0.0) == []
    assert machine.add_connection(1, 4, 0.0) == []  # the lost one may still write there
    assert machine.failed(0, [whole(1)], gone, 0.0) == [Assign(1, (whole(1),))]
    assert machine.failed(0, [whole(0)], gone, 0.0) == [Assign(1, (whole(0),))]
    machine.no_more_connections()
    assert machine.connection_lost(1, gone, 0.0) == []
    assert land(machine, 1, whole(0)) == []
    assert machine.failed(1, [whole(1)], gone, 0.0) == [Fail((gone, gone))]
    assert machine.retries == 3


def test_the_last_read_of_a_lost_connection_may_complete_the_pull() -> None:
    machine = machine_of(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1, 0.0)
    machine.no_more_connections()
    assert machine.connection_lost(0, PeerLostError("gone"), 0.0) == []
    assert land(machine, 0, whole(0)) == [LayerReady(0)]
    assert machine.ended


def test_the_pull_fails_when_the_last_lost_connection_has_ended() -> None:
    machine = machine_of(grid_of([2]))
    machine.start()
    machine.add_connection(0, 1, 0.0)
    machine.no_more_connections()
    gone = PeerLostError("gone")
    assert machine.connection_lost(0, gone, 0.0) == []
    assert land(machine, 0, whole(0)) == [Fail((gone,))]


def test_a_read_that_keeps_failing_ends_its_connection() -> None:
    machine = machine_of(grid_of([1]))
    machine.start()
    machine.add_connection(0, 1, 0.0)
    machine.no_more_connections()
    commands: list[Command] = []
    for _ in range(10):
        commands = machine.failed(0, [whole(0)], PeerProtocolError("no"), 0.0)
        if machine.ended:
            break
    assert isinstance(commands[-1], Fail)


def test_a_stopped_connection_is_dropped_once_the_others_would_be_sooner() -> None:
    machine = machine_of(grid_of([4]))
    machine.start()
    machine.add_connection(0, 1, 0.0, bytes_per_s=1e9)
    (other,) = machine.add_connection(1, 1, 0.0, bytes_per_s=1e9)
    assert isinstance(other, Assign)
    now_s = 0.0
    part = other.parts[0]
    while True:
        now_s += 0.001
        following = land(machine, 1, part, now_s)
        if not any(isinstance(command, Assign) for command in following):
            break
        part = next(c for c in following if isinstance(c, Assign)).parts[0]
    assert machine.holdings.bits.bit_count() == 3  # without connection 0's, which never came
    assert machine.tick(now_s + 0.5) == []
    (dropped,) = machine.tick(now_s + 5.0)
    assert isinstance(dropped, DropConnection)
    assert dropped.connection == 0
    assert isinstance(dropped.reason, PathSlowError)
    assert machine.failed(0, [whole(0)], ClosedError("closed"), now_s + 5.0) == [
        Assign(1, (whole(0),))
    ]


def test_early_layers_do_not_wait_for_a_connection_that_has_slowed_down() -> None:
    machine = machine_of(grid_of([1000]))
    machine.start()
    driver = Driver(machine, machine._grid)
    driver.take(machine.add_connection(0, 1, 0.0, bytes_per_s=1e8))
    driver.take(machine.add_connection(1, 1, 0.0, bytes_per_s=1e8))
    for _ in range(40):  # both do 100 MB/s
        driver.now_s += 0.0105
        for part in list(driver.in_flight):
            driver.landed(part)
    slow = next(part for part, connection in driver.in_flight.items() if connection == 0)
    for _ in range(90):  # connection 0 stops; most of the model is left
        driver.now_s += 0.0105
        driver.landed(
            next(part for part, connection in driver.in_flight.items() if connection == 1)
        )
    assert machine.tick(driver.now_s, {slow: 1000}) == []
    driver.now_s += 0.2
    driver.take(machine.tick(driver.now_s, {slow: 1000}))
    assert driver.dropped == [0]
    driver.failed(slow, ClosedError("closed"))
    driver.landed(next(part for part, connection in driver.in_flight.items() if connection == 1))
    assert slow in driver.in_flight  # the lowest that is missing: at once


def test_the_only_connection_is_never_late() -> None:
    machine = machine_of(grid_of([4]))
    machine.start()
    machine.add_connection(0, 1, 0.0, bytes_per_s=1e9)
    assert machine.due_s == math.inf
    assert machine.tick(1000.0) == []


def test_late_connections_are_looked_for_once_there_are_two() -> None:
    machine = machine_of(grid_of([4]))
    for number in range(2):
        machine.add_connection(number, 1, 0.0)
    assert machine.due_s <= TICK_S
    machine.tick(8.0)
    assert machine.due_s == 8.0 + TICK_S
    machine.connection_lost(1, PeerLostError("cut"), 8.0)
    assert machine.due_s == math.inf


def test_a_model_without_bytes_is_complete_at_once() -> None:
    machine = machine_of(grid_of([0, 0]))
    assert machine.start() == [LayerReady(0), LayerReady(1)]
    assert machine.ended
    assert machine.add_connection(0, 4, 0.0) == []


def test_what_is_there_already_is_not_read() -> None:
    machine = machine_of(grid_of([1, 1]))
    machine.start()
    assert machine.already_landed([0]) == ([0], [LayerReady(0)])
    assert machine.add_connection(0, 4, 0.0) == [Assign(0, (whole(1),))]
    assert machine.already_landed([0]) == ([], [])
    assert machine.already_landed([1]) == ([], [])  # it is being read
    assert land(machine, 0, whole(1)) == [LayerReady(1)]
    assert machine.already_landed([1]) == ([], [])


def test_abort_ends_it_once() -> None:
    machine = machine_of(grid_of([1]))
    machine.start()
    cause = PeerLostError("enough")
    assert machine.abort(cause) == [Fail((cause,))]
    assert machine.abort(cause) == []
    assert machine.add_connection(0, 1, 0.0) == []


def test_one_number_is_one_connection() -> None:
    machine = machine_of(grid_of([1]))
    machine.add_connection(0, 1, 0.0)
    with pytest.raises(ValueError, match="there already"):
        machine.add_connection(0, 1, 0.0)
