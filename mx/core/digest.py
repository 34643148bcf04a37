"""Chunk and document digests.

A chunk's digest is xxh3_128 over the xxh3_128 digests of its 1 MiB blocks, so that it can be
computed as bytes land, in parallel, and on a GPU. Blocks are cut on layer-space offsets; padding
inside a block is left out. Documents and tensors are blake3.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from mx.core.types import BLOCK_BYTES, Segment

DIGEST_BYTES = 16


def block_parts(segments: Sequence[Segment]) -> list[list[tuple[int, int, int]]]:
    """The blocks of a chunk's segments in order, each as parts (segment's index, offset within
    the segment, bytes). A block without payload is left out."""
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
    """Hashes one chunk while it lands, front to back.

    `segments` are the chunk's (layer-space) segments and `views` writable or read-only byte
    views of the same lengths. `landed(n)` says that the first `n` payload bytes are in place;
    every block that is thereby complete is hashed at once, while it is in the cache. Not
    thread-safe: one thread at a time.
    """

    __slots__ = ("_pieces", "_next", "_blocks")

    def __init__(self, segments: Sequence[Segment], views: Sequence[memoryview]) -> None:
        # One entry per block: (payload bytes up to its end, the views that make it up).
        self._pieces: list[tuple[int, list[memoryview]]] = []
        self._blocks: list[bytes] = []
        self._next = 0
        payload = 0
        for parts in block_parts(segments):
            payload += sum(nbytes for _, _, nbytes in parts)
            self._pieces.append((payload, [views[i][at : at + nbytes] for i, at, nbytes in parts]))

    def landed(self, payload_nbytes: int) -> None:
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
        """Those of all blocks, one after the other; hashes what `landed` has not announced."""
        if self._pieces:
            self.landed(self._pieces[-1][0])
        return b"".join(self._blocks)

    def digest(self) -> bytes:
        """The digest of the chunk, or of what was given of it."""
        return digest_of_blocks(self.block_digests())


def digest_of_blocks(block_digests: bytes) -> bytes:
    """A chunk's digest from those of its blocks, 16 bytes each, in order."""
    return xxh3_128_digest(block_digests)


def chunk_digest(segments: Sequence[Segment], views: Sequence[memoryview]) -> bytes:
    """The 16-byte digest of a chunk that is wholly in memory."""
    return ChunkHasher(segments, views).digest()


def document_digest(data: bytes | memoryview) -> bytes:
    """The 32-byte blake3 of a manifest document or side file."""
    return blake3(data).digest()
