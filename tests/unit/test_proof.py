"""Addresses that a source proves to be its own, and places that are believed."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from mx.core.locality import is_this_machine, with_verified_place
from mx.core.paths import UNKNOWN_GB_PER_S, rails
from mx.core.topology import Nic, Place
from mx.errors import PeerTimeoutError, SourceError
from mx.transport import ExposeOptions, Grant
from mx_transports.tcp import TcpTransport
from mx_transports.toolkit import dial, framing, proof
from tests.support.planned_paths import source as record

DATAGRAMS = socket.SOCK_DGRAM

HERE = Place(
    boot_id="b",
    hostname="me",
    net_namespace=4,
    addresses=("10.0.0.1",),
    nics=(Nic("eth0", "up", ("10.0.0.1/24",), 10_000),),
)


@pytest.mark.parametrize(
    ("endpoint", "kept"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("me:1", True),
        ("10.0.0.1:1", True),
        ("10.0.0.2:1", False),
        ("elsewhere:1", False),
        ("[fd00::1]:1", False),
    ],
)
def test_a_place_here_is_believed_of_an_endpoint_here(endpoint: str, kept: bool) -> None:
    source = replace(record("a"), endpoint=endpoint, place=HERE)
    found = with_verified_place(source, HERE)
    assert (found == source) is kept
    assert is_this_machine(endpoint.rpartition(":")[0], HERE) is kept
    assert (found.place.same_host_key == HERE.same_host_key) is kept
    other = replace(source, place=replace(HERE, boot_id="c"))
    assert with_verified_place(other, HERE) == other


@pytest.mark.parametrize(
    ("mine", "theirs", "gb_per_s"),
    [
        (10_000, 8_000_000, 1.25),
        (100_000, 10_000, 1.25),
        (100_000, 0, 12.5),
        (0, 8_000_000, UNKNOWN_GB_PER_S),
        (0, 1_000, 0.125),
        (0, 0, UNKNOWN_GB_PER_S),
    ],
)
def test_a_rail_is_no_faster_than_the_interface_here(
    mine: int, theirs: int, gb_per_s: float
) -> None:
    here = replace(HERE, nics=(Nic("eth0", "up", ("10.0.0.1/24",), mine),))
    there = Place("c", addresses=("10.0.0.2",), nics=(Nic("e", "up", ("10.0.0.2/24",), theirs),))
    (rail,) = rails(here, there)
    assert rail.gb_per_s == pytest.approx(gb_per_s)


def test_more_interfaces_there_are_no_faster_than_the_one_here() -> None:
    nics = tuple(Nic(f"e{n}", "up", (f"10.0.0.{n}/24",), 8_000_000) for n in range(2, 18))
    there = Place("c", addresses=tuple(f"10.0.0.{n}" for n in range(2, 18)), nics=nics)
    assert sum(rail.gb_per_s for rail in rails(HERE, there)) == pytest.approx(1.25)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "169.254.169.254", "fe80::1", "224.0.0.1",
     "ff02::1", "255.255.255.255", "::ffff:10.0.0.2"],
)  # fmt: skip
def test_what_is_no_other_machines_is_never_asked(host: str) -> None:
    assert not proof.may_be_challenged(host)
    assert proof.may_be_challenged("10.0.0.2") and proof.may_be_challenged("fd00::2")


@pytest.fixture
def challengeable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback stands for another machine's interface."""
    monkeypatch.setattr(proof, "may_be_challenged", lambda host: True)


def grant_of(ticket: bytes, **more: object) -> Grant:
    return Grant("g", ticket, 1, (), "p", stall_timeout_s=5.0, peer_addresses=("10.9.9.9",), **more)  # type: ignore[arg-type]


@pytest.mark.usefixtures("challengeable")
def test_a_source_proves_its_address_as_long_as_the_grant_stands() -> None:
    exposure = TcpTransport().expose([], ExposeOptions(hosts=("127.0.0.1", "127.0.0.2")))
    try:
        data = exposure.grant("g")
        ticket = framing.decode_ticket(data, "p")
        grant = grant_of(data)
        assert len(dial.addresses(ticket, grant)) == 2
        # A sender without the secret proves nothing, whatever the key.
        forged = ticket._replace(secret=bytes(framing.SECRET_BYTES))
        hasty = replace(grant, stall_timeout_s=0.3)
        with pytest.raises(PeerTimeoutError, match="proved"):
            dial.addresses(forged, hasty)
        exposure.revoke("g")
        with pytest.raises(PeerTimeoutError, match="proved"):
            dial.addresses(ticket, hasty)
    finally:
        exposure.close()
        assert exposure.join(10)


@pytest.mark.usefixtures("challengeable")
def test_an_answer_from_another_address_or_of_another_nonce_is_none() -> None:
    """A third party's port that echoes, and one that repeats an answer for another's address."""
    secret = bytes(range(32))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as third:
        third.bind(("127.0.0.1", 0))
        third.settimeout(20)
        address = third.getsockname()
        ticket = framing.Ticket(bytes(16), secret, {"addresses": [list(address)]})
        grant = replace(grant_of(b""), stall_timeout_s=0.5)

        def echo() -> None:
            data, sender = third.recvfrom(100)
            third.sendto(data, sender)
            _, _, nonce = proof.CHALLENGE.unpack(data)
            other = proof.ANSWER.pack(proof.MAGIC, proof._mac(secret, nonce, "127.0.0.2"))
            third.sendto(other, sender)

        echoing = threading.Thread(target=echo)
        echoing.start()
        with pytest.raises(PeerTimeoutError, match="proved"):
            dial.addresses(ticket, grant)
        echoing.join(20)


def test_where_control_stays_on_this_machine_its_addresses_are_known() -> None:
    fields: dict[str, object] = {"addresses": [["10.0.0.1", 5], ["127.0.0.1", 5], ["10.0.0.7", 5]]}
    ticket = framing.Ticket(bytes(16), bytes(32), fields)
    local = replace(grant_of(b""), peer_addresses=("127.0.0.1",), place=HERE)
    assert dial.addresses(ticket, local) == [("10.0.0.1", 5), ("127.0.0.1", 5)]
    remote = replace(local, peer_addresses=("10.0.0.7",))
    assert dial.addresses(ticket, remote) == [("10.0.0.7", 5)]


@pytest.mark.usefixtures("challengeable")
@pytest.mark.parametrize("known", [True, False], ids=["no greeting", "no answer to a challenge"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "meanwhile"])
def test_what_is_cancelled_waits_for_no_peer(known: bool, early: bool) -> None:
    """An address that takes connections and datagrams, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket(type=DATAGRAMS) as prover:
        address = silent.getsockname()
        prover.bind(address)
        fields: dict[str, object] = {"addresses": [list(address)]}
        ticket = framing.Ticket(bytes(framing.KEY_BYTES), bytes(framing.SECRET_BYTES), fields)
        grant = replace(grant_of(ticket.encode()), stall_timeout_s=1000.0)
        if known:
            grant = replace(grant, peer_addresses=("127.0.0.1",))
        if early:
            grant.cancelled.set()
        failed: list[BaseException] = []

        def connect() -> None:
            try:
                TcpTransport().open(grant)
            except SourceError as error:
                failed.append(error)

        opening = threading.Thread(target=connect, daemon=True)
        opening.start()
        if not early:
            if known:
                with silent.accept()[0] as accepted:
                    assert accepted.recv(1)
                    grant.cancelled.set()
                    opening.join(60)
            else:
                assert prover.recv(1)
                grant.cancelled.set()
        opening.join(60)
        assert failed and not opening.is_alive()
