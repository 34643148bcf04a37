"""Kernels whose last parameter seems not to be read, for trials over the stand-in."""

import triton
import triton.language as tl

from tests.support.driver.kernels import Image, compiled

BLOCK = 128
#: Numbers below `out` that `tail_writes` writes to: 8 MiB, which no region of tests has there.
BELOW = 2 << 20


@triton.jit
def tail_skipped(x, zero, out, n, tail, block: tl.constexpr):
    """out = x"""
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def tail_read(x, zero, out, n, tail, block: tl.constexpr):
    """out = x, or x + tail for large tokens"""
    at = tl.arange(0, block)
    more = tl.where(tl.load(x) > 100.0, tail, 0)
    tl.store(out + at, tl.load(x + at, mask=at < n) + more.to(tl.float32), mask=at < n)


@triton.jit
def tail_writes(x, zero, out, n, tail, below: tl.constexpr, block: tl.constexpr):
    """out = x, and so is what is far below it if the tail is 0"""
    at = tl.arange(0, block)
    row = tl.load(x + at, mask=at < n)
    tl.store(out + at, row, mask=at < n)
    tl.store(out - below + at, row, mask=(at < n) & (tail == 0))


@triton.jit
def tail_loops(x, zero, out, n, tail, block: tl.constexpr):
    """out = x, never for a large tail"""
    at = tl.arange(0, block)
    while tail > 60_000:
        tl.store(zero + 8, tail)  # a loop that does nothing may be left out
        tail -= tl.load(zero)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def tail_faults(x, zero, out, n, tail, block: tl.constexpr):
    """out = x, and one is written where no memory is if the tail is even"""
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.store(out + (tail.to(tl.int64) + 1024) * 65536, 1.0, mask=tail % 2 == 0)


def images(capability: int = 90) -> tuple[Image, ...]:
    """Return the kernels for a compute capability."""
    pointers = {"x": "*fp32", "zero": "*i32", "out": "*fp32"}
    signature = {**pointers, "n": "i32", "tail": "i32"}
    plain = (tail_skipped, tail_read, tail_loops, tail_faults)
    constants = {"block": BLOCK}
    return (
        *(compiled(each, signature, constants, capability) for each in plain),
        compiled(tail_writes, signature, {"below": BELOW, **constants}, capability),
    )
