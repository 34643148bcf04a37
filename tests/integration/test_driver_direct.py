"""GPUDirect by ucx, over the stand-in driver and `tcp,cuda_copy`: agents in processes of their own
read from a GPU's memory into another one's. What fails is the error of one reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.processes import Cluster
from mx.units import KIB
from mx_transports.ucx import nixl
from tests.support.driver.build import environment
from tests.support.driver.logs import copied
from tests.support.driver.programs import each_major_at_leisure, passes

pytestmark = [
    each_major_at_leisure,
    pytest.mark.skipif(nixl.find() is None, reason="no NIXL here"),
]

#: One exposure of GPU 0's memory, and sessions into GPU 1's. Settings of the stand-in that are in
#: AGENTS are those of the agents alone: this process has read its own by then.
_COMMON = """
import dataclasses
import signal
from mx.cuda.driver import load
from mx.errors import ClosedError, LocalError, PathSlowError, SourceError, StaleGenerationError
from mx.testing.harness import PEER
from mx.testing.memory import Kind, Memory
from mx.transport import DeviceView, ExposeOptions, Grant, Piece, Read
from mx_transports.ucx import UcxTransport, agent_process, direct, direct_session, nixl

NBYTES, PATIENT_S = {nbytes}, 60.0
use(1)
near, far = ("cuda:" + load().device_uuid(ordinal) for ordinal in (1, 0))
memory = Memory(NBYTES, 3, Kind.{kind}, far)
nixl.INHERITED.append("MX_STANDIN_")
os.environ.update({agents})
started = []
_start = agent_process.AgentProcess._start

def note(self, theirs):
    started.append(self)
    return _start(self, theirs)

agent_process.AgentProcess._start = note

def wanted(name):
    return {{"gpudirect": "always"}}[name]

exposure = UcxTransport().expose(
    [memory.region(0)], ExposeOptions(stall_timeout_s=PATIENT_S, setting=wanted)
)
exposure.set_generation(1)
transport = UcxTransport()

def until(condition):
    while not condition():
        time.sleep(0.005)

class Sink:
    def __init__(self, hold=False):
        self.ended, self.held, self.go = (threading.Event() for _ in range(3))
        self.error = None
        if not hold:
            self.go.set()
    def landed(self, nbytes):
        self.held.set()
        self.go.wait()
    def done(self):
        self.ended.set()
    def failed(self, error):
        self.error = error
        self.ended.set()

class Reader:
    count = 0

    def __init__(self, hold=False, device=near):
        Reader.count += 1
        name = f"reader {{Reader.count}}"
        before = len(started)
        self.grant = Grant(
            name, exposure.grant(name), 1, (NBYTES,), PEER, setting=wanted, device=device,
            stall_timeout_s=PATIENT_S,
        )
        self.session = transport.open(self.grant)
        self.direct = getattr(self.session, "fills_device", False)
        mine = started[before:]
        of_gpu = [each for each in mine if each.reads or each._imports is not list]
        self.processes = {{each.reads: each for each in of_gpu}}
        self.sink = Sink(hold)
        if self.direct:
            self.address = alloc(NBYTES)
            self.view = DeviceView(near, self.address, NBYTES)
        else:
            self.bytes = bytearray(NBYTES)
            self.view = memoryview(self.bytes)

    def begin(self):
        self.session.read([Read("all", [Piece(0, 0, self.view)], self.sink)])

    def right(self):
        self.sink.ended.wait()
        assert self.sink.error is None, self.sink.error
        found = fetch(self.address, NBYTES) if self.direct else bytes(self.bytes)
        return found == memory.expected

    def fails(self, kind):
        self.sink.ended.wait()
        assert isinstance(self.sink.error, kind), repr(self.sink.error)
        assert PEER in str(self.sink.error)

    def close(self):
        self.session.close()
        assert self.session.join(PATIENT_S)
        assert all(each.ended for each in self.processes.values() if each.reads)

def end(*readers):
    for reader in readers:
        reader.close()
    exposure.close()
    assert exposure.join(PATIENT_S)
    assert all(each.ended for each in started)
    memory.close()
