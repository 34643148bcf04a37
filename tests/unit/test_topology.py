"""Places on the wire, the process's own place, and the matrix of what reaches what."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from mx import discovery, plugins
from mx.api.survey import Reach, SourceReach, TopologyReport, paths
from mx.core.paths import Path, rails
from mx.core.planner import plan
from mx.core.topology import (
    MAX_FACT_BYTES,
    MAX_FACTS_BYTES,
    Fact,
    Gpu,
    GpuPeer,
    Nic,
    NumaNode,
    Place,
)
from mx.discovery import Topology
from mx.errors import ConfigError, PeerProtocolError
from mx.fetching.paths import path_between
from mx.hardware import netlink
from mx.hardware.gpus import GpusFound
from mx.hardware.netlink import Interface
from mx.operations import topo_tables
from mx.transport import Unavailable, Viable
from mx.wire.place import place_from_json, place_from_wire, place_to_wire
from mx.wire.v1 import common_pb2 as pb
from tests.support.places import nvlink_host, uuid
from tests.support.records import make_documents, make_record

# --- on the wire


def sent(place: Place) -> Place:
    return place_from_wire(pb.Place.FromString(place_to_wire(place).SerializeToString()))


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=8)
_INT = st.integers(-1, (1 << 63) - 1)
_FLOAT = st.floats(0, 1e9)


def _of(kind: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **special)


def _some(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=3).map(tuple)


_NICS = _of(Nic, name=_TEXT, state=_TEXT, addresses=_some(_TEXT), speed_mbit_per_s=_INT, mtu=_INT,
            numa_node=_INT, pci_address=_TEXT, rdma_device=_TEXT, rdma_port=_INT,
            link_layer=_TEXT)  # fmt: skip
_PEERS = _of(GpuPeer, uuid=_TEXT, nvlinks=_INT, p2p_read=st.booleans(), p2p_write=st.booleans(),
             relation=_TEXT)  # fmt: skip
_GPUS = _of(Gpu, uuid=_TEXT, index=_INT, name=_TEXT, compute_capability=_TEXT, memory_nbytes=_INT,
            pci_address=_TEXT, numa_node=_INT, pcie_generation=_INT, pcie_width=_INT, nvlinks=_INT,
            nvlink_gb_per_s=_FLOAT, peers=_some(_PEERS))  # fmt: skip
_FACTS = st.dictionaries(_TEXT, st.binary(max_size=256), max_size=3).map(
    lambda found: tuple(Fact(name, data.hex()) for name, data in found.items())
)
_NODES = _of(NumaNode, index=_INT, cpus=_TEXT, memory_nbytes=_INT, distances=_some(_INT))
PLACES = _of(Place, boot_id=_TEXT, hostname=_TEXT, uid=_INT, pid=_INT, pid_start_ticks=_INT,
             pid_namespace=_INT, net_namespace=_INT, user_namespace=_INT, ipc_namespace=_INT,
             device=_TEXT, addresses=_some(_TEXT), driver=_TEXT, nics=_some(_NICS),
             gpus=_some(_GPUS), numa_nodes=_some(_NODES), facts=_FACTS)  # fmt: skip

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(PLACES)
def test_places_come_back_as_they_were(place: Place) -> None:
    assert sent(place) == place
    assert place_from_json(json.dumps(asdict(place))) == place


def test_what_is_unknown_takes_no_room() -> None:
    assert place_to_wire(Place()).SerializeToString() == b""
    assert place_to_wire(Place(nics=(Nic("eth0"),))) == pb.Place(nics=[{"name": "eth0"}])
    assert place_from_wire(pb.Place()) == Place() and Place().uid == -1


def test_messages_have_the_fields_of_the_classes() -> None:
    for kind in (Place, Nic, Gpu, GpuPeer, NumaNode, Fact):
        message = getattr(pb, kind.__name__).DESCRIPTOR
        assert [each.name for each in message.fields] == [each.name for each in fields(kind)]


def _spots(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to each value inside of a JSON document."""
    inner: list[tuple[str | int, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))
    for key, each in inner:
        yield (*at, key)
        yield from _spots(each, (*at, key))


_HOST = replace(nvlink_host(gpus=2, nics=1), facts=(Fact("piece", "00ff"), Fact("other", "")))


