from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mx.core.paths import Medium, Path, rails
from mx.core.planner import Plan, plan
from mx.core.topology import Nic, Place
from mx.core.types import (
    AddressTable,
    Region,
    SourceState,
)
from tests.support.planned_paths import REF, source

HERE = Place(boot_id="b0", hostname="target")


def nic(name: str, address: str, gbit_per_s: int = 10) -> Nic:
    return Nic(name, "up", (address,), gbit_per_s * 1000)


def place(name: str, *nics: Nic) -> Place:
    addresses = tuple(address.partition("/")[0] for n in nics for address in n.addresses)
    return Place(boot_id=name, hostname=name, addresses=addresses, nics=nics)


def reach(transport: str, there: Place) -> Path | str:
    if transport == "shm":
        if there.hostname != "here":
            return "another host"
        return Path("shm", 10.0, attach=True)
    medium = Medium.MEMORY if there.hostname == "here" else Medium.NETWORK
    return Path(transport, 2.0 if transport == "ucx" else 3.0, medium=medium)


def labels(found: Plan) -> list[tuple[str, str]]:
    return [(path.source.source_id, path.label) for path in found.chosen]


def test_attach_comes_first_and_every_way_has_its_reason() -> None:
    found = plan(HERE, [source("far"), source("here")], ["shm", "tcp"], reach)
    assert labels(found) == [("here", "shm")]
    assert [(s.path.source.source_id, s.path.transport, s.reason) for s in found.spare] == [
        ("far", "tcp", "here:1 is nearer"),
        ("here", "tcp", "shm attaches: there is nothing to move"),
    ]
    assert [(r.source.source_id, r.transport, r.reason) for r in found.rejected] == [
        ("far", "shm", "another host")
    ]
    assert [str(each) for each in found.rejected] == ["far:1: skipped shm: another host"]


def test_memory_in_another_layout_is_copied() -> None:
    scattered = source("here")
    table = AddressTable(REF.layout, (Region(0, "cpu", 0, 1 << 20),), held=((0, 4),))
    scattered = replace(scattered, table=table)
    found = plan(HERE, [scattered, source("far")], ["shm", "tcp"], reach)
    assert labels(found) == [("here", "shm")] and not found.chosen[0].attach


def test_forcing_leaves_the_rest_out_and_says_so() -> None:
    found = plan(HERE, [source("here")], ["shm", "tcp"], reach, forced="tcp", attach=False)
    assert [w.transport for w in found.paths] == ["tcp"]
    assert "you asked for tcp" in found.rejected[0].reason
    assert found.why_none() == ""


def test_draining_sources_come_last() -> None:
    draining = replace(source("here"), state=SourceState.DRAINING)
    found = plan(HERE, [draining, source("far")], ["shm", "tcp"], reach)
    assert [w.source.source_id for w in found.paths] == ["far", "here", "here"]


def test_two_copies_through_the_same_memory_are_not_made_at_once() -> None:
    found = plan(HERE, [source("here")], ["shm", "tcp"], reach, attach=False)
    assert labels(found) == [("here", "shm")]
    assert [s.reason for s in found.spare] == ["shm is faster over the same memory"]


def test_every_rail_is_used_by_the_transport_that_is_fastest_on_it() -> None:
    near = place("target", nic("eth0", "10.0.0.2/24"), nic("eth1", "10.0.1.2/24", 40))
    far = place("far", nic("enp1", "10.0.0.1/24"), nic("enp2", "10.0.1.1/24", 40))
    found = plan(near, [source("far", ("tcp", "ucx"), far)], ["tcp", "ucx"], reach)
    assert labels(found) == [("far", "tcp eth1→enp2"), ("far", "tcp eth0→enp1")]
    assert [path.gb_per_s for path in found.chosen] == [3.0, 1.25]
    assert {s.reason for s in found.spare} == {
        "tcp eth1→enp2 is faster over the same network",
        "tcp eth0→enp1 is as fast over the same network",
    }
    assert sum(found.shares(1 << 30)) == 1 << 30
    assert found.shares(4250)[1] == 1250


def test_a_rail_that_adds_next_to_nothing_is_left_out() -> None:
    near = place("target", nic("eth0", "10.0.0.2/24", 100), nic("eth1", "10.0.1.2/24", 1))
    far = place("far", nic("eth0", "10.0.0.1/24", 100), nic("eth1", "10.0.1.1/24", 1))
    found = plan(near, [source("far", ("tcp",), far)], ["tcp"], reach)
    assert labels(found) == [("far", "tcp eth0→eth0")]
    assert "5%" in found.spare[0].reason


def test_rails_pair_interfaces_of_one_subnet_and_use_all_of_the_larger_side() -> None:
    near = place("a", nic("n0", "10.0.0.2/24", 25))
    far = place("b", nic("f0", "10.0.0.3/24"), nic("f1", "10.0.0.4/24"), nic("f2", "10.9.0.1/24"))
    pairs = [(r.local_address, r.remote_address, r.gb_per_s) for r in rails(near, far)]
    assert pairs == [("10.0.0.2", "10.0.0.3", 1.25), ("10.0.0.2", "10.0.0.4", 1.25)]
    assert rails(place("a"), far) == []


def test_only_addresses_that_are_listened_on_make_rails() -> None:
    near = place("a", nic("n0", "10.0.0.2/24"), nic("n1", "10.0.1.2/24"))
    far = place("b", nic("f0", "10.0.0.3/24"), nic("f1", "10.0.1.3/24"))
    far = replace(far, addresses=("10.0.1.3",))
    assert [r.remote_nic for r in rails(near, far)] == ["f1"]


@given(st.text(max_size=40))
def test_what_another_machine_says_of_its_interfaces_never_raises(text: str) -> None:
    odd = Place(addresses=(text,), nics=(Nic("x", "up", (text, text + "/24")),))
    rails(odd, place("b", nic("f0", "10.0.0.3/24")))


@given(st.permutations(["a", "b", "here", "c"]))
def test_the_same_input_in_any_order_gives_the_same_plan(names: list[str]) -> None:
    one = plan(HERE, [source(n) for n in names], ["shm", "tcp"], reach)
    other = plan(HERE, [source(n) for n in sorted(names)], ["tcp", "shm"], reach)
    assert one.paths == other.paths
