"""Hashes what lands, on the transports' threads, and reports how each read ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from mx.core.digest import DIGEST_BYTES, SHORTCUT_BYTES, BlockHasher, shortcut_blocks
from mx.core.grid import ChunkGrid
from mx.core.striping import Part
from mx.errors import MxError
from mx.fetching.destination import PartMemory
from mx.memory.arena import Hasher, MakeHasher

if TYPE_CHECKING:
    from mx.cuda.digest_table import DigestTable, QueuedDigests
    from mx.fetching.transfer import Transfer


class ReadSink:
    """One read's. It is called by one thread at a time; others read `landed_nbytes`."""

    __slots__ = ("connection", "landed_nbytes", "part", "uses", "_transfer")

    def __init__(self, transfer: Transfer, connection: int, part: Part) -> None:
        """
        Args:
            transfer: What is told how the read ended.
            connection: The number of the connection that it is read through.
            part: The part that is read, or the first one.
        """
        self.connection = connection
        self.part = part
        #: Whether `end` is to be called.
        self.uses = True
        self.landed_nbytes = 0
        self._transfer = transfer

    def landed_parts(self) -> Iterator[tuple[Part, int]]:
        """Yield each part, and how many of its bytes have landed."""
        raise NotImplementedError

    def digests(self) -> Sequence[tuple[Part, bytes | None]]:
        """Return each part with the blake3 digests of its blocks, all of which have landed; with
        None if the shortcut has found them right. Raises MxError."""
        raise NotImplementedError

    def end(self) -> None:
        """Let others use what this has used: the read has ended. Idempotent."""
        raise NotImplementedError

    def landed(self, nbytes: int) -> None:
        self.landed_nbytes = nbytes

    def done(self) -> None:
        try:
            self._transfer.read_done(self)
        except BaseException as error:  # noqa: BLE001 - the thread is the transport's
            self._transfer.raised(error)

    def failed(self, error: MxError) -> None:
        try:
            self._transfer.read_failed(self, error)
        except BaseException as raised:  # noqa: BLE001 - as above
            self._transfer.raised(raised)


class PartSink(ReadSink):
    """Hashes one part as it lands."""

    __slots__ = ("landing", "_make_hasher", "_hasher", "_vouched")

    def __init__(
        self,
        transfer: Transfer,
        connection: int,
        landing: PartMemory,
        make_hasher: MakeHasher,
        vouched: memoryview | None,
    ) -> None:
        """
        Args:
            transfer: As for `ReadSink`.
            connection: As there.
            landing: Where the part lands.
            make_hasher: Makes hashers that compute blake3.
            vouched: The shortcut digests that the blocks should have; None: compute blake3.
        """
        # Not by the base's, since this is made for each read.
        self.connection, self.part = connection, landing.part
        self.uses = landing.buffer is not None
        self.landed_nbytes = 0
        self._transfer = transfer
        self.landing = landing
        self._make_hasher = make_hasher
        self._vouched = vouched
        self._hasher: Hasher
        if vouched is not None:
            blocks = cast("Sequence[memoryview]", landing.blocks)  # a shortcut is of host memory
            self._hasher = BlockHasher(blocks, shortcut_blocks)
        else:
            self._hasher = make_hasher(landing.blocks)

    def landed_parts(self) -> Iterator[tuple[Part, int]]:
        yield self.part, self.landed_nbytes

    def landed(self, nbytes: int) -> None:
        self._hasher.landed(nbytes)
        self.landed_nbytes = nbytes

    def digests(self) -> Sequence[tuple[Part, bytes | None]]:
        digests, vouched = self._hasher.block_digests(), self._vouched
        if vouched is None:
            return ((self.part, digests),)
        self._vouched = None
        if digests == bytes(vouched):
            return ((self.part, None),)
        # On a mismatch blake3 has the last word: the shortcut's digests may be the wrong ones.
        return ((self.part, self._make_hasher(self.landing.blocks).block_digests()),)

    def end(self) -> None:
        self._transfer.free(self.landing)


class TripSink(ReadSink):
    """Has a GPU hash a run of parts behind the copies that bring it (`mx.transport.DeviceHashing`).

    Where it can't, the blocks are hashed once they are there.
    """

    __slots__ = ("_launch", "_make_hasher", "_table", "parts")

    def __init__(
        self,
        transfer: Transfer,
        connection: int,
        parts: Sequence[Part],
        table: DigestTable,
        make_hasher: MakeHasher,
    ) -> None:
        """
        Args:
            transfer: As for `ReadSink`.
            connection: As there.
            parts: The parts, each of which begins where the one before ends.
            table: That of the pull.
            make_hasher: Makes hashers that compute blake3.
        """
        super().__init__(transfer, connection, parts[0])
        self.parts = parts
        self._table = table
        self._make_hasher = make_hasher
        self._launch: QueuedDigests | None = None

    @property
    def tag(self) -> str:
        """Names the read in errors."""
        first, last = self.parts[0].chunk, self.parts[-1].chunk
        return f"chunk {first}" if first == last else f"chunks {first} to {last}"

    def landed_parts(self) -> Iterator[tuple[Part, int]]:
        left_nbytes = self.landed_nbytes
        for part in self.parts:
            nbytes = min(left_nbytes, self._transfer.grid.part_nbytes(*part))
            yield part, nbytes
            left_nbytes -= nbytes

    def queued(self, stream: int) -> None:
        grid, first, last = self._transfer.grid, self.parts[0], self.parts[-1]
        begin, end = grid.row(first.chunk, first.begin), grid.row(last.chunk, last.end)
        self._launch = self._table.queue(begin, end, stream)

    def digests(self) -> Sequence[tuple[Part, bytes | None]]:
        found = None
        if self._launch is None:
            blocks = [block for part in self.parts for block in self._transfer.blocks(part)]
            found = self._make_hasher(blocks).block_digests()
        else:
            found = self._table.wrong(self._launch)
            if found is None:  # all are as their pages say
                return [(part, self._transfer.expected(part)) for part in self.parts]
        digests: list[tuple[Part, bytes | None]] = []
        at = 0
        for part in self.parts:
            end = at + DIGEST_BYTES * (part.end - part.begin)
            digests.append((part, found[at:end]))
            at = end
        return digests

    def end(self) -> None:
        launch, self._launch = self._launch, None
        if launch is not None:
            self._table.give_back(launch)


def vouched_of(digests: memoryview | None, grid: ChunkGrid, part: Part) -> memoryview | None:
    """Return the shortcut digests of a part's blocks.

    Args:
        digests: Those of all blocks of the model, as a source says; None: it says nothing.
        grid: How the model is cut into chunks.
        part: The part.

    Returns:
        None if there are none, or not as many as the model has blocks.
    """
    if digests is None or len(digests) != SHORTCUT_BYTES * grid.first_of_layer[-1]:
        return None
    first, last = grid.row(part.chunk, part.begin), grid.row(part.chunk, part.end)
    return digests[SHORTCUT_BYTES * first : SHORTCUT_BYTES * last]
