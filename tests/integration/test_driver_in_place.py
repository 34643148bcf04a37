"""Bytes between the host and a GPU that no CPU touches: over the stand-in driver, which moves them
by maps of its own while a process that touches them faults (MX_STANDIN_PROTECT)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import MIB
from mx_transports.toolkit.cuda.copier import STAGED_STEP_BYTES
from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major_at_leisure, passes

pytestmark = [each_major_at_leisure, pytest.mark.timeout(180)]

#: A coordinator, and a checkpoint of 64 MiB that `serve` serves; `mx pull` and pulls of this
#: process, which `read` and print nothing unless the bytes are wrong.
_CLUSTER = """
import json, subprocess
import numpy as np
from pathlib import Path
from safetensors.numpy import load_file
from benchmarks.processes import Cluster
from mx import api
CHECKPOINT = Path({checkpoint!r})
WANTED = load_file(CHECKPOINT / "model.safetensors")
cluster = Cluster()
def serve(device):
    return cluster.serve(str(CHECKPOINT), "m", "--device", device)
def command(device, *more):
    line = [sys.executable, "-m", "mx", "pull", "m", "--device", device, "--json", *more]
    line += ["--coordinator", cluster.coordinator]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, errors = child.communicate()
    assert not child.returncode, errors
    assert {{path["transport"] for path in json.loads(said)["paths"]}} == {{"pcie_p2p"}}, said
    print(child.pid)
    details = [path.get("detail", "") for path in json.loads(said)["paths"]]
    print(errors.count("through slots"), *details, errors)
def pull(**options):
    return api.pull("m", coordinator=cluster.coordinator, transport="pcie_p2p", **options)
def check(found):
    for name, values in WANTED.items():
        assert (np.asarray(found[name]) == values).all(), name
try:
    {body}
finally:
    cluster.close()
"""


def run(folder: Path, major: int, body: str, **settings: object) -> list[str]:
    """Run what `_CLUSTER` prepares and return the lines of its output."""
    (folder / "log").mkdir()
    (folder / "checkpoint").mkdir()
    weights = np.random.default_rng(1).integers(0, 256, (4, 16 * MIB), dtype=np.uint8)
    tensors = {f"model.layers.{n}.weight": weights[n] for n in range(4)}
    save_file(tensors, folder / "checkpoint/model.safetensors")
    code = _CLUSTER.format(
        checkpoint=str(folder / "checkpoint"), body="\n    ".join(body.strip().splitlines())
    )
    return passes(major, code, LOG=folder / "log", KERNELS=True, **settings)


def pulled(folder: Path, major: int, there: str, here: str, **settings: object) -> tuple[str, str]:
    """Run `mx pull` in a process of its own.

    Returns:
        The log of its calls, and what it said.
    """
    process, *errors = run(folder, major, f"serve({there!r})\ncommand({here!r})", **settings)
    assert kept(calls(folder / "log", int(process))) == []
    return (folder / f"log/{process}.log").read_text(), "\n".join(errors)


def moved(log: str, kind: str) -> int:
    """Return how many bytes were copied between a GPU and registered memory, by copies of a kind:
    "HtoD" or "DtoH"."""
    windows = [(int(at, 16), int(nbytes)) for at, nbytes in registered(log)]
    total = 0
    for to, source, size in re.findall(rf"cuMemcpy{kind}Async\((\w+), (\w+), (\d+)", log):
        host, nbytes = int(to if kind == "DtoH" else source, 16), int(size)
        inside = any(at <= host and host + nbytes <= at + length for at, length in windows)
        total += nbytes if inside else 0
    return total


def registered(log: str, flags: str = r"\w+") -> list[tuple[str, str]]:
    """Return address and bytes of each registration: with the flags 0xb those of a source's memory,
    with 0x3 those of a destination, and of the ring that others may read a GPU's memory by."""
    return re.findall(rf"cuMemHostRegister\((\w+), (\d+), {flags}\) CUDA_SUCCESS", log)


