"""The hash tree over weights, and the digests of documents.

A *block* is 1 MiB of one tensor's bytes in storage order; a tensor's last block is shorter. A
block's digest is its blake3. A tensor's *root* is blake3, with a key derived from `ROOT_CONTEXT`,
over the tensor's length (8 bytes, little-endian) and the digests of its blocks. The root of every
tensor is in the identity document, whose blake3 is the model's identity, so that a block can be
checked alone: its digest against the tensor's digests, and those against the root.

A *pin* that covers the files too is blake3, with a key derived from `PIN_CONTEXT`, over identity
and digest of the packaging document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from struct import Struct

from blake3 import blake3
from xxhash import xxh3_128_digest

DIGEST_BYTES = 32
#: What `shortcut_digest` returns.
SHORTCUT_BYTES = 16

ROOT_CONTEXT = "mx 2026-11-22 root of a tensor's blocks"
PIN_CONTEXT = "mx 2026-11-22 pin of identity and packaging"

_LENGTH = Struct("<Q")


def block_digest(block: bytes | memoryview) -> bytes:
    """Return the 32-byte digest of a block."""
    return blake3(block).digest()


def digest_blocks(blocks: Iterable[memoryview]) -> Iterable[bytes]:
    """Return the digest of each of some blocks."""
    return [blake3(block).digest() for block in blocks]


#: Returns the xxh3_128 of a block, 16 bytes.
#:
#: It guards against accidents only: second preimages take a tenth of a second. It may stand in for
#: `block_digest` where the kernel vouches that this user's own process wrote the memory.
shortcut_digest = xxh3_128_digest
#: As `digest_blocks`, of shortcut digests.
shortcut_blocks: Callable[[Iterable[memoryview]], Iterable[bytes]] = partial(map, shortcut_digest)


def tensor_root(nbytes: int, block_digests: bytes | memoryview) -> bytes:
    """Return the 32-byte root of a tensor.

    Args:
        nbytes: The tensor's length.
        block_digests: The digests of its blocks, one after the other; empty for an empty tensor.
    """
    data = b"".join((_LENGTH.pack(nbytes), block_digests))
    return blake3(data, derive_key_context=ROOT_CONTEXT).digest()


def pin_of(identity: bytes, packaging: bytes) -> bytes:
    """Return the pin of weights together with their files.

    Args:
        identity: The identity.
        packaging: The digest of the packaging document; b"" if there are no files, and then the
            pin is the identity.
    """
    if not packaging:
        return identity
    return blake3(identity + packaging, derive_key_context=PIN_CONTEXT).digest()


def document_digest(data: bytes | memoryview) -> bytes:
    """Return the 32-byte blake3 of a manifest document or side file."""
    return blake3(data).digest()


class BlockHasher:
    """Hashes blocks while they land, front to back. Not thread-safe."""

    __slots__ = ("_views", "_ends", "_digests", "_digests_of")

    def __init__(
        self,
        views: Sequence[memoryview],
        digests_of: Callable[[Iterable[memoryview]], Iterable[bytes]] = digest_blocks,
    ) -> None:
        """
        Args:
            views: The blocks, as byte views. They are used until `block_digests` returns.
            digests_of: `digest_blocks` or `shortcut_blocks`.
        """
        self._views = views
        self._digests_of = digests_of
        #: Where each block ends in the bytes of all.
        self._ends = list(accumulate(map(len, views)))
        self._digests: list[bytes] = []

    def landed(self, payload_nbytes: int) -> None:
        """Hash the blocks that lie within the first `payload_nbytes`, which are in place now.

        Hashing them at once finds them in the cache.
        """
        done = len(self._digests)
        end = bisect_right(self._ends, payload_nbytes, done)
        self._digests += self._digests_of(self._views[done:end])

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, one after the other.

        Hashes the blocks that `landed` has not announced, too.
        """
        if len(self._digests) < len(self._ends):
            self.landed(self._ends[-1])
        return b"".join(self._digests)
