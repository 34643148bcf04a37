"""Coordinated reading within one machine from the first chunk, as a setting demands: three pulls of
one model share out what each reads from the origin, over any transport."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from mx.errors import EXIT_OK
from tests.support.commands import Command, Run, serve
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("coordinated")]

LAYERS = 12
MODEL_NBYTES = LAYERS * 2 * 1024 * 1024
TARGETS = 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{n}.mlp.up_proj.weight": (1024, 1024) for n in range(LAYERS)
    }
    write_checkpoint(path, shapes)
    return path


def start_pulls(run: Run, tmp_path: Path, coordinator: str, *more: str) -> list[Command]:
    """Three pulls that wait for the source, and so begin together however busy the machine is."""
    options = ("--coordinator", coordinator, "--no-attach", "--wait", "100", "--json", *more)
    commands = [
        run("pull", "m", "--out", str(tmp_path / str(number)), *options)
        for number in range(TARGETS)
    ]
    port = int(coordinator.rpartition(":")[2])
    for command in commands:
        command.until(functools.partial(is_connected, command, port), "call of the coordinator")
    return commands


def is_connected(command: Command, port: int) -> bool:
    try:
        connections = psutil.Process(command.process.pid).net_connections("tcp")
    except psutil.Error:  # it has ended: its output says why
        return False
    return any(each.raddr and each.raddr.port == port for each in connections)


def reports_of(commands: list[Command]) -> list[Any]:
    reports = [command.json() for command in commands]
    assert [command.wait() for command in commands] == [EXIT_OK] * TARGETS
    return reports


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.long)])
@pytest.mark.timeout(180)
def test_pulls_of_one_machine_give_to_each_other_where_that_is_asked_for(
    run: Run, coordinator: str, weights: Path, tmp_path: Path, transport: str
) -> None:
    pulls = start_pulls(run, tmp_path, coordinator, "--transport", transport)
    origin = serve(run, weights, "m", coordinator, "--max-bandwidth", "3MB/s").json()["endpoint"]
    reports = reports_of(pulls)
    from_origin = 0
    for number, report in enumerate(reports):
        assert same(load_file(tmp_path / str(number) / "model.safetensors"), load_file(weights))
        assert sum(path["bytes"] for path in report["paths"]) == MODEL_NBYTES
        # One that begins late may find everything at the others.
        assert {path["source"] for path in report["paths"]} - {origin}
        from_origin += sum(p["bytes"] for p in report["paths"] if p["source"] == origin)
    assert MODEL_NBYTES <= from_origin < (TARGETS - 0.5) * MODEL_NBYTES
    assert all(report["verified"] == "digest" for report in reports)
