"""Fixtures of the integration tests: processes, hosts, checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.hosts import Hosts, unavailable
from mx import config
from tests.support.command_fixtures import commands_are_forked, run, torch_is_forked
from tests.support.commands import (
    CHILD_SETTINGS,
    HostCommand,
    Run,
    commands,
    serve,
    start_coordinator,
)
from tests.support.driver.build import MAJORS
from tests.support.driver.programs import forked

__all__ = ["commands_are_forked", "run", "torch_is_forked"]  # fixtures


@pytest.fixture
def coordinated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have child processes coordinate, on any medium, as soon as others read from their source."""
    monkeypatch.setitem(CHILD_SETTINGS, "MX_PEER_COORDINATED_READING", "always")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts to be made and linked by the test, gone after it."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Hosts() as made:
        yield made


@pytest.fixture
def run_in(hosts: Hosts) -> Iterator[Callable[..., HostCommand]]:
    """Start commands in hosts, the host's name first; they end with the test."""
    started: list[HostCommand] = []

    def start(host: str, *arguments: str, daemon: bool = False) -> HostCommand:
        started.append(HostCommand(hosts, host, *arguments, daemon=daemon))
        return started[-1]

    yield start
    for command in reversed(started):
        command.end()


@pytest.fixture
def coordinator(run: Run) -> str:
    """A coordinator's address; the process is `coordinator_process`'s."""
    return start_coordinator(run)[0]


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[str]:
    """A coordinator that knows the model "m", and "slow" that takes half a minute."""
    with commands() as run:
        coordinator, _ = start_coordinator(run)
        serve(run, checkpoint, "m", coordinator)
        serve(run, checkpoint, "slow", coordinator, "--max-bandwidth", "1MB/s")
        yield coordinator


@pytest.fixture(scope="module", autouse=True)
def driver_programs_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs over the stand-in driver are forks, too."""
    module = request.node
    if not module.name.startswith("test_driver_"):
        yield
        return
    items = [each for each in request.session.items if each.getparent(pytest.Module) is module]
    called = (getattr(each, "callspec", None) for each in items)
    with forked({MAJORS[-1], *(each.params.get("major", MAJORS[-1]) for each in called if each)}):
        yield


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is freed by the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: several that spin for a busy machine take far longer."""
    import torch  # some of these tests run where there is none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 28 MB in 10 layers."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    write_checkpoint(path, llama_shapes(8, 384, 1024, 2048))
    return path


@pytest.fixture(scope="session")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 390 MB in 34 layers: long enough to be interrupted."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    write_checkpoint(path, llama_shapes(32, 768, 3072, 8192))
    return path


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    """The defaults, whatever the machine's own configuration says."""
    return config.load(environ={"HOME": "/nonexistent"})
