"""How often `mx pull` calls the driver, and how many bytes it has it copy: by the log of calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import MIB
from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.logs import calls
from tests.support.driver.programs import passes

MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

#: Serves a folder from GPU 0, and pulls it; prints the pulls' process and how it says it came.
_PULLS = """
import json, subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    for target in {targets!r}:
        command = ["-m", "mx", "pull", "m", "--device", target, "--json"]
        command += ["--coordinator", cluster.coordinator]
        pull = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        report = json.loads(pull.communicate()[0])
        print(json.dumps([pull.pid, [path["transport"] for path in report["paths"]]]))
finally:
    cluster.close()
"""


def pulls(folder: Path, mib: int, targets: list[str]) -> dict[str, tuple[int, list[str]]]:
    """Pull a model of some MiB to each target; return each pull's process and its paths."""
    folder.mkdir()
    (folder / "log").mkdir()
    (folder / "checkpoint").mkdir()
    weights = np.random.default_rng(1).integers(0, 256, (4, mib // 4 * MIB), dtype=np.uint8)
    tensors = {f"model.layers.{n}.weight": weights[n] for n in range(4)}
    save_file(tensors, folder / "checkpoint/model.safetensors")
    code = _PULLS.format(checkpoint=str(folder / "checkpoint"), targets=targets)
    lines = passes(MAJOR, code, LOG=folder / "log", KERNELS=True)
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


def test_an_attach_calls_no_more_for_a_larger_model(tmp_path: Path) -> None:
    made = []
    for mib in (8, 64):
        folder = tmp_path / str(mib)
        process, paths = pulls(folder, mib, ["cuda:0"])["cuda:0"]
        assert paths == ["cuda_ipc-attach"]
        made.append(Counter(name for name, _ in calls(folder / "log", process)))
    assert made[0] == made[1]
