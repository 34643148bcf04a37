"""What a broadcast sends at once: runs of whole blocks, in layer order. Pure arithmetic.

All ranks cut the same layout, so that they send and receive the same buckets.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from mx.core.grid import BLOCK_BYTES, block_count
from mx.core.types import Layout
from mx.units import MIB

#: The most bytes of a bucket, a multiple of `BLOCK_BYTES`: three of them are in memory or on the
#: wire at a time.
BUCKET_BYTES = 8 * MIB
#: A run of a tensor with so many bytes is a bucket of its own, which needs no copy.
ALONE_BYTES = MIB


class BucketPart(NamedTuple):
    """Whole blocks of one tensor.

    `tensor` is its index in `Layout.tensors`, `arena_offset` the place of the first byte in an
    arena, and `block` the number of the first block in its layer.
    """

    tensor: int
    layer: int
    arena_offset: int
    nbytes: int
    block: int


class Bucket(NamedTuple):
    """Some parts, sent one after the other. Once this one and those before it have landed, the
    first `layers` layers are complete."""

    parts: tuple[BucketPart, ...]
    nbytes: int
    layers: int


def cut_buckets(layout: Layout) -> list[Bucket]:
    """Cut a layout into buckets.

    Large tensors are in buckets of their own, `BUCKET_BYTES` at most each. Small ones share
    buckets, with those of the next layers too while there is little to send.

    Returns:
        The buckets, in the order to send them; none if the tensors have no bytes.
    """
    found: list[list[BucketPart]] = []
    small: list[BucketPart] = []
    small_nbytes = since = 0  # `since`: the bytes that were cut since small ones were last sent
    last = [-1] * len(layout.layers)  # the last bucket of each layer

    def close(parts: list[BucketPart]) -> None:
        for part in parts:
            last[part.layer] = len(found)
        found.append(parts)

    for layer in layout.layers:
        block = 0
        for index, (offset, nbytes) in enumerate(layer.extents, layer.first_tensor):
            for at in range(0, nbytes, BUCKET_BYTES):
                size = min(BUCKET_BYTES, nbytes - at)
                first = block + at // BLOCK_BYTES
                part = BucketPart(index, layer.index, layer.arena_offset + offset + at, size, first)
                since += size
                if size >= ALONE_BYTES:
                    close([part])
                    continue
                if small_nbytes + size > BUCKET_BYTES:
                    close(small)
                    small, small_nbytes = [], 0
                small.append(part)
                small_nbytes += size
            block += block_count(nbytes)
        if small and (since >= BUCKET_BYTES or layer is layout.layers[-1]):
            close(small)
            small, small_nbytes, since = [], 0, 0
    complete = [0] * len(found)
    for count, bucket in enumerate(accumulate(last, max), 1):
        if found:
            complete[max(bucket, 0)] = count  # the first layers may be empty
    return [
        Bucket(tuple(parts), sum(part.nbytes for part in parts), layers)
        for parts, layers in zip(found, accumulate(complete, max), strict=True)
    ]
