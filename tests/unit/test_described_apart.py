"""Which tensors are compared with others, to describe what shares memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mx.memory.arrays import Array
from mx.memory.describe import _parted

_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(_ranges)
def test_tensors_alone_share_memory_with_none(ranges: list[tuple[int, int]]) -> None:
    arrays = {
        f"{index}": Array("U8", (nbytes,), (1,), "cpu", address, None)
        for index, (address, nbytes) in enumerate(ranges)
    }

    def share(some: Array, other: Array) -> bool:
        ends = (some.address + some.span_nbytes, other.address + other.span_nbytes)
        return max(some.address, other.address) < min(ends)

    alone, others = _parted(arrays)
    assert sorted((*alone, *others)) == sorted(arrays)
    for name in alone:
        assert arrays[name].span_nbytes
        assert not any(share(arrays[name], arrays[other]) for other in arrays if other != name)
    for name in others:  # nothing is compared without need, but for what has no bytes
        empty = [each for each in arrays.values() if not each.span_nbytes]
        assert (
            not arrays[name].span_nbytes
            or any(share(arrays[name], arrays[other]) for other in arrays if other != name)
            or empty
        )