"""
_MIB = 1 << 20


def _passes(
    major: int,
    code: str,
    *,
    nbytes: int = 5 * _MIB + 7,
    kind: str = "GPU",
    agents: dict[str, str] | None = None,
) -> None:
    given = {f"MX_STANDIN_{name}": value for name, value in (agents or {}).items()}
    passes(major, _COMMON.format(nbytes=nbytes, kind=kind, agents=given) + code)


@pytest.mark.parametrize("kind", ["GPU", "SCATTERED"])
def test_what_is_read_is_right(major: int, kind: str) -> None:
    code = """
one, other = Reader(), Reader()
assert one.direct and one.session.detail == "GPUDirect"
for process in one.processes.values():  # all users can read this
    told = open(f"/proc/{process.pid}/cmdline").read()
    assert "agent.py" in told and "imports" not in told, told
one.begin()
other.begin()
assert one.right() and other.right()
end(one, other)
"""
    _passes(major, code, kind=kind)


#: More than a session has under way: a read whose sink waits does not end.
_LARGE = 64 * _MIB
#: So that copies of agents are still running when something happens.
_LATE = {"LATE_US": "3000"}


def test_an_agent_that_dies_is_the_error_of_one_reader(major: int) -> None:
    code = """
one, other = Reader(hold=True), Reader()
one.begin()
other.begin()
one.sink.held.wait()
os.kill(one.processes[False].pid, signal.SIGKILL)
one.sink.go.set()
one.fails(PathSlowError)
assert other.right() and other.direct
# What has failed once is not tried again: this peer's memory comes through slots.
third = Reader()
assert not third.direct
third.begin()
assert third.right()
end(one, other, third)
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.long
def test_a_reading_process_that_dies_is_an_error(major: int) -> None:
    code = """
one = Reader(hold=True)
one.begin()
one.sink.held.wait()
os.kill(one.processes[True].pid, signal.SIGKILL)
one.sink.go.set()
one.fails(PathSlowError)
end(one)
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.long
def test_a_reading_process_that_stops_is_ended(major: int) -> None:
    code = """
one = Reader(hold=True)
one.session.grant = dataclasses.replace(one.grant, stall_timeout_s=1.0)
one.begin()
one.sink.held.wait()
os.kill(one.processes[True].pid, signal.SIGSTOP)
one.sink.go.set()
one.fails(PathSlowError)
assert one.processes[True].ended
end(one)
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.long
def test_a_reader_that_leaves_disturbs_no_other(major: int) -> None:
    code = """
one, other = Reader(hold=True), Reader()
one.begin()
other.begin()
one.sink.held.wait()
one.session.close()
one.sink.go.set()
one.fails(ClosedError)
assert one.processes[True].ended  # so that nothing writes there any more
assert other.right() and other.direct
end(one, other)
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.long
def test_a_source_that_ends_frees_nothing_that_is_read(major: int) -> None:
    code = """
one = Reader(hold=True)
one.begin()
one.sink.held.wait()
exposure.close()
assert exposure.join(PATIENT_S)
assert one.processes[False].ended
memory.close()
one.sink.go.set()
one.fails(SourceError)
one.close()
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.long
def test_a_grant_that_is_withdrawn_ends_its_agent(major: int) -> None:
    code = """
one, other = Reader(hold=True), Reader()
one.begin()
other.begin()
one.sink.held.wait()
exposure.revoke(one.grant.grant_id)
until(lambda: one.processes[False].ended)
one.sink.go.set()
one.fails(SourceError)
assert other.right() and other.direct
end(one, other)
"""
    _passes(major, code, nbytes=_LARGE)


@pytest.mark.long
def test_a_generation_that_has_passed_is_an_error(major: int) -> None:
    code = """
one = Reader(hold=True)
one.begin()
one.sink.held.wait()
exposure.set_generation(2)
one.sink.go.set()
one.fails(StaleGenerationError)
end(one)
"""
    _passes(major, code, nbytes=_LARGE, agents=_LATE)


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param("cuInit:1:CUDA_ERROR_NO_DEVICE", marks=pytest.mark.long),
        pytest.param("cuDevicePrimaryCtxRetain:1:CUDA_ERROR_OUT_OF_MEMORY", marks=pytest.mark.long),
        pytest.param("cuIpcOpenMemHandle:1:CUDA_ERROR_INVALID_HANDLE", marks=pytest.mark.long),
        "cuMemcpyAsync:1:CUDA_ERROR_LAUNCH_FAILED",
    ],
)
def test_memory_that_is_not_to_be_had_comes_through_slots(major: int, failing: str) -> None:
    code = """
one = Reader()
assert not one.direct
one.begin()
assert one.right()
until(lambda: all(each.ended or each._imports is list for each in started))
end(one)
"""
    _passes(major, code, agents={"FAIL": failing})


