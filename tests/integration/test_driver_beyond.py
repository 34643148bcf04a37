"""GPU memory beyond the host, over the stand-in driver: by tcp and ucx, through pinned rings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.hosts import Hosts
from benchmarks.processes import Child, Cluster
from mx.units import KIB
from mx_transports.ucx import nixl
from tests.support.driver.build import environment
from tests.support.driver.logs import calls, copied
from tests.support.driver.programs import each_major_at_leisure, passes

pytestmark = each_major_at_leisure
_ROOT = Path(__file__).parents[2]

#: Forty readers request all of a GPU's memory and read nothing; another one gets it meanwhile.
#: Then some of them go on to read.
_HOGS = """
import tempfile
from mx.cuda.driver import load
from mx.testing.certificates import certificates
from mx.testing.harness import PEER
from mx.testing.memory import Kind, Memory
from mx.transport import ExposeOptions, Grant, Piece, Read
from mx_transports.tcp import TcpTransport
from mx_transports.tcp.wire import MAGIC, REQUEST, RESPONSE
from mx_transports.toolkit import dial, pinned
from mx_transports.toolkit.pieces import encode_request
from pathlib import Path

NBYTES, HOGS, PATIENT_S = 16 * MIB, 40, 300.0
pinned.SLOTS, pinned.SLOT_BYTES = 4, 8 * MIB  # more than sockets take: all stop within a slot
tls = certificates(Path(tempfile.mkdtemp()))[0] if {tls} else None
device = "cuda:" + load().device_uuid(0)
memory = Memory(NBYTES, 3, Kind.{kind}, device)
transport = TcpTransport()
exposure = transport.expose(
    [memory.region(0)], ExposeOptions(tls=tls, stall_timeout_s=PATIENT_S)
)
exposure.set_generation(1)

class Sink:
    def __init__(self):
        self.ended, self.error = threading.Event(), None
    def landed(self, nbytes):
        pass
    def done(self):
        self.ended.set()
    def failed(self, error):
        self.error = error
        self.ended.set()

def grant(name):
    return Grant(
        name, exposure.grant(name), 1, (NBYTES,), PEER, tls=tls, stall_timeout_s=20.0, streams=1
    )

def read(sink):
    into = bytearray(NBYTES)
    return into, Read("all", [Piece(0, 0, memoryview(into))], sink)

hogs = []
for number in range(HOGS):
    (stream,) = dial.open_streams(MAGIC, grant(f"hog {{number}}"))
    stream.send_all([encode_request(REQUEST, (0, 1), read(Sink())[1].pieces)])
    hogs.append(stream)
while exposure.active_readers() < HOGS:
    time.sleep(0.01)
session = transport.open(grant("honest"))
sink = Sink()
into, wanted = read(sink)
session.read([wanted])
assert sink.ended.wait(30), "the hogs have all slots"
assert sink.error is None, sink.error
assert into == memory.expected
assert exposure.active_readers() >= HOGS, "a hog was cut off"
for stream in hogs[::8]:
    found = stream.receive(RESPONSE.size + NBYTES + RESPONSE.size)
    assert found[RESPONSE.size : -RESPONSE.size] == memory.expected
session.close()
assert session.join(10)
for stream in hogs:
    stream.abort()
exposure.close()
assert exposure.join(10)
for stream in hogs:
    stream.close()
memory.close()
"""


@pytest.mark.parametrize(
    ("kind", "tls"), [("GPU", False), ("SCATTERED", True)], ids=["plain", "scattered and TLS"]
)
def test_readers_that_stop_leave_slots(major: int, tmp_path: Path, kind: str, tls: bool) -> None:
    passes(major, _HOGS.format(kind=kind, tls=tls), LOG=tmp_path)
    found = Counter(calls(tmp_path))
    assert found["cuMemHostAlloc", "CUDA_SUCCESS"] == 1  # whatever the number of readers
    assert {result for _, result in found} == {"CUDA_SUCCESS"}


#: Readers of ucx hold slots and do not read them; others lie, or go; another one reads meanwhile.
_HOLDERS = """
import dataclasses
from mx.cuda.driver import load
from mx.errors import LocalError
from mx.testing.memory import Kind, Memory
from mx.transport import ExposeOptions, Grant, Piece, Read
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.pieces import encode_request
from mx_transports.ucx import UcxTransport, slots, wire
from mx_transports.ucx.opening import _receive_info

NBYTES, STALL_S = 5 * MIB + 7, 6.0
device = "cuda:" + load().device_uuid(0)
memory = Memory(NBYTES, 3, Kind.GPU, device)
transport = UcxTransport()
lost = []
options = ExposeOptions(stall_timeout_s=STALL_S, on_lost=lost.append)
host = dataclasses.replace(memory.region(0), index=1, view=memoryview(bytes(9)), device="cpu")
try:
    transport.expose([memory.region(0), host], options)
