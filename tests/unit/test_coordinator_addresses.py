"""Whose streams the coordinator counts together."""

from __future__ import annotations

import pytest

from mx.coordinator.bounds import StreamBounds
from mx.errors import CapacityError


class Context:
    def __init__(self, peer: str, uri: str = "") -> None:
        self._peer = peer
        named: dict[str, tuple[bytes, ...]] = {"x509_pem_cert": (b"",), "peer_uri": (uri.encode(),)}
        self._shown = named if uri else {}

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return self._shown


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
    bounds = StreamBounds("watches", in_all=10, per_principal=1)
    with bounds.admitted(Context(one)):
        with pytest.raises(CapacityError, match="1 watches of"), bounds.admitted(Context(same)):
            pass
        with bounds.admitted(Context(other)):
            pass
    with bounds.admitted(Context(same)):
        pass


def test_a_principal_counts_as_one_wherever_it_dials_from() -> None:
    bounds = StreamBounds("watches", in_all=10, per_principal=1)
    one, same = (Context(f"ipv4:10.0.0.{n}:5", "spiffe://e.com/a") for n in (1, 2))
    with bounds.admitted(one):
        with pytest.raises(CapacityError, match="of spiffe://e.com/a"), bounds.admitted(same):
            pass
        with bounds.admitted(Context("ipv4:10.0.0.1:6", "spiffe://e.com/b")):
            pass
