"""Which bytes a slice takes: against numpy, which slices."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mx.core.cuts import Cut, cut_of
from mx.core.grid import BLOCK_BYTES
from mx.core.types import Tensor
from mx.memory.subset import copy_runs

DTYPES = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


def tensor_of(dtype: str, shape: tuple[int, ...]) -> Tensor:
    nbytes = int(np.prod(shape, dtype=int)) * DTYPES[dtype]
    return Tensor("t", dtype, shape, 0, 0, nbytes)


@st.composite
def slices(draw: st.DrawFn, most: int = 9) -> tuple[Tensor, tuple[int, int, int]]:
    shape = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    begin = draw(st.integers(0, shape[dim] - 1))
    end = draw(st.integers(begin + 1, shape[dim]))
    return tensor_of(draw(st.sampled_from(sorted(DTYPES))), shape), (dim, begin, end)


def numbered(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes, each with its number, in the tensor's shape with its bytes as the last
    dimension."""
    return np.arange(tensor.nbytes).reshape(*tensor.shape, DTYPES[tensor.dtype])


def taken(tensor: Tensor, part: tuple[int, int, int]) -> list[int]:
    dim, begin, end = part
    return np.take(numbered(tensor), range(begin, end), axis=dim).ravel().tolist()


@given(slices(), st.data())
def test_runs_of_any_piece_are_what_numpy_slices(
    case: tuple[Tensor, tuple[int, int, int]], data: st.DataObject
) -> None:
    tensor, part = case
    cut = cut_of(tensor, part)
    wanted = taken(tensor, part)
    assert cut.taken_nbytes == len(wanted)
    begin = data.draw(st.integers(0, tensor.nbytes))
    end = data.draw(st.integers(begin, tensor.nbytes))
    runs = cut.runs(begin, end)
    assert len(runs) <= 3
    found = {
        each.target + number * each.nbytes + byte: begin + each.offset + number * each.stride + byte
        for each in runs
        for number in range(each.number)
        for byte in range(each.nbytes)
    }
    assert found == {at: byte for at, byte in enumerate(wanted) if begin <= byte < end}
    assert list(found) == sorted(found)


@given(slices(), st.integers(1, 40))
def test_copies_of_pieces_make_up_the_slice(
    case: tuple[Tensor, tuple[int, int, int]], elements: int
) -> None:
    tensor, part = case
    dim, begin, end = part
    cut, width = cut_of(tensor, part), DTYPES[tensor.dtype]
    rng = np.random.default_rng(tensor.nbytes)
    content = rng.integers(0, 256, (*tensor.shape, width), np.uint8)
    target = bytearray(cut.taken_nbytes)
    whole = memoryview(content.tobytes())
    for at in range(0, tensor.nbytes, elements * width):
        data = whole[at : at + elements * width]
        for runs in cut.runs(at, at + len(data)):
            stop = runs.target + runs.nbytes * runs.number
            copy_runs(memoryview(target)[runs.target : stop], data, runs)
    assert bytes(target) == np.take(content, range(begin, end), axis=dim).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["U8", "F32"]),
    st.tuples(st.integers(1, 6), st.integers(1, 700), st.integers(1, 900)),
    st.data(),
)
def test_block_ranges_are_the_blocks_that_hold_some_of_it(
    dtype: str, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    tensor = tensor_of(dtype, shape)
    dim = data.draw(st.integers(0, 2))
    begin = data.draw(st.integers(0, shape[dim] - 1))
    end = data.draw(st.integers(begin + 1, shape[dim]))
    check_block_ranges(tensor, (dim, begin, end))


@settings(max_examples=1)
@example("rows")
@example("middle")
@example("columns")
@given(st.just("one"))
def test_block_ranges_of_wide_tensors(which: str) -> None:
    """Runs of more than a block, some of whose blocks lie in them whole."""
    tensor = tensor_of("F32", (3, 1500, 700))
    part = {"rows": (0, 1, 2), "middle": (1, 400, 1300), "columns": (2, 0, 699)}
    check_block_ranges(tensor, part.get(which, (1, 0, 1)))


def check_block_ranges(tensor: Tensor, part: tuple[int, int, int]) -> None:
    cut = cut_of(tensor, part)
    mask = np.zeros(tensor.nbytes, bool)
    wanted = np.array(taken(tensor, part))
    mask[wanted] = True
    found: dict[int, bool] = {}
    previous = None
    for each in cut.block_ranges():
        assert each.begin < each.end
        if previous is not None:
            assert previous.end < each.begin or (
                previous.end == each.begin and previous.aside != each.aside
            )
        previous = each
        found |= dict.fromkeys(range(each.begin, each.end), each.aside)
    expected = {}
    moved = 0
    for number in range(-(-tensor.nbytes // BLOCK_BYTES)):
        block = mask[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if block.any():
            places = np.searchsorted(wanted, [number * BLOCK_BYTES])[0]
            own = wanted[places : places + len(block)]
            whole = len(own) == len(block) and own[-1] - own[0] == len(block) - 1
            # Whole in the tensor's order means one after the other in the slice, too.
            expected[number] = not (whole and block.all())
            moved += len(block)
    assert found == expected
    assert cut.moved_nbytes() == moved


def test_a_whole_tensor_is_one_run_without_anything_aside() -> None:
    tensor = tensor_of("F32", (1000, 1000))
    cut = cut_of(tensor, None)
    assert cut.taken_nbytes == cut.moved_nbytes() == tensor.nbytes
    (blocks,) = cut.block_ranges()
    assert blocks == (0, 4, False)


def test_an_empty_tensor_has_nothing() -> None:
    cut = Cut(0, 0, 0, 1, 1)
    assert not cut.runs(0, 0) and not cut.block_ranges() and not cut.moved_nbytes()
