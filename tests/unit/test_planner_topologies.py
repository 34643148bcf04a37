"""The planner and the real transports' `reach`, over simulated clusters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from typing import TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx import plugins
from mx.core.grid import MOST_CHUNK_BYTES as CHUNK_BYTES
from mx.core.paths import Medium, Path, rails
from mx.core.planner import MOST_SOURCES, Plan, plan
from mx.core.topology import Fact, Place
from mx.core.types import SourceRecord, SourceState
from mx.fetching.paths import path_between, path_or_reason
from tests.support.topologies import cluster, host, nvlink_gpus, rail_nics, source

TRANSPORTS = plugins.transports()
CLUSTERS = {
    "one subnet for each rail": cluster(),
    "one subnet": cluster(flat=True),
    "no RDMA": cluster(layer=""),
}
HOSTS = {name: {h.name: h for h in hosts} for name, hosts in CLUSTERS.items()}
RAILS = HOSTS["one subnet for each rail"]
PLACES = [p for hosts in CLUSTERS.values() for h in hosts for p in h.places()]


def make(
    here: Place,
    sources: Sequence[SourceRecord],
    transports: Sequence[str] = tuple(TRANSPORTS),
    *,
    trusted: bool = True,
    forced: str | None = None,
    attach: bool = True,
) -> Plan:
    def reach(name: str, there: Place) -> Path | str:
        return path_or_reason(TRANSPORTS[name], here, there, trusted_fabric=trusted)

    return plan(here, sources, transports, reach, forced=forced, attach=attach)


def chosen(
    here: Place, there: Place, *, trusted: bool = True, attach: bool = True
) -> list[tuple[str, str, bool]]:
    """(transport, medium, attach) of what is used at once, rails counted as one."""
    found = make(here, [source(there)], trusted=trusted, attach=attach).chosen
    return list(dict.fromkeys((path.transport, path.medium.value, path.attach) for path in found))


# -- reach ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_what_reaches_one_way_reaches_the_other_way_as_fast(name: str) -> None:
    transport = TRANSPORTS[name]
    reached = 0
    # Some lead only to places of which they say something.
    places = [replace(place, facts=(Fact(name, "01"),)) for place in PLACES]
    for one, other in itertools.combinations(places, 2):
        path = transport.reach(one, other)
        assert path == transport.reach(other, one), (one.device, other.device)
        reached += path is not None
    assert reached


def test_rails_are_the_same_seen_from_either_end() -> None:
    for one, other in itertools.combinations(PLACES, 2):
        there = {(r.local_address, r.remote_address, r.gb_per_s) for r in rails(one, other)}
        back = {(r.remote_address, r.local_address, r.gb_per_s) for r in rails(other, one)}
        assert there == back


def test_rails_promise_no_more_than_the_interfaces_at_either_end_can_do() -> None:
    for one, other in itertools.permutations([h.place() for h in RAILS.values()], 2):
        _check_interfaces(one, other)
    flat = HOSTS["one subnet"]
    for one, other in itertools.permutations([h.place() for h in flat.values()], 2):
        _check_interfaces(one, other)


def _check_interfaces(one: Place, other: Place) -> None:
    near: dict[str, float] = defaultdict(float)
    far: dict[str, float] = defaultdict(float)
    for rail in rails(one, other):
        near[rail.local_nic] += rail.gb_per_s
        far[rail.remote_nic] += rail.gb_per_s
    assert near
    for place, used in ((one, near), (other, far)):
        for nic in place.nics:
            assert used[nic.name] <= nic.speed_mbit_per_s / 8000 + 1e-9


# -- any plan ---------------------------------------------------------------------------------


Input = tuple[Place, list[SourceRecord]]


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    hosts = CLUSTERS[draw(st.sampled_from(sorted(CLUSTERS)))]
    places = [place for each in hosts for place in each.places()]
    there = draw(st.lists(st.sampled_from(places), max_size=6, unique=True))
    sources = [source(replace(place, pid=1000 + i)) for i, place in enumerate(there)]
    draining = draw(st.sets(st.sampled_from(range(6))))
    states = [SourceState.DRAINING if i in draining else SourceState.SERVING for i in range(6)]
    sources = [replace(s, state=state) for s, state in zip(sources, states, strict=False)]
    return draw(st.sampled_from(places)), sources


class Options(TypedDict):
    trusted: bool
    forced: str | None
    attach: bool


OPTIONS = st.builds(
    Options,
    trusted=st.booleans(),
    forced=st.none() | st.sampled_from(sorted(TRANSPORTS)),
    attach=st.booleans(),
)


@given(inputs(), OPTIONS, st.randoms(use_true_random=False))
def test_the_same_input_in_any_order_gives_the_same_plan(
    given_: Input, options: Options, random: Random
) -> None:
    here, sources = given_
    shuffled, transports = list(sources), list(TRANSPORTS)
    random.shuffle(shuffled)
    random.shuffle(transports)
    one, other = make(here, sources, **options), make(here, shuffled, transports, **options)
    assert (one.chosen, one.spare) == (other.chosen, other.spare)
    assert set(one.rejected) == set(other.rejected)


@given(inputs(), OPTIONS)
def test_every_way_is_chosen_or_has_a_reason(given_: Input, options: Options) -> None:
    here, sources = given_
    found = make(here, sources, **options)
    accounted = {(w.source.source_id, w.transport) for w in found.paths}
    rejected = [(r.source.source_id, r.transport) for r in found.rejected]
    assert accounted.isdisjoint(rejected)
    assert len(accounted) + len(rejected) == len(sources) * len(TRANSPORTS)
    assert len(set(found.paths)) == len(found.paths)
    reasons = [each.reason for each in found.spare] + [each.reason for each in found.rejected]
    assert all(reason.strip() for reason in reasons)
    assert bool(found.chosen) == bool(found.paths)
    for path in found.paths:
        network = path.medium is Medium.NETWORK
        assert not network or path.rail in [*rails(here, path.source.place), None]
        if options["forced"] is not None:
            assert path.transport == options["forced"]
        assert options["attach"] or not path.attach


@given(inputs(), OPTIONS, st.integers(0, 1 << 42))
def test_shares_are_all_of_the_bytes_each_in_its_bandwidths_part(
    given_: Input, options: Options, nbytes: int
) -> None:
    here, sources = given_
    found = make(here, sources, **options)
    shares = found.shares(nbytes)
    assert len(shares) == len(found.chosen)
    if not found.chosen:
        return
    assert sum(shares) == nbytes
    for share, path in zip(shares, found.chosen, strict=True):
        assert 0 <= share <= nbytes * path.gb_per_s / found.gb_per_s + CHUNK_BYTES


@given(inputs(), OPTIONS)
def test_what_is_used_at_once_shares_nothing(given_: Input, options: Options) -> None:
    here, sources = given_
    found = make(here, sources, **options)
    places = {path.source.source_id: path.source.place for path in found.chosen}
    if len(places) > 1:
        assert len(places) <= MOST_SOURCES
        hosts = {(place.boot_id, place.net_namespace) for place in places.values()}
        if all(path.medium is Medium.NETWORK for path in found.chosen):
            assert len(hosts) == len(places)
        else:  # by several links of one GPU
            assert all(path.link for path in found.chosen) and len(hosts) == 1
    assert len({path.bottleneck for path in found.chosen}) == len(found.chosen)
    assert len(found.chosen) == 1 or not any(path.attach for path in found.chosen)
    serving = [w for w in found.paths if w.source.state is SourceState.SERVING]
    assert not serving or found.chosen[0].source.state is SourceState.SERVING


# -- who wins ---------------------------------------------------------------------------------


def test_memory_of_the_same_gpu_is_attached() -> None:
    gpu = RAILS["nvlink"].place(3)
    assert chosen(replace(gpu, pid=2), gpu) == [("cuda_ipc", "device", True)]


def test_between_gpus_nvlink_comes_before_pcie() -> None:
    nvlink = RAILS["nvlink"]
    assert chosen(nvlink.place(0), nvlink.place(7))[0] == ("cuda_ipc", "nvlink", False)


def test_without_nvlink_it_is_pcie_straight_within_a_switch_and_staged_beyond() -> None:
    pcie = RAILS["pcie"]
    for other, detail in ((1, "peer to peer"), (3, "peer to peer"), (4, "staged through host")):
        found = make(pcie.place(0), [source(pcie.place(other))])
        assert [w.transport for w in found.chosen] == ["pcie_p2p"]
        assert detail in found.chosen[0].detail


def test_of_many_sources_the_nearest_wins() -> None:
    nvlink, far = RAILS["nvlink"], RAILS["rack8-a"]
    here = nvlink.place(0, pid=99)
    order = [
        (nvlink.place(0), "cuda_ipc"),
        (nvlink.place(5), "cuda_ipc"),
        (nvlink.place(), "pcie_p2p"),
        (far.place(), "ucx"),
    ]
    while order:
        place, transport = order[0]
        found = make(here, [source(p) for p, _ in reversed(order)])
        assert found.chosen[0].source.place == place
        assert found.chosen[0].transport == transport
        order.pop(0)


def test_on_one_host_memory_is_attached_or_copied_not_sent() -> None:
    a, b = RAILS["rack4-a"].place(pid=1), RAILS["rack4-a"].place(pid=2)
    assert chosen(a, b) == [("shm", "memory", True)]
    assert chosen(a, b, attach=False) == [("shm", "memory", False)]


@pytest.mark.parametrize("count", [4, 8])
def test_between_hosts_every_rail_goes_by_rdma(count: int) -> None:
    found = make(RAILS[f"rack{count}-a"].place(), [source(RAILS[f"rack{count}-b"].place())])
    assert [w.transport for w in found.chosen] == ["ucx"] * count
    assert len({w.rail for w in found.chosen}) == count
    assert all(w.detail == "RDMA" for w in found.chosen)
    reasons = {s.reason for s in found.spare}
    assert all("is faster over the same network" in reason for reason in reasons)


def test_without_rdma_or_without_trust_it_is_tcp() -> None:
    plain = HOSTS["no RDMA"]
    for hosts, trusted in ((plain, True), (RAILS, False)):
        found = chosen(hosts["rack4-a"].place(), hosts["rack4-b"].place(), trusted=trusted)
        assert found == [("tcp", "network", False)]
    distrusted = make(RAILS["rack4-a"].place(), [source(RAILS["rack4-b"].place())], trusted=False)
    (ucx,) = [r for r in distrusted.rejected if r.transport == "ucx"]
    assert "`trusted_fabric`" in ucx.reason


def test_ports_of_different_link_layers_do_not_make_rdma() -> None:
    infiniband = host("ib", rail_nics(1, 4))
    roce = host("roce", rail_nics(2, 4, layer="Ethernet"))
    assert chosen(infiniband.place(), roce.place()) == [("tcp", "network", False)]


def test_between_racks_of_four_and_eight_the_four_are_all_there_is() -> None:
    for hosts in (RAILS, HOSTS["one subnet"]):
        found = make(hosts["rack4-a"].place(), [source(hosts["rack8-a"].place())])
        assert {w.transport for w in found.chosen} == {"ucx"}
        assert {w.rail.local_nic for w in found.chosen if w.rail} == {f"eth{i}" for i in range(4)}
        # Four of 200 Gbit/s, whatever eight of 400 could do.
        assert found.gb_per_s == pytest.approx(100)


def test_a_gpu_is_filled_from_another_host_through_its_own() -> None:
    found = make(RAILS["nvlink"].place(2), [source(RAILS["rack8-a"].place())])
    assert [w.transport for w in found.chosen] == ["ucx"] * 8
    assert all(w.staged for w in found.chosen)


def test_where_nothing_reaches_every_transport_says_why() -> None:
    alone = host("alone", gpus=nvlink_gpus("x", 1))
    found = make(RAILS["rack4-a"].place(), [source(alone.place(0))])
    assert found.paths == ()
    assert len(found.rejected) == len(TRANSPORTS)


def test_tcp_from_a_gpu_is_for_other_hosts() -> None:
    """Within a host its bytes go over the PCIe link of the GPU, which `pcie_p2p` fills better."""
    offered = ("cuda_ipc", "pcie_p2p", "tcp")
    here, beside = (HOSTS["no RDMA"]["nvlink"].place(gpu, pid=2 + gpu) for gpu in (0, 1))
    found = make(here, [replace(source(beside), transports=offered)])
    assert [path.transport for path in found.chosen] == ["cuda_ipc"]
    first, second = found.spare
    # Through the host it would take a context on the source's GPU.
    assert first.path.transport == "pcie_p2p" and "context" in first.reason
    assert (second.path.transport, second.path.staged) == ("tcp", True)
    assert second.reason == "it would add less than 5% to cuda_ipc"
    far = HOSTS["no RDMA"]["pcie"].place(1, pid=4)
    found = make(here, [replace(source(far), transports=offered)])
    assert {path.transport for path in found.chosen} == {"tcp"} and not found.spare
    assert {rejected.transport for rejected in found.rejected} >= {"cuda_ipc", "pcie_p2p"}
    to_host = make(replace(here, device="cpu"), [replace(source(far), transports=offered)])
    assert {(path.transport, path.staged) for path in to_host.chosen} == {("tcp", False)}


def test_between_host_memories_no_other_places_are_tried() -> None:
    """A plan asks this of each transport and of each of maybe a thousand sources."""
    made = 0

    class Counted(Place):
        def __new__(cls, *_: object, **__: object) -> Counted:
            nonlocal made
            made += 1
            return object.__new__(cls)

    places = [RAILS[name].place() for name in ("rack4-a", "rack4-b")]
    one, other = (Counted(*(getattr(p, f.name) for f in fields(p))) for p in places)
    ways = {name: path_between(transport, one, other) for name, transport in TRANSPORTS.items()}
    assert ways["cuda_ipc"] is ways["pcie_p2p"] is ways["shm"] is None is not ways["tcp"]
    assert made == 2