def slots(log: str) -> int:
    """Return how many stages of copying threads have pinned memory of their own."""
    return log.count(f"cuMemHostAlloc({STAGED_STEP_BYTES}, ")


def test_a_sealed_source_is_read_in_place(major: int, tmp_path: Path) -> None:
    log, _ = pulled(tmp_path, major, "cpu", "cuda:0", PROTECT=True, CAPTURE="global")
    assert moved(log, "HtoD") == 64 * MIB and slots(log) == 0
    windows = registered(log, "0xb")
    assert sum(int(nbytes) for _, nbytes in windows) == 64 * MIB
    assert log.count("are moved elsewhere") >= len(windows) > 1
    assert "the capture is invalidated" not in log


def test_a_destination_is_written_in_place(major: int, tmp_path: Path) -> None:
    log, _ = pulled(tmp_path, major, "cuda:0", "cpu")
    assert moved(log, "DtoH") == 64 * MIB and slots(log) == 0
    assert registered(log, "0x3") and not registered(log, "0xb")


_HELD = """
serve("cuda:0")
with pull(device="cpu", hold=True) as held:
    events = list(held.layers())
    held.wait()
    held.hold()
    check({name: view.view for event in events for name, view in event.views().items()})
"""


#: Pulls whose connections have the GPU's kernel before their first read. The processor's hashing is
#: counted.
_AT_SOURCE = """
import concurrent.futures
from mx.core.digest import BlockHasher
from mx.cuda import source_digests
source_digests.LEAST_BYTES = 0
begin = source_digests.SourceDigests.__init__
def begun(digests, *arguments):
    begin(digests, *arguments)
    concurrent.futures.wait([digests._made])
source_digests.SourceDigests.__init__ = begun
hashed = []
digests = BlockHasher.block_digests
BlockHasher.block_digests = lambda hasher: hashed.append(hasher) or digests(hasher)
"""
_HASHED = (
    _AT_SOURCE
    + """
serve("cuda:0")
with pull(device="cpu", {options}) as pulled:
    report = pulled.wait()
    events = list(pulled.layers())
    check({{name: view.view for event in events for name, view in event.views().items()}})
print(report.verified, len(hashed))
print(os.getpid())
"""
)


@pytest.mark.parametrize(
    ("options", "verified"),
    [
        ("", "gpu"),
        pytest.param('verify="strong"', "strong", marks=pytest.mark.long),
        pytest.param("hold=True", "digest", marks=pytest.mark.long),
    ],
)
def test_the_sources_gpu_hashes_what_comes_from_it(
    major: int, tmp_path: Path, options: str, verified: str
) -> None:
    said, process = run(tmp_path, major, _HASHED.format(options=options), PROTECT=True)
    by, often = said.split()
    assert by == verified and (int(often) > 0) is (verified != "gpu")
    log = (tmp_path / f"log/{process}.log").read_text()
    assert moved(log, "DtoH") == 64 * MIB and slots(log) == 0
    trips = log.count("cuLaunchKernel") - 2  # a trial, and a set of it
    assert (0 < trips <= 6) is (verified == "gpu")
    assert kept(calls(tmp_path / "log", int(process))) == []


_CHANGED = (
    _AT_SOURCE
    + """
import mx
from mx.errors import IncompleteError
from mx.memory.device import DeviceArena
arenas = []
made = DeviceArena.__init__
DeviceArena.__init__ = lambda arena, *how: arenas.append(arena) or made(arena, *how)
with mx.serve(CHECKPOINT, model="m", device="cuda:0", coordinator=cluster.coordinator):
    (arena,) = arenas
    with arena.device.current():
        arena.device.driver.memset(arena.address + 40 * MIB, 0, 1, 0)
    try:
        pull(device="cpu").wait()
    except IncompleteError as error:
        print(error)
    assert not hashed
    serve("cuda:0")
    with pull(device="cpu") as pulled:
        print(pulled.wait().verified)
        events = list(pulled.layers())
        check({name: view.view for event in events for name, view in event.views().items()})
"""
)


