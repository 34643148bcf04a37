"""What mx does to the process that uses it, over the stand-in driver: CUDA is started only where a
GPU is used, graphs are captured while mx works, and a fork is told what it can't do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.driver.logs import calls
from tests.support.driver.programs import each_major, finish, passes

pytestmark = each_major

#: Serves a folder, and runs commands of mx, of which it prints the output of each in a line.
_COMMANDS = """
import subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", *{serve!r})
    for words in {commands!r}:
        command = [sys.executable, "-m", "mx", *words, "--json"]
        command += ["--coordinator", cluster.coordinator]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        assert ended.returncode == 0, words
        print(ended.stdout.replace(chr(10), " "))
finally:
    cluster.close()
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    random = np.random.default_rng(1)
    tensors = {f"model.layers.{n}.weight": random.random(350_000) for n in range(3)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def run(
    major: int, checkpoint: Path, serve: list[str], commands: list[list[str]], **settings: object
) -> list[dict[str, Any]]:
    code = _COMMANDS.format(checkpoint=str(checkpoint), serve=serve, commands=commands)
    ended = finish(major, code, **settings)
    assert ended.returncode == 0, ended.stderr
    # cuda_ipc is not for the host's memory: that is not news.
    assert "does not serve the model" not in ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_without_a_gpu_in_use_cuda_is_not_started(
    major: int, checkpoint: Path, tmp_path: Path
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    pull = ["pull", "m", "--out", str(out)]
    run(major, checkpoint, [], [pull, ["plan", "m"], ["models"], ["sources"]], LOG=log)
    assert (out / "model.safetensors").stat().st_size
    assert calls(log) == []
    # The log has what is called where a GPU is used.
    run(major, checkpoint, [], [["pull", "m", "--device", "cuda:0"]], LOG=log)
    assert ("cuInit", "CUDA_SUCCESS") in calls(log)


@pytest.mark.parametrize("target", ["cuda:0", "cuda:1", "cpu"])
def test_while_another_thread_captures(
    major: int, checkpoint: Path, tmp_path: Path, target: str
) -> None:
    """One that began with GLOBAL, which forbids all other threads most calls."""
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    pull = ["pull", "m", "--device", target, "--out", str(out)]
    serve = ["--device", "cuda:0"]
    run(major, checkpoint, serve, [pull], LOG=log, KERNELS=True, CAPTURE="global")
    written = (out / "model.safetensors").read_bytes()
    assert written == (checkpoint / "model.safetensors").read_bytes()
    results = {result for _, result in calls(log)}
    assert results <= {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}
    assert not any("# the capture is invalidated" in each.read_text() for each in log.iterdir())


def test_kernels_that_do_not_load(major: int, checkpoint: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    pull = ["pull", "m", "--device", "cuda:1", "--out", str(out)]
    run(major, checkpoint, ["--device", "cuda:0"], [pull], LOG=log)
    written = (out / "model.safetensors").read_bytes()
    assert written == (checkpoint / "model.safetensors").read_bytes()
    assert not [call for call in calls(log) if call[0] == "cuLaunchKernel"]


_INSTANCE = """
from mx.cuda import driver
print(driver.load().device_uuid(0))
"""


def test_an_instance_of_a_divided_gpu(major: int, checkpoint: Path) -> None:
    (uuid,) = passes(major, _INSTANCE, MIG=2)
    assert uuid.startswith("MIG-")
    device = f"cuda:{uuid}"
    serve, pull = ["--device", "cuda:0"], ["pull", "m", "--device", device]
    (found,) = run(major, checkpoint, serve, [pull], MIG=2, KERNELS=True)
    assert [path["transport"] for path in found["paths"]] == ["cuda_ipc-attach"]


_FORK = """
from mx.cuda import driver
from mx.cuda.device import Device, DeviceMemory
from mx.errors import ForkError
gpu = Device.open(driver.load(), "cuda:0")
memory = DeviceMemory(gpu, 100)
child = os.fork()
if not child:
    code = 1
    try:
        DeviceMemory(gpu, 100)
    except ForkError as error:
        assert "spawn" in error.hint
        code = 0
    memory.close()
    gpu.close()
    del memory, gpu
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
memory.close()
gpu.close()
"""

_FORK_OF_OTHERS = """
from cuda.bindings import driver as cuda
assert cuda.cuInit(0)[0] == 0  # as torch does
child = os.fork()
if not child:
    import mx
    from mx.errors import ForkError
    for use in (mx.serve, mx.pull):
        try:
            use(*([{}] if use is mx.serve else []), model="m", device="cuda:0")
        except ForkError as error:
            assert "spawn" in error.hint
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("code", [_FORK, _FORK_OF_OTHERS], ids=["mx", "another library"])
def test_a_fork_of_a_process_that_uses_cuda(major: int, code: str) -> None:
    assert passes(major, code) == []


_SIGNALS = """
import ctypes
from mx.cuda import driver
from mx.cuda.device import Device, DeviceMemory, PinnedMemory, CudaStream
from mx.errors import LocalError
from mx.memory.readiness import LayerSignals
gpu = Device.open(driver.load(), "cuda:0")
with LayerSignals(Device.open(driver.load(), "cuda:0"), 2, 2.0) as signals:
    with CudaStream(gpu) as engine, CudaStream(gpu) as copies, PinnedMemory(gpu, 8) as host:
        memory = DeviceMemory(gpu, 8)
        signals.wait_verified(1, engine.handle)
        # What the pull itself waits for, before it can say that the layer is there.
        with gpu.current():
            gpu.driver.copy_htod(memory.address, host.address, 8, copies.handle)
        copies.synchronize()
        signals.verified(0)
        signals.verified(1)
        engine.synchronize()
        try:
            signals.check()
            print("verified")
        except LocalError as error:
            print("poisoned", error)
        memory.close()
gpu.close()
"""


@pytest.mark.parametrize("one_queue", [False, True])
def test_a_stream_that_waits_for_a_layer(major: int, one_queue: bool) -> None:
    """Where all streams share a hardware queue, it holds up the very copies that it waits for."""
    settings = {"ONE_QUEUE": True} if one_queue else {}
    said = passes(major, _SIGNALS, **settings)
    assert said[0].startswith("poisoned no layer became ready" if one_queue else "verified")
