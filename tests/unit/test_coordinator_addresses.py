"""Whose streams the coordinator counts together."""

from __future__ import annotations

import pytest

from mx.coordinator.bounds import StreamBounds
from mx.errors import CapacityError


class Context:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("ipv4:10.0.0.1:5", "ipv4:10.0.0.1:6", "ipv4:10.0.0.2:5"),
        ("ipv6:%5B2001:db8::1%5D:5", "ipv6:%5B2001:db8::ffff:2%5D:6", "ipv6:%5B2001:db8:1::1%5D:5"),
        ("unix:", "unix:", "ipv4:10.0.0.1:5"),
    ],
    ids=["ipv4", "ipv6", "unix"],
)
def test_a_host_counts_as_one_address_whichever_of_its_own_it_dials_from(
    one: str, same: str, other: str
) -> None:
    bounds = StreamBounds("watches", in_all=10, per_address=1)
    with bounds.admitted(Context(one)):
        with pytest.raises(CapacityError, match="1 watches from"), bounds.admitted(Context(same)):
            pass
        with bounds.admitted(Context(other)):
            pass
    with bounds.admitted(Context(same)):
        pass
