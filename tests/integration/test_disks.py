"""Pulls to disks that are none of this machine's, from folders that are gone, and by processes that
lack standard streams or memory."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mx
from mx import config
from mx.api.verifying import verify_folder
from mx.errors import MxError
from tests.support.commands import Run, commands, environment, start_coordinator
from tests.support.daemon import ROOT
from tests.support.disks import other_disk
from tests.support.folders import tree
from tests.support.outcomes import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_MX = "from mx.cli import main; main()"
_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tensors = {
        f"model.layers.{i}.mlp.w": torch.full((1 << 20,), i, dtype=torch.uint8)
        for i in range(_LAYERS)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def coordinator(model: Path) -> Iterator[str]:
    """The address of a coordinator that lists the model `small`."""
    with commands() as run:
        address = start_coordinator(run)[0]
        serve(run, model, address)
        yield address


def serve(run: Run, model: Path, address: str) -> None:
    source = run("serve", str(model), "--model", "small", "--json", "--coordinator", address)
    assert "endpoint" in source.json()


def begun(
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    before: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _MX, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(**(env or {})),
        preexec_fn=before,  # noqa: PLW1509 - no thread runs here while it does
    )


def pulled(coordinator: str, out: Path | str, **how: object) -> tuple[int, str]:
    """Pull the model with `--out`; return the exit code and the standard error."""
    pull = begun("pull", "small", "--coordinator", coordinator, "--out", str(out), **how)  # type: ignore[arg-type]
    try:
        _, err = pull.communicate(timeout=120)
    finally:
        pull.kill()
    return pull.returncode, err


@pytest.mark.parametrize(
    "answers",
    [{"flock": errno.ENOSYS}, {"flock": errno.ENOLCK}, {"fsync": errno.EINVAL}],
    ids=["no flock", "no locks", "no fsync of folders"],
)
def test_a_disk_without(
    answers: dict[str, int], coordinator: str, model: Path, tmp_path: Path
) -> None:
    disk = other_disk(tmp_path, **answers)
    place = tmp_path / "place"
    for name in ("one", "two"):
        code, err = pulled(coordinator, place / name, env=disk)
        assert code == 0, err
        assert tree(place / name) == tree(model)
    assert sorted(os.listdir(place)) == ["one", "two"]


def test_two_pulls_at_once_without_flock(coordinator: str, model: Path, tmp_path: Path) -> None:
    """One of them writes; the other one is told, or finds the output whole."""
    disk, out = other_disk(tmp_path, flock=errno.ENOLCK), tmp_path / "place" / "out"
    arguments = ("pull", "small", "--coordinator", coordinator, "--out", str(out))
    pulls = [begun(*arguments, env=disk) for _ in range(3)]
    said = [pull.communicate(timeout=120)[1] for pull in pulls]
    codes = sorted(pull.returncode for pull in pulls)
    assert codes == [0, 2, 2], said
    for pull, err in zip(pulls, said, strict=True):
        assert (pull.returncode == 0) != ("another mx is writing" in err or "is not empty" in err)
    assert tree(out) == tree(model)
    assert os.listdir(out.parent) == ["out"]


def test_what_a_killed_pull_left_without_flock(run: Run, model: Path, tmp_path: Path) -> None:
    disk, out = other_disk(tmp_path, flock=errno.ENOLCK), tmp_path / "place" / "out"
    address = start_coordinator(run)[0]
    source = run(
        "serve", str(model), "--model", "small", "--json", "--coordinator", address,
        "--max-bandwidth", "1MB/s",
    )  # fmt: skip
    assert "endpoint" in source.json()
    arguments = ("pull", "small", "--coordinator", address, "--out", str(out))
    pull = begun(*arguments, "--transport", "tcp", env=disk)
    claim = out.parent / ".out.mx-partial" / "lock"
    while not claim.exists():
        assert pull.poll() is None
    pull.kill()
    pull.communicate()
    assert claim.exists()
    code, err = pulled(address, out, env=disk)
    assert code == 0, err
    assert tree(out) == tree(model)
    assert os.listdir(out.parent) == ["out"]


_needs_fuse = pytest.mark.skipif(
    shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"), reason="there is no FUSE"
)


@contextmanager
def file_system(folder: Path) -> Iterator[tuple[Path, Path, subprocess.Popen[bytes]]]:
    """A file system that a process serves: what is behind it, where it is mounted, the process."""
    behind, mounted = folder / "behind", folder / "mounted"
    behind.mkdir(parents=True)
    mounted.mkdir()
    with subprocess.Popen(["bindfs", "-f", str(behind), str(mounted)]) as process:
        try:
            until(lambda: os.path.ismount(mounted), "its mount")
            yield behind, mounted, process
        finally:
            process.kill()
            subprocess.run(["fusermount", "-u", "-z", str(mounted)], check=True)


@_needs_fuse
@pytest.mark.parametrize("what", ["load", "serve", "verify", "out", "freeze"])
def test_a_file_system_that_goes_away(
    what: str, coordinator: str, large_checkpoint: Path, tmp_path: Path
) -> None:
    """The error says which file, though to close it and to remove what was written fail as well."""
    dice = random.Random(what)
    asked: dict[str, Any] = {"coordinator": coordinator}
    failed = 0
    with ExitStack() as exits:
        if what in ("out", "freeze"):
            settings = config.given(config.load(), max_bandwidth="800MB/s")
            source = mx.serve(large_checkpoint, model="far", settings=settings, **asked)
            exits.enter_context(source)
        for number in range(6):
            with file_system(tmp_path / str(number)) as (behind, mounted, process):
                if what not in ("out", "freeze"):
                    os.link(large_checkpoint, behind / "model.safetensors")
                ways: dict[str, Callable[[], Any]] = {
                    "load": lambda: mx.load("near", path=mounted),
                    "serve": lambda: mx.serve(mounted, model="near", **asked).close(),
                    "verify": lambda: verify_folder(mounted, "00" * 32),
                    "out": lambda: mx.pull("far", out=mounted / "out", **asked).wait(),
                    "freeze": lambda: mx.freeze("far", mounted / "frozen", **asked),
                }
                timer = threading.Timer(dice.uniform(0.02, 0.4), process.kill)
                timer.start()
                try:
                    ways[what]()
                except MxError as error:
                    failed += process.poll() is not None
                    assert str(mounted) in str(error) or "00000000" in str(error)
                timer.join()
    assert failed


@_needs_fuse
def test_fuse(coordinator: str, model: Path, tmp_path: Path) -> None:
    behind, mounted = tmp_path / "behind", tmp_path / "mounted"
    behind.mkdir()
    mounted.mkdir()
    subprocess.run(["bindfs", str(behind), str(mounted)], check=True)
    try:
        for name in ("one", "two"):
            code, err = pulled(
                coordinator, mounted / name, env={"XDG_STATE_HOME": str(mounted / "state")}
            )
            assert code == 0, err
            assert tree(behind / name) == tree(model)
        assert not [name for name in os.listdir(behind) if name.startswith(".")]
    finally:
        subprocess.run(["fusermount", "-u", str(mounted)], check=True)


def test_a_working_folder_that_is_gone(coordinator: str, model: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    out = tmp_path / "out"
    code, err = pulled(coordinator, out, cwd=gone, before=gone.rmdir, env={"PYTHONSAFEPATH": "1"})
    assert code == 0, err
    assert tree(out) == tree(model)


@pytest.mark.parametrize("closed", [(0, 1, 2), (0,), (1,), (2,)])
def test_closed_standard_streams(
    closed: tuple[int, ...], coordinator: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def close() -> None:
        for fd in closed:
            os.close(fd)

    code, err = pulled(coordinator, out, before=close)
    assert code == 0, err
    assert tree(out) == tree(model)


@pytest.mark.parametrize(
    "arguments",
    [
        ("pull", "small", "--out", "OUT"),
        ("models",),
        ("serve", "MODEL", "--model", "other"),
    ],
)
def test_too_little_memory_for_threads(
    arguments: tuple[str, ...], coordinator: str, model: Path, tmp_path: Path
) -> None:
    """gRPC's core starts none then, says nothing, and waits for ever."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300_000 << 10, 300_000 << 10))

    places = {"OUT": str(tmp_path / "out"), "MODEL": str(model)}
    command = begun(
        *(places.get(each, each) for each in arguments), "--coordinator", coordinator, before=limit
    )
    try:
        _, err = command.communicate(timeout=60)
    finally:
        command.send_signal(signal.SIGKILL)
    assert command.returncode == 1
    assert "may not map 320 MiB for its threads" in err
    assert "ulimit -v" in err
    assert not (tmp_path / "out").exists()
