"""How many calls of the driver and of Python bytes take that end in a GPU's memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import MIB
from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.programs import passes

MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

#: Pulls a model from each device to another by one transport, in one process, and prints what the
#: process has called meanwhile: the driver, and functions of Python on the threads that carry bytes
#: (those of the event loop follow the time).
_PULLS = """
import json, os
import mx
from benchmarks.processes import Cluster
cluster, count, counting, carrying = Cluster(), [0], [False], set()
def profile(frame, event, arg):
    if counting[0] and event == "call" and threading.current_thread() in carrying:
        count[0] += 1
def started(thread, start=threading.Thread.start):
    if thread.name.startswith(("mx-cuda_ipc", "mx-tcp", "mx-shm", "mx-staged")):
        carrying.add(thread)
    start(thread)
threading.Thread.start = started
threading.setprofile(profile)  # of all threads that start from now on
log = {folder!r} + "/log/" + str(os.getpid()) + ".log"
try:
    ends = {{}}
    for device in {sources!r}:
        _, said = cluster.serve({folder!r} + "/m", "m", "--device", device)
        ends[device] = said["endpoint"]
    for source, target, transport in {cases!r}:
        for _ in range(2):  # the first one loads what is loaded once
            count[0], counting[0] = 0, True
            begin = os.stat(log).st_size if os.path.exists(log) else 0
            with mx.pull(
                "m", peer=ends[source], device=target, transport=transport, attach=False
            ) as pull:
                pull.wait(200)
            counting[0] = False
            with open(log) as file:
                file.seek(begin)
                calls = [line.split(" ", 1)[1].split("(")[0] for line in file if line[0] != "#"]
        print(json.dumps([calls, count[0]]))
finally:
    cluster.close()
"""

#: What each step of bytes takes, and what making a context current does.
_STEP = ("cuMemcpy", "cuLaunchKernel", "cuEventRecord", "cuEventSynchronize")
_CONTEXT = ("cuCtxPush", "cuCtxPop", "cuThreadExchange")


def _pulled(folder: Path, source: str, target: str, transport: str) -> tuple[Counter[str], int]:
    """Return what a pull of 384 MiB calls: functions of the driver, and how many of Python."""
    (folder / "log").mkdir()
    (folder / "m").mkdir()
    weights = np.random.default_rng(1).integers(0, 256, (24, 16 * MIB), dtype=np.uint8)
    tensors = {f"model.layers.{n // 4}.m{n % 4}": each for n, each in enumerate(weights)}
    save_file(tensors, folder / "m" / "model.safetensors")
    cases = [(source, target, transport)]
    code = _PULLS.format(folder=str(folder), sources=[source], cases=cases)
    (line,) = passes(MAJOR, code, LOG=folder / "log", KERNELS=True)
    calls, python = json.loads(line)
    return Counter(calls), python


def _of(calls: Counter[str], names: tuple[str, ...]) -> int:
    return sum(count for name, count in calls.items() if name.startswith(names))


def test_the_bytes_between_gpus_take_few_trips(tmp_path: Path) -> None:
    """The first layer, 256 MiB, and the rest: a copy, a launch, an event and its wait for each, and
    some of the table. Nothing is uploaded but that. A trip is what was read in some time before: on
    a busy machine it may be shorter, and another pull shows how long they are."""
    for attempt in range(5):
        (tmp_path / f"{attempt}").mkdir()
        calls, python = _pulled(tmp_path / f"{attempt}", "cuda:0", "cuda:1", "cuda_ipc")
        trips = calls["cuMemcpyDtoDAsync"]
        assert calls["cuLaunchKernel"] <= trips + 2 and calls["cuMemcpyHtoDAsync"] <= 10, calls
        assert _of(calls, _STEP) <= 4 * trips + 40, calls
        if trips <= 6:
            break
    assert 3 <= trips <= 6 and python <= 6_000, (calls, python)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_chunk_through_the_ring_takes_few_calls_of_the_driver(
    tmp_path: Path, transport: str
) -> None:
    """A copy, an event and its wait for each slot, and a launch: 450 a GiB, of chunks of 16 MiB. A
    context is made current for each thread, not for each of them."""
    calls, _ = _pulled(tmp_path, "cpu", "cuda:0", transport)
    copies = calls["cuMemcpyHtoDAsync"]
    assert copies >= 24 and calls["cuLaunchKernel"] <= copies + 2, calls
    assert _of(calls, _STEP) <= 4 * copies + 40, calls
    assert _of(calls, _CONTEXT) <= 800, calls  # some 560 for what a pull makes and closes
