"""Which paths `mx plan` and `mx pull` take between GPUs of one host, over the stand-in driver: the
reports, the bytes, and the log of each process's calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import MIB
from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major_at_leisure, passes

pytestmark = each_major_at_leisure

#: A coordinator; `serve` and `run` start `mx` with the GPUs that it sees, None for all. What `run`
#: and `start` start are forks of a process that has imported mx, and has found no driver yet.
_CLUSTER = """
import json
from benchmarks.processes import Cluster
from tests.support import forkserver
cluster = Cluster()
def environ(sees, **settings):
    settings = {{f"MX_STANDIN_{{name}}": str(value) for name, value in settings.items()}}
    return settings if sees is None else settings | {{"CUDA_VISIBLE_DEVICES": sees}}
def serve(what, model, *more, sees=None):
    names = ("serve", what, "--model", model, "--coordinator", cluster.coordinator, "--json")
    child = cluster.start("-m", "mx", *names, *more, env=environ(sees))
    child.hear()
    return child
def start(*command, sees=None, **settings):
    command = [*command, "--coordinator", cluster.coordinator, "--json"]
    env = os.environ | environ(sees, **settings)
    return forkserver.python("from mx.cli import main; main()", *command, env=env, errors=True)
def run(*command, **how):
    child = start(*command, **how)
    said, errors = child.communicate()
    assert not child.returncode, errors
    return child.pid, json.loads(said)
def refused(child):
    errors = child.communicate(timeout=120)[1]
    return child.pid, child.returncode, errors
found = {{}}
try:
    with forkserver.running(os.environ):
        exec({body!r})
finally:
    cluster.close()
print(json.dumps(found))
"""


def cluster(major: int, body: str, **settings: object) -> Any:
    """Run what `_CLUSTER` prepares, and return `found`, which the body fills."""
    return json.loads(passes(major, _CLUSTER.format(body=body), **settings)[-1])


def checkpoint(folder: Path, mib: int, layers: int = 4) -> Path:
    """Write a checkpoint of random bytes and return its file."""
    folder.mkdir()
    random = np.random.default_rng(mib)
    tensors = {
        f"model.layers.{n}.weight": random.integers(0, 255, mib * MIB // layers, dtype=np.uint8)
        for n in range(layers)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def lines_of(log: Path, process: int, name: str) -> list[str]:
    """Return the lines of a process's log that are of calls whose names begin so."""
    found = (log / f"{process}.log").read_text().splitlines()
    return [line.split(" ", 1)[1] for line in found if f" {name}" in line]


def copied_nbytes(log: Path, process: int) -> int:
    copies = lines_of(log, process, "cuMemcpy")
    return sum(int(line.split(", ")[2].split(")")[0]) for line in copies)


