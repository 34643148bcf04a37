"""`mx serve` and `mx pull` over the stand-in driver: bytes, paths, and the log of calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.storage.load import hash_opened
from mx.storage.safetensors import open_checkpoint
from tests.support.commands import free_port
from tests.support.distributions import put
from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major, passes

pytestmark = each_major

#: Serves a folder from GPU 0, pulls it to each of three targets, and prints each report in a line.
_PULLS = """
import subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    for target in ("cuda:0", "cpu", "cuda:1"):
        command = ["-m", "mx", "pull", "m", "--device", target, "--out", {out!r} + target, "--json"]
        command += ["--coordinator", cluster.coordinator]
        ended = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        assert ended.returncode == 0, target
        print(ended.stdout.replace(chr(10), " "))
finally:
    cluster.close()
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"NO_VMM": True, "SMALL_IN_BLOCKS": True}, marks=pytest.mark.long, id="legacy"
        ),
        pytest.param({"ONE_QUEUE": True, "LATE_US": 2000}, marks=pytest.mark.long, id="late"),
    ],
)
def test_serve_and_pull(major: int, tmp_path: Path, settings: dict[str, object]) -> None:
    checkpoint, log = tmp_path / "checkpoint", tmp_path / "log"
    checkpoint.mkdir()
    log.mkdir()
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{n}.weight": random.standard_normal((1001, 700), dtype=np.float32)
        for n in range(4)
    }
    save_file(tensors, checkpoint / "model.safetensors")
    code = _PULLS.format(checkpoint=str(checkpoint), out=str(tmp_path / "out-"))
    lines = passes(major, code, LOG=log, KERNELS=True, **settings)
    to_itself, to_host, _ = (json.loads(line)["paths"] for line in lines)
    assert [path["transport"] for path in to_itself] == ["cuda_ipc-attach"]
    assert [path["transport"] for path in to_host] == ["pcie_p2p"]
    for target in ("cuda:0", "cpu", "cuda:1"):
        written = tmp_path / f"out-{target}" / "model.safetensors"
        assert written.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    found = calls(log)
    assert {result for _, result in found} <= {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}
    assert kept(found) == []
    count = Counter(name for name, _ in found)
    assert count["cuLaunchKernel"]  # what came to GPU 1 was hashed there
    assert count["cuIpcOpenMemHandle" if settings.get("NO_VMM") else "cuMemCreate"]


#: Pulls from a store that writes to the GPU by itself, and from one that writes other bytes there.
_FROM_A_STORE = """
import os, sys
sys.path.insert(0, {site!r})
from pathlib import Path
from mx import api, config
from mx.errors import MxError
from mx.testing import spans
for kind in ("right", "wrong", "failing"):
    settings = config.load({{"object_url": "gpu://" + kind + {folder!r}}})
    try:
        with api.pull({pinned!r}, source="auto", coordinator={address!r}, settings=settings,
                      device="cuda:0") as pull:
            report = pull.wait(60)
            print(kind, report.pin, len(spans.peek(pull.device_buffer())) > 1 << 23)
    except MxError as error:
        print(kind, error.exit_code, type(error).__name__)
"""
_GPU_STORE = """
import os
from mx.stores import DeviceView, ListedFile
from mx.testing import spans

class GpuStore:
    threads, place, reads_devices = 2, "gpu", True

    def __init__(self, url, opening):
        self.kind, _, folder = url.removeprefix("gpu://").partition("/")
        self.folder = "/" + folder

    def list(self):
        entries = os.scandir(self.folder)
        return [ListedFile(each.name, each.stat().st_size) for each in entries]

    def read(self, file, offset, view):
        with open(self.folder + "/" + file.path, "rb") as opened:
            opened.seek(offset)
            data = opened.read(len(view))
        if isinstance(view, DeviceView):
            if self.kind == "failing":
                raise SystemExit("no")
            spans.poke(view, data if self.kind == "right" else bytes(len(data)))
        else:
            view[:] = data
        return len(data)

    def close(self):
        pass
"""


def test_a_store_that_writes_to_the_gpu(major: int, tmp_path: Path) -> None:
    folder, site = tmp_path / "m", tmp_path / "site"
    folder.mkdir()
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{n}.weight": random.standard_normal((1001, 700), dtype=np.float32)
        for n in range(4)
    }
    save_file(tensors, folder / "model.safetensors")
    put(site, {"gpu_store.py": _GPU_STORE}, "[mx.stores]\ngpu = gpu_store:GpuStore\n")
    manifest = hash_opened(open_checkpoint(folder), threads=1).manifest
    pin = manifest.ref.pin.hex()
    code = _FROM_A_STORE.format(
        site=str(site),
        folder=str(folder),
        pinned=f"m@{pin}",
        address=f"127.0.0.1:{free_port()}",
    )
    right, wrong, failing = passes(major, code, KERNELS=True)
    assert right == f"right {pin} True"
    assert wrong.split()[1] == "4" and failing.split()[1] == "3"
