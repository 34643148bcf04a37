"""Kernels of a decode step with a cache of keys and values, for graphs over the stand-in."""

# Triton reads the kernels' annotations: no `from __future__ import annotations` here.

import triton
import triton.language as tl

from tests.support.driver import decode
from tests.support.driver.kernels import Image, compiled


@triton.jit
def attend(
    ids,
    positions,
    mask,
    count,
    embed,
    scale,
    keys,
    values,
    hidden,
    rows,
    width,
    block: tl.constexpr,
):
    """Adds a token to the cache at `count`, and mixes the tokens that the mask lets through."""
    lane = tl.arange(0, block)
    inside = lane < width
    token, at = tl.load(ids).to(tl.int32), tl.load(count).to(tl.int32)
    x = tl.load(embed + token * width + lane, mask=inside, other=0.0)
    x = x * tl.load(scale + lane, mask=inside, other=0.0) + tl.load(positions).to(tl.float32)
    tl.store(keys + at * width + lane, x, mask=inside)
    tl.store(values + at * width + lane, x + x, mask=inside)
    total = tl.zeros((block,), tl.float32)
    for row in range(rows):
        seen = tl.load(mask + row) == 0.0
        here = tl.where(
            row == at, x + x, tl.load(values + row * width + lane, mask=inside, other=0.0)
        )
        total += tl.where(seen, here, 0.0)
    tl.store(hidden + lane, total + x, mask=inside)


@triton.jit
def advance(count):
    """count += 1"""
    tl.store(count, tl.load(count) + 1)


BLOCK = 128


def images(capability: int = 90) -> tuple[Image, ...]:
    """Return attend, advance and matvec for a compute capability."""
    pointers = dict.fromkeys(["embed", "scale", "keys", "values", "hidden"], "*fp32")
    signature = {"ids": "*i64", "positions": "*i64", "mask": "*fp32", "count": "*i64"} | pointers
    return (
        compiled(attend, signature | {"rows": "i32", "width": "i32"}, {"block": BLOCK}, capability),
        compiled(advance, {"count": "*i64"}, {}, capability),
        decode.images(capability)[0],
    )