LEGACY = {"NO_VMM": True, "SMALL_IN_BLOCKS": True}


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="vmm"), pytest.param(LEGACY, marks=pytest.mark.long, id="legacy")],
)
def test_nvlink_whatever_each_side_sees(
    major: int, tmp_path: Path, settings: dict[str, object]
) -> None:
    there = checkpoint(tmp_path / "big", 64)
    small = checkpoint(tmp_path / "small", 1, layers=2)  # of a block, where there are blocks
    body = f"""
found["source"] = serve({str(there.parent)!r}, "m", "--device", "cuda:0").pid
serve({str(small.parent)!r}, "hidden", "--device", "cuda:0", sees="0")
for case in ("m cuda:1", "hidden cuda:0 1", "hidden cuda:0 1,0"):
    model, device, *sees = case.split()
    sees = sees[0] if sees else None
    if sees != "1,0":
        found["plan " + case] = run("plan", model, "--device", device, sees=sees)[1]
    out = ["--out", {str(tmp_path)!r} + "/out"] if sees == "1,0" else []
    found["pull " + case] = run("pull", model, "--device", device, *out, sees=sees)
found["topo"] = run("topo", "--sources")[1]
"""
    log = tmp_path / "log"
    log.mkdir()
    found = cluster(major, body, LOG=log, KERNELS=True, **settings)
    for case in ("plan m cuda:1", "plan hidden cuda:0 1"):
        paths = {path["transport"]: path for path in found[case]["paths"]}
        assert paths["cuda_ipc"]["use"] == "chosen" and "NVLink" in paths["cuda_ipc"]["reason"]
        assert paths["pcie_p2p"]["use"] == "spare" and "context" in paths["pcie_p2p"]["reason"]
    for case in ("m cuda:1", "hidden cuda:0 1", "hidden cuda:0 1,0"):
        process, report = found[f"pull {case}"]
        assert [path["transport"] for path in report["paths"]] == ["cuda_ipc"]
        # No context but the target's GPU's: where CUDA_VISIBLE_DEVICES begins with it, GPU 0.
        retained = set(lines_of(log, process, "cuDevicePrimaryCtxRetain"))
        assert retained == {f"cuDevicePrimaryCtxRetain({case.split()[1][-1]}) CUDA_SUCCESS"}
        results = {result for _, result in calls(log, process)}
        assert results <= {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}
    chosen = {
        (path["target"][-1], path["transport"], path["attach"])
        for source in found["topo"]["sources"]
        for path in source["paths"]
        if path["chosen"]
    }
    assert chosen == {("u", "pcie_p2p", False), ("0", "cuda_ipc", True), ("1", "cuda_ipc", False)}
    process, _ = found["pull m cuda:1"]
    assert 64 * MIB <= copied_nbytes(log, process) <= 1.05 * 64 * MIB
    written = tmp_path / "out" / "model.safetensors"
    assert written.read_bytes() == small.read_bytes()
    retained = set(lines_of(log, found["source"], "cuDevicePrimaryCtxRetain"))
    assert retained == {"cuDevicePrimaryCtxRetain(0) CUDA_SUCCESS"}


def test_each_model_of_a_process_names_its_gpu(major: int, tmp_path: Path) -> None:
    there = checkpoint(tmp_path / "small", 1)
    body = f"""
import mx
sources = [
    mx.serve({str(there.parent)!r}, model=f"on-{{n}}", device=f"cuda:{{n}}",
             coordinator=cluster.coordinator)
    for n in (0, 1)
]
for model in (0, 1):
    for target in (0, 1):
        made = mx.plan(f"on-{{model}}", device=f"cuda:{{target}}", coordinator=cluster.coordinator)
        found[f"{{model}}{{target}}"] = [(path.transport, path.attach) for path in made.plan.chosen]
for source in sources:
    source.close()
"""
    found = cluster(major, body, KERNELS=True)
    assert found["00"] == found["11"] == [["cuda_ipc", True]]
    assert found["01"] == found["10"] == [["cuda_ipc", False]]