except LocalError as error:
    assert "one GPU" in str(error), error
else:
    raise AssertionError("host memory among a GPU's is exposed")
exposure = transport.expose([memory.region(0)], options)
exposure.set_generation(1)

class Sink:
    def __init__(self):
        self.ended, self.error = threading.Event(), None
    def landed(self, nbytes):
        pass
    def done(self):
        self.ended.set()
    def failed(self, error):
        self.error = error
        self.ended.set()

def grant(name):
    return Grant(name, exposure.grant(name), 1, (NBYTES,), "peer", stall_timeout_s=60.0)

def greeted(standing):
    (stream,) = dial.open_streams(wire.MAGIC, dataclasses.replace(standing, streams=1))
    return stream, _receive_info(stream, "peer")

def begin(stream, number, *pieces, kind=wire.BEGIN):
    wanted = [Piece(region, at, memoryview(bytes(nbytes))) for region, at, nbytes in pieces]
    stream.send_all([encode_request(wire.REQUEST, (kind, number, 1), wanted)])

def answer(stream):
    return wire.RESPONSE.unpack(stream.receive(wire.RESPONSE.size))

def gone(stream):
    try:
        stream.wait(memoryview(bytearray(1)))
    except OSError:
        return True
    return False

def read_all(session):
    sink, into = Sink(), bytearray(NBYTES)
    session.read([Read("all", [Piece(0, 0, memoryview(into))], sink)])
    assert sink.ended.wait(60), "the holders have all slots"
    assert sink.error is None, sink.error
    assert into == memory.expected

def held():
    return slots.SLOTS - exposure._slots._ring.free

# One grant gets half of the slots; what was given back is taken again.
one, info = greeted(grant("one"))
assert info.slot_bytes == slots.SLOT_BYTES
for number in range(slots.SLOTS):
    begin(one, number, (0, number * 1000, MIB))
