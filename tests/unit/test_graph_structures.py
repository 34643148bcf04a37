"""What kernels of torch don't read of their parameters."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.graphs.merge import combine
from mx.graphs.message import Capture, decode
from mx.graphs.package import Kernel, KernelNode, Library, RegionSpec
from mx.graphs.structures import divider_of, unread
from tests.support.graphs import BASE, NBYTES, small
from tests.support.torch_structures import CLOSURE, ZEROS, calculator, closure, reduction

TORCH = Library("libtorch_cuda.so", "01", b"t" * 32, "2.11.0+cu130")
REGIONS = [RegionSpec(BASE, NBYTES)]
NATIVE = "_ZN2at6native"
UNROLLED = f"{NATIVE}27unrolled_elementwise_kernelINS0_10AbsFunctorIbEESt5arrayIPcLm2EELi4E"
REDUCE = f"{NATIVE}13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_9MinMaxOpsIbbiEEjbLi4ELi4EEEEEvT1_"
DRAW = (
    f"{NATIVE}57_GLOBAL__N__d8df7886_24_DistributionBernoulli_cu_7537a20d"
    "43distribution_elementwise_grid_stride_kernelIfLi4E"
)


def _addresses(count: int) -> list[int]:
    return [BASE + 512 * n for n in range(count)]


def masked(name: str, number: int, value: bytes, library: Library | None = TORCH) -> bytes:
    """Return a parameter with zeros where it is not read."""
    found = bytearray(value)
    kernel = Kernel(name, None, None, (), 0)
    for begin, end in unread(kernel, library, number, value, REGIONS):
        found[begin:end] = bytes(end - begin)
    return bytes(found)


SIZES = st.lists(st.integers(1, (1 << 31) - 1), max_size=25)
SEEDS = st.integers(0, 1 << 30)


@given(SIZES, st.integers(1, 5), SEEDS, SEEDS)
def test_a_closure_is_the_same_but_for_what_is_not_read(
    sizes: list[int], operands: int, one: int, other: int
) -> None:
    values = [closure(sizes, _addresses(operands), random.Random(seed)) for seed in (one, other)]
    found = [masked(CLOSURE, 1, value) for value in values]
    assert found[0] == found[1]
    # What is written is kept.
    written = closure(sizes, _addresses(operands), ZEROS)
    assert found[0] == written


@given(st.integers(1, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_a_divider_divides(divisor: int, number: int) -> None:
    """So does the kernel: by a multiplication, of which the upper half counts, and a shift."""
    found, multiplier, shift = divider_of(divisor)
    assert found == divisor and multiplier < 1 << 32
    assert (number * multiplier >> 32) + number >> shift == number // divisor


@given(SIZES.filter(bool), SEEDS, SEEDS, st.sampled_from([4, 8, 12, 16, 40]))
def test_a_reduction_is_the_same_but_for_what_is_not_read(
    sizes: list[int], one: int, other: int, ident: int
) -> None:
    values = [reduction(sizes, random.Random(seed), ident) for seed in (one, other)]
    found = [masked(REDUCE, 0, value) for value in values]
    assert found[0] == found[1] and found[0] != values[0]
    assert found[0][:ident] == b"i" * ident and found[0][-4:] == struct.pack("<i", 1)


def test_parameters_of_unrolled_kernels() -> None:
    draw = random.Random(1)
    for number in (3, 4, 5, 6):
        assert masked(UNROLLED, number, b"\xa5") == b"\0"
    whole = calculator([7, 5], 2, draw)
    assert masked(UNROLLED, 3, whole) == calculator([7, 5], 2, ZEROS)
    assert masked(UNROLLED, 3, whole + b"\1" * 4) == whole + b"\1" * 4
    assert masked(UNROLLED, 5, b"\1\2\3" + b"\xa5" + bytes(range(12))) == (
        b"\1\2\3\0" + bytes(range(12))
    )
    assert masked(UNROLLED, 2, b"\xa5") == b"\xa5" and masked(UNROLLED, 1, b"\xa5") == b"\xa5"


def test_the_state_of_random_numbers() -> None:
    state = struct.pack("<3Q", 1, 2, 3) + b"\1" + b"\xa5" * 7
    assert masked(DRAW, 1, state) == state[:25] + bytes(7)
    assert masked(DRAW, 1, state[:24] + b"\7" * 8) == state[:24] + b"\7" * 8
    assert masked(DRAW, 0, state) == state


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, struct.pack("<i", 26)),
        (0, struct.pack("<i", -1)),
        (0, struct.pack("<i", 3)),  # dimensions whose dividers are garbage
        (4, struct.pack("<I", 8)),  # a divider of another divisor
        (8, b"\xff"),
        (12, b"\xff"),
        (504, struct.pack("<Q", 0x7F12_0000_0000)),  # no address of the region
    ],
)
def test_a_structure_that_says_something_else_has_no_unread_bytes(at: int, value: bytes) -> None:
    right = closure([7, 5], _addresses(2), random.Random(2))
    spoiled = right[:at] + value + right[at + len(value) :]
    assert masked(CLOSURE, 1, right) != right
    assert masked(CLOSURE, 1, spoiled) == spoiled


def test_only_kernels_and_releases_that_are_known_have_unread_bytes() -> None:
    value = closure([7, 5], _addresses(2), random.Random(2))
    other = CLOSURE.replace("gpu_kernel_impl_nocast", "opmath_gpu_kernel_impl")
    for name in ("_Z3addPfS_", other, CLOSURE[4:], f"x{CLOSURE}"):
        assert masked(name, 1, value) == value
    assert masked(CLOSURE, 0, value) == value
    assert masked(CLOSURE, 1, value, None) == value
    for version in ("", "2.10.0", "2.12.0", "12.11.0"):
        assert masked(CLOSURE, 1, value, replace(TORCH, version=version)) == value


def test_captures_of_such_a_kernel_are_joined_with_zeros() -> None:
    graph = small()
    first, *_ = graph.nodes
    assert isinstance(first, KernelNode)
    values = [
        struct.pack("<2i", 5, 0) + closure([7], _addresses(2), random.Random(n)) for n in (1, 2)
    ]
    kernel = Kernel(CLOSURE, None, None, ((0, 4), (8, len(values[0]) - 8)), 0)
    graph = replace(graph, libraries=(TORCH, TORCH), kernels=(kernel, *graph.kernels[1:]))
    captures = [
        Capture(
            replace(graph, tried=(), nodes=(replace(first, values=value), *graph.nodes[1:])),
            (bytes(1000),),
            (0x7F00_0000_0000 + n,),
        )
        for n, value in enumerate(values)
    ]
    node = decode(combine(*captures).graph)[0].nodes[0]
    assert isinstance(node, KernelNode)
    assert node.values[:8] == values[0][:8]
    assert node.values[8:] == masked(CLOSURE, 1, values[0][8:])
