"""What kernels of torch don't read of the structures that they take by value.

An entry is for kernels by their mangled names and for releases of torch whose headers have been
read. Only bytes are named that no code path of the kernel reads, for what the structure says of
itself: what it says is checked first, as far as it can be, so that a structure of another layout
has no such bytes. cuBLAS packs its parameters in ways that are not public, and a CUtensorMap is
opaque and may be read in whole: there is no entry for either.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence

from mx.graphs.addresses import inside
from mx.graphs.package import Kernel, Library, RegionSpec
from mx.units import align_up

Spans = list[tuple[int, int]]

_RELEASES = re.compile(r"2\.(11|13)\.")
_MAX_DIMS = 25
_DIVIDER_BYTES = 12
_STRIDES_AT = 4 + _DIVIDER_BYTES * _MAX_DIMS
#: Of a structure of `dims` dimensions: operands of an elementwise function.
_MOST_OPERANDS = 8


def unread(
    kernel: Kernel,
    library: Library | None,
    number: int,
    value: bytes,
    regions: Sequence[RegionSpec],
) -> Spans:
    """Return the spans (begin, end) of a parameter's bytes that its kernel never reads.

    Args:
        kernel: The kernel.
        library: That which the kernel is of; None for one whose image travels.
        number: Which parameter it is.
        value: Its bytes.
        regions: The regions of the graph.
    """
    if library is None or not _RELEASES.match(library.version):
        return []
    for name, rule in _RULES:
        if name.match(kernel.name):
            return [(begin, end) for begin, end in rule(number, value, regions) if begin < end]
    return []


def _calculator(value: bytes, at: int, operands: int) -> Spans | None:
    """Return what is unread of an OffsetCalculator of 32-bit indices, None if it is none.

    ATen/cuda/detail/OffsetCalculator.cuh: the number of dimensions, 25 dividers, and 25 rows of
    strides. The constructor writes as many of both as there are dimensions; `get` ends its loop
    there. ATen/cuda/detail/IntegerDivider.cuh: a divider is a divisor, a multiplier and a shift,
    which follow from the divisor.
    """
    end = at + calculator_bytes(operands)
    if at < 0 or end > len(value):
        return None
    (dims,) = struct.unpack_from("<i", value, at)
    if not 0 <= dims <= _MAX_DIMS:
        return None
    for dim in range(dims):
        divider = struct.unpack_from("<3I", value, at + 4 + _DIVIDER_BYTES * dim)
        if not 0 < divider[0] < 1 << 31 or divider != divider_of(divider[0]):
            return None
    strides = at + _STRIDES_AT
    return [(at + 4 + _DIVIDER_BYTES * dims, strides), (strides + 4 * operands * dims, end)]


def calculator_bytes(operands: int) -> int:
    """Return the size of an OffsetCalculator."""
    return _STRIDES_AT + 4 * _MAX_DIMS * max(1, operands)


def divider_of(divisor: int) -> tuple[int, int, int]:
    """Return the words of an IntDivider of 32 bits."""
    shift = (divisor - 1).bit_length()
    return divisor, ((1 << shift) - divisor << 32) // divisor + 1, shift


def _closure(number: int, value: bytes, regions: Sequence[RegionSpec]) -> Spans:
    """`elementwise_kernel(int N, func_t f)`, ATen/native/cuda/CUDALoops.cuh.

    `gpu_kernel_impl` and `gpu_kernel_impl_nocast` give it a closure over an OffsetCalculator, then
    an array of as many pointers as it has operands, and the function. The order is the compiler's:
    exactly one number of operands has to be followed by so many addresses of the regions.
    """
    found = []
    for operands in range(1, _MOST_OPERANDS + 1) if number == 1 else ():
        spans, end = _calculator(value, 0, operands), calculator_bytes(operands)
        data = align_up(end, 8)
        if spans is None or data + 8 * operands > len(value):
            continue
        if all(inside(each, regions) for each in struct.unpack_from(f"<{operands}Q", value, data)):
            found.append([*spans, (end, data)])
    return found[0] if len(found) == 1 else []


def _unrolled(number: int, value: bytes, _regions: Sequence[RegionSpec]) -> Spans:
    """`unrolled_elementwise_kernel` and `vectorized_templated_elementwise_kernel(int N, func_t f,
    array_t data, inp_calc_t, out_calc_t, loader_t, storer_t)`, ATen/native/cuda/CUDALoops.cuh.

    A TrivialOffsetCalculator has no members, and neither has LoadWithoutCast or StoreWithoutCast
    (ATen/native/cuda/MemoryAccess.cuh). LoadWithCast and StoreWithCast are an array of types, of a
    byte each, and one of sizes, of four bytes each: what is between is padding.
    """
    size = len(value)
    if number in (3, 4, 5, 6) and size == 1:
        return [(0, 1)]
    if number in (3, 4):
        operands, rest = divmod(size - _STRIDES_AT, 4 * _MAX_DIMS)
        return (_calculator(value, 0, operands) or []) if operands > 0 and not rest else []
    if number in (5, 6):
        counts = (n for n in range(1, _MOST_OPERANDS + 1) if align_up(n, 4) + 4 * n == size)
        return [(n, align_up(n, 4)) for n in counts]
    return []


#: Of a ReduceOp, after its calculators: addresses, base_idx, two flags, and the number of outputs.
_TAIL_BYTES, _CONFIG_BYTES = 64, 64


def _reduction(number: int, value: bytes, regions: Sequence[RegionSpec]) -> Spans:
    """`reduce_kernel(ReduceOp)`, ATen/native/cuda/Reduce.cuh.

    A ReduceOp ends with a ReduceConfig (14 ints, a flag, 3 bytes of padding, an int), the
    OffsetCalculators of one and of two operands, six words of which the first is the source's
    address, `base_idx`, two flags, 2 bytes of padding, and an int. `dst[1]` is read where there are
    two outputs, and is not named here.
    """
    found: list[Spans] = []
    tail = len(value) - _TAIL_BYTES
    one, two = calculator_bytes(1), calculator_bytes(2)
    for padding in (0, 4) if number == 0 and tail > 0 and not tail % 8 else ():
        at = tail - padding - one - two
        spans, more = _calculator(value, at, 1), _calculator(value, at + one, 2)
        config = at - _CONFIG_BYTES
        if spans is None or more is None or config < 0:
            continue
        if inside(int.from_bytes(value[tail : tail + 8], "little"), regions):
            found.append([(config + 57, config + 60), *spans, *more, (tail - padding, tail)])
            found[-1].append((tail + 58, tail + 60))
    return found[0] if len(found) == 1 else []


def _distribution(number: int, value: bytes, _regions: Sequence[RegionSpec]) -> Spans:
    """`distribution_elementwise_grid_stride_kernel(int64_t numel, PhiloxCudaState, ...)`,
    ATen/native/cuda/DistributionTemplates.h.

    A PhiloxCudaState (ATen/cuda/detail/PhiloxCudaStateRaw.cuh) is three words, a flag, and 7 bytes
    of padding.
    """
    return [(25, 32)] if number == 1 and len(value) == 32 and value[24] in (0, 1) else []


def _named(name: str, rest: str = "I") -> re.Pattern[str]:
    return re.compile(rf"_ZN2at6native(\d+_GLOBAL__N_\w*?)?{len(name)}{name}{rest}")


_RULES: tuple[tuple[re.Pattern[str], Callable[[int, bytes, Sequence[RegionSpec]], Spans]], ...] = (
    (_named("elementwise_kernel", r"ILi\d+ELi\d+EZNS0_\d+gpu_kernel_impl(_nocast)?I"), _closure),
    (_named("unrolled_elementwise_kernel"), _unrolled),
    (_named("vectorized_templated_elementwise_kernel"), _unrolled),
    (_named("reduce_kernel", r"ILi\d+ELi\d+ENS0_8ReduceOpI"), _reduction),
    (_named("distribution_elementwise_grid_stride_kernel"), _distribution),
)
