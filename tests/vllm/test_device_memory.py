"""vLLM's real loader classes over the stand-in driver: every state is lent from a GPU's memory, and
filled there, without a copy in host memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mx
from tests.support.driver.build import MAJORS, environment, why_not
from tests.vllm.checkpoints import bare
from tests.vllm.hosts import Host, host, lending, start

_MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_not(_MAJOR)), reason=why_not(_MAJOR)),
]
#: What the model has, about: 2 bytes an element.
_WEIGHTS_BYTES = 2 * (2 * 256 * 128 + 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in logs the calls of each process."""
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def hosts(coordinator: str, place: Path, log: Path) -> Iterator[tuple[Host, Host]]:
    settings = {"HOST_ACCESS": True, "KERNELS": True, "LOG": log}
    over = {
        name: value
        for name, value in environment(_MAJOR, settings).items()
        if name.startswith(("MX_STANDIN_", "LD_LIBRARY_PATH", "PYTHONPATH"))
    }
    logs = place / "a.log", place / "b.log"
    with host(coordinator, logs[0], **over) as a, host(coordinator, logs[1], **over) as b:
        yield a, b


def copied_bytes(log: Path, where: Host, call: str) -> int:
    """Return how many bytes a process has copied by a call of the driver."""
    text = (log / f"{where.process.pid}.log").read_text()
    return sum(map(int, re.findall(rf" {call}\(\w+, \w+, (\d+), \w+\) CUDA_SUCCESS", text)))


@pytest.mark.parametrize("state", ["processed", "loaded"])
def test_a_state_goes_from_gpu_to_gpu(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, log: Path, state: str
) -> None:
    a, b = hosts
    one = start(a, checkpoint, state, gpu=True, extra={"state": state})
    assert lending(a)["lending"] == "lending", a.status()["why"]
    (table,) = mx.list_tables(state, coordinator=coordinator)
    assert {each.device[:9] for each in table.tensors} == {"cuda:GPU-"}
    copied = copied_bytes(log, b, "cuMemcpyDtoDAsync")
    two = start(b, bare(checkpoint), state, gpu=True, extra={"state": state})
    assert lending(b)["lending"] == "lending", b.status()["why"]
    assert b.status()["loads"] == {state: 1}
    assert (two["tensors"], two["generated"]) == (one["tensors"], one["generated"])
    assert (a.do("host_copies"), b.do("host_copies")) == ([], [])
    # Of the weights nothing but digests comes to the host.
    assert copied_bytes(log, b, "cuMemcpyDtoDAsync") - copied >= _WEIGHTS_BYTES
    for each in hosts:
        assert copied_bytes(log, each, "cuMemcpyDtoHAsync") < 0.05 * _WEIGHTS_BYTES


def test_processing_that_changes_the_weights(
    hosts: tuple[Host, Host], checkpoint: Path, log: Path
) -> None:
    """What they were before is lent as a copy, if one was asked for; else nothing is."""
    a, b = hosts
    name = "model.norm.weight"
    loaded = {"state": "loaded"}
    start(a, checkpoint, "changed", gpu=True, scaled=name, extra=loaded)
    status = lending(a)
    assert status["lending"] == "withdrawn"
    assert "processing has changed the weights" in status["why"]
    kept = loaded | {"copy": "device"}
    one = start(a, checkpoint, "kept", gpu=True, scaled=name, extra=kept)
    assert lending(a)["lending"] == "lending", a.status()["why"]
    two = start(b, bare(checkpoint), "kept", gpu=True, scaled=name, extra=kept)
    assert lending(b)["lending"] == "lending", b.status()["why"]
    assert b.status()["loads"] == {"loaded": 1}
    assert two["generated"] == one["generated"]
    assert (a.do("host_copies"), b.do("host_copies")) == ([], [])
    for each in hosts:
        assert copied_bytes(log, each, "cuMemcpyDtoHAsync") < 0.05 * _WEIGHTS_BYTES
    start(a, checkpoint, "host", gpu=True, scaled=name, extra=loaded | {"copy": "host"})
    assert lending(a)["lending"] == "lending", a.status()["why"]
    assert any(said.startswith("cpu of") for said in a.do("host_copies"))  # so they are noticed