def test_the_gpu_finds_the_block_that_was_changed(major: int, tmp_path: Path) -> None:
    error, verified = run(tmp_path, major, _CHANGED)
    assert "66.1 MB of 67.1 MB" in error and verified == "gpu", error


def test_what_is_held_is_sealed_after_it_was_registered(major: int, tmp_path: Path) -> None:
    run(tmp_path, major, _HELD, PROTECT=True)


@pytest.mark.parametrize(
    ("settings", "in_place"),
    [
        ({"NO_READ_ONLY": True}, False),
        ({"FAIL": "cuMemHostRegister:2:CUDA_ERROR_NOT_PERMITTED"}, True),
        ({"LOCK_BYTES": 40 * MIB}, True),
    ],
    ids=["never", "in mid-pull", "at a limit"],
)
def test_a_refusal_to_register_is_said_once(
    major: int, tmp_path: Path, settings: dict[str, object], in_place: bool
) -> None:
    log, said = pulled(tmp_path, major, "cpu", "cuda:0", **settings)
    assert slots(log) > 0 and (0 < moved(log, "HtoD") < 64 * MIB) is in_place
    assert said.startswith("1 copied through slots: cuMemHostRegister"), said
    assert ("ulimit -l" in said) is ("LOCK_BYTES" in settings)


_INTO = """
serve("cuda:0")
serve("cuda:1")
into = {name: np.zeros_like(values) for name, values in WANTED.items()}
with pull(into=into) as filled:
    report = filled.wait()
    check(into)
if MINE:
    from mx.buffers import address_of
    use()
    at = address_of(memoryview(into["model.layers.1.weight"]).cast("B")) + MIB
    call("cuMemHostRegister", at - at % 4096, MIB, 3)
    for values in into.values():
        values[:] = 0
    with pull(into=into) as filled:
        filled.wait()
        check(into)
print(os.getpid())
"""


@pytest.mark.parametrize("mine", [False, True], ids=["by two sessions", "by somebody else"])
def test_memory_of_an_engine_is_registered_once(major: int, tmp_path: Path, mine: bool) -> None:
    (process,) = run(tmp_path, major, f"MINE = {mine}" + _INTO)
    log = (tmp_path / f"log/{process}.log").read_text()
    assert ("ALREADY_REGISTERED" in log) is mine
    assert (slots(log) > 0) is mine
    assert moved(log, "DtoH") >= 64 * MIB


_AGAIN = """
from mx_transports.toolkit.cuda.hosts import source_maps
serve("cpu")
for device in ("cuda:0", "cuda:1", "cuda:0"):
    with pull(device=device) as pulled:
        pulled.wait()
def maps():
    return sum("/memfd:mx:m" in line for line in open("/proc/self/maps"))
assert maps()
child = os.fork()
if not child:
    os._exit(maps())
assert os.waitpid(child, 0)[1] == 0
assert maps()
source_maps.clear()
assert not maps()
print(os.getpid())
"""


def test_a_sources_map_stays_for_the_next_pulls(major: int, tmp_path: Path) -> None:
    (process,) = run(tmp_path, major, _AGAIN)
    log = (tmp_path / f"log/{process}.log").read_text()
    assert sum(int(nbytes) for _, nbytes in registered(log, "0xb")) == 64 * MIB
    assert moved(log, "HtoD") == 3 * 64 * MIB and slots(log) == 0
    assert kept(calls(tmp_path / "log", int(process))) == []


