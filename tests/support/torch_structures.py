"""Structures that torch passes to kernels by value, as its headers lay them out: bytes that their
constructors don't write are garbage."""

from __future__ import annotations

import struct
from typing import Protocol

from mx.graphs.structures import calculator_bytes, divider_of
from tests.support.graphs import BASE

CLOSURE = (
    "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastINS0_13AUnaryFunctorIlll"
    "NS0_17BitwiseAndFunctorIlEEEEEEvRNS_18TensorIteratorBaseERKT_EUliE_EEviT1_"
)


class Garbage(Protocol):
    """Where bytes come from that are not written: `random.Random`, for one."""

    def randbytes(self, n: int, /) -> bytes: ...


class _Zeros:
    def randbytes(self, n: int, /) -> bytes:
        return bytes(n)


#: Memory that was zero before.
ZEROS = _Zeros()


def calculator(sizes: list[int], operands: int, garbage: Garbage) -> bytes:
    """Return an OffsetCalculator of contiguous floats, as its constructor writes it: the rest is
    what was there."""
    made = bytearray(garbage.randbytes(calculator_bytes(operands)))
    struct.pack_into("<i", made, 0, len(sizes))
    stride = 4
    for dim, size in enumerate(sizes):
        struct.pack_into("<3I", made, 4 + 12 * dim, *divider_of(size))
        strides = [stride] * operands
        struct.pack_into(f"<{operands}I", made, 304 + 4 * operands * dim, *strides)
        stride = stride * size % (1 << 32)
    return bytes(made)


def closure(
    sizes: list[int], addresses: list[int], garbage: Garbage, function: bytes = b"f" * 8
) -> bytes:
    """Return the closure of an elementwise kernel: the calculator, addresses, the function."""
    made = calculator(sizes, len(addresses), garbage)
    made += garbage.randbytes(-len(made) % 8)
    return made + struct.pack(f"<{len(addresses)}Q", *addresses) + function


def reduction(
    sizes: list[int], garbage: Garbage, ident: int = 8, outputs: list[int] | None = None
) -> bytes:
    """Return a ReduceOp of the identity and operations' size."""
    config = struct.pack("<14i", 4, *range(1, 14)) + b"\1" + garbage.randbytes(3)
    made = b"i" * ident + config + struct.pack("<i", 1)
    made += calculator(sizes, 1, garbage) + calculator(outputs or [], 2, garbage)
    made += garbage.randbytes(-len(made) % 8)
    made += struct.pack("<6Q", *(BASE + 512 * n for n in range(6))) + bytes(8)
    return made + b"\0\1" + garbage.randbytes(2) + struct.pack("<i", 1)