@pytest.mark.long
def test_a_target_that_cannot_be_imported_is_an_error(major: int) -> None:
    code = """
def refuse(spans):
    raise LocalError("it is not exported")

one = Reader()
direct_session.GpuImports = refuse
one.begin()
one.fails(PathSlowError)
assert "it is not exported" in str(one.sink.error)
end(one)
"""
    _passes(major, code)


@pytest.mark.long
def test_a_copy_that_fails_is_an_error(major: int) -> None:
    code = """
one = Reader()
assert one.direct
one.begin()
one.fails(PathSlowError)
end(one)
"""
    _passes(major, code, agents={"FAIL": "cuMemcpyAsync:9:CUDA_ERROR_LAUNCH_FAILED"})


@pytest.mark.long
def test_agents_are_few(major: int) -> None:
    code = """
direct.MAX_AGENTS = 1
one, other = Reader(), Reader()
assert one.direct and not other.direct
for reader in (one, other):
    reader.begin()
    assert reader.right()
one.close()
until(lambda: one.processes[False].ended)
third = Reader(device="cpu")
assert not third.direct  # its memory is the host's
fourth = Reader()
assert fourth.direct
fourth.begin()
assert fourth.right()
end(other, third, fourth)
"""
    _passes(major, code)


def _checkpoint(folder: Path) -> tuple[Path, int]:
    rng = np.random.default_rng(38)
    shape = (1 << 21) + 77
    tensors = {f"model.layers.{i}.weight": rng.standard_normal(shape, np.float32) for i in range(3)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder, sum(tensor.nbytes for tensor in tensors.values())


#: `mx`, whose agents have its settings of the stand-in.
_MX = """
import sys
from mx_transports.ucx import nixl
nixl.INHERITED.append("MX_STANDIN_")
from mx.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "failing",
    ["", pytest.param("cuMemcpyAsync:30:CUDA_ERROR_LAUNCH_FAILED", marks=pytest.mark.long)],
)
def test_a_pull(major: int, tmp_path: Path, failing: str) -> None:
    """Neither the source's process nor the pull's copies a byte; the GPU hashes them. Where copies
    fail in its middle the pull goes on through slots."""
    checkpoint, nbytes = _checkpoint(tmp_path / "checkpoint")
    cluster = Cluster()
    base = ["--coordinator", cluster.coordinator, "--json"]

    def run_in(name: str) -> dict[str, str]:
        # No process of mx makes the call that fails.
        env = environment(major, {"LOG": tmp_path / name, "KERNELS": True, "FAIL": failing})
        (tmp_path / name).mkdir()
        return env | {"MX_PEER_GPUDIRECT": "always", "MX_PEER_STALL_TIMEOUT_S": "60"}

    try:
        serve = ("serve", str(checkpoint), "--model", "m", "--device", "cuda:0")
        assert cluster.start("-c", _MX, *serve, *base, env=run_in("source")).hear()
        command = [sys.executable, "-c", _MX, "pull", "m", "--device", "cuda:1", *base]
        ended = subprocess.run(
            [*command, "--transport", "ucx", "--out", str(tmp_path / "out")],
            env=run_in("target"),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr
        written = (tmp_path / "out" / "model.safetensors").read_bytes()
        assert written == (checkpoint / "model.safetensors").read_bytes()
        paths = json.loads(ended.stdout)["paths"]
        assert {path["transport"] for path in paths} == {"ucx"}
        assert sum(path["bytes"] for path in paths) == nbytes
        down, up = (
            copied(tmp_path / "source", "cuMemcpyDtoHAsync"),
            copied(tmp_path / "target", "cuMemcpyHtoDAsync"),
        )
        if failing:
            assert down and up
        else:
            assert [path["detail"] for path in paths] == ["GPUDirect"]
            assert not down and up < 2 * KIB  # the table of digests
    finally:
        cluster.close()
