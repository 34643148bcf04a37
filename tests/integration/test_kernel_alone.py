"""The kernel works without any of the packs: they are removed, and so is what only they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_checkpoint
from tests.support.commands import Command, environment, free_port
from tests.support.daemon import ROOT
from tests.support.kernel import PACKS, TRANSPORT_PACKS

pytestmark = pytest.mark.integration

#: Libraries that only packs use.
LIBRARIES = ("nixl_cu12", "nixl_cu13", "prometheus_client", "redis", "starlette", "transformers")
BLOCKS = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LIBRARIES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


class KernelCommand(Command):
    """One of our commands, of the kernel alone."""

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-P", "-c", f"{BLOCKS}\nfrom mx.cli import {entry}; {entry}()"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which mx is its kernel."""
    there = tmp_path_factory.mktemp("kernel")
    for place, packs in (("mx", PACKS), ("transports/mx_transports", TRANSPORT_PACKS)):
        shutil.copytree(
            ROOT / place,
            there / place,
            ignore=lambda folder, names, top=ROOT / place, packs=packs: [
                n for n in names if n == "__pycache__" or (Path(folder) == top and n in packs)
            ],
        )
    return environment(PYTHONPATH=f"{there}{os.pathsep}{there / 'transports'}")


@pytest.fixture
def run(alone: dict[str, str]) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str, daemon: bool = False) -> Command:
        started.append(KernelCommand(*arguments, daemon=daemon, env=alone))
        return started[-1]

    yield start
    for command in reversed(started):
        command.end()


def test_serve_pull_plan_and_verify(run: Callable[..., Command], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shapes = {f"layers.{n}.w": (1024, 512) for n in range(3)}
    write_checkpoint(checkpoint / "model.safetensors", shapes)
    address = f"127.0.0.1:{free_port()}"
    state = f"sqlite:{tmp_path / 'state.db'}"
    run("--listen", address, "--state", state, "--json", daemon=True).json()
    at = ("--coordinator", address)

    def asked(*arguments: str) -> dict[str, Any]:
        command = run(*arguments, "--json")
        assert command.wait(60) == 0, command.err
        found: dict[str, Any] = json.loads(command.out)
        return found

    source = run("serve", str(checkpoint), "--model", "m", *at, "--json")
    pin = source.json()["pin"]

    attached = asked("pull", "m", *at)
    assert [path["transport"] for path in attached["paths"]] == ["shm-attach"]
    for transport in ("shm", "tcp"):
        copied = asked("pull", "m", *at, "--no-attach", "--transport", transport)
        assert [path["transport"] for path in copied["paths"]] == [transport]
    asked("pull", "m", *at, "--out", str(tmp_path / "out"))
    for file in checkpoint.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert asked("verify", str(tmp_path / "out"), pin)["pin"] == pin
    held = run("pull", "m", *at, "--no-attach", "--hold", "--json")
    assert held.json()["pin"] == pin
    held.until(lambda: len(asked("sources", "m", *at)["sources"]) == 2, "second source")
    assert [each["model"] for each in asked("models", *at)["models"]] == ["m"]
    assert asked("plan", "m", *at)["pin"] == pin
    assert asked("config", "show")["coordinator"]["value"]


def test_what_is_not_there_is_said(run: Callable[..., Command], alone: dict[str, str]) -> None:
    doctor = run("doctor")
    assert doctor.wait() == 2 and "there is no command mx doctor" in doctor.err
    code = """
import mx
assert "pull" in dir(mx) and callable(mx.pull)
for name in ("Router", "cache", "nothing"):
    try:
        getattr(mx, name)
    except AttributeError as error:
        assert name in str(error)
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-P", "-c", code], env=alone, check=True)


def test_a_state_of_a_pack_that_is_not_there(run: Callable[..., Command]) -> None:
    refused = run("--listen", f"127.0.0.1:{free_port()}", "--state", "redis://h:1/0", daemon=True)
    assert refused.wait() == 2
    assert "redis is not a kind of state" in refused.err.replace("--state ", "")


def test_a_store_of_a_pack_that_is_not_there(run: Callable[..., Command]) -> None:
    url = ("--object-url", "s3://bucket/m", "--coordinator", f"127.0.0.1:{free_port()}")
    refused = run("pull", "m", "--from", "auto", *url)
    assert refused.wait() == 3
    assert "objects: --object-url needs the pack mx.remote, which is not there" in refused.err
