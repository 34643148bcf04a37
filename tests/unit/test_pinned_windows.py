"""How host memory is cut into the windows in which it is registered with CUDA."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mx.units import GIB, MIB
from mx_transports.toolkit.cuda.windows import FIRST_BYTES, WINDOW_BYTES, plan

PAGE = 4096


@pytest.mark.parametrize("nbytes", [1, FIRST_BYTES, FIRST_BYTES + 1, GIB + 7, 140 * GIB])
def test_windows_follow_each_other_and_grow(nbytes: int) -> None:
    found = plan([(5 * GIB + 100, nbytes)], WINDOW_BYTES)
    assert found[0][0] == 5 * GIB
    assert 0 <= found[-1][1] - (5 * GIB + 100 + nbytes) < PAGE
    assert all(before == begin for (_, before), (begin, _) in pairwise(found))
    sizes = [end - begin for begin, end in found]
    assert 0 < sizes[0] <= FIRST_BYTES and max(sizes) <= WINDOW_BYTES
    assert all(later in (earlier, 2 * earlier) for earlier, later in pairwise(sizes[:-1]))
    assert not any(begin % PAGE or end % PAGE for begin, end in found)


def test_pieces_that_share_pages_are_one() -> None:
    places = [(9 * PAGE, 1), (100, 50), (0, 0), (PAGE - 1, 2), (200, 10), (2 * PAGE, PAGE)]
    assert plan(places, MIB) == [(0, 3 * PAGE), (9 * PAGE, 10 * PAGE)]
    assert plan([(0, 3 * MIB)], MIB) == [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 3 * MIB)]
    assert plan([], MIB) == plan([(7, 0)], MIB) == []