addresses = [answer(one)[2] for _ in range(slots.SLOTS // 2)]
assert len(set(addresses)) == slots.SLOTS // 2 == held()
begin(one, 0, kind=wire.END)
assert {answer(one)[:2], answer(one)[:2]} == {(0, framing.OK), (slots.SLOTS // 2, framing.OK)}
one.close()
while held():
    time.sleep(0.01)

# What is not there, or does not fit into a slot, is refused; the connection stays.
liar, _ = greeted(grant("liar"))
wrong = [(0, NBYTES - 1, 2)], [(1, 0, 1)], [(0, 0, MIB + 1)], [(0, 0, MIB), (0, 2 * MIB, 1)]
for number, pieces in enumerate(wrong):
    begin(liar, number, *pieces)
    assert answer(liar)[:2] == (number, framing.OUT_OF_RANGE)
    begin(liar, number, kind=wire.END)
    assert answer(liar)[0] == number
assert held() == 0
begin(liar, 9)  # nothing needs no slot
assert answer(liar)[:2] == (9, framing.OK) and held() == 0
begin(liar, 9, (0, 0, 1))  # the same number again
assert gone(liar)
liar.close()

# All slots are held. A reader that holds one too long loses it once another one waits.
holders = [greeted(grant(f"holder {n}"))[0] for n in range(slots.SLOTS + 2)]
for holder in holders:
    begin(holder, 0, (0, 0, MIB))
while held() < slots.SLOTS:
    time.sleep(0.01)
session = transport.open(grant("honest"))
read_all(session)
session.close()
assert session.join(10)
for holder in holders:
    holder.close()
while held():
    time.sleep(0.01)
assert not lost
exposure.close()
assert exposure.join(30)
memory.close()
"""


@pytest.mark.skipif(nixl.find() is None, reason="NIXL is not installed")
def test_holders_of_slots_lose_them(major: int, tmp_path: Path) -> None:
    passes(major, _HOLDERS, LOG=tmp_path)
    found = Counter(calls(tmp_path))
    assert found["cuMemHostRegister", "CUDA_SUCCESS"] == 1  # whatever the number of readers
    assert {result for _, result in found} == {"CUDA_SUCCESS"}


def _checkpoint(folder: Path, mib: int = 16) -> tuple[Path, int]:
    """Write a checkpoint whose blocks do not end where slots do; return it and its tensor bytes."""
    folder.mkdir()
    random = np.random.default_rng(1)
    rows = (mib << 20) // 4 // 4 // 700
    tensors = {
        f"model.layers.{n}.weight": random.standard_normal((rows, 700), dtype=np.float32)
        for n in range(4)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder, sum(tensor.nbytes for tensor in tensors.values())


def _log(folder: Path) -> str:
    return "".join(log.read_text() for log in folder.glob("*.log"))


#: No TLS, and ucx between hosts.
_OPEN = ("--insecure", "--trusted-fabric")
_NIXL = pytest.mark.skipif(nixl.find() is None, reason="no NIXL here")
by_each = pytest.mark.parametrize(
    "transport",
    [
        "tcp",
        pytest.param("ucx", marks=_NIXL),
    ],
)


class _Host:
    """A network namespace whose processes have GPUs, and a log for each of them that is started."""

    def __init__(self, hosts: Hosts, name: str, address: str, major: int, logs: Path) -> None:
        self.prefix, self.address = hosts.prefix(name), address
        self._name, self._major, self._logs, self._count = name, major, logs, 0

    def environment(self) -> tuple[dict[str, str], Path]:
        self._count += 1
        log = self._logs / f"{self._name}-{self._count}"
        log.mkdir(parents=True)
        return environment(self._major, {"LOG": log, "KERNELS": True}), log

    def serve(self, what: list[str], coordinator: str) -> tuple[Child, Path]:
        """Start `mx serve`, or `mx pull --hold`; return it once it is registered, and its log."""
        env, log = self.environment()
        base = ("--listen", f"{self.address}:0", "--coordinator", coordinator)
        child = Child("-m", "mx", *what, *base, *_OPEN, "--json", prefix=self.prefix, env=env)
        child.hear()
        return child, log

    def pull(self, coordinator: str, model: str, *more: str) -> tuple[list[str], Path]:
        """Pull, and return the transports that brought anything, and the log."""
        env, log = self.environment()
        command = [*self.prefix, sys.executable, "-m", "mx", "pull", model, *more, "--json"]
        command += ["--listen", f"{self.address}:0", "--coordinator", coordinator, *_OPEN]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return [path["transport"] for path in json.loads(ended.stdout)["paths"]], log


@pytest.mark.parametrize(
    ("transport", "direct"),
    [
        pytest.param("tcp", False, marks=pytest.mark.long),
        pytest.param("ucx", False, marks=_NIXL),
        pytest.param("ucx", True, marks=_NIXL),
    ],
    ids=["tcp", "ucx", "GPUDirect"],
)
def test_another_host(
    major: int,
    tmp_path: Path,
    hosts: Hosts,
    transport: str,
    direct: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MX_PEER_GPUDIRECT", "always" if direct else "auto")
    monkeypatch.setenv("MX_PEER_STALL_TIMEOUT_S", "60")
    checkpoint, nbytes = _checkpoint(tmp_path / "checkpoint")
    link = hosts.link("near", "far")
    near, far = (
        _Host(hosts, name, link.address(name), major, tmp_path) for name in ("near", "far")
    )
    cluster = Cluster(near.address, near.prefix)
    children: list[Child] = []

    def serve(host: _Host, *what: str) -> Path:
        child, log = host.serve(list(what), cluster.coordinator)
        children.append(child)
        return log

    def check(host: _Host, model: str, device: str) -> Path:
        out = tmp_path / f"{model}-{device}-{host.address}"
        by = ("--device", device, "--transport", transport, "--out", str(out))
        found, log = host.pull(cluster.coordinator, model, *by)
        assert found == [transport]
        written = (out / "model.safetensors").read_bytes()
        assert written == (checkpoint / "model.safetensors").read_bytes()
        return log

    try:
        gpu = serve(near, "serve", str(checkpoint), "--model", "g", "--device", "cuda:0")
        serve(near, "serve", str(checkpoint), "--model", "c")
        for model, device in (("g", "cuda:1"), ("g", "cpu"), ("c", "cuda:1")):
            before = copied(gpu, "cuMemcpyDtoHAsync")
            log = check(far, model, device)
            # One copy each side, and what landed was hashed by the GPU, whose table is short. From
            # GPU to GPU there may be none.
            none = direct and model == "g" and device != "cpu"
            expected = nbytes if model == "g" and not none else 0
            assert copied(gpu, "cuMemcpyDtoHAsync") - before == expected
            most = 2 * KIB + (0 if none else nbytes) if device != "cpu" else 0
            assert (most and most - 2 * KIB) <= copied(log, "cuMemcpyHtoDAsync") <= most
            assert ("cuLaunchKernel" in _log(log)) is (device != "cpu")
            assert ("cuInit" in _log(log)) is (device != "cpu")
        # And back: what was pulled into a GPU is given from there.
        relay = serve(far, "pull", "g", "--device", "cuda:1", "--hold", "--transport", transport)
        children.pop(0).close(terminate=True)
        before = copied(relay, "cuMemcpyDtoHAsync")
        check(near, "g", "cuda:0")
        assert copied(relay, "cuMemcpyDtoHAsync") - before == (0 if direct else nbytes)
        results = re.findall(r"\) (\S+)$", _log(tmp_path / "near-1"), re.MULTILINE)
        assert set(results) <= {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}
    finally:
        for child in children:
            child.close(terminate=True)
        cluster.close()


@pytest.mark.long
@by_each
def test_a_lost_gpu_ends_its_own_pulls(major: int, tmp_path: Path, transport: str) -> None:
    """Every call fails from some moment on: a typed error, and others go on."""
    checkpoint, nbytes = _checkpoint(tmp_path / "checkpoint")
    cluster = Cluster()
    base = ["--transport", transport, "--coordinator", cluster.coordinator, "--json"]

    def serve(model: str, **settings: object) -> None:
        env = environment(major, settings)
        at = ("--coordinator", cluster.coordinator, "--json")
        what = ("serve", str(checkpoint), "--model", model, "--device", "cuda:0")
        assert cluster.start("-m", "mx", *what, *at, env=env).hear()

    def pull(model: str, **settings: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "mx", "pull", model, "--device", "cuda:1", *base]
        env = environment(major, settings)
        ended = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=240
        )
        return ended.returncode, ended.stdout

    try:
        serve("m")
        for where in ("cuMemcpyHtoDAsync:3", "work:3"):
            code, said = pull("m", FAIL=f"{where}:CUDA_ERROR_ILLEGAL_ADDRESS")
            assert code == 6 and "CUDA_ERROR_ILLEGAL_ADDRESS" in said, (where, said)
        code, said = pull("m", FAIL="cuMemHostAlloc:1:CUDA_ERROR_OUT_OF_MEMORY")
        assert code == 1 and "CudaMemoryError" in said
        code, said = pull("m", MEMORY_BYTES=16 << 20)
        assert code == 1 and "CapacityError" in said  # before anything is allocated
        # A source that loses its GPU, and another one: what was written is not pulled again.
        serve("lost", FAIL="cuMemcpyDtoHAsync:14:CUDA_ERROR_ILLEGAL_ADDRESS")
        base += ["--out", str(tmp_path / "out")]
        code, said = pull("lost")
        assert code == 6 and "IncompleteError" in said
        serve("lost")
        code, said = pull("lost")
        assert code == 0
        found = {path["transport"]: path["bytes"] for path in json.loads(said)["paths"]}
        assert found["resume"] and found["resume"] + found[transport] == nbytes
        written = (tmp_path / "out" / "model.safetensors").read_bytes()
        assert written == (checkpoint / "model.safetensors").read_bytes()
    finally:
        cluster.close()


@pytest.mark.long
@by_each
def test_gpus_give_each_other(major: int, tmp_path: Path, hosts: Hosts, transport: str) -> None:
    """Two pulls into GPUs at the same time: each gives from its GPU what it has."""
    checkpoint, nbytes = _checkpoint(tmp_path / "checkpoint", mib=48)
    names = ("origin", "one", "other")
    # Slow enough that a second between their starts is little beside the pull.
    links = hosts.star(names, up_mbit_per_s=60, down_mbit_per_s=60)
    origin, *targets = (
        _Host(hosts, name, links[name].address(name), major, tmp_path) for name in names
    )
    cluster = Cluster(origin.address, origin.prefix)
    serving = ["serve", str(checkpoint), "--model", "m", "--device", "cuda:0"]
    child, _ = origin.serve(serving, cluster.coordinator)
    try:
        by = ("--device", "cuda:1", "--transport", transport)
        before = hosts.sent_nbytes(links["origin"], "origin")
        with ThreadPoolExecutor(2) as pool:
            pulls = [pool.submit(host.pull, cluster.coordinator, "m", *by) for host in targets]
            logs = [pull.result()[1] for pull in pulls]
        assert hosts.sent_nbytes(links["origin"], "origin") - before < 1.6 * nbytes
        for log in logs:
            assert copied(log, "cuMemcpyHtoDAsync") >= nbytes
            assert copied(log, "cuMemcpyDtoHAsync")  # what it gave
    finally:
        child.close(terminate=True)
        cluster.close()


_REUSES = """
import mx, subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
options = {{"coordinator": cluster.coordinator, "transport": "tcp"}}
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    with mx.pull("m", device="cuda:1", **options) as on_gpu, mx.pull("m", **options) as in_host:
        in_host.wait()
        for held, device in ((on_gpu, "cuda:0"), (on_gpu, "cpu"), (in_host, "cuda:1")):
            with mx.pull("m", device=device, reuse=held, verify="strong", **options) as again:
                print(*(path.transport for path in again.wait().paths))
finally:
    cluster.close()
"""


def test_weights_are_reused_wherever_they_are(major: int, tmp_path: Path) -> None:
    checkpoint, _ = _checkpoint(tmp_path / "checkpoint", mib=4)
    assert passes(major, _REUSES.format(checkpoint=str(checkpoint))) == ["reuse"] * 3
