"""Chunk and document digests.

A chunk's digest is xxh3_128 over the xxh3_128 digests of its 1 MiB blocks, so that it can be
computed as bytes land, in parallel, and on a GPU. Block boundaries are layer-space offsets;
padding inside a block is not hashed. Documents and tensors are hashed with blake3.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from mx.core.types import BLOCK_BYTES, Segment

DIGEST_BYTES = 16


def block_parts(segments: Sequence[Segment]) -> list[list[tuple[int, int, int]]]:
    """Return the blocks of a chunk's segments in order.

    Returns:
        Each block as its parts: (index of the segment, offset in the segment, bytes). A block
        without payload is left out.
    """
    found: list[list[tuple[int, int, int]]] = []
    block = -1
    for index, segment in enumerate(segments):
        done = 0
        while done < segment.nbytes:
            offset = segment.offset + done
            take = min(segment.nbytes - done, BLOCK_BYTES - offset % BLOCK_BYTES)
            if offset // BLOCK_BYTES != block:
                block = offset // BLOCK_BYTES
                found.append([])
            found[-1].append((index, done, take))
            done += take
    return found


class ChunkHasher:
    """Hashes one chunk while it lands, front to back. Not thread-safe."""

    __slots__ = ("_pieces", "_next", "_blocks")

    def __init__(self, segments: Sequence[Segment], views: Sequence[memoryview]) -> None:
        """
        Args:
            segments: The chunk's segments in layer space.
            views: Byte views of the same lengths, read-only or writable. They are used until the
                digest is returned.
        """
        # One entry per block: (payload bytes up to its end, the views that make it up).
        self._pieces: list[tuple[int, list[memoryview]]] = []
        self._blocks: list[bytes] = []
        self._next = 0
        payload = 0
        for parts in block_parts(segments):
            payload += sum(nbytes for _, _, nbytes in parts)
            self._pieces.append((payload, [views[i][at : at + nbytes] for i, at, nbytes in parts]))

    def landed(self, payload_nbytes: int) -> None:
        """Hash the blocks that lie within the first `payload_nbytes`, which are in place now.

        Hashing them at once finds them in the cache.
        """
        pieces = self._pieces
        while self._next < len(pieces) and pieces[self._next][0] <= payload_nbytes:
            views = pieces[self._next][1]
            if len(views) == 1:
                self._blocks.append(xxh3_128_digest(views[0]))
            else:
                state = xxh3_128()
                for view in views:
                    state.update(view)
                self._blocks.append(state.digest())
            self._next += 1

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, one after the other, 16 bytes each.

        Hashes the blocks that `landed` has not announced, too.
        """
        if self._pieces:
            self.landed(self._pieces[-1][0])
        return b"".join(self._blocks)

    def digest(self) -> bytes:
        """Return the 16-byte digest over all segments given."""
        return digest_of_blocks(self.block_digests())


def digest_of_blocks(block_digests: bytes) -> bytes:
    """Return a chunk's digest, given its blocks' digests, 16 bytes each, in order."""
    return xxh3_128_digest(block_digests)


def chunk_digest(segments: Sequence[Segment], views: Sequence[memoryview]) -> bytes:
    """Return the 16-byte digest of a chunk that is wholly in memory."""
    return ChunkHasher(segments, views).digest()


def document_digest(data: bytes | memoryview) -> bytes:
    """Return the 32-byte blake3 of a manifest document or side file."""
    return blake3(data).digest()
