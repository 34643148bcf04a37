"""The ucx transport beyond the rules: what it refuses, what a forged peer can do, its processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mx.core.topology import Nic, Place
from mx.errors import (
    LocalError,
    NotAllowedError,
    PathError,
    PeerLostError,
    PeerTimeoutError,
    SourceError,
)
from mx.testing import conformance
from mx.testing.bench import Bench, BenchSource
from mx.testing.harness import GENERATION
from mx.testing.memory import Kind, Memory
from mx.transport import ExposeOptions, Grant, Medium, TlsFiles, Unavailable
from mx.units import MIB
from mx_transports import ucx
from mx_transports.toolkit import framing
from mx_transports.ucx import exposure as ucx_exposure
from mx_transports.ucx import nixl, wire
from mx_transports.ucx import session as session_module
from mx_transports.ucx.agent_process import AgentProcess
from mx_transports.ucx.exposure import UcxExposure
from mx_transports.ucx.session import UcxSession

installed = pytest.mark.skipif(nixl.find() is None, reason="NIXL is not installed")


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(conformance.Harness("mx_transports.ucx:UcxTransport")) as bench:
        yield bench


def agents(source: BenchSource) -> list[AgentProcess]:
    assert isinstance(source.exposure, UcxExposure)
    return list(source.exposure._agents.values())


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


# --- choice


def place(boot: str, *addresses: str, nics: tuple[Nic, ...] = (), device: str = "cpu") -> Place:
    return Place(boot, boot, 0, 1, 1, 1, 1, 1, 1, device, addresses, nics=nics)


def rdma_nic(address: str, layer: str = "InfiniBand") -> Nic:
    return Nic(
        "ib0", "up", (address,), 400_000, rdma_device="mlx5_0", rdma_port=1, link_layer=layer
    )


def test_reach_says_what_trust_it_needs_and_what_rdma_gives() -> None:
    reach = ucx.UcxTransport().reach
    here, there = place("a", "10.0.0.1"), place("b", "10.0.0.2")
    path = reach(here, there)
    assert path is not None and path.medium is Medium.NETWORK and path.trusting
    assert path.rdma_gb_per_s > path.gb_per_s
    assert reach(here, place("b", "127.0.0.1")) is None
    assert reach(here, place("b", "10.0.0.2", device="cuda:GPU-1")) is None
    gpus = reach(
        place("a", "10.0.0.1", device="cuda:GPU-0"), place("b", "10.0.0.2", device="cuda:GPU-1")
    )
    assert gpus is not None and gpus.staged and "GPUDirect" in gpus.rdma_detail
    assert path.rdma_detail == "RDMA" and not path.staged
    alone = reach(here, place("a", "127.0.0.1"))
    assert alone is not None and alone.medium is Medium.MEMORY and not alone.trusting
    seen = reach(here, place("a", "10.0.0.9"))
    assert seen is not None and seen.medium is Medium.MEMORY and seen.trusting


def test_a_reader_uses_rdma_where_both_sides_have_it() -> None:
    here = place("a", nics=(rdma_nic("10.0.0.1/24"), Nic("eth0", "up", ("10.0.1.1/24",))))
    device = wire.reader_device
    assert device(here, "10.0.0.1", ("ib1", "mlx5_3:2")) == "mlx5_0:1"
    assert device(here, "10.0.0.1", ("eth7",)) == "ib0"
    assert device(here, "10.0.1.1", ("ib1", "mlx5_3:2")) == "eth0"
    assert device(here, "127.0.0.1", ()) == "lo"
    assert device(here, "10.9.9.9", ("eth0",)) == ""


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find", lambda: None)
    transport = ucx.UcxTransport()
    probed = transport.probe()
    assert isinstance(probed, Unavailable) and "pip install '.[cuda12]'" in probed.reason
    with pytest.raises(LocalError, match="cuda12"):
        transport.expose([], ExposeOptions())


def test_a_gpus_memory_is_read_directly_where_there_is_rdma_or_if_that_is_wanted() -> None:
    rdma, sockets = ("ib0", "mlx5_0:1"), ("lo",)

    def wants(value: str) -> list[bool]:
        return [
            wire.goes_direct({"gpudirect": value}.__getitem__, each) for each in (rdma, sockets)
        ]

    assert [wants("auto"), wants("always"), wants("off")] == [
        [True, False],
        [True] * 2,
        [False] * 2,
    ]
    no_settings: dict[str, str] = {}
    assert wire.goes_direct(no_settings.__getitem__, rdma)


# --- refusals


@installed
@pytest.mark.parametrize("kind", [Kind.ANONYMOUS, Kind.UNSEALED])
def test_other_memory_than_sealed_memfds_is_refused(kind: Kind) -> None:
    memory = Memory(4096, 1, kind)
    with pytest.raises(LocalError, match="sealed memfds only"):
        ucx.UcxTransport().expose([memory.region(0)], ExposeOptions())
    memory.close()


@installed
def test_beyond_loopback_both_sides_must_trust_the_fabric() -> None:
    transport = ucx.UcxTransport()
    memory = Memory(4096, 1)
    with pytest.raises(NotAllowedError, match="`trusted_fabric`"):
        transport.expose([memory.region(0)], ExposeOptions(hosts=("127.0.0.1", "10.1.2.3")))
    memory.close()
    fields: dict[str, object] = {"addresses": [["10.1.2.3", 4000]]}
    ticket = framing.Ticket(b"k" * 16, b"s" * 32, fields).encode()
    with pytest.raises(NotAllowedError, match=r"peer:1 by ucx.*`trusted_fabric`"):
        transport.open(Grant("g", ticket, 1, (4096,), "peer:1", peer_addresses=("10.1.2.3",)))


@installed
def test_what_nixl_raises_is_an_error_that_names_peer_and_way(bench: Bench) -> None:
    agent = nixl.TargetAgent("peer:1", "lo")
    with pytest.raises(PathError, match="peer:1 by ucx: its metadata is refused") as caught:
        agent.connect(b"no metadata")
    assert caught.value.peer == "peer:1"
    with pytest.raises(PathError, match="peer:1 by ucx: a read"):
        agent.post([nixl.AddressRange(4096, 8)], [nixl.AddressRange(4096, 8)])
    agent.close()
    with pytest.raises(PathError, match="a UCX agent on nosuch0"):
        nixl.TargetAgent("peer:1", "nosuch0")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"metadata": "zz", "regions": [], "devices": []}',
        b'{"metadata": "", "regions": [[0, -1, 4]], "devices": []}',
        b'{"metadata": "", "regions": [[0, 18446744073709551615, 4]], "devices": []}',
        b'{"metadata": "", "regions": [[0, 1]], "devices": []}',
        b'{"metadata": "", "regions": [[0, true, 4]], "devices": []}',
        *(
            b'{"metadata": "", "regions": [], "devices": [], "slot_bytes": 0, "places": [%s]}'
            % place
            for place in (b"[0, 0, 1]", b"[0, 0, 1, -4]", b"[0, 0, 18446744073709551615, 4]", b"{}")
        ),
    ],
)
def test_malformed_words_about_an_agent(text: bytes) -> None:
    with pytest.raises(SourceError, match="peer:1"):
        wire.decode_info(text, "peer:1")


def test_memlock_is_named_where_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert "ulimit -l unlimited" in nixl.memlock_hint()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert nixl.memlock_hint() == ""


# --- the agents' processes


@installed
def test_an_agent_has_nothing_to_steal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_TEST_TOKEN", "the-secret-token")
    source = bench.source(MIB)
    secret = os.memfd_create("the-secret-file", 0)  # inheritable, as a careless library's
    try:
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(MIB))))
        (agent,) = agents(source)
        folder = Path(f"/proc/{agent.pid}")
        assert b"secret" not in (folder / "cmdline").read_bytes()
        assert "NoNewPrivs:\t1" in (folder / "status").read_text()
        if os.geteuid():
            # Not even its own user may look.
            with pytest.raises(PermissionError):
                (folder / "environ").read_bytes()
            return
        assert b"secret" not in (folder / "environ").read_bytes()
        links = [os.readlink(folder / "fd" / name) for name in os.listdir(folder / "fd")]
        assert not [link for link in links if "secret" in link or "memfd" in link]
        maps = [line for line in (folder / "maps").read_text().splitlines() if "/memfd:" in line]
        assert [line.split()[1] for line in maps] == ["r--s"]
    finally:
        os.close(secret)


@installed
def test_an_agent_dies_with_its_source(bench: Bench) -> None:
    remote, session = bench.remote(MIB)
    bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(MIB))))
    pids = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(remote.pid)],  # type: ignore[attr-defined]
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert len(pids) == 1
    remote.kill()
    eventually(lambda: not alive(int(pids[0])))


@installed
def test_a_dead_agent_costs_its_readers_and_is_replaced(bench: Bench) -> None:
    source = bench.source(bench.harness.big_nbytes)
    grant_id, ticket = source.grant()
    session = bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
    running = bench.held_read(session, memoryview(bytearray(source.sizes[0])), "running")
    (agent,) = agents(source)
    os.kill(agent.pid, signal.SIGKILL)
    running.release()
    bench.failure(running, PeerLostError, "running")
    eventually(lambda: not agents(source))
    # The grant stands: the next connection gets another agent.
    view = memoryview(bytearray(MIB))
    again = bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
    bench.succeed(bench.read(again, 0, 0, view))
    assert bytes(view) == source.memories[0].expected[:MIB]
    assert agents(source)[0].pid != agent.pid


@installed
def test_a_stopped_agent_runs_into_the_deadline(bench: Bench) -> None:
    source = bench.source(bench.harness.big_nbytes)
    session = bench.open(source)
    running = bench.held_read(session, memoryview(bytearray(source.sizes[0])), "running")
    os.kill(agents(source)[0].pid, signal.SIGSTOP)
    running.release()
    bench.failure(running, PeerTimeoutError, "running")
    session.close()
    assert session.join(bench.harness.deadline_s)
    source.exposure.close()
    assert source.exposure.join(bench.harness.deadline_s)


@installed
def test_agents_that_keep_dying_are_not_replaced_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_exposure, "MAX_DEATHS", 1)
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
    os.kill(agents(source)[0].pid, signal.SIGKILL)
    eventually(lambda: not agents(source))
    assert not bench.refuses(grant_id, ticket, source.sizes)
    with pytest.raises(SourceError, match="no agent"):
        bench.open_ticket(grant_id, ticket, source.sizes, tls=None)


@installed
def test_withdrawing_from_the_only_reader_ends_the_agent(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
    pid = agents(source)[0].pid
    source.exposure.revoke(grant_id)
    eventually(lambda: not alive(pid))


@installed
def test_an_unused_agent_is_let_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_exposure, "LINGER_S", 0.0)
    source = bench.source(MIB)
    session = bench.open(source)
    pid = agents(source)[0].pid
    session.close()
    eventually(lambda: not alive(pid))
    view = memoryview(bytearray(MIB))
    bench.succeed(bench.read(bench.open(source), 0, 0, view))
    assert bytes(view) == source.memories[0].expected


@installed
def test_an_agent_that_cannot_start_is_the_paths_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = nixl.agent_environment
    # The source's alone: the reader's own UCX is not what is looked at here.
    theirs = {"UCX_TLS": "nonsense"}
    monkeypatch.setattr(nixl, "agent_environment", lambda devices: ours(devices) | theirs)
    source = bench.source(MIB)
    with pytest.raises(SourceError, match=r"localhost:7601.*its agent"):
        bench.open(source)


# --- readers


@installed
def test_an_adopted_arena_is_registered_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[nixl.AddressRange] = []
    register = nixl.TargetAgent.register

    def note(self: nixl.TargetAgent, block: nixl.AddressRange) -> Any:
        registered.append(block)
        return register(self, block)

    monkeypatch.setattr(nixl.TargetAgent, "register", note)
    source = bench.source(3 * MIB)
    session = bench.open(source)
    arena = memoryview(bytearray(3 * MIB))
    session.adopt(arena)
    sinks = [bench.read(session, 0, n * MIB, arena[n * MIB : (n + 1) * MIB]) for n in range(3)]
    bench.succeed(*sinks)
    assert bytes(arena) == source.memories[0].expected
    assert [block.nbytes for block in registered] == [3 * MIB]
    # Destinations outside of the arena are registered by themselves.
    other = memoryview(bytearray(4096))
    bench.succeed(bench.read(session, 0, 0, other))
    assert bytes(other) == source.memories[0].expected[:4096]
    assert [block.nbytes for block in registered] == [3 * MIB, 4096]


@installed
def test_the_control_connection_uses_tls_if_there_is_any(
    authorities: tuple[TlsFiles, TlsFiles],
) -> None:
    harness = conformance.Harness("mx_transports.ucx:UcxTransport", tls=authorities[0])
    with Bench(harness) as bench:
        source = bench.source(20 * MIB)
        session = bench.open(source)
        view = memoryview(bytearray(20 * MIB))
        sinks = [bench.read(session, 0, n * MIB, view[n * MIB : (n + 1) * MIB]) for n in range(20)]
        bench.succeed(*sinks)
        assert view == source.memories[0].expected
        grant_id, ticket = source.grant()
        for other in (None, authorities[1]):
            with pytest.raises(SourceError):
                bench.open_ticket(grant_id, ticket, source.sizes, tls=other)


@installed
def test_a_reader_that_begins_reads_and_ends_none_is_cut_off(bench: Bench) -> None:
    source = bench.source(MIB)
    _, ticket = source.grant()
    described = json.loads(ticket)
    key, secret = bytes.fromhex(described["key"]), bytes.fromhex(described["secret"])
    with socket.create_connection(tuple(described["addresses"][0])) as reader:
        reader.settimeout(30)
        reader.sendall(framing.PREAMBLE.pack(wire.MAGIC, key, secret))
        reader.recv(framing.HELLO.size, socket.MSG_WAITALL)
        kind = wire.STARTING
        while kind == wire.STARTING:
            header = reader.recv(wire.INFO.size, socket.MSG_WAITALL)
            kind, nbytes = wire.INFO.unpack(header)
            reader.recv(nbytes, socket.MSG_WAITALL)
        assert kind == wire.READY
        begins = [
            wire.REQUEST.pack(wire.BEGIN, number, GENERATION, 0)
            for number in range(ucx_exposure.MAX_RUNNING + 1)
        ]
        reader.sendall(b"".join(begins))
        answers = b""
        while got := reader.recv(1 << 16):
            answers += got
        assert len(answers) == ucx_exposure.MAX_RUNNING * wire.RESPONSE.size
    eventually(lambda: source.exposure.active_readers() == 0)


# --- sinks


@installed
def test_ucx_is_polled_while_a_sink_blocks_for_as_many_steps_as_may_be_under_way(
    bench: Bench,
) -> None:
    nbytes = 2 * session_module.STEPS * session_module.STEP_BYTES
    source = bench.source(nbytes)
    session = bench.open(source)
    assert isinstance(session, UcxSession)
    view = memoryview(bytearray(nbytes))
    sink = bench.sink(hold=True)
    bench.read(session, 0, 0, view, sink=sink)
    bench.wait(sink.held, "no first bytes")
    landed = session_module.STEPS * session_module.STEP_BYTES
    eventually(lambda: view[:landed] == source.memories[0].expected[:landed])
    eventually(lambda: session._reports.landings == session_module.STEPS)
    assert view[landed:] == bytes(landed)
    assert sink.landings == [session_module.STEP_BYTES]
    sink.release()
    bench.succeed(sink)
    assert view == source.memories[0].expected


@installed
def test_a_sink_that_raises_costs_its_own_read_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: reported.append(given.exc_type))
    source = bench.source(MIB)
    session = bench.open(source)
    view = memoryview(bytearray(MIB))
    raising = bench.sink(raises="landed")
    bench.read(session, 0, 0, memoryview(bytearray(MIB)), tag="raises", sink=raising)
    others = [bench.read(session, 0, 0, view) for _ in range(3)]
    bench.failure(raising, PeerLostError, "raises")
    bench.succeed(*others)
    assert view == source.memories[0].expected
    assert len(reported) == 1 and raising.ends == 1


@installed
@pytest.mark.parametrize("quiet_s", [0.0, 60.0])
def test_an_agent_sleeps_only_after_some_time_with_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, quiet_s: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("mx_transports.ucx.nixl.time.sleep", slept.append)
    monkeypatch.setattr("mx_transports.ucx.agent.YIELD_S", quiet_s)
    agent = nixl.TargetAgent("peer:1", "lo")
    agent._worked_s = time.perf_counter()
    agent.pause()
    agent.close()
    assert len(slept) == (not quiet_s)


# --- a forged peer

_FORGER = """
import ctypes, json, secrets, sys
sys.path[:] = json.loads(sys.argv[1])
asked = json.loads(sys.argv[2])
from mx_transports.ucx import nixl
del nixl.UCX_SETTINGS["PROTOS"]  # it can write, too
agent = nixl.TargetAgent("victim", "lo")
agent.connect(bytes.fromhex(asked["metadata"]))
room = ctypes.create_string_buffer(asked["fill"].encode() * 64, 4096)
here = ctypes.addressof(room)
agent.register(nixl.AddressRange(here, 4096))
op = getattr(agent._nixl, asked["operation"])
# What NIXL would check on this side is taken out of the way: the metadata is forged to cover it.
forged = bytes.fromhex(asked["metadata"]).replace(
    asked["address"].to_bytes(8, "little"), asked["target"].to_bytes(8, "little")
)
if forged != bytes.fromhex(asked["metadata"]):
    agent._agent.invalidateRemoteMD(agent._remote)
    agent.connect(forged)