@given(st.sampled_from(list(_spots(json.loads(json.dumps(asdict(_HOST)))))), _JSON)
def test_a_place_with_anything_in_any_spot_is_read_or_refused(
    spot: tuple[str | int, ...], value: Any
) -> None:
    document: Any = json.loads(json.dumps(asdict(_HOST)))
    inner = document
    for key in spot[:-1]:
        inner = inner[key]
    inner[spot[-1]] = value
    try:
        found = place_from_json(json.dumps(document))
    except ValueError:
        return
    assert sent(found) == found
    rails(found, _HOST)


_SENT = place_to_wire(_HOST).SerializeToString()


@given(st.integers(0, len(_SENT)), st.integers(0, 8), st.binary(max_size=8))
def test_a_message_with_anything_in_any_spot_is_read_or_refused(
    at: int, gone: int, new: bytes
) -> None:
    try:
        found = place_from_wire(pb.Place.FromString(_SENT[:at] + new + _SENT[at + gone :]))
    except (DecodeError, PeerProtocolError):
        return
    assert sent(found) == found
    rails(found, _HOST)


@given(st.text() | _JSON.map(json.dumps))
def test_anything_else_is_read_or_refused(text: str) -> None:
    try:
        found = place_from_json(text)
    except ValueError:
        return
    assert sent(found) == found


@pytest.mark.parametrize(
    "text",
    [
        '{"gpus": [{"nvlink_gb_per_s": NaN}]}',
        '{"gpus": [{"nvlink_gb_per_s": 1e999}]}',
        '{"gpus": [{"nvlink_gb_per_s": -1.5}]}',
        '{"gpus": [{"nvlink_gb_per_s": 1' + "0" * 400 + "}]}",
        '{"gpus": [{"pcie_width": -16}]}',
        '{"pid": 9223372036854775808}',
        '{"pid": true}',
        '{"hostname": "\\u001b[2J"}',
        '{"hostname": "\\ud800"}',
        '{"nics": [{"name": "a\\nb"}]}',
        '{"nics": {}}',
        '{"addresses": [["10.0.0.1"]]}',
        '{"facts": [{"transport": "piece", "data": "AP8="}]}',
        '{"facts": [{"transport": "piece", "data": "00FF"}]}',
        '{"facts": [{"transport": "piece", "data": "00f"}]}',
        '{"facts": [{"transport": "piece", "data": "00", "data": "\\u0660\\u0661"}]}',
        '{"facts": {"piece": "00"}}',
    ],
)
def test_what_no_machine_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        place_from_json(text)


@pytest.mark.parametrize(
    "place",
    [
        pb.Place(gpus=[pb.Gpu(nvlink_gb_per_s=math.nan)]),
        pb.Place(gpus=[pb.Gpu(nvlink_gb_per_s=math.inf)]),
        pb.Place(gpus=[pb.Gpu(nvlink_gb_per_s=-1.5)]),
        pb.Place(gpus=[pb.Gpu(nvlink_gb_per_s=1e10)]),
        pb.Place(gpus=[pb.Gpu(peers=[pb.GpuPeer(nvlinks=-2)])]),
        pb.Place(gpus=[pb.Gpu(pcie_width=-16)]),
        pb.Place(pid=-(1 << 63)),
        pb.Place(numa_nodes=[pb.NumaNode(distances=[10, -2])]),
        pb.Place(hostname="\x1b[2J"),
        pb.Place(nics=[pb.Nic(name="a\nb")]),
        pb.Place(addresses=["10.0.0.1", "\x07"]),
        pb.Place(addresses=[""] * 1025),
        pb.Place(nics=[pb.Nic()] * 1025),
        pb.Place(driver="x" * 16_384),
        pb.Place(facts=[pb.Fact(transport="a", data="00" * (MAX_FACT_BYTES + 1))]),
        pb.Place(facts=[pb.Fact(transport=str(i), data="00" * 250) for i in range(5)]),
        pb.Place(facts=[pb.Fact(transport="a" * 500 + str(i)) for i in range(3)]),
        pb.Place(facts=[pb.Fact(transport=str(i)) for i in range(1025)]),
        pb.Place(facts=[pb.Fact(transport="a", data="00"), pb.Fact(transport="a", data="01")]),
        pb.Place(facts=[pb.Fact(), pb.Fact()]),
        pb.Place(facts=[pb.Fact(transport="a", data="0")]),
        pb.Place(facts=[pb.Fact(transport="a", data="xy")]),
        pb.Place(facts=[pb.Fact(transport="a", data=" " * 8_000)]),
        pb.Place(facts=[pb.Fact(transport="a", data="00 ff")]),
        pb.Place(facts=[pb.Fact(transport="a", data="AB")]),
        pb.Place(facts=[pb.Fact(transport="\x1b[2J", data="00")]),
    ],
)
def test_what_no_machine_sends_is_refused(place: pb.Place) -> None:
    with pytest.raises(PeerProtocolError, match="place"):
        place_from_wire(place)


