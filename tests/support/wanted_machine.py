"""The transfer machine of a pull that wants some blocks: a driver that carries out its commands."""

from __future__ import annotations

import random

from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import (
    Assign,
    Command,
    CopyOut,
    DropConnection,
    Fail,
    HandOut,
    LayerReady,
)
from mx.core.wanted import ASIDE_BYTES, BlockRange, WantedBlocks
from tests.support.transfer_machine import Known, land


class Driver:
    """Carries out commands of a machine with wanted blocks, copies late, and checks them."""

    def __init__(self, machine: TransferMachine, wanted: WantedBlocks, known: Known) -> None:
        self.machine, self.wanted, self.known = machine, wanted, known
        self.in_flight: dict[Part, int] = {}
        self.copying: list[Part] = []
        self.handing_out: list[Part] = []
        self.right: set[tuple[int, int]] = set()  # (chunk, block): verified, and in their place
        self.ready: list[int] = []
        self.lost: set[int] = set()
        self.failure: Fail | None = None
        self.now_s = 0.0

    def take(self, commands: list[Command]) -> None:
        grid = self.known.grid
        for command in commands:
            match command:
                case Assign(connection, parts):
                    assert connection not in self.lost
                    for part in parts:
                        kinds = {self.wanted.is_aside(each) for each in blocks(part)}
                        assert len(kinds) == 1, "a part of two kinds"
                        assert not self.right & numbers(part), "read again"
                        others = [*self.in_flight, *self.copying]
                        assert not any(numbers(part) & numbers(other) for other in others)
                        if kinds == {True}:
                            assert grid.layer_of[part.chunk] in self.known.layers
                            nbytes = grid.part_nbytes(part.chunk, part.begin, part.end)
                            assert nbytes <= ASIDE_BYTES
                        self.in_flight[part] = connection
                case CopyOut(part):
                    assert self.wanted.is_aside(part)
                    self.copying.append(part)
                case HandOut(part):
                    self.handing_out.append(part)
                case LayerReady(layer):
                    chunks = [c for c in self.wanted.chunks if grid.layer_of[c] == layer]
                    needed = [part for chunk in chunks for part in self.wanted.parts(chunk)]
                    assert set().union(*map(numbers, needed)) <= self.right, "ready too early"
                    pending = [p for p in self.handing_out if not self.wanted.is_aside(p)]
                    assert layer not in [grid.layer_of[p.chunk] for p in pending], "as above"
                    assert layer not in self.ready
                    self.ready.append(layer)
                case DropConnection(connection, _):
                    self.lost.add(connection)
                case Fail():
                    self.failure = command

    def landed(self, part: Part, *, right: bool = True) -> None:
        connection = self.in_flight.pop(part)
        if right and not self.wanted.is_aside(part):
            self.right |= numbers(part)
        self.take(land(self.machine, connection, part, self.now_s, right=right))

    def copied(self, part: Part) -> None:
        self.copying.remove(part)
        self.right |= numbers(part)
        self.take(self.machine.copied_out(part))
        assert self.machine.copied_out(part) == []

    def handed_out(self, part: Part) -> None:
        self.handing_out.remove(part)
        self.take(self.machine.handed_out(part))
        assert self.machine.handed_out(part) == []


def blocks(part: Part) -> list[Part]:
    """Return each block of a part, as a part."""
    return [Part(part.chunk, block, block + 1) for block in range(part.begin, part.end)]


def numbers(part: Part) -> set[tuple[int, int]]:
    """Return the chunk and number of each block of a part."""
    return {(part.chunk, block) for block in range(part.begin, part.end)}


def wanted_at_random(known: Known, rng: random.Random) -> WantedBlocks:
    """Return some blocks of some chunks, in place or aside."""
    grid = known.grid
    ranges: dict[int, list[BlockRange]] = {}
    for chunk in range(len(grid)):
        kinds = [rng.choice((None, False, True)) for _ in range(grid.block_count(chunk))]
        found: list[BlockRange] = []
        for block, aside in enumerate(kinds):
            if aside is None:
                continue
            if found and (found[-1].end, found[-1].aside) == (block, aside):
                found[-1] = found[-1]._replace(end=block + 1)
            else:
                found.append(BlockRange(block, block + 1, aside))
        if found:
            ranges[chunk] = found
    return WantedBlocks(grid, ranges)