@pytest.mark.long
def test_ranks_of_two_models_share_a_gpu(major: int, tmp_path: Path) -> None:
    """Four ranks, two of each model, pull at once from a source on their GPU, and see no other."""
    models = [checkpoint(tmp_path / f"m{n}", 8 + n) for n in range(2)]
    body = f"""
for n in range(2):
    serve({str(tmp_path)!r} + f"/m{{n}}", f"m{{n}}", "--device", "cuda:0", sees="1")
ranks = [
    start("pull", f"m{{n % 2}}", "--device", "cuda:0", "--out", {str(tmp_path)!r} + f"/out{{n}}",
          *(["--no-attach"] if n < 2 else []), sees="1")
    for n in range(4)
]
found["ranks"] = [(rank.pid, rank.communicate()[0], rank.returncode) for rank in ranks]
"""
    log = tmp_path / "log"
    log.mkdir()
    found = cluster(major, body, LOG=log, KERNELS=True)
    for n, (process, said, code) in enumerate(found["ranks"]):
        assert code == 0
        (path,) = json.loads(said)["paths"]
        assert path["transport"] == ("cuda_ipc" if n < 2 else "cuda_ipc-attach")
        written = (tmp_path / f"out{n}" / "model.safetensors").read_bytes()
        assert written == models[n % 2].read_bytes()
        assert kept(calls(log, process)) == []


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="vmm"), pytest.param(LEGACY, marks=pytest.mark.long, id="legacy")],
)
def test_bad_luck(major: int, tmp_path: Path, settings: dict[str, object]) -> None:
    """A GPU that can't be mapped, one that is lost, a source that is killed: typed errors, and
    nothing kept; other readers go on. To attach more takes no more calls."""
    big, small = checkpoint(tmp_path / "big", 32), checkpoint(tmp_path / "small", 3)
    log = tmp_path / "log"
    log.mkdir()
    body = f"""
serve({str(small.parent)!r}, "small", "--device", "cuda:0")
source = serve({str(big.parent)!r}, "big", "--device", "cuda:0")
to = ("pull", "big", "--device", "cuda:1", "--transport", "cuda_ipc")
hidden = ("pull", "big", "--device", "cuda:0", "--transport", "cuda_ipc")
found["hidden"] = refused(start(*hidden, sees="1", HIDDEN_REFUSED=1))
found["lost"] = refused(start(*to, FAIL="work:2:CUDA_ERROR_ILLEGAL_ADDRESS"))
found["after"] = run(*to)[1]
for model in ("big", "small"):
    found[model] = run("pull", model, "--device", "cuda:0")
reader = start(*to, LATE_US=1_000_000)
log = {str(log)!r} + f"/{{reader.pid}}.log"
while not os.path.exists(log) or "cuMemcpyDtoDAsync" not in open(log).read():
    assert reader.poll() is None
    time.sleep(0.01)
os.kill(source.pid, 9)
found["killed"] = refused(reader)
"""
    found = cluster(major, body, LOG=log, KERNELS=True, **settings)
    for case, says in (("hidden", "cuda_ipc"), ("lost", "cuda_ipc"), ("killed", "Incomplete")):
        process, code, errors = found[case]
        assert code in (1, 3, 6) and says in errors and "Traceback" not in errors, (case, errors)
        if case != "lost":  # where all ended with the context
            assert kept(calls(log, process)) == [], case
    assert found["after"]["verified"]
    counts = []
    for model in ("big", "small"):
        process, report = found[model]
        assert [path["transport"] for path in report["paths"]] == ["cuda_ipc-attach"]
        counts.append(Counter(name for name, _ in calls(log, process)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("path", [pytest.param("cuda_ipc", marks=pytest.mark.long), "pcie_p2p"])
def test_one_side_is_lost(major: int, tmp_path: Path, path: str) -> None:
    """A source's process or GPU, or the target's GPU or memory, in the middle of a pull: typed
    errors that say what to do, nothing kept, and readers of other sources go on."""
    folder, log = checkpoint(tmp_path / "big", 16).parent, tmp_path / "log"
    log.mkdir()
    copy = "cuMemcpyDtoDAsync" if path == "cuda_ipc" else "cuMemcpyDtoHAsync"
    taken = "cuMemAddressReserve" if path == "cuda_ipc" else "cuMemHostAlloc"
    body = f"""
def served(model, **settings):
    command = ("serve", {str(folder)!r}, "--model", model, "--device", "cuda:0", "--json")
    more = ("--coordinator", cluster.coordinator)
    child = cluster.start("-m", "mx", *command, *more, env=environ(None, **settings))
    child.hear()
    return child
to = ("--device", "cuda:1", "--transport", {path!r})
def pull(model, **settings):
    return start("pull", model, *to, **settings)
def reading(model, **settings):
    child = pull(model, LATE_US=100_000, **settings)
    log = {str(log)!r} + f"/{{child.pid}}.log"
    while not os.path.exists(log) or "cuMemcpyDto" not in open(log).read():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    return child
def holds(child):
    return len(os.listdir(f"/proc/{{child.pid}}/fd"))
def ended(child):
    said, errors = child.communicate()
    return json.loads(said) if not child.returncode else errors
kept = served("kept")
run("pull", "kept", *to)
found["held"] = [holds(kept)]
alone, legacy = served("alone"), served("legacy", NO_VMM=1)
killed, other = reading("alone"), reading("kept")
os.kill(alone.pid, 9)
found["killed"], found["beside"] = refused(killed), ended(other)
killed = reading("legacy", EXPORTER_DEATH=1)
os.kill(legacy.pid, 9)
found["legacy"] = refused(killed)
both = [served("both"), served("both")]
reader = reading("both")
os.kill(max(both, key=holds).pid, 9)
found["one of two"] = ended(reader)
broken = ":CUDA_ERROR_ECC_UNCORRECTABLE"
for call in ("{copy}:-2", "cuEventRecord:-2", "*:-60"):
    found[call] = refused(pull("kept", FAIL=call + broken))
found["memory"] = refused(pull("kept", MEMORY_BYTES=16 << 20))
found["taken"] = refused(pull("kept", FAIL="{taken}:-2:CUDA_ERROR_OUT_OF_MEMORY"))
lost = served("lost", FAIL="cuMemExportToShareableHandle:-1" + broken)
found["lost"] = refused(pull("lost"))
while "lost" in [each["model"] for each in run("sources")[1]["sources"]]:
    time.sleep(0.05)
run("pull", "kept", *to)
found["held"].append(holds(kept))
"""
    found = cluster(major, body, LOG=log, KERNELS=True)
    held = found.pop("held")
    assert held[0] == held[1]
    assert found.pop("beside")["verified"]
    both = found.pop("one of two")
    sources = {part["source"] for part in both["paths"]} | {part["source"] for part in both["left"]}
    assert both["verified"] and len(sources) == 2, both
    gpu, again, memory = "see nvidia-smi -q -d ECC", "mx sources shows", "free memory on the GPU"
    ends = {
        "killed": (6, again),
        "legacy": (6, "IncompleteError"),
        f"{copy}:-2": (6, gpu),
        "cuEventRecord:-2": (6, gpu),
        "*:-60": (1, gpu),
        "memory": (1, memory),
        "taken": (1 if path == "cuda_ipc" else 6, memory),
        "lost": (3, again),
    }
    assert found.keys() == ends.keys()
    for case, (wanted, hint) in ends.items():
        process, code, errors = found[case]
        assert code == wanted and hint in errors, (case, code, errors)
        assert "Traceback" not in errors, errors
        if case in ("killed", "memory", "taken", "lost"):  # else all ended with the context
            assert kept(calls(log, process)) == [], case
    # Nothing was unmapped under copies that were queued, late as they are.
    assert " is broken " not in (log / f"{found['killed'][0]}.log").read_text()
    assert not lines_of(log, found["memory"][0], "cuMemcpy")


def test_what_a_target_can_do_without(major: int, tmp_path: Path) -> None:
    """Other numbers of the same GPUs, GPUs of another architecture than the kernels', and a driver
    that is too old, where no GPU is used."""
    there = checkpoint(tmp_path / "small", 3)
    body = f"""
serve({str(there.parent)!r}, "m", "--device", "cuda:0")
out = {str(tmp_path)!r} + "/"
to = ("--device", "cuda:0", "--transport", "pcie_p2p")
found["renumbered"] = run("pull", "m", *to, "--out", out + "renumbered", sees="1,0")[1]
to = ("--device", "cuda:1", "--out", out + "other")
child = start("pull", "m", *to, COMPUTE_CAPABILITY=80)
found["other"] = [child.communicate()[1], child.returncode]
for device in ("cuda:0", "cpu"):
    child = start("pull", "m", "--device", device, "--transport", "tcp", VERSION=11080)
    found[device] = [child.communicate()[1], child.returncode]
"""
    found = cluster(major, body, KERNELS=True)
    assert [each["transport"] for each in found["renumbered"]["paths"]] == ["pcie_p2p"]
    errors, code = found["other"]
    assert code == 0 and errors.count("is hashed on the host") == 1, errors
    for out in ("renumbered", "other"):
        assert (tmp_path / out / "model.safetensors").read_bytes() == there.read_bytes()
    errors, code = found["cuda:0"]
    assert code == 2 and "too old" in errors and "update the NVIDIA driver" in errors, errors
    assert found["cpu"][1] == 0, found["cpu"]


def test_the_driver_is_asked_for_its_gpus_once(major: int, tmp_path: Path) -> None:
    code = """
from mx.cuda.device import find_ordinal
from mx.cuda.driver import load
for _ in range(1000):
    print(find_ordinal(load(), "cuda:GPU-6d782073-7461-6e64-2d69-6e2047500001"))
"""
    assert set(passes(major, code, LOG=tmp_path)) == {"1"}
    count = Counter(name for name, _ in calls(tmp_path))
    assert count["cuDeviceGetUuid"] == 2
