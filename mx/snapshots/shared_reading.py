"""Ranks on one host read a checkpoint once, where nothing says what its blocks are: each reads and
hashes a share of all blocks, puts into its memory what it wants of them, and hands the others what
they want. Each shows the digests of its share, of which all compute the identity.

What another rank hands over is taken as it is, as by all that share: it hashed what it read.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate, pairwise
from typing import NamedTuple

from mx.contexts import Undo
from mx.core import manifest as manifests
from mx.core.digest import DIGEST_BYTES, block_digest, document_digest, tensor_root
from mx.core.grid import ChunkGrid, block_count
from mx.core.holdings import members
from mx.core.layout_rules import RULES
from mx.core.local_ranks import UNIT_BLOCKS, LocalRanks, Shares, bits, index_nbytes
from mx.core.pages import Pages
from mx.core.selection import Selection
from mx.core.striping import Part
from mx.core.types import Layout
from mx.core.wanted import ASIDE_BYTES, BlockRange, WantedBlocks, append
from mx.errors import ClosedError
from mx.fetching.exchange import Exchange
from mx.fetching.ranks import meet
from mx.fetching.stored import StoredModel, read_buffer
from mx.memory.live import Memory
from mx.memory.subset import SubsetMemory
from mx.runtime import unexpected
from mx.storage.landing import ArenaDigests
from mx.storage.load import LoadedCheckpoint, hashing, load_opened, manifest_of_digests
from mx.storage.safetensors import Checkpoint
from mx.storage.stages import HASH, PLACE, WAIT, StageClock, Stages
from mx.threads import Threads

#: How often what the others have read is looked at.
_POLL_S = 0.01


class SharedCheckpoint(NamedTuple):
    """A checkpoint of which this rank has read a part: the bytes that it has read, and that each
    other rank has handed over."""

    loaded: LoadedCheckpoint[Memory | SubsetMemory]
    read_nbytes: int
    given_nbytes: dict[int, int]


def load_shared(
    checkpoint: Checkpoint,
    arena_of: Callable[[Layout], Memory | SubsetMemory],
    ranks: LocalRanks,
    *,
    where: str,
    layout_version: int | None,
    silent_s: float,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    stages: Stages,
) -> SharedCheckpoint:
    """Read a checkpoint, whose headers were read, with the other ranks on this host. Blocks.

    Args:
        checkpoint: The checkpoint.
        arena_of: Makes the memory of what is wanted, given the layout of all.
        ranks: Which rank this is.
        where: Names the checkpoint in errors.
        layout_version: As for `plan_layout`.
        silent_s: Leave a rank that has not been heard of for so many seconds.
        progress: Called with (bytes so far, bytes in total), from any thread.
        cancelled: Returns True once the pull was closed.
        stages: Gets the times of the threads that read.

    Returns:
        The manifest, the digests and the memory, which the caller owns. If no other rank has come,
        all of it was read.

    Raises:
        ConfigError: Another pull of this host is the same rank.
        ClosedError: `cancelled`.
        MxError: As `load_opened`.
    """
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases, layout_version)
    grid = ChunkGrid(layout.layers, RULES[layout.version].chunk_nbytes(layout.payload_nbytes))
    arena = arena_of(layout)
    with Undo(arena.release):
        if isinstance(arena, SubsetMemory):
            memory = arena
        else:  # a GPU's, to which blocks go one by one
            memory = SubsetMemory(Selection().of(layout), arena)
        exchange = meet(
            ranks,
            document_digest(repr((layout.version, layout.tensors, _versions(checkpoint))).encode()),
            grid,
            memory.subset.wanted(grid),
            cancelled,
            table_nbytes=DIGEST_BYTES * grid.first_of_layer[-1],
        )
        if exchange is None:
            found = load_opened(
                checkpoint,
                lambda layout: arena,
                layout_version=layout_version,
                threads=checkpoint.threads,
                progress=progress,
                cancelled=cancelled,
                stages=stages,
            )
            return SharedCheckpoint(found, layout.payload_nbytes, {})
        with closing(exchange), closing(StoredModel(checkpoint, layout, where)) as model:
            reading = _SharedReading(grid, ranks.rank, exchange, model, memory, progress, cancelled)
            exchange.begin(reading, reading.shares, silent_s)
            digests = reading.run(checkpoint.threads, stages)
            model.check_unchanged()  # since before any rank read it
        filled = _filled(layout, grid, digests)
        companions = hashing(checkpoint.threads, cancelled)
        manifest = manifest_of_digests(checkpoint, layout, filled, companions)
        memory.forget()  # all of it is there
    pages = Pages.whole(manifest, filled.pages)
    loaded: LoadedCheckpoint[Memory | SubsetMemory]
    loaded = LoadedCheckpoint(manifest, pages, b"", memory)
    return SharedCheckpoint(loaded, reading.read_nbytes, reading.given_nbytes)


def _versions(checkpoint: Checkpoint) -> list[object]:
    """Return what differs once a file has changed, the same to all ranks."""
    stamps = [getattr(file, "stamp", None) for file in checkpoint.files]
    return [
        (file.path, stamp and (stamp.device, stamp.inode, stamp.nbytes, stamp.mtime_ns))
        for file, stamp in zip(checkpoint.files, stamps, strict=True)
    ] + [getattr(file, "listed", None) for file in checkpoint.files]


def _filled(layout: Layout, grid: ChunkGrid, digests: bytearray) -> ArenaDigests:
    """Return the digests of all blocks, which are in layer order, by tensor and by layer."""
    roots, at = {}, 0
    for tensor in layout.tensors:
        end = at + DIGEST_BYTES * block_count(tensor.nbytes)
        roots[tensor.name] = tensor_root(tensor.nbytes, bytes(digests[at:end]))
        at = end
    ends = [DIGEST_BYTES * blocks for blocks in grid.first_of_layer]
    return ArenaDigests(roots, [bytes(digests[a:b]) for a, b in pairwise(ends)], b"")


def _dealt(grid: ChunkGrid, indices: dict[int, bytes]) -> dict[int, list[int]]:
    """Return the blocks that each rank is to have, by chunk, as bit sets: what it wants, and its
    share of what none wants."""
    ranks, at, turn = sorted(indices), 0, 0
    found: dict[int, list[int]] = {rank: [] for rank in ranks}
    for chunk in range(len(grid)):
        end = at + -(-grid.block_count(chunk) // 8)
        masks = {rank: int.from_bytes(indices[rank][at:end], "little") for rank in ranks}
        at, wanted = end, functools.reduce(int.__or__, masks.values())
        for begin in range(0, grid.block_count(chunk), UNIT_BLOCKS):
            unit = bits(Part(chunk, begin, min(begin + UNIT_BLOCKS, grid.block_count(chunk))))
            if unit & ~wanted:
                masks[ranks[turn % len(ranks)]] |= unit & ~wanted
                turn += 1
        for rank in ranks:
            found[rank].append(masks[rank])
    return found


class _SharedReading:
    """One rank's reading; what its exchange calls is `mx.fetching.exchange.Pulling`."""

    def __init__(
        self,
        grid: ChunkGrid,
        rank: int,
        exchange: Exchange,
        model: StoredModel,
        memory: SubsetMemory,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._grid, self._rank, self._exchange = grid, rank, exchange
        self._model, self._memory = model, memory
        self._report, self._cancelled = progress, cancelled
        rings = {fellow.rank: fellow.ring for fellow in exchange.fellows} | {rank: exchange.ring}
        self._fellows = {fellow.rank: fellow for fellow in exchange.fellows}
        first = index_nbytes(grid)
        self._tables = {each: ring.shown[first:] for each, ring in rings.items()}
        dealt = _dealt(grid, {each: bytes(ring.shown[:first]) for each, ring in rings.items()})
        self.shares = Shares(
            grid,
            rank,
            _all_of(grid, dealt[rank]),
            {each: _packed(grid, masks) for each, masks in dealt.items()},
        )
        self.read_nbytes = 0
        self.given_nbytes: dict[int, int] = {}
        self._digests = bytearray(DIGEST_BYTES * grid.first_of_layer[-1])
        self._changed = threading.Condition()
        #: What is not hashed yet, by the rank that reads it.
        self._left = {each: set(parts) for each, parts in self.shares.read_by.items()}
        self._queue = deque(self.shares.read_by[rank])
        self._shown_nbytes = 0  # of this rank's share
        self._total_nbytes = sum(self.shares.nbytes_by.values())
        self._failure: BaseException | None = None

    def run(self, threads: int, stages: Stages) -> bytearray:
        """Read until all blocks are hashed, and what is wanted is in its place. Blocks.

        Args:
            threads: How many threads read.
            stages: Gets their times.

        Returns:
            The digests of all blocks of the model, in layer order.

        Raises:
            ClosedError: The pull was closed.
            MxError: As `StoredModel.read`.
        """
        is_cancelled = True
        with Threads(threads, "mx-share") as pool:
            try:
                for _ in range(threads):
                    pool.submit(self._work, stages)
                with self._changed:
                    while self._goes_on():
                        self._wait()
                    is_cancelled = self._failure is None and any(self._left.values())
            except BaseException as error:
                self._fail(error)  # an interrupt of this thread
                raise
            finally:
                if self._failure is not None or is_cancelled:
                    self._exchange.close()  # a thread may wait to hand something out
        if self._failure is not None:
            raise unexpected(self._failure)
        if is_cancelled:
            raise ClosedError("reading was cancelled")
        return self._digests

    def _goes_on(self) -> bool:
        return self._failure is None and any(self._left.values()) and not self._cancelled()

    def _wait(self) -> None:
        """Wait a moment for what other ranks do, under the lock."""
        self._hear()
        self._changed.wait(_POLL_S)

    def _hear(self) -> None:
        """Take the digests of ranks that have read their share. Call this under the lock."""
        for rank in self._fellows:
            if self._left[rank] and self._has_read(rank):
                for part in self._left[rank]:
                    self._take_digests(rank, part)
                self._left[rank].clear()
                self._changed.notify_all()

    def _has_read(self, rank: int) -> bool:
        """Return True if a rank has said that it has read its share: what it was to hand over has
        come before."""
        return self._fellows[rank].landed_nbytes == self.shares.nbytes_by[rank]

    def _rows(self, part: Part) -> slice:
        row = DIGEST_BYTES * self._grid.row(part.chunk, part.begin)
        return slice(row, row + DIGEST_BYTES * (part.end - part.begin))

    def _take_digests(self, rank: int, part: Part) -> None:
        rows = self._rows(part)
        self._digests[rows] = self._tables[rank][rows]

    # -- on the threads that read -----------------------------------------------------------------

    def _work(self, stages: Stages) -> None:
        with (
            stages.clock(self._model.device) as clock,
            read_buffer() as ring,
            memoryview(ring) as buffer,
            mmap.mmap(-1, ASIDE_BYTES) as unit,
            memoryview(unit) as view,
        ):
            try:
                while (part := self._next()) is not None:
                    clock.lap(WAIT)
                    self._read(part, buffer, view, clock)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error.with_traceback(None)
            self._changed.notify_all()

    def _next(self) -> Part | None:
        """Return what to read next; None at the end. Waits for what other ranks may leave."""
        with self._changed:
            while self._goes_on() and not self._queue:
                self._wait()
            return self._queue.popleft() if self._goes_on() else None

    def _read(self, part: Part, buffer: memoryview, view: memoryview, clock: StageClock) -> None:
        """Read and hash a part, and put it where it is wanted."""
        base = self._grid.layers[self._grid.layer_of[part.chunk]].arena_offset
        places = [
            (base + offset, nbytes)
            for offset, nbytes in self._grid.blocks(part.chunk)[part.begin : part.end]
        ]
        ends = list(accumulate(nbytes for _, nbytes in places))
        blocks = [view[end - nbytes : end] for end, (_, nbytes) in zip(ends, places, strict=True)]
        pieces = [(place, block) for (place, _), block in zip(places, blocks, strict=True)]
        self._model.read(pieces, buffer, clock=clock)
        digests = b"".join(map(block_digest, blocks))
        clock.lap(HASH, ends[-1])
        for place, block in pieces:
            self._memory.write(place, block)
        clock.lap(PLACE)
        rows, nbytes = self._rows(part), ends[-1]
        own = part in self._left[self._rank]
        if own:
            self._tables[self._rank][rows] = digests
            self._exchange.hand_out(part, blocks)
        with self._changed:
            self._digests[rows] = digests
            self.read_nbytes += nbytes
            self._shown_nbytes += own * nbytes
            for left in self._left.values():
                left.discard(part)
            self._progressed()
        if own and self._shown_nbytes == self.shares.nbytes_by[self._rank]:
            self._exchange.beat()

    def _progressed(self) -> None:
        """Tell of progress, under the lock."""
        self._report(self.read_nbytes + sum(self.given_nbytes.values()), self._total_nbytes)
        self._changed.notify_all()

    # -- on the thread of the exchange ------------------------------------------------------------

    def write_given(self, part: Part, data: memoryview) -> None:
        """Scatter a part's wanted blocks to their destinations."""
        base, at = self._grid.layers[self._grid.layer_of[part.chunk]].arena_offset, 0
        for offset, nbytes in self._grid.blocks(part.chunk)[part.begin : part.end]:
            self._memory.write(base + offset, data[at : at + nbytes])
            at += nbytes

    def given(self, rank: int, part: Part) -> None:
        """A part that this rank has read is in its place."""
        with self._changed:
            if part in self._left[rank]:
                self._take_digests(rank, part)
                self._left[rank].discard(part)
                nbytes = self._grid.part_nbytes(*part)
                self.given_nbytes[rank] = self.given_nbytes.get(rank, 0) + nbytes
                self._progressed()

    def landed_nbytes(self) -> int:
        """Return how much of its share this rank has shown."""
        return self._shown_nbytes

    def expects(self, rank: int) -> bool:
        """Return True if this rank has yet to read something."""
        with self._changed:
            return bool(self._left[rank]) and not self._has_read(rank)

    def take_up(self, rank: int) -> bool:
        """Read what this rank has not read. Returns True if there is anything."""
        with self._changed:
            self._hear()
            left = sorted(self._left[rank])
            self._queue += left
            self._changed.notify_all()
            return bool(left)

    def raised(self, error: BaseException) -> None:
        """The thread of the exchange raised an unexpected exception."""
        self._fail(error)


def _all_of(grid: ChunkGrid, masks: list[int]) -> WantedBlocks:
    """Return the blocks of bit sets, one for each chunk."""
    ranges: dict[int, list[BlockRange]] = {}
    for chunk, mask in enumerate(masks):
        for block in members(mask):
            append(ranges.setdefault(chunk, []), BlockRange(block, block + 1, False))
    return WantedBlocks(grid, ranges)


def _packed(grid: ChunkGrid, masks: list[int]) -> bytes:
    """Return bit sets as `mx.core.local_ranks.index_of` has them."""
    return b"".join(
        mask.to_bytes(-(-grid.block_count(chunk) // 8), "little")
        for chunk, mask in enumerate(masks)
    )