def test_a_fact_is_given_back_to_its_transport_and_no_other() -> None:
    widest = tuple(Fact(f"t{i}", bytes([i] * MAX_FACT_BYTES).hex()) for i in range(3))
    left = MAX_FACTS_BYTES - sum(2 + MAX_FACT_BYTES for _ in widest)
    place = Place(facts=(*widest, Fact("t3", "33" * (left - 2))))
    assert sent(place) == place
    assert place.fact("t1") == b"\1" * MAX_FACT_BYTES and place.fact("t9") == b""
    assert discovery.at_device(place, "cpu").facts == place.facts
    with pytest.raises(ValueError, match=f"{MAX_FACTS_BYTES} in all"):
        replace(place, facts=(*place.facts, Fact("x")))


def test_what_a_newer_machine_sends_besides_is_ignored_but_counted() -> None:
    unknown = b"\xfa\x7f" + bytes([100]) + b"x" * 100
    assert place_from_wire(pb.Place.FromString(_SENT + unknown)) == _HOST
    with pytest.raises(PeerProtocolError, match="more than"):
        place_from_wire(pb.Place.FromString(_SENT + unknown * 160))


def test_large_hosts_fit_into_a_message() -> None:
    whole = nvlink_host(gpus=8, nics=8)
    assert sent(whole) == whole
    # As registered: one GPU, however many peers, and as many interfaces as discovery allows.
    widest = nvlink_host(gpus=16, nics=discovery._MAX_NICS, addresses=discovery._MAX_ADDRESSES)
    addresses = tuple(a.partition("/")[0] for nic in widest.nics for a in nic.addresses)
    widest = replace(widest, gpus=widest.gpus[:1], addresses=addresses)
    assert sent(widest) == widest


# --- this process


def test_this_process_knows_where_it_is() -> None:
    place = discovery.here()
    assert (place.pid, place.uid, place.device) == (os.getpid(), os.getuid(), "cpu")
    assert place.ipc_namespace == os.stat("/proc/self/ns/ipc").st_ino
    assert place.gpus == ()
    assert sent(place) == place
    assert all(nic.addresses for nic in place.nics)


def test_a_gpu_place_reports_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = nvlink_host()
    known = GpusFound(host.gpus, "580.95.05")
    monkeypatch.setattr(discovery, "_gpus", lambda: known)
    place = discovery.here(f"cuda:{uuid(3)}")
    assert place.gpus == (host.gpus[3],)
    assert place.gpu == host.gpus[3]
    assert place.driver == "580.95.05"
    assert discovery.topology({}).place.gpus == host.gpus


def test_a_host_of_containers_keeps_to_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bridges = [
        Interface(i, f"br-{i:012x}", "up", 1500, addresses=(f"172.{i // 250}.{i % 250}.1/24",))
        for i in range(500)
    ]
    many = tuple(f"10.0.{i}.1/24" for i in range(100))
    interfaces = [*bridges, Interface(1000, "eth0", "up", 1500, addresses=many)]
    monkeypatch.setattr(discovery, "read_interfaces", lambda: interfaces)
    place = discovery.here(nics=["eth0"])
    assert place.addresses == tuple(f"10.0.{i}.1" for i in range(4))
    assert sent(discovery.here()).nics
    assert len(discovery.topology({}).place.nics) == 501


