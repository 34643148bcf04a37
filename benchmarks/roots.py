"""What a tensor whose bytes are all in memory is verified by."""

from __future__ import annotations

from mx.core.digest import block_digest, tensor_root
from mx.core.grid import BLOCK_BYTES


def root_of(data: bytes | memoryview) -> bytes:
    """Return the root of a tensor whose bytes are all in memory.

    Args:
        data: The bytes; a view is contiguous, its items may be of any size.
    """
    view = memoryview(data)
    nbytes = view.nbytes
    flat = view.cast("B") if nbytes else view  # a view with a zero in its shape cannot be cast
    starts = range(0, nbytes, BLOCK_BYTES)
    return tensor_root(
        nbytes, b"".join([block_digest(flat[at : at + BLOCK_BYTES]) for at in starts])
    )
