"""The memory that a trial guards."""

from __future__ import annotations

from mx.cuda.vmm import FIXED_BYTES
from mx.graphs.package import RegionSpec
from mx.graphs.trying import guards_of
from mx.units import MIB

BASE = 0x6000_0000_0000


def test_a_region_has_a_guard_on_both_sides() -> None:
    found = dict(guards_of([RegionSpec(BASE, 4 * MIB)]))
    assert found == {BASE - FIXED_BYTES: FIXED_BYTES, BASE + FIXED_BYTES: 2 * MIB}
    # It begins where the region ends, if addresses of one's own may begin there.
    assert BASE + 2 * FIXED_BYTES in dict(guards_of([RegionSpec(BASE, 2 * FIXED_BYTES)]))


def test_no_guard_is_in_a_region_and_none_is_there_twice() -> None:
    one = RegionSpec(BASE, FIXED_BYTES)
    adjoining = RegionSpec(BASE + FIXED_BYTES, 4 * MIB)
    assert sorted(at for at, _ in guards_of([one, adjoining])) == [
        BASE - FIXED_BYTES,
        BASE + 2 * FIXED_BYTES,
    ]
    apart = RegionSpec(BASE + 2 * FIXED_BYTES, 4 * MIB)
    for regions in ([one, apart], [apart, one]):
        assert sorted(guards_of(regions)) == [
            (BASE - FIXED_BYTES, FIXED_BYTES),
            (BASE + FIXED_BYTES, FIXED_BYTES),
            (BASE + 3 * FIXED_BYTES, 2 * MIB),
        ]
