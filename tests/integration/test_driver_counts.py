"""How often `mx pull` calls the driver, and how many bytes it has it copy: by the log of calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import GIB, MIB
from mx_transports.toolkit.cuda.maps import THREADS
from mx_transports.ucx import nixl
from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.logs import calls, kept, parsed
from tests.support.driver.programs import passes, program

MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

#: Serves a folder from GPU 0, and pulls it to each target by each transport, "" for any; prints the
#: pull's process and how it says it came.
_PULLS = """
import json, subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    for target, *transport in map(str.split, {targets!r}):
        command = ["-m", "mx", "pull", "m", "--device", target, "--json"]
        command += ["--coordinator", cluster.coordinator]
        command += ["--transport", *transport] if transport else []
        pull = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        report = json.loads(pull.communicate()[0])
        print(json.dumps([pull.pid, [path["transport"] for path in report["paths"]]]))
finally:
    cluster.close()
"""


def pulls(
    folder: Path, mib: int, targets: list[str], **settings: object
) -> dict[str, tuple[int, list[str]]]:
    """Pull a model of some MiB to each target; return each pull's process and its paths."""
    folder.mkdir()
    (folder / "log").mkdir()
    (folder / "checkpoint").mkdir()
    weights = np.random.default_rng(1).integers(0, 256, (4, mib // 4 * MIB), dtype=np.uint8)
    tensors = {f"model.layers.{n}.weight": weights[n] for n in range(4)}
    save_file(tensors, folder / "checkpoint/model.safetensors")
    code = _PULLS.format(checkpoint=str(folder / "checkpoint"), targets=targets)
    lines = passes(MAJOR, code, LOG=folder / "log", KERNELS=True, **settings)
    return dict(zip(targets, (tuple(json.loads(line)) for line in lines), strict=True))


def copied(log: Path) -> Counter[str]:
    """Return the bytes that each kind of copy was told to move."""
    count: Counter[str] = Counter()
    for name, nbytes in re.findall(r"(cuMemcpy\w+)\([^,]*, [^,]*, (\d+)", log.read_text()):
        count[name] += int(nbytes)
    return count


def test_each_byte_is_copied_once(tmp_path: Path) -> None:
    nbytes = 64 * MIB
    found = pulls(tmp_path / "m", 64, ["cuda:1", "cpu"])
    for target, name in (("cuda:1", "cuMemcpyDtoDAsync"), ("cpu", "cuMemcpyDtoHAsync")):
        count = copied(tmp_path / f"m/log/{found[target][0]}.log")
        assert nbytes <= count[name] and count.total() <= 1.05 * nbytes, (target, count)


def test_no_thread_polls(tmp_path: Path) -> None:
    """Every operation is late, so that there is something to wait for; what waits sleeps, in mx
    and in the driver (CU_EVENT_BLOCKING_SYNC)."""
    targets = ["cuda:1 cuda_ipc", "cuda:1 pcie_p2p", "cpu pcie_p2p", "cuda:1 tcp"]
    targets += ["cuda:1 ucx"] if nixl.find() else []
    found = pulls(tmp_path / "m", 64, targets, LATE_US=5_000)
    assert [paths for _, paths in found.values()] == [[target.split()[1]] for target in targets]
    logs = [log.read_text() for log in (tmp_path / "m/log").iterdir()]
    assert len(logs) == 1 + len(targets)
    for log in logs:
        assert "cuEventSynchronize(" in log
        assert not re.search("cu(Stream|Event)Query", log)
        assert set(re.findall(r"cuEventCreate\((\w+)", log)) == {"0x3"}
        # A wait for a stream may spin: so end streams, and no copy or hash.
        assert log.count("cuStreamSynchronize(") < 32
        before_last_copy = log[: log.rfind("cuMemcpy")]
        assert before_last_copy.count("cuStreamSynchronize(") < before_last_copy.count("cuMemcpy")
        # What needs all of a context, or the driver's allocator, is done once, whatever the size.
        for once in (
            "cuModuleLoad",
            "cuMemAlloc",
            "cuMemHostAlloc",
            "cuMemCreate",
            "cuStreamCreate",
        ):
            assert log.count(f"{once}(") <= 16, once
        assert "cuCtxSynchronize(" not in log[: log.rfind("cuMemcpy")]


def test_an_attach_calls_no_more_for_a_larger_model(tmp_path: Path) -> None:
    made = []
    for mib in (8, 64):
        folder = tmp_path / str(mib)
        process, paths = pulls(folder, mib, ["cuda:0"])["cuda:0"]
        assert paths == ["cuda_ipc-attach"]
        made.append(Counter(name for name, _ in calls(folder / "log", process)))
    assert made[0] == made[1]


#: Exposes as many allocations of a size as its input says, in one region: in one piece, or each in
#: a place of its own.
_EXPOSES = """
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.driver import load
from mx.cuda.vmm import VmmMemory
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, ScatteredView
from mx_transports.cuda_ipc import CudaIpcTransport
device = Device(load(), 0)
def made(kind, count, nbytes):
    if kind != "segment":
        make = {"vmm": VmmMemory.allocate, "malloc": DeviceMemory}[kind]
        return [make(device, nbytes) for _ in range(count)]
    with device.current():
        handles = [device.driver.vmm_create(0, nbytes) for _ in range(count)]
    return [VmmMemory(device, handles, [nbytes] * count)]
for line in sys.stdin:
    kind, *numbers = line.split()
    memories = made(kind, *map(int, numbers))
    views = [DeviceView(device.key, memory.address, memory.nbytes, memory) for memory in memories]
    view, nbytes = views[0], sum(map(len, views))
    if len(views) > 1:
        begins = [number * len(view) for number in range(len(views))]
        view = ScatteredView.over(begins, views, nbytes)
    region = ExposedRegion(0, view, getattr(view, "address", 0), device.key)
    exposure = CudaIpcTransport().expose([region], ExposeOptions())
    exposure.set_generation(1)
    print(exposure.grant("g").hex(), nbytes)
    sys.stdin.readline()
    exposure.close()
    assert exposure.join(30)
    for memory in memories:
        memory.close()
    print("closed")
"""

#: Attaches to the region of a ticket, looks at all of it, and lets go.
_ATTACHES = """
from mx.cuda.driver import load
from mx.transport import Grant
from mx.views import located_spans
from mx_transports.cuda_ipc import CudaIpcTransport
from tests.support.gpu_rig import place
here = place(load(), "0")
print("ready")
for line in sys.stdin:
    ticket, nbytes = line.split()
    grant = Grant("g", bytes.fromhex(ticket), 1, (int(nbytes),), "peer", place=here)
    session = CudaIpcTransport().open(grant)
    view = session.attach(0)
    spans = located_spans(view)
    assert sum(map(len, spans)) == len(view) == int(nbytes)
    session.close()
    assert session.join(30)
    del view, spans
    print("let go")
"""

#: What each allocation takes: each call of these once. What is mapped in one piece is looked at
#: once, whatever its parts.
_LOOKS = ["cuMemGetAddressRange", "cuPointerGetAttribute"]
_RESERVES = ["cuMemAddressReserve", "cuMemSetAccess", "cuMemAddressFree"]
_MAPS = ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemUnmap", "cuMemRelease"]
_EACH = {
    "malloc": {"cuIpcOpenMemHandle", "cuIpcCloseMemHandle", *_LOOKS},
    "vmm": {*_MAPS, *_RESERVES, *_LOOKS},
    "segment": {*_MAPS},
}
#: What a thread calls to make the context current.
_ENTERING = {"cuCtxPushCurrent": 1, "cuCtxPopCurrent": 1, "cuThreadExchangeStreamCaptureMode": 2}


def test_an_attach_of_100_gb_takes_a_call_of_each_kind_for_each_allocation(tmp_path: Path) -> None:
    """Neither the size nor the number of allocations makes any other call more frequent, but for
    what makes the context current on the threads that open them."""
    large = {"MEMORY_BYTES": 128 * GIB}
    counted: dict[tuple[str, int, int], Counter[str]] = {}
    with (
        program(MAJOR, _EXPOSES, **large) as there,
        program(MAJOR, _ATTACHES, **large, LOG=tmp_path) as here,
    ):
        here.read()
        log, begin = tmp_path / f"{here.process.pid}.log", 0
        # The first one is not counted: CUDA's GPUs are looked up in it.
        for kind in _EACH:
            for count, nbytes in ((1, 2 * MIB), (1, 2 * MIB), (1, 100 * GIB), (64, 2 * MIB)):
                here.ask(there.ask(f"{kind} {count} {nbytes}"))
                there.ask("")
                made = parsed(log.read_text().splitlines())
                assert kept(made[begin:]) == [], (kind, count, nbytes)
                counted[kind, count, nbytes] = Counter(name for name, _ in made[begin:])
                begin = len(made)
    for kind, each in _EACH.items():
        one = counted[kind, 1, 2 * MIB]
        assert one == counted[kind, 1, 100 * GIB]
        more = counted[kind, 64, 2 * MIB] - one
        entering = {name: more.pop(name, 0) for name in _ENTERING}
        expected = Counter({name: 63 * one[name] for name in each})
        if kind == "segment":  # the first one shows whether it can be mapped, then come the others
            expected += Counter({name: one[name] for name in (*_LOOKS, "cuMemSetAccess")})
        assert more == expected
        assert all(entering[name] <= THREADS * calls for name, calls in _ENTERING.items())


def test_a_call_that_is_refused_keeps_nothing_else(tmp_path: Path) -> None:
    code = """
from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.cuda.vmm import VmmMemory
device = Device(load(), 0)
with device.current():
    handles = [device.driver.vmm_create(0, 2 * MIB) for _ in range(3)]
VmmMemory(device, handles, [2 * MIB] * 3).close()
device.close()
"""
    passes(MAJOR, code, LOG=tmp_path, FAIL="cuMemUnmap:1:CUDA_ERROR_NOT_PERMITTED")
    count = Counter(calls(tmp_path))
    assert count["cuMemUnmap", "CUDA_ERROR_NOT_PERMITTED"] == 1
    assert count["cuMemUnmap", "CUDA_SUCCESS"] == 2
    assert count["cuMemRelease", "CUDA_SUCCESS"] == 3
    assert count["cuDevicePrimaryCtxRelease", "CUDA_SUCCESS"] == 1
