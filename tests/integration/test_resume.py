"""`--out` again: a pull goes on from the layers that one before it has written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts
from mx.cli.outcome import EXIT_INTERRUPTED
from mx.errors import EXIT_CONFIG, EXIT_INCOMPLETE, EXIT_OK, EXIT_OTHER
from tests.integration.halfway import LAYERS, NEAR, SHAPES, Net, kill, net_of
from tests.support.commands import HostCommand, RunIn
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

AGAIN = f"of {LAYERS} layers"


@pytest.fixture
def net(hosts: Hosts, run_in: RunIn, tmp_path: Path) -> Net:
    made = net_of(hosts, run_in, tmp_path)
    made.start_coordinator()
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def partial(place: Path) -> Path:
    return place / ".out.mx-partial"


def killed_halfway(net: Net, place: Path, part: float = 0.7) -> None:
    pull = net.pull("--out", str(place / "out"))
    net.until_sent(pull, part)
    pull.until((partial(place) / "journal").exists, "journal")
    pull.signal(signal.SIGKILL)
    pull.wait()
    assert not (place / "out").exists()


def pulled(net: Net, place: Path, *more: str) -> tuple[dict[str, Any], int]:
    """The report of a pull that works, and the bytes that it took of the link; what it wrote is
    right, and nothing else is there."""
    before = net.sent_nbytes()
    pull = net.pull("--out", str(place / "out"), *more)
    report = pull.json()
    assert pull.wait() == EXIT_OK, pull.err
    assert same(load_file(place / "out" / "model.safetensors"), load_file(net.weights))
    assert [path.name for path in place.iterdir()] == ["out"]
    assert sum(path["bytes"] for path in report["paths"]) == net.nbytes
    return report, net.sent_nbytes() - before


def resumed_nbytes(report: dict[str, Any]) -> int:
    return sum(path["bytes"] for path in report["paths"] if path["transport"] == "resume")


@pytest.mark.parametrize("verify", ["chunks", pytest.param("strong", marks=pytest.mark.long)])
def test_a_pull_that_was_killed(net: Net, place: Path, verify: str) -> None:
    net.serve(7701)
    killed_halfway(net, place)
    report, sent_nbytes = pulled(net, place, "--verify", verify)
    assert resumed_nbytes(report) > 0.3 * net.nbytes
    assert sent_nbytes < 1.1 * (net.nbytes - resumed_nbytes(report)) + 1e6
    (path,) = (path for path in report["paths"] if path["transport"] == "resume")
    assert path["source"] == str(partial(place))
    assert report["verified"] == ("strong" if verify == "strong" else "digest")


def test_a_pull_that_lost_its_source_says_how_to_go_on(net: Net, place: Path) -> None:
    source = net.serve(7701)
    pull = net.pull("--out", str(place / "out"))
    net.until_sent(pull, 0.7)
    kill(source)
    assert pull.wait() == EXIT_INCOMPLETE
    assert "run the same command again to go on from " in pull.err
    assert AGAIN in pull.err
    net.serve(7702)
    report, _ = pulled(net, place)
    assert resumed_nbytes(report) > 0


def test_a_pull_that_was_interrupted(net: Net, place: Path) -> None:
    net.serve(7701)
    pull = net.pull("--out", str(place / "out"))
    net.until_sent(pull, 0.7)
    pull.signal(signal.SIGINT)
    assert pull.wait() == EXIT_INTERRUPTED
    said = json.loads(pull.err.splitlines()[-1])["fields"]  # as `--json` has it
    assert said["message"] == "interrupted"
    assert said["hint"].startswith("run the same command again to go on from ")
    report, _ = pulled(net, place)
    assert resumed_nbytes(report) > 0


@pytest.mark.long
def test_no_resume_begins_anew_and_leaves_nothing(net: Net, place: Path) -> None:
    source = net.serve(7701)
    killed_halfway(net, place)
    pull = net.pull("--out", str(place / "out"), "--no-resume")
    net.until_sent(pull, 0.7)
    kill(source)
    assert pull.wait() == EXIT_INCOMPLETE
    assert "run the same command" not in pull.err
    assert list(place.iterdir()) == []
    net.serve(7702)
    killed_halfway(net, place)
    report, _ = pulled(net, place, "--no-resume")
    assert resumed_nbytes(report) == 0


def flip_everywhere(folder: Path) -> None:
    path = folder / "files" / "model.safetensors"
    with path.open("r+b") as file:
        for offset in range(0, path.stat().st_size, 100_000):
            file.seek(offset)
            file.write(b"damage")


def flip_once(folder: Path) -> None:
    with (folder / "files" / "model.safetensors").open("r+b") as file:
        file.seek(1_700_000)
        file.write(b"damage")


def test_damage_to_what_was_written_is_found(net: Net, place: Path) -> None:
    net.serve(7701)
    killed_halfway(net, place)
    flip_once(partial(place))
    report, _ = pulled(net, place)
    assert 0 < resumed_nbytes(report) < net.nbytes


def garble_journal(folder: Path) -> None:
    with (folder / "journal").open("ab") as file:
        file.write(b"garbage\0\xff" * 1000 + b"0123456789abcdef layer 3\n" * 10 + b"2" * (1 << 20))


def truncate_journal(folder: Path) -> None:
    os.truncate(folder / "journal", (folder / "journal").stat().st_size - 5)


def link_weights(folder: Path) -> None:
    precious = folder.parent.parent / "precious"
    (folder / "files" / "model.safetensors").rename(precious)
    (folder / "files" / "model.safetensors").symlink_to(precious)


@pytest.mark.long
def test_whatever_became_of_what_was_left_the_result_is_right(net: Net, place: Path) -> None:
    net.hosts.throttle(net.link, 1000, NEAR)
    net.serve(7701)
    for change in (garble_journal, truncate_journal, link_weights, flip_everywhere):
        net.hosts.throttle(net.link, 200, NEAR)
        killed_halfway(net, place)
        change(partial(place))
        outside = {path: path.read_bytes() for path in place.parent.glob("precious")}
        net.hosts.throttle(net.link, None, NEAR)
        pulled(net, place)
        assert all(path.read_bytes() == data for path, data in outside.items())
        shutil.rmtree(place / "out")


@pytest.mark.long
def test_another_model_takes_its_place(net: Net, place: Path) -> None:
    source = net.serve(7701)
    killed_halfway(net, place)
    kill(source)
    net.weights.unlink()
    write_checkpoint(net.weights, SHAPES, seed=1)
    net.serve(7702, "--revision", "other")
    report, _ = pulled(net, place, "--revision", "other")
    assert resumed_nbytes(report) == 0


def test_two_at_once(net: Net, place: Path) -> None:
    net.serve(7701)
    killed_halfway(net, place)
    net.hosts.throttle(net.link, 5, NEAR)
    first = net.pull("--out", str(place / "out"))
    net.until_sent(first, 0.02)
    second = net.pull("--out", str(place / "out"))
    assert second.wait() == EXIT_CONFIG
    assert "another mx is writing" in second.err
    net.hosts.throttle(net.link, None, NEAR)
    assert first.wait(60) == EXIT_OK
    assert same(load_file(place / "out" / "model.safetensors"), load_file(net.weights))


@pytest.fixture
def small_disk(net: Net, tmp_path: Path) -> Iterator[Path]:
    """Room for the model and a little more."""
    path = tmp_path / "small"
    path.mkdir()
    size = f"size={net.nbytes + (2 << 20)}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(path)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def with_config(net: Net) -> None:
    """Serve a folder with a configuration of 1 MiB from now on."""
    folder = net.weights.parent / "folder"
    folder.mkdir()
    net.weights.rename(folder / "model.safetensors")
    net.weights = folder
    (folder / "config.json").write_text('{"text": "%s"}' % ("x" * (1 << 20)))


def test_a_disk_that_fills_up_meanwhile(net: Net, small_disk: Path) -> None:
    """Everything has its room from the start: the weights are given theirs, and the side files are
    written first."""
    with_config(net)
    net.serve(7701)
    pull: HostCommand = net.pull("--out", str(small_disk / "out"))
    net.until_sent(pull, 0.3)
    fill(small_disk / "filler")
    assert pull.wait(60) == EXIT_OK, pull.err
    out = small_disk / "out"
    assert same(load_file(out / "model.safetensors"), load_file(net.weights / "model.safetensors"))
    assert (out / "config.json").read_bytes() == (net.weights / "config.json").read_bytes()


@pytest.mark.long
def test_a_disk_without_room_for_the_side_files(net: Net, small_disk: Path) -> None:
    with_config(net)
    net.serve(7701)
    (small_disk / "filler").write_bytes(bytes(3 << 19))  # half a MiB beside the weights is left
    pull = net.pull("--out", str(small_disk / "out"))
    assert pull.wait(60) == EXIT_OTHER
    assert "No space left" in pull.err or "free" in pull.err
    assert "Traceback" not in pull.err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    (small_disk / "filler").unlink()
    pull = net.pull("--out", str(small_disk / "out"))
    assert pull.wait(60) == EXIT_OK, pull.err
    config = (small_disk / "out" / "config.json").read_bytes()
    assert config == (net.weights / "config.json").read_bytes()


@pytest.mark.long
def test_a_disk_that_is_full_at_first(net: Net, small_disk: Path) -> None:
    """Nothing was gained, so nothing is left."""
    net.serve(7701)
    fill(small_disk / "filler")
    pull = net.pull("--out", str(small_disk / "out"))
    assert pull.wait() == EXIT_OTHER
    assert "run the same command" not in pull.err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
