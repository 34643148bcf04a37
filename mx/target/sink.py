"""Hashes parts as they land, on the transports' threads, and reports how each ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mx.core.digest import SHORTCUT_BYTES, BlockHasher, shortcut_digest
from mx.core.grid import ChunkGrid
from mx.core.striping import Part
from mx.errors import MxError
from mx.memory.arena import MakeHasher
from mx.target.destination import Landing
from mx.transport import host_view

if TYPE_CHECKING:
    from mx.target.transfer import Transfer


class PartSink:
    """Hashes one part as it lands and reports how it ended. It is called by one thread at a time;
    others read `landed_nbytes`."""

    __slots__ = (
        "connection",
        "landing",
        "part",
        "landed_nbytes",
        "_transfer",
        "_make_hasher",
        "_hasher",
        "_vouched",
    )

    def __init__(
        self,
        transfer: Transfer,
        connection: int,
        landing: Landing,
        make_hasher: MakeHasher,
        vouched: memoryview | None,
    ) -> None:
        """
        Args:
            transfer: What is told how the part ended.
            connection: The number of the connection that reads it.
            landing: Where it lands.
            make_hasher: Makes hashers that compute blake3.
            vouched: The shortcut digests that the blocks should have; None: compute blake3.
        """
        self.connection = connection
        self.landing = landing
        self.part = landing.part
        self.landed_nbytes = 0
        self._transfer = transfer
        self._make_hasher = make_hasher
        self._vouched = vouched
        if vouched is None:
            self._hasher = make_hasher(landing.blocks)
        else:
            self._hasher = BlockHasher([host_view(b) for b in landing.blocks], shortcut_digest)

    def landed(self, nbytes: int) -> None:
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
