"""`--from auto`: each step that fails hands on what was verified."""

from __future__ import annotations

import hashlib
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mx import api, config
from mx.errors import EXIT_INTEGRITY, EXIT_NO_SOURCE
from tests.support.chains import bytes_from, flip, pulling, steps
from tests.support.commands import Run, environment, free_port, serve

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torch_is_forked")]

SLOW = ("--max-bandwidth", "6MB/s")
#: Copies from peers on this host end as soon as those do.
QUICK: dict[str, object] = {"stall_timeout_s": 3.0, "connect_timeout_s": 10.0}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A folder with the checkpoint of the model "m", and a file beside it."""
    root = tmp_path_factory.mktemp("kept")
    (root / "m").mkdir()
    shutil.copy(checkpoint, root / "m" / "model.safetensors")
    (root / "m" / "config.json").write_text('{"model_type": "llama"}')
    return root


def digests(path: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in load_file(path).items()
    }


def size_of(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def run_dry(run: Run, coordinator: str, kept: Path, number: int, **arguments: object) -> object:
    """End the source in the middle of a pull by a signal. Returns what the pull says."""
    source = serve(run, kept / "m", "m", coordinator, *SLOW)
    settings = QUICK | {"checkpoint_root": str(kept)}
    with pulling(coordinator, environment(), settings, **arguments) as pull:
        pull.going()
        source.signal(number)
        return pull.ended()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_disk_gives_the_rest(run: Run, coordinator: str, kept: Path, number: int) -> None:
    said = run_dry(run, coordinator, kept, number)
    assert isinstance(said, dict) and "report" in said, said
    report, weights = said["report"], kept / "m" / "model.safetensors"
    assert said["tensors"] == digests(weights)
    came = bytes_from(report)
    assert came["tcp"] > 0 and came["disk"] > 0
    assert sum(came.values()) == size_of(weights)
    assert report["fallback"] == "disk" and "defined_by" not in report
    outcomes = steps(report)
    assert (outcomes["host"], outcomes["disk"]) == ("partly", "used")
    assert outcomes["hub"] == outcomes["objects"] == outcomes["peers"] == "skipped"
    assert {each["step"]: each["bytes"] for each in report["steps"]}["disk"] == came["disk"]


def test_the_disk_gives_the_rest_of_some_tensors(run: Run, coordinator: str, kept: Path) -> None:
    only = ["model.layers.*"]
    said = run_dry(run, coordinator, kept, signal.SIGKILL, only=only)
    assert isinstance(said, dict) and "report" in said, said
    wanted = {
        name: digest
        for name, digest in digests(kept / "m" / "model.safetensors").items()
        if name.startswith("model.layers.")
    }
    assert said["tensors"] == wanted
    assert bytes_from(said["report"])["disk"] > 0


def test_a_disk_with_other_weights_gives_no_byte_that_is_wrong(
    run: Run, coordinator: str, kept: Path, tmp_path: Path
) -> None:
    """All but one block are the same: they are taken, and the pull fails for want of that one."""
    other = tmp_path / "m"
    shutil.copytree(kept / "m", other)
    flip(other / "model.safetensors", -1)
    source = serve(run, kept / "m", "m", coordinator, *SLOW)
    settings = QUICK | {"checkpoint_root": str(tmp_path)}
    with pulling(coordinator, environment(), settings) as pull:
        pull.going()
        source.signal(signal.SIGKILL)
        said = pull.ended()
    assert (said["error"], said["code"]) == ("DigestError", EXIT_INTEGRITY)
    assert str(other) in said["message"]


def test_a_disk_with_another_model(
    run: Run, coordinator: str, kept: Path, tmp_path: Path, tiny: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    source = serve(run, kept / "m", "m", coordinator, *SLOW)
    with pulling(coordinator, environment(), QUICK | {"checkpoint_root": str(tmp_path)}) as pull:
        pull.going()
        source.signal(signal.SIGKILL)
        said = pull.ended()
    assert (said["error"], said["code"]) == ("CheckpointError", EXIT_INTEGRITY)
    assert "another model" in said["message"]


@pytest.mark.usefixtures("coordinated")
def test_pulls_that_trade_go_on_from_the_disk(run: Run, coordinator: str, kept: Path) -> None:
    source = serve(run, kept / "m", "m", coordinator, *SLOW)
    settings = QUICK | {"checkpoint_root": str(kept)}
    with (
        pulling(coordinator, environment(), settings) as one,
        pulling(coordinator, environment(), settings) as two,
    ):
        one.going()
        two.going()
        source.signal(signal.SIGKILL)
        said = [one.ended(), two.ended()]
    for each in said:
        assert "report" in each, each
        assert each["tensors"] == digests(kept / "m" / "model.safetensors")
        assert each["report"]["paths"][-1]["bytes"] > 0
    assert any(bytes_from(each["report"]).get("disk") for each in said)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with another model."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny")
    save_file({"weight": torch.ones(300, 3)}, folder / "model.safetensors")
    return folder


def test_what_the_coordinator_says_holds_where_no_source_is_left(
    run: Run, coordinator: str, kept: Path, tiny: Path, tmp_path: Path
) -> None:
    """It still lists a source that is gone, and has the manifest."""
    source = serve(run, kept / "m", "m", coordinator)
    source.signal(signal.SIGKILL)
    settings = config.load({"checkpoint_root": str(kept)} | QUICK, environ={})
    out = tmp_path / "out"
    options = {"coordinator": coordinator, "source": "auto", "attach": False, "transport": "tcp"}
    with api.pull("m", settings=settings, out=out, **options) as pull:  # type: ignore[arg-type]
        report = pull.wait(60)
    assert report.fallback == "disk" and report.defined_by == ""
    assert {path.transport for path in report.paths} == {"disk"}
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (kept / "m" / name).read_bytes()
    (tmp_path / "other").mkdir()
    shutil.copytree(tiny, tmp_path / "other" / "m")
    where = ("--coordinator", coordinator, "--from", "auto", "--no-attach", "--transport", "tcp")
    pull_other = run("pull", "m", *where, "--checkpoint-root", str(tmp_path / "other"))
    assert pull_other.wait(60) == EXIT_INTEGRITY, pull_other.err


def test_without_any_source_the_disk_defines_the_model(
    run: Run, kept: Path, tmp_path: Path
) -> None:
    unused = f"127.0.0.1:{free_port()}"
    where = ("--coordinator", unused, "--from", "auto", "--checkpoint-root", str(kept))
    found = run("pull", "m", *where, "--json").json()
    assert (found["fallback"], found["defined_by"]) == ("disk", "disk")
    outcomes = steps(found)
    assert (outcomes["peers"], outcomes["disk"]) == ("failed", "used")
    pinned = run("pull", f"m@{found['identity']}", *where, "--json").json()
    assert "defined_by" not in pinned
    wrong = run("pull", f"m@{'0' * 64}", *where, "--out", str(tmp_path / "out"))
    assert wrong.wait(60) == EXIT_INTEGRITY, wrong.err
    assert not (tmp_path / "out").exists()
    said = run("pull", "m", "--from", f"auto={kept / 'm'}", "--coordinator", unused)
    assert said.wait(60) == 0 and "compared with nothing (no pin)" in said.out


def test_all_steps_are_named_where_none_works(run: Run, kept: Path) -> None:
    unused = f"127.0.0.1:{free_port()}"
    nothing = run("pull", "m", "--coordinator", unused, "--from", "auto")
    assert nothing.wait(60) == EXIT_NO_SOURCE
    for said in ("peers: ", "disk: no --checkpoint-root is set", "hub: no --hub-id", "objects: no"):
        assert said in nothing.err
    absent = run("pull", "x", "--coordinator", unused, "--from", "auto",
                 "--checkpoint-root", str(kept), "--json")  # fmt: skip
    error = absent.json()["error"]
    assert error["exit_code"] == EXIT_NO_SOURCE and str(kept / "x") in error["message"]


def test_peers_are_enough(run: Run, coordinator: str, kept: Path) -> None:
    serve(run, kept / "m", "m", coordinator)
    where = ("--coordinator", coordinator, "--from", "auto", "--checkpoint-root", "/nowhere")
    found = run("pull", "m", *where, "--json").json()
    assert found["fallback"] is None
    assert steps(found) == {
        "attach": "used", "host": "not needed", "peers": "not needed", "disk": "not needed",
        "hub": "skipped", "objects": "skipped",
    }  # fmt: skip


def test_files_alone_from_the_chain(run: Run, kept: Path, tmp_path: Path) -> None:
    unused = f"127.0.0.1:{free_port()}"
    pull = run("pull", "m", "--coordinator", unused, "--from", "auto", "--checkpoint-root",
               str(kept), "--files-only", "--out", str(tmp_path / "out"), "--json")  # fmt: skip
    assert pull.json()["fallback"] == "disk"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
