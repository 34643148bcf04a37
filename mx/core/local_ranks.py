"""How ranks on one host divide the blocks that they want, so that each is moved to the host once.

Every rank computes the same division from what all of them want. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mx.core.grid import BLOCK_BYTES, ChunkGrid
from mx.core.holdings import members
from mx.core.striping import Part
from mx.core.wanted import ASIDE_BYTES, BlockRange, WantedBlocks, append
from mx.errors import ConfigError

#: Ranks on one host; each gives the others two descriptors at once.
MOST_RANKS = 64
#: The most blocks that are handed over at once.
UNIT_BLOCKS = ASIDE_BYTES // BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """A pull is that of rank `rank` of `size` on this host, which start together.

    `group` tells groups that pull the same model on one host apart. A rank waits at most `wait_s`
    for the others, and goes on with those that are there.
    """

    rank: int
    size: int
    group: str = ""
    wait_s: float = 10.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        numbers = type(self.rank) is int and type(self.size) is int
        if not numbers or not 0 <= self.rank < self.size <= MOST_RANKS:
            raise ConfigError(
                f"`LocalRanks`: there is no rank {self.rank!r} of {self.size!r} on one host",
                hint=f"give 0 <= rank < size <= {MOST_RANKS}, such as LOCAL_RANK and "
                "LOCAL_WORLD_SIZE of torchrun",
            )
        if not isinstance(self.group, str):
            raise ConfigError(f"`LocalRanks`: the group {self.group!r} is not text")
        if not isinstance(self.wait_s, int | float) or not self.wait_s >= 0:
            raise ConfigError(f"`LocalRanks`: {self.wait_s!r} is not a time to wait, in seconds")


def index_nbytes(grid: ChunkGrid) -> int:
    """Return the length of an `index_of` any rank."""
    return sum(-(-grid.block_count(chunk) // 8) for chunk in range(len(grid)))


def index_of(grid: ChunkGrid, wanted: WantedBlocks) -> bytes:
    """Return what a rank wants, for the other ranks: of each chunk a bit for each block."""
    return b"".join(
        wanted.mask(chunk).to_bytes(-(-grid.block_count(chunk) // 8), "little")
        for chunk in range(len(grid))
    )


class Shares:
    """One rank's view of the division. Immutable.

    `mine` are the blocks that this rank reads. `expected` are the parts that others read and hand
    over, by rank. `read_by` are all that each rank reads, `nbytes_by` how much that is.
    """

    def __init__(
        self, grid: ChunkGrid, rank: int, wanted: WantedBlocks, indices: Mapping[int, bytes]
    ) -> None:
        """
        Args:
            grid: The chunks.
            rank: This rank.
            wanted: The blocks that it wants.
            indices: What each rank that is there wants, by rank, as `index_of` gives it.
        """
        ranks = sorted(indices)
        self._takers: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        mine: dict[int, list[BlockRange]] = {}
        self.expected: dict[int, list[Part]] = {other: [] for other in ranks if other != rank}
        self.read_by: dict[int, list[Part]] = {each: [] for each in ranks}
        self.nbytes_by = dict.fromkeys(ranks, 0)
        at = 0
        for chunk in range(len(grid)):
            blocks = grid.block_count(chunk)
            end = at + -(-blocks // 8)
            masks = [(each, int.from_bytes(indices[each][at:end], "little")) for each in ranks]
            at = end
            for begin, until, takers in _units(blocks, masks):
                owner = min(takers, key=lambda each: (self.nbytes_by[each], each))
                self.read_by[owner].append(Part(chunk, begin, until))
                self.nbytes_by[owner] += grid.part_nbytes(chunk, begin, until)
                if rank not in takers:
                    continue
                found = wanted.within(chunk, begin, until)
                if owner == rank:
                    for each in found:
                        append(mine.setdefault(chunk, []), each)
                    others = tuple(each for each in takers if each != rank)
                    if others:
                        self._takers.setdefault(chunk, []).append((begin, until, others))
                else:
                    self.expected[owner] += [Part(chunk, each.begin, each.end) for each in found]
        self.mine = WantedBlocks(grid, mine)
        self._expected_of = {
            other: _mask_of(parts) for other, parts in self.expected.items() if parts
        }

    def pieces(self, part: Part) -> list[tuple[Part, tuple[int, ...]]]:
        """Return what of a part that this rank has read others want, and which ranks: pieces of at
        most `UNIT_BLOCKS` blocks, all of which each of them wants."""
        found = []
        for begin, end, others in self._takers.get(part.chunk, ()):
            low, high = max(begin, part.begin), min(end, part.end)
            if low < high:
                found.append((Part(part.chunk, low, high), others))
        return found

    def expects(self, rank: int, part: Part) -> bool:
        """Return True if that rank reads all of the part, and this one wants all of it."""
        mask = bits(part)
        return self._expected_of.get(rank, {}).get(part.chunk, 0) & mask == mask


class ExpectedBlocks:
    """The blocks that other ranks read, and have yet to hand over."""

    def __init__(self, shares: Shares | None) -> None:
        """At first these are all that others read; None: there are no other ranks."""
        self._parts = {} if shares is None else shares.expected
        self._blocks = _mask_of(part for parts in self._parts.values() for part in parts)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def any_of(self, rank: int) -> bool:
        """Return True if that rank has yet to hand over something."""
        parts = self._parts.get(rank, ())
        return any(self._blocks.get(part.chunk, 0) & bits(part) for part in parts)

    def take(self, part: Part) -> bool:
        """Expect the part no longer. Returns False if not all of it was."""
        mask, expected = bits(part), self._blocks.get(part.chunk, 0)
        if expected & mask != mask:
            return False
        self._blocks[part.chunk] = expected & ~mask
        if expected == mask:
            del self._blocks[part.chunk]
        return True

    def take_all(self, rank: int) -> list[Part]:
        """Expect nothing from that rank any more. Returns what was."""
        found = []
        for part in self._parts.get(rank, ()):
            left = self._blocks.get(part.chunk, 0) & bits(part)
            begin = end = part.begin
            for block in [*members(left), -1]:  # in runs
                if block != end:
                    if begin < end:
                        found.append(Part(part.chunk, begin, end))
                    begin = block
                end = block + 1
        for run in found:
            self.take(run)
        return found


def bits(part: Part) -> int:
    """Return the blocks of a part as a bit set, numbered within its chunk."""
    return (1 << part.end) - (1 << part.begin)


def _mask_of(parts: Iterable[Part]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        found[part.chunk] = found.get(part.chunk, 0) | bits(part)
    return found


def _units(
    blocks: int, masks: Sequence[tuple[int, int]]
) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Yield runs of blocks that the same ranks want: (begin, end, ranks)."""
    union = 0
    for _, mask in masks:
        union |= mask
    begin = end = 0
    takers: tuple[int, ...] = ()
    for block in members(union & ((1 << blocks) - 1)):
        now = tuple(rank for rank, mask in masks if mask >> block & 1)
        if block != end or now != takers or block - begin == UNIT_BLOCKS:
            if takers:
                yield begin, end, takers
            begin, takers = block, now
        end = block + 1
    if takers:
        yield begin, end, takers
