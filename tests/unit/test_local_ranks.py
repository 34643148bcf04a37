"""How ranks on one host divide what they want, and hand it to each other."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core.grid import ChunkGrid
from mx.core.local_ranks import UNIT_BLOCKS, LocalRanks, Shares, bits, index_nbytes, index_of
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.wanted import BlockRange, WantedBlocks
from mx.errors import ClosedError, ConfigError, PeerLostError
from tests.support.transfer_machine import Known, grid_of
from tests.support.wanted_machine import Driver, numbers, wanted_at_random


def shares_of(grid: ChunkGrid, wanted: list[WantedBlocks]) -> list[Shares]:
    indices = {rank: index_of(grid, each) for rank, each in enumerate(wanted)}
    assert {len(index) for index in indices.values()} == {index_nbytes(grid)}
    return [Shares(grid, rank, each, indices) for rank, each in enumerate(wanted)]


def blocks_of(parts: list[Part]) -> list[tuple[int, int]]:
    return [number for part in parts for number in sorted(numbers(part))]


def of(wanted: WantedBlocks) -> list[Part]:
    return [part for chunk in wanted.chunks for part in wanted.parts(chunk)]


@settings(max_examples=100, deadline=None)
@given(
    layers=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    chunk_mib=st.integers(1, 8),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_each_wanted_block_is_read_by_one_rank_that_wants_it(
    layers: list[int], chunk_mib: int, ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    grid = grid_of(layers, chunk_mib)
    known = Known(grid, at_once=True)
    wanted = [wanted_at_random(known, rng) for _ in range(ranks)]
    found = shares_of(grid, wanted)
    reader: dict[tuple[int, int], int] = {}
    for rank, shares in enumerate(found):
        for number in blocks_of(of(shares.mine)):
            assert number not in reader, "two ranks read it"
            reader[number] = rank
    for rank, (shares, own) in enumerate(zip(found, wanted, strict=True)):
        come = blocks_of(of(shares.mine))
        for other, parts in shares.expected.items():
            come += blocks_of(parts)
            assert {reader[number] for number in blocks_of(parts)} <= {other}
            for part in parts:
                assert shares.expects(other, part) and not shares.expects(rank, part)
                assert len({own.is_aside(Part(c, b, b + 1)) for c, b in numbers(part)}) == 1
        assert sorted(come) == blocks_of(of(own)), "once each, and no others"
        # What it reads goes to exactly those that expect it from this rank.
        for part in of(shares.mine):
            assert all(piece.end - piece.begin <= UNIT_BLOCKS for piece, _ in shares.pieces(part))
        given = {
            (number, other)
            for part in of(shares.mine)
            for piece, others in shares.pieces(part)
            for number in numbers(piece)
            for other in others
        }
        assert given == {
            (number, other)
            for other, theirs in enumerate(found)
            if other != rank
            for number in blocks_of(theirs.expected[rank])
        }


def test_the_work_is_divided_evenly() -> None:
    grid = grid_of([64])
    everything = WantedBlocks(
        grid, {c: [BlockRange(0, grid.block_count(c), True)] for c in range(len(grid))}
    )
    found = shares_of(grid, [everything] * 4)
    assert {shares.mine.nbytes for shares in found} == {16 << 20}


@settings(max_examples=100, deadline=None)
@given(
    layers=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    chunk_mib=st.integers(1, 8),
    ranks=st.integers(2, 4),
    deaths=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_every_rank_gets_all_that_it_wants_whichever_dies(
    layers: list[int], chunk_mib: int, ranks: int, deaths: int, seed: int
) -> None:
    rng = random.Random(seed)
    grid = grid_of(layers, chunk_mib)
    knowns = [Known(grid, at_once=rng.random() < 0.5) for _ in range(ranks)]
    wanted = [wanted_at_random(known, rng) for known in knowns]
    drivers = []
    for own, known, shares in zip(wanted, knowns, shares_of(grid, wanted), strict=True):
        machine = TransferMachine(grid, known.get, wanted=own, shares=shares)
        driver = Driver(machine, own, known)
        driver.take(machine.start())
        driver.take(machine.add_connection(0, 3, 0.0, source="sound"))
        driver.take(machine.add_connection(1, 2, 0.0, source="faulty"))
        driver.take(machine.no_more_connections())
        drivers.append((driver, shares))
    alive = set(range(ranks))
    queue: list[tuple[int, int, Part]] = []  # from, to, what was handed out
    read: list[tuple[int, int]] = []

    def hand_out(rank: int) -> None:
        driver, shares = drivers[rank]
        part = rng.choice(driver.handing_out)
        read.extend(numbers(part) & set(blocks_of([p for p, _ in shares.pieces(part)])))
        for piece, others in shares.pieces(part):
            queue.extend((rank, other, piece) for other in others if other in alive)
        driver.handed_out(part)

    def step(rank: int) -> bool:
        driver, _ = drivers[rank]
        known, machine = driver.known, driver.machine
        unknown = [layer for layer in range(len(layers)) if layer not in known.layers]
        if driver.handing_out and (rng.random() < 0.5 or not driver.in_flight):
            hand_out(rank)
        elif driver.copying:
            driver.copied(rng.choice(driver.copying))
        elif driver.in_flight:
            part = rng.choice(sorted(driver.in_flight, key=lambda part: (part.chunk, part.begin)))
            if driver.in_flight[part] == 0 or rng.random() < 0.6:
                driver.landed(part)
            elif rng.random() < 0.5:
                driver.landed(part, right=False)
            else:
                driver.in_flight.pop(part)
                driver.take(machine.failed(1, [part], ClosedError("again"), 0.0))
        elif unknown:
            known.layers.add(layer := rng.choice(unknown))
            driver.take(machine.page_known(layer, 0.0))
        else:
            return False
        return True

    moved = True
    while moved or queue:
        moved = False
        for rank in sorted(alive):
            moved |= step(rank)
        if deaths and len(alive) > 1 and rng.random() < 0.1:
            deaths -= 1
            dead = rng.choice(sorted(alive))
            alive.discard(dead)
            queue = [each for each in queue if each[1] != dead]
            # What it said before comes first, or is lost with it.
            lost = rng.random() < 0.5
            for _, to, piece in [] if lost else [each for each in queue if each[0] == dead]:
                give(drivers[to][0], piece)
            queue = [each for each in queue if each[0] != dead]
            for rank in alive:
                driver = drivers[rank][0]
                driver.take(driver.machine.take_up(dead, 0.0))
                assert not driver.machine.expects(dead)
            moved = True
        elif queue and (rng.random() < 0.5 or not moved):
            _, to, piece = queue.pop(rng.randrange(len(queue)))
            give(drivers[to][0], piece)
            moved = True
    for rank in alive:
        driver, _ = drivers[rank]
        assert driver.failure is None
        assert driver.machine.holdings.whole
        assert sorted(driver.ready) == list(range(len(layers)))
        assert driver.machine.landed_nbytes() == driver.wanted.layer_nbytes
    if len(alive) == ranks:
        assert len(read) == len(set(read)), "moved twice"


def give(driver: Driver, piece: Part) -> None:
    """What a rank does with a piece that another one hands it: copy, then count."""
    driver.right |= numbers(piece)
    driver.take(driver.machine.given(piece))
    assert driver.machine.given(piece) == []  # once


def test_a_rank_that_is_gone_is_read_for_only_while_sources_are_left() -> None:
    grid = grid_of([8])
    known = Known(grid, at_once=True)
    whole = {c: [BlockRange(0, grid.block_count(c), True)] for c in range(len(grid))}
    wanted = WantedBlocks(grid, whole)
    shares, _ = shares_of(grid, [wanted, wanted])
    machine = TransferMachine(grid, known.get, wanted=wanted, shares=shares)
    driver = Driver(machine, wanted, known)
    driver.take(machine.start())
    driver.take(machine.add_connection(0, 1, 0.0))
    while driver.in_flight:
        driver.landed(next(iter(driver.in_flight)))
        while driver.handing_out:
            driver.handed_out(driver.handing_out[0])
        while driver.copying:
            driver.copied(driver.copying[0])
    driver.take(machine.connection_lost(0, PeerLostError("gone"), 0.0))
    driver.take(machine.no_more_connections())
    assert driver.failure is None and machine.expects(1)  # it may still come
    driver.take(machine.take_up(1, 0.0))
    assert driver.failure is not None


@pytest.mark.parametrize(
    "arguments",
    [(2, 2), (-1, 2), (0, 0), (0, 65), (True, 2), (0.0, 2), (0, 2, 3), (0, 2, "", -1.0),
     (0, 2, "", "soon")],
)  # fmt: skip
def test_malformed_ranks_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        LocalRanks(*arguments)


def test_bits_of_a_part() -> None:
    assert bits(Part(0, 1, 3)) == 0b110