_PINNED = """
cluster.serve(str(CHECKPOINT), "m", "--pinned")
command("cuda:0", "--out", str(CHECKPOINT) + "-out")
command("cuda:1")
for transport in ("tcp", "shm"):
    with api.pull("m", coordinator=cluster.coordinator, transport=transport) as pulled:
        pulled.wait()
        events = list(pulled.layers())
        check({name: view.view for event in events for name, view in event.views().items()})
"""


def test_host_memory_that_the_driver_makes_needs_no_pinning(major: int, tmp_path: Path) -> None:
    """The target maps it for its GPU alone: a processor that touched a byte would fault."""
    processes = [line for line in run(tmp_path, major, _PINNED) if line.isdigit()]
    assert len(processes) == 2
    for process in processes:
        log = (tmp_path / f"log/{process}.log").read_text()
        copied = re.findall(r"cuMemcpyAsync\(\w+, \w+, (\d+)", log)
        assert sum(map(int, copied)) == 64 * MIB and len(copied) <= 4
        assert not registered(log, "0xb") and slots(log) == 0
        assert kept(calls(tmp_path / "log", int(process))) == []
    written = tmp_path / "checkpoint-out" / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "checkpoint/model.safetensors").read_bytes()


_NOT_PINNED = """
for more in (["--pinned"], ["--pinned", "--device", "cuda:0"]):
    line = [sys.executable, "-m", "mx", "serve", str(CHECKPOINT), "--model", "x", *more]
    ended = subprocess.run(line, capture_output=True, text=True)
    print(ended.returncode, *ended.stderr.splitlines()[-2:])
"""


def test_a_driver_that_makes_no_host_memory_is_named(major: int, tmp_path: Path) -> None:
    without, beside = run(tmp_path, major, _NOT_PINNED, NO_HOST_NUMA=True)
    assert without.startswith("2 ") and "HOST_NUMA" in without and "--pinned" in without
    assert beside.startswith("2 ") and "only memory of the host is pinned" in beside


_BAD_LUCK = """
def begun(model, *more):
    line = [sys.executable, "-m", "mx", "pull", model, "--device", "cuda:0", "--json", *more]
    line += ["--coordinator", cluster.coordinator, "--transport", "pcie_p2p"]
    env = os.environ | {"MX_STANDIN_LATE_US": "100000"}
    child = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    log = Path(os.environ["MX_STANDIN_LOG"]) / f"{child.pid}.log"
    while not log.exists() or COPIES[model] not in log.read_text():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    return child
COPIES = {"memfd": "cuMemcpyHtoDAsync", "pinned": "cuMemcpyAsync", "stopped": "cuMemcpyHtoDAsync"}
for model, more in (("memfd", []), ("pinned", ["--pinned"])):
    source, _ = cluster.serve(str(CHECKPOINT), model, *more)
    child = begun(model)
    os.kill(source.pid, 9)
    said, errors = child.communicate()
    print(child.pid, child.returncode, "Traceback" in errors)
env = {"MX_PEER_READER_LEASE_S": "1"}
cluster.serve(str(CHECKPOINT), "stopped", env=env)
child = begun("stopped", "--out", str(CHECKPOINT) + "-out")
os.kill(child.pid, 19)
time.sleep(3)  # past the lease, in which the trip was to end
os.kill(child.pid, 18)
said, errors = child.communicate()
print(child.pid, child.returncode, "Traceback" in errors)
"""


@pytest.mark.long
def test_a_source_that_dies_and_a_reader_that_stops_in_a_trip(major: int, tmp_path: Path) -> None:
    ends = [line.split() for line in run(tmp_path, major, "import time" + _BAD_LUCK)]
    assert [end[1:] for end in ends if end[0].isdigit()] == [
        ["6", "False"],
        ["6", "False"],
        ["0", "False"],
    ]
    for process in (int(end[0]) for end in ends if end[0].isdigit()):
        assert kept(calls(tmp_path / "log", process)) == []
    written = tmp_path / "checkpoint-out" / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "checkpoint/model.safetensors").read_bytes()