try:
    handle = agent._agent.createXferReq(
        op,
        agent._list([nixl.AddressRange(here, 4096)]),
        agent._list([nixl.AddressRange(asked["target"], 4096)]),
        agent._remote,
    )
    agent._agent.postXferReq(handle)
    import time
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if agent._agent.getXferStatus(handle) == agent._nixl.NIXL_SUCCESS:
            break
    else:
        raise TimeoutError
    print(json.dumps({"done": room.raw.hex()}))
except agent._failures as error:
    print(json.dumps({"failed": type(error).__name__}))
"""


def forge(agent: AgentProcess, operation: str, target: int) -> dict[str, str]:
    """Another process, with the metadata that a granted reader gets, does what it should not."""
    asked = {
        "metadata": agent.metadata.hex(),
        "address": agent.addresses[0],
        "target": target,
        "operation": operation,
        "fill": "forged!!",
    }
    done = subprocess.run(
        [sys.executable, "-c", _FORGER, json.dumps(sys.path), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


@installed
@pytest.mark.integration
def test_a_forged_write_does_not_reach_the_bytes(bench: Bench) -> None:
    source = bench.source(MIB)
    session = bench.open(source)
    (agent,) = agents(source)
    assert agent.settled.wait(15)
    answer = forge(agent, "NIXL_WRITE", agent.addresses[0])
    assert source.memories[0].unchanged()
    # Writing to its read-only map has ended the agent, and the session that it served with it.
    assert "failed" in answer or not alive(agent.pid)
    eventually(lambda: agent not in agents(source))
    late = bench.read(session, 0, 0, memoryview(bytearray(64)), tag="late")
    bench.failure(late, SourceError, "late")
    # The source lives, and serves on.
    view = memoryview(bytearray(MIB))
    bench.succeed(bench.read(bench.open(source), 0, 0, view))
    assert bytes(view) == source.memories[0].expected


@installed
@pytest.mark.integration
@pytest.mark.parametrize("operation", ["NIXL_READ", "NIXL_WRITE"])
def test_forged_metadata_does_not_reach_the_sources_process(bench: Bench, operation: str) -> None:
    secret = bytearray(b"the-secret-token" * 512)
    source = bench.source(MIB)
    bench.open(source)
    (agent,) = agents(source)
    assert agent.settled.wait(15)
    address = nixl.Pin(memoryview(secret)).range.address & ~4095
    answer = forge(agent, operation, address + 4096)
    # The same address in the agent's process is another thing, or nothing.
    assert b"secret" not in bytes.fromhex(answer.get("done", ""))
    assert secret == b"the-secret-token" * 512
    assert source.memories[0].unchanged()
    view = memoryview(bytearray(MIB))
    eventually(lambda: not agents(source) or alive(agent.pid))
    bench.succeed(bench.read(bench.open(source), 0, 0, view))
    assert bytes(view) == source.memories[0].expected


_LOADING = """
import ctypes, json, sys
sys.path[:] = json.loads(sys.argv[1])
libc = ctypes.CDLL(None)

