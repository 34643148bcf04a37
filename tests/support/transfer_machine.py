"""The transfer machine with what it needs, and a driver that carries out its commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mx.core.grid import ChunkGrid, Layer
from mx.core.striping import Part
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import Assign, Command, DropConnection, Fail, LayerReady
from mx.errors import MxError
from mx.units import MIB, align_up


def grid_of(layer_mib: Sequence[int], chunk_mib: int = 1) -> ChunkGrid:
    """Return the chunks of layers of so many MiB each."""
    layers, base = [], 0
    for index, mib in enumerate(layer_mib):
        nbytes = mib * MIB
        layers.append(Layer(index, f"layer.{index}", nbytes, base, ((0, nbytes),), index))
        base += align_up(nbytes, 4096)
    return ChunkGrid(layers, chunk_mib * MIB)


class Known:
    """The pages that the machine knows: at first all, or none."""

    def __init__(self, grid: ChunkGrid, *, at_once: bool = True) -> None:
        self.grid = grid
        self.layers = set(range(len(grid.layers))) if at_once else set[int]()

    def get(self, layer: int) -> bytes | None:
        if layer not in self.layers:
            return None
        return digests_of(range(self.grid.layer_blocks[layer]))


def machine_of(grid: ChunkGrid, known: Known | None = None) -> TransferMachine:
    """A machine that finds blocks of `blocks_of` right."""
    return TransferMachine(grid, (known or Known(grid)).get)


def digests_of(numbers: Iterable[int], *, right: bool = True) -> bytes:
    """Return the digests of a layer's blocks, which follow from their numbers."""
    return b"".join(bytes([number % 256, right] * 16) for number in numbers)


def blocks_of(grid: ChunkGrid, part: Part, *, right: bool = True) -> bytes:
    """Return the part's block digests."""
    first = grid.first_block[part.chunk]
    return digests_of(range(first + part.begin, first + part.end), right=right)


class Driver:
    """Carries out the machine's commands, and checks that they are consistent."""

    def __init__(self, machine: TransferMachine, grid: ChunkGrid) -> None:
        self.machine = machine
        self.grid = grid
        self.in_flight: dict[Part, int] = {}  # -> connection
        self.covered: dict[int, set[int]] = {}  # chunk -> blocks in flight or landed
        machine.holdings.subscribe(self)
        self.done: set[int] = set()
        self.wrong: list[tuple[int, str]] = []
        self.lies: list[Part] = []  # landed wrong, and not judged yet, the oldest first
        self.ready: list[int] = []
        self.dropped: list[int] = []
        self.lost: set[int] = set()
        self.failure: Fail | None = None
        self.now_s = 0.0

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Assign(connection, parts):
                    assert connection not in self.lost
                    for part in parts:
                        self._requested(part, connection)
                case LayerReady(layer):
                    assert layer not in self.ready
                    self.ready.append(layer)
                case DropConnection(connection, _):
                    self.lost.add(connection)
                    self.dropped.append(connection)
                case Fail():
                    assert self.failure is None
                    self.failure = command

    def _requested(self, part: Part, connection: int) -> None:
        assert part.chunk not in self.done, "read again"
        blocks = set(range(part.begin, part.end))
        covered = self.covered.setdefault(part.chunk, set())
        assert blocks and not blocks & covered, "read twice at once"
        covered |= blocks
        self.in_flight[part] = connection

    def landed(self, part: Part, *, right: bool = True) -> None:
        connection = self.in_flight.pop(part)
        if not right:
            self.lies.append(part)
        self.take(land(self.machine, connection, part, self.now_s, right=right))

    @property
    def completed(self) -> bool:
        return self.machine.holdings.whole

    # -- mx.core.holdings.HoldingsListener --------------------------------------------------------

    def chunk_verified(self, chunk: int) -> None:
        assert chunk not in self.done, "verified twice"
        assert chunk not in [part.chunk for part in self.in_flight]
        self.done.add(chunk)

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        self.wrong.append((chunk, source))
        part = next(part for part in self.lies if part.chunk == chunk)
        self.lies.remove(part)
        self.covered[chunk] -= set(range(part.begin, part.end))

    def failed(self, part: Part, error: MxError) -> None:
        self.covered[part.chunk] -= set(range(part.begin, part.end))
        self.take(self.machine.failed(self.in_flight.pop(part), [part], error, self.now_s))


def land(
    machine: TransferMachine, connection: int, part: Part, now_s: float = 0.0, *, right: bool = True
) -> list[Command]:
    """Tell the machine that a part has landed, with right digests or wrong ones."""
    digests = blocks_of(machine._grid, part, right=right)
    return machine.landed(connection, [(part, digests)], now_s)