def test_without_an_answer_from_the_kernel_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> list[Interface]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(discovery, "read_interfaces", refuse)
    assert discovery.here().addresses == ()
    assert "network interfaces" in caplog.text
    assert discovery.data_hosts("10.0.0.1") == ("10.0.0.1",)
    assert discovery.data_hosts("0.0.0.0") == ("127.0.0.1",)
    assert "not permitted" in discovery.topology({}).missing["nics"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1"])
def test_loopback_stays_loopback(host: str) -> None:
    (found,) = discovery.data_hosts(host)
    assert found in ("127.0.0.1", "::1", "127.8.0.1")


def test_an_interface_that_is_not_there_is_named() -> None:
    for ask in (lambda: discovery.here(nics=["nope0"]),
                lambda: discovery.data_hosts("127.0.0.1", ["nope0"])):  # fmt: skip
        with pytest.raises(ConfigError, match="nope0"):
            ask()


def test_what_a_coordinator_imports_has_no_torch_and_no_nvml() -> None:
    code = (
        "import sys, mx.coordinator.daemon, mx.source.server, mx.discovery as d; d.here();"
        "print([m for m in ('torch', 'pynvml', 'cuda') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- netlink, with a kernel that misbehaves


def message(kind: int, body: bytes = b"", flags: int = 0, sequence: int = 1) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


@contextmanager
def kernel(*answers: bytes) -> Iterator[socket.socket]:
    """A socket whose other end answers each request with the next of `answers`."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        for answer in answers:
            far.recv(4096)
            far.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with near, far:
        near.settimeout(5)
        yield near
        thread.join()


DONE = 3


def test_an_answer_that_was_interrupted_is_asked_for_again() -> None:
    first = message(16, b"old!") + message(DONE, bytes(4), flags=0x10)
    late = message(16, b"old!") + message(16, b"new!", sequence=2)
    with kernel(first, late + message(DONE, bytes(4), sequence=2)) as sock:
        assert [bytes(body) for _, body in netlink._dump(sock, 18)] == [b"new!"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (message(2, struct.pack("=i", -1)), "Operation not permitted"),
        (struct.pack("=IHHII", 400, 16, 0, 1, 0), "cut off"),
        (struct.pack("=IHHII", 3, 16, 0, 1, 0), "cut off"),
    ],
)
def test_a_refusal_and_a_cut_off_answer_are_os_errors(answer: bytes, text: str) -> None:
    with kernel(answer) as sock, pytest.raises(OSError, match=text):
        netlink._dump(sock, 18)


def test_names_that_would_upset_a_terminal_are_changed() -> None:
    body = struct.pack("=BxHiII", 0, 1, 7, 0, 0) + struct.pack("=HH", 10, 3) + b"a\x1b\xffbc\0"
    assert [link[1] for link in netlink._links([(16, memoryview(body))])] == ["a?\ufffdbc"]


# --- what reaches what

TRANSPORTS = plugins.transports()


def device_of(host: Place, device: str) -> Place:
    return replace(host, device=device)


def test_devices_of_one_host_reach_each_other_the_best_way_first() -> None:
    host = nvlink_host(gpus=2)
    devices = ["cpu", *(f"cuda:{gpu.uuid}" for gpu in host.gpus)]
    best = {
        (one, other): paths(device_of(host, one), device_of(host, other), TRANSPORTS)[0]
        for one in devices
        for other in devices
    }
    cpu, gpu0, gpu1 = devices
    assert (best[cpu, cpu].transport, best[cpu, cpu].attach) == ("shm", True)
    assert (best[gpu0, gpu0].transport, best[gpu0, gpu0].attach) == ("cuda_ipc", True)
    assert best[gpu0, gpu1].transport == "cuda_ipc"
    assert best[cpu, gpu0].transport == best[gpu0, cpu].transport == "pcie_p2p"
    for pair, path in best.items():
        assert best[pair[::-1]] == path


def test_a_network_to_a_gpu_is_staged_through_the_host() -> None:
    near, far = nvlink_host(host=1), nvlink_host(host=2)
    found = paths(device_of(near, f"cuda:{near.gpus[0].uuid}"), far, TRANSPORTS)
    assert {path.transport for path in found} == {"tcp", "ucx"}
    assert all(path.staged and not path.attach for path in found)


def test_two_interfaces_that_share_two_subnets_are_one_rail_over_ipv4() -> None:
    def host(last: int) -> Place:
        nic = Nic("eth0", "up", (f"fd00::{last}/64", f"10.0.0.{last}/24"), 10_000)
        return Place(addresses=(f"fd00::{last}", f"10.0.0.{last}"), nics=(nic,))

    (rail,) = rails(host(1), host(2))
    assert (rail.local_address, rail.remote_address) == ("10.0.0.1", "10.0.0.2")
    only_ipv6 = replace(host(2), addresses=("fd00::2",))
    (rail,) = rails(host(1), only_ipv6)
    assert (rail.local_address, rail.remote_address) == ("fd00::1", "fd00::2")


def test_a_bridge_that_every_host_has_is_no_rail() -> None:
    docker = Nic("docker0", "up", ("172.17.0.1/16",))
    place = Place(addresses=("172.17.0.1",), nics=(docker,))
    assert rails(place, replace(place, boot_id="another")) == []


# --- what `mx topo` prints


def report(host: Place, *, sources: tuple[Place, ...] = ()) -> TopologyReport:
    devices = ("cpu", *(f"cuda:{gpu.uuid}" for gpu in host.gpus))
    matrix = tuple(
        Reach(one, other, paths(device_of(host, one), device_of(host, other), TRANSPORTS))
        for one in devices
        for other in devices
    )
    probes = {name: Viable("by a test") for name in TRANSPORTS}
    topology = Topology(host, {}, {**probes, "rocket": Unavailable("it has not landed")})
    found = []
    for there in sources:
        record = replace(make_record(make_documents("a")), place=there, transports=("tcp", "shm"))

        def reach(name: str, place: Place, here: Place = host) -> Path | str:
            return path_between(TRANSPORTS[name], here, place) or "it does not reach"

        plans = {
            device: plan(device_of(host, device), [record], ("shm", "tcp"), reach)
            for device in devices
        }
        found.append(SourceReach(record, plans))
    return TopologyReport(topology, devices, matrix, tuple(found))


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    def show(found: TopologyReport, *, sources: bool = False) -> list[str]:
        topo_tables.show(found, asked_for_sources=sources)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return show


def test_the_matrix_of_eight_gpus_fits_eighty_columns(printed: Any) -> None:
    lines = printed(report(nvlink_host()))
    start = next(i for i, line in enumerate(lines) if line.startswith("From (columns)"))
    matrix = lines[start + 1 :]
    assert max(map(len, matrix)) <= 80
    assert matrix[0].split() == ["cpu", *(f"gpu{i}" for i in range(8))]
    assert len(matrix) == 1 + 9 + 1
    for i, line in enumerate(matrix[2:10]):
        assert line.split()[0] == f"gpu{i}"
        assert line.count("=") == 1  # itself
    assert "A cuda_ipc, B pcie_p2p, C shm" in matrix[-1]
    assert any(line.split() == ["each", "each", "18", "-", "read", "and", "write"]
               for line in lines)  # fmt: skip


def test_few_devices_are_shown_with_all_their_paths(printed: Any) -> None:
    lines = printed(report(nvlink_host(gpus=1, nics=1)))
    assert any("shm attach" in line and "pcie_p2p" in line for line in lines)
    assert any("tcp 2 staged" in line for line in lines)
    assert any(line.split()[:2] == ["rocket", "no"] for line in lines)
    assert any("mlx5_0/1 InfiniBand" in line and "400" in line for line in lines)


def test_gpus_that_differ_are_distinguished(printed: Any) -> None:
    host = nvlink_host(gpus=3)
    first, *rest = host.gpus
    slower = replace(first.peers[1], nvlinks=0, p2p_write=False, relation="bridge")
    first = replace(first, peers=(first.peers[0], slower))
    lines = [line.split("  ") for line in printed(report(replace(host, gpus=(first, *rest))))]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert ["gpu0", "gpu1", "18", "-", "read and write"] in cells
    assert ["gpu0", "gpu2", "-", "PCIe switches", "read"] in cells


def test_sources_of_other_hosts_are_shown_with_their_rails(printed: Any) -> None:
    near, far = nvlink_host(gpus=2, nics=2, host=1), nvlink_host(gpus=0, nics=2, host=1)
    # The same subnets, but another machine there.
    theirs = tuple(
        replace(nic, name=f"eth{i}", addresses=(f"10.{i}.1.2/24",))
        for i, nic in enumerate(far.nics)
    )
    far = replace(far, boot_id="far", hostname="far", nics=theirs,
                  addresses=("10.0.1.2", "10.1.1.2"))  # fmt: skip
    unreachable = Place(boot_id="moon", hostname="moon", addresses=("127.0.0.1",))
    text = "\n".join(printed(report(near, sources=(far, unreachable)), sources=True))
    assert "tcp enp0s0f0np0→eth0" in text
    assert "tcp enp1s0f0np0→eth1" in text
    assert "cpu, gpu0, gpu1" in text  # the same ways to all of them
    assert "none" in text.split("moon")[1]
    assert "it does not reach" in text
    none_opened = printed(report(near), sources=True)
    assert none_opened[-1] == "Sources: the coordinator lists none"


def test_a_machine_with_nothing_is_shown_whole(printed: Any) -> None:
    missing = {"nics": "no netlink", "numa_nodes": "no NUMA", "gpus": "no driver"}
    found = TopologyReport(Topology(Place(), missing, {}), ("cpu",), (Reach("cpu", "cpu", ()),))
    lines = printed(found)
    for line in ("Network interfaces: no netlink", "NUMA nodes: no NUMA", "GPUs: none: no driver"):
        assert line in lines
    assert lines[-1].split() == ["cpu", "-"]
