"""Kernels of a small layer, for graphs over the stand-in: what a decode step launches."""

import triton
import triton.language as tl

from tests.support.driver.kernels import Image, compiled


@triton.jit
def matvec(x, weights, out, rows, columns, block: tl.constexpr):
    """out[row] = sum of weights[row, k] * x[k]"""
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    total = tl.zeros((block,), tl.float32)
    for k in range(columns):
        total += tl.load(x + k) * tl.load(weights + row * columns + k, mask=inside, other=0.0)
    tl.store(out + row, total, mask=inside)


@triton.jit
def add(x, y, out, scale, n, block: tl.constexpr):
    """out[i] = x[i] + scale * y[i]"""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(
        out + at,
        tl.load(x + at, mask=inside) + scale * tl.load(y + at, mask=inside),
        mask=inside,
    )


@triton.jit
def norm(x, weight, out, n, block: tl.constexpr):
    """RMSNorm of one row of up to `block` numbers."""
    at = tl.arange(0, block)
    inside = at < n
    row = tl.load(x + at, mask=inside, other=0.0)
    scale = 1 / tl.sqrt(tl.sum(row * row) / n + 1e-5)
    tl.store(out + at, row * scale * tl.load(weight + at, mask=inside), mask=inside)


BLOCK = 128


def images(capability: int = 90) -> tuple[Image, ...]:
    """Return matvec, add and norm for a compute capability."""
    vectors = {"x": "*fp32", "weights": "*fp32", "out": "*fp32"}
    numbers = {"rows": "i32", "columns": "i32"}
    return (
        compiled(matvec, vectors | numbers, {"block": BLOCK}, capability),
        compiled(
            add,
            {"x": "*fp32", "y": "*fp32", "out": "*fp32", "scale": "fp32", "n": "i32"},
            {"block": BLOCK},
            capability,
        ),
        compiled(
            norm,
            {"x": "*fp32", "weight": "*fp32", "out": "*fp32", "n": "i32"},
            {"block": BLOCK},
            capability,
        ),
    )
