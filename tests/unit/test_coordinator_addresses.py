"""Whose streams the coordinator counts together, and where callers may be."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from mx.coordinator.callers import _local_addresses, check_places, own_host, own_port
from mx.core.budget import Budget
from mx.errors import CapacityError, NotAllowedError
from mx.wire.address import join_address
from mx.wire.principals import Access, payer_of
from tests.support.records import make_documents, make_record


class Context:
    def __init__(self, peer: str, uri: str = "", *dns: str) -> None:
        self._peer = peer
        named: dict[str, tuple[bytes, ...]] = {
            "x509_pem_cert": (b"",),
            "peer_uri": (uri.encode(),),
            "peer_dns": tuple(each.encode() for each in dns),
        }
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
    bounds = Budget(2, "the coordinator has {} watches")
    with bounds.held(payer_of(Context(one))):
        with (
            pytest.raises(CapacityError, match="1 watches of"),
            bounds.held(payer_of(Context(same))),
        ):
            pass
        with bounds.held(payer_of(Context(other))):
            pass
    with bounds.held(payer_of(Context(same))):
        pass


def test_a_principal_counts_as_one_wherever_it_dials_from() -> None:
    bounds = Budget(2, "the coordinator has {} watches")
    one, same = (Context(f"ipv4:10.0.0.{n}:5", "spiffe://e.com/a") for n in (1, 2))
    with bounds.held(payer_of(one)):
        with pytest.raises(CapacityError, match="of spiffe://e.com/a"), bounds.held(payer_of(same)):
            pass
        with bounds.held(payer_of(Context("ipv4:10.0.0.1:6", "spiffe://e.com/b"))):
            pass


LOOPBACK = ("localhost", "a.localhost", "ip6-loopback", "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0")


@pytest.mark.parametrize("host", [*LOOPBACK, "::ffff:127.0.0.1"])
def test_a_certificate_that_names_loopback_is_there_on_this_machine_alone(host: str) -> None:
    record = make_record(make_documents("weights"))
    endpoint = join_address(host, 7601)
    there = replace(record, endpoint=endpoint, place=replace(record.place, addresses=()))
    data = replace(record, endpoint="gpu.example:1", place=replace(record.place, addresses=(host,)))
    own = next((f"ipv4:{each}:5" for each in _local_addresses() if "." in each), "unix:")
    for peer, here in (
        ("ipv4:127.0.0.1:5", True),
        ("unix:", True),
        (own, True),
        ("ipv4:203.0.113.9:5", False),
        ("ipv6:%5B2001:db8::1%5D:5", False),
    ):
        context = Context(peer, "spiffe://e.com/a", host, "gpu.example")
        assert own_host(context, host) == (host if here else "")
        assert own_host(context, "gpu.example") == "gpu.example"
        assert own_port(context, Access(), "m", endpoint, 8000) == (8000 if here else 0)
        for found in (there, data):
            with nullcontext() if here else pytest.raises(NotAllowedError, match="another machine"):
                check_places(context, found)