def code():
    names = ("mmap", "munmap", "mremap", "madvise", "shmat", "shmdt", "brk", "sbrk")
    found = (ctypes.cast(getattr(libc, name), ctypes.c_void_p).value for name in names)
    return [ctypes.string_at(address, 16) for address in found]

before = code()
from mx_transports.ucx import UcxTransport, nixl
UcxTransport().prepare()
agent = nixl.TargetAgent("peer", "lo")
agent._list([nixl.AddressRange(4096, 8)])
agent.close()
print(json.dumps([nixl._loaded, before == code(), "numpy" in sys.modules]))
import nixl_cu12
print(nixl_cu12._api.nixlBind is nixl._bindings("peer"))
"""


@installed
@pytest.mark.integration
def test_loading_ucx_patches_no_function_and_imports_no_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADING, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    loaded, same = done.stdout.splitlines()
    assert json.loads(loaded) == [True, True, False]
    assert same == "True"  # one copy of its types


#: Processes that load UCX on a thread, and fork meanwhile, each at another moment of it.
_FORKING = """
import json, os, signal, sys, threading, time
sys.path[:] = json.loads(sys.argv[1])
from mx.plugins import transports

ucx = transports()["ucx"]

def load():
    ucx.prepare()
    from mx_transports.ucx import nixl
    return nixl.TargetAgent("peer", "lo").close()

def child_while_loading(delay_s):
    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(delay_s)
    child = os.fork()
    if not child:
        signal.alarm(30)  # a child that hangs is killed
        sys.exit(5 if load() else 6)
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for delay_s in (0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2):
    parent = os.fork()
    if not parent:
        os._exit(child_while_loading(delay_s) & 255)
    print(os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]))
"""


@installed
@pytest.mark.integration
def test_a_child_forked_while_ucx_loads_can_use_it() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKING, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout.split() == ["5"] * 7, done.stderr
