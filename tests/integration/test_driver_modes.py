"""`mx serve` and `mx pull` in the stricter modes of the stand-in driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.logs import kept, parsed
from tests.support.driver.programs import passes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.parametrize(
        "major",
        [
            pytest.param(
                m,
                id=f"cuda{m}",
                marks=[
                    pytest.mark.skipif(bool(why_not(m)), reason=why_not(m)),
                    *([] if m == MAJORS[-1] else [pytest.mark.long]),
                ],
            )
            for m in MAJORS
        ],
    ),
]

#: Serves a folder from GPU 0, pulls it to each target, and prints how each ends.
_PULLS = """
import json, subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    for target in {targets!r}:
        command = ["-m", "mx", "pull", "m", "--device", target, "--out", {out!r} + target, "--json"]
        command += ["--coordinator", cluster.coordinator]
        more = {{**os.environ, **{more!r}}}
        ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=more)
        print(json.dumps([ended.returncode, ended.stdout, ended.stderr]))
finally:
    cluster.close()
"""


def write(folder: Path) -> Path:
    """Write a checkpoint of 8 MB into a new folder and return it."""
    folder.mkdir()
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{n}.weight": random.standard_normal((1001, 700), dtype=np.float32)
        for n in range(3)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def pulls(
    major: int,
    folder: Path,
    targets: list[str],
    more: dict[str, str] | None = None,
    **settings: object,
) -> list[tuple[int, str, str]]:
    """Serve a checkpoint from GPU 0 and pull it to each target; return code, report and stderr.

    The environment of the pulls alone has `more`.
    """
    (folder / "log").mkdir()
    code = _PULLS.format(
        checkpoint=str(write(folder / "checkpoint")),
        targets=targets,
        out=str(folder / "out-"),
        more=more or {},
    )
    settings = {"KERNELS": True, "LOG": folder / "log", **settings}
    return [tuple(json.loads(line)) for line in passes(major, code, **settings)]


def whole(folder: Path, target: str) -> bool:
    return (folder / f"out-{target}/model.safetensors").read_bytes() == (
        folder / "checkpoint/model.safetensors"
    ).read_bytes()


def logs(folder: Path) -> str:
    return "".join(log.read_text() for log in sorted((folder / "log").iterdir()))


@pytest.mark.parametrize(
    "settings",
    [
        {"LOAD_SYNCS": True, "LATE_US": 1000},
        {"ONE_QUEUE": True, "LATE_US": 1000},
        {"SMALL_IN_BLOCKS": True, "REUSE_ADDRESSES": True, "NO_VMM": True},
        {"PEERS": "none"},
    ],
    ids=["a module load that synchronises", "one queue", "small in blocks", "no peers"],
)
def test_a_pull_is_whole(major: int, tmp_path: Path, settings: dict[str, Any]) -> None:
    targets = ["cuda:0", "cuda:1"] if "NO_VMM" in settings else ["cuda:1"]
    for code, _, stderr in pulls(major, tmp_path, targets, **settings):
        assert code == 0, stderr
    assert all(whole(tmp_path, target) for target in targets)
    found = logs(tmp_path)
    assert kept(parsed(found.splitlines())) == []
    assert "is broken" not in found and "the capture is invalidated" not in found


def test_too_little_memory_is_said_before_a_byte_moves(major: int, tmp_path: Path) -> None:
    little = {"MX_STANDIN_MEMORY_BYTES": str(66 << 20)}  # 64 MiB are spare
    ((code, _, stderr),) = pulls(major, tmp_path, ["cuda:1"], little)
    assert code == 1 and "free memory on the GPU" in stderr, (code, stderr)
    assert not (tmp_path / "out-cuda:1/model.safetensors").exists()
    assert "cuMemcpyDtoDAsync" not in logs(tmp_path)


#: Attaches, kills the source's process, and goes on: reads what it has attached, and then its own.
_ORPHAN = """
import gc, os, signal
import mx
from benchmarks.processes import Cluster
from mx.errors import MxError
from mx.testing import spans
cluster = Cluster()
try:
    source, _ = cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    pull = mx.pull("m", coordinator=cluster.coordinator, device="cuda:0")
    view = pull.device_buffer()
    before = spans.peek(view)
    os.kill(source.pid, signal.SIGKILL)
    cluster.close()
    try:
        print(spans.peek(view) == before)
    except MxError as error:
        print(type(error).__name__)
    del view
    pull.close()
    gc.collect()
    print("closed")
finally:
    cluster.close()
"""


@pytest.mark.parametrize("vmm", [True, False], ids=["vmm", "legacy"])
def test_an_exporter_that_is_killed_while_mapped(major: int, tmp_path: Path, vmm: bool) -> None:
    """What came by descriptors stays; legacy memory is an error, and nothing hangs or crashes."""
    code = _ORPHAN.format(checkpoint=str(write(tmp_path / "checkpoint")))
    settings = {} if vmm else {"NO_VMM": True, "EXPORTER_DEATH": True}
    read, closed = passes(major, code, KERNELS=True, **settings)
    assert read == ("True" if vmm else "CudaError")
    assert closed == "closed"


#: Attaches, queues an engine's work on what it has attached, and lets go before that has begun.
_LETS_GO = """
import gc
import mx
from benchmarks.processes import Cluster
from mx.cuda.device import Device, DeviceMemory, CudaStream
from mx.cuda.driver import load
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    os.environ["MX_STANDIN_LATE_US"] = "300000"
    with Device(load(), 0) as device, CudaStream(device) as engine, DeviceMemory(device, 64) as own:
        pull = mx.pull("m", coordinator=cluster.coordinator, device="cuda:0")
        view = pull.device_buffer()
        with device.current():
            device.driver.copy_dtod(own.address, view.address, 64, engine.handle)
        del view
        pull.close()
        gc.collect()
        engine.synchronize()
    print("whole")
finally:
    cluster.close()
"""


@pytest.mark.parametrize("settings", [{}, {"NO_VMM": True}], ids=["vmm", "legacy"])
def test_attached_memory_is_closed_after_its_last_work(
    major: int, tmp_path: Path, settings: dict[str, Any]
) -> None:
    code = _LETS_GO.format(checkpoint=str(write(tmp_path / "checkpoint")))
    (tmp_path / "log").mkdir()
    assert passes(major, code, KERNELS=True, LOG=tmp_path / "log", **settings) == ["whole"]
    found = logs(tmp_path)
    assert kept(parsed(found.splitlines())) == []
    assert "is broken" not in found
