"""Hashes parts as they land, on the transports' threads, and reports how each ended."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from mx.core.digest import SHORTCUT_BYTES, BlockHasher, block_digest, shortcut_digest
from mx.core.grid import ChunkGrid
from mx.core.striping import Part
from mx.errors import MxError
from mx.fetching.destination import PartMemory
from mx.memory.arena import Hasher, MakeHasher
from mx.transport import host_view

if TYPE_CHECKING:
    from mx.fetching.transfer import Transfer


class PartSink:
    """Hashes one part as it lands and reports how it ended. It is called by one thread at a time,
    but for `passing`; others read `landed_nbytes`.

    What goes to a GPU through this host's memory is hashed there (`mx.transport.HostHashing`).
    """

    __slots__ = (
        "connection",
        "landing",
        "part",
        "landed_nbytes",
        "_transfer",
        "_make_hasher",
        "_hasher",
        "_passed",
        "_vouched",
    )

    def __init__(
        self,
        transfer: Transfer,
        connection: int,
        landing: PartMemory,
        make_hasher: MakeHasher,
        vouched: memoryview | None,
        staged: bool = False,
    ) -> None:
        """
        Args:
            transfer: What is told how the part ended.
            connection: The number of the connection that reads it.
            landing: Where it lands.
            make_hasher: Makes hashers that compute blake3.
            vouched: The shortcut digests that the blocks should have; None: compute blake3.
            staged: Whether all of it passes through this host's memory to a GPU (`passing`).
        """
        self.connection = connection
        self.landing = landing
        self.part = landing.part
        self.landed_nbytes = 0
        self._transfer = transfer
        self._make_hasher = make_hasher
        self._vouched = vouched
        self._hasher: Hasher | None = None
        self._passed: dict[int, bytes] = {}  # digests by where their blocks begin in the part
        if vouched is not None:
            self._hasher = BlockHasher([host_view(b) for b in landing.blocks], shortcut_digest)
        elif not staged:
            self._hasher = make_hasher(landing.blocks)

    def block_ends(self) -> Sequence[int]:
        return list(accumulate(map(len, self.landing.blocks)))

    def passing(self, begin: int, view: memoryview) -> None:
        ends, done = self.block_ends(), 0
        for end in ends[bisect_right(ends, begin) :]:
            if end > begin + len(view):
                break
            self._passed[begin + done] = block_digest(view[done : end - begin])
            done = end - begin

    def landed(self, nbytes: int) -> None:
        if self._hasher is not None:
            self._hasher.landed(nbytes)
        self.landed_nbytes = nbytes

    def done(self) -> None:
        try:
            self._transfer.part_done(self)
        except BaseException as error:  # noqa: BLE001 - the thread is the transport's
            self._transfer.raised(error)

    def failed(self, error: MxError) -> None:
        try:
            self._transfer.part_failed(self, error)
        except BaseException as raised:  # noqa: BLE001 - as above
            self._transfer.raised(raised)

    def block_digests(self) -> bytes | None:
        """Return the blake3 digests of the blocks; None: the shortcut has found them right."""
        if self._hasher is None:
            return b"".join(self._passed[begin] for begin in sorted(self._passed))
        digests, vouched = self._hasher.block_digests(), self._vouched
        if vouched is None:
            return digests
        self._vouched = None
        if digests == bytes(vouched):
            return None
        # On a mismatch blake3 has the last word: the shortcut's digests may be the wrong ones.
        return self._make_hasher(self.landing.blocks).block_digests()


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
    first = grid.first_of_layer[grid.layer_of[part.chunk]] + grid.first_block[part.chunk]
    return digests[SHORTCUT_BYTES * (first + part.begin) : SHORTCUT_BYTES * (first + part.end)]
