"""Sources with bounds, and `mx top`, between real processes. What is judged is which pull
read from which source and what was reported, not how long it took."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from mx import api, config
from mx.core.pull_status import PullPhase
from mx.errors import EXIT_NO_SOURCE, EXIT_OK
from tests.support.commands import Run, environment, free_port, serve
from tests.support.outcomes import until

pytestmark = [pytest.mark.integration, pytest.mark.long]

LAYERS = 12
MODEL_NBYTES = LAYERS * 2 * 1024 * 1024


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB in 12 layers: at 5 MB/s long enough to be looked at."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{n}.mlp.up_proj.weight": (1024, 1024) for n in range(LAYERS)
    }
    write_checkpoint(path, shapes)
    return path


@pytest.fixture
def observer(coordinator: str) -> Iterator[api.Observer]:
    with api.Observer(coordinator=coordinator) as made:
        yield made


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reader_beyond_the_bound_waits_for_its_turn(
    run: Run, coordinator: str, weights: Path, observer: api.Observer, transport: str
) -> None:
    serve(run, weights, "m", coordinator, "--max-readers", "1", "--max-bandwidth", "12MB/s")
    at = ("--coordinator", coordinator, "--transport", transport, "--no-attach", "--json")
    first = run("pull", "m", *at)
    until(lambda: [s for s in observer.look().sources if s.readers], "reader")
    second = run("pull", "m", *at, "--wait", "60")
    reports = [command.json() for command in (first, second)]
    assert [command.wait() for command in (first, second)] == [EXIT_OK, EXIT_OK]
    for report in reports:
        assert sum(path["bytes"] for path in report["paths"]) == MODEL_NBYTES


def test_a_reader_beyond_the_bound_reads_from_one_within_it(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    origin = serve(run, weights, "m", coordinator, "--max-readers", "1",
                   "--max-bandwidth", "3MB/s").json()["endpoint"]  # fmt: skip
    at = ("--coordinator", coordinator, "--transport", "tcp", "--json")
    first = run("pull", "m", *at, "--hold")
    until(lambda: [s for s in observer.look().sources if s.record.role.value == "relay"], "relay")
    second = run("pull", "m", *at, "--wait", "60")
    report = second.json()
    assert second.wait() == EXIT_OK
    brought = {path["source"]: path["bytes"] for path in report["paths"]}
    assert sum(brought.values()) == MODEL_NBYTES
    assert sum(nbytes for source, nbytes in brought.items() if source != origin) > 0
    assert first.json()["bytes"] == MODEL_NBYTES


def test_a_pull_whose_only_giver_leaves_finishes_where_there_is_room_again(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    serve(run, weights, "m", coordinator, "--max-readers", "1", "--max-bandwidth", "3MB/s")
    at = ("--coordinator", coordinator, "--transport", "tcp", "--json")
    first = run("pull", "m", *at)
    until(lambda: [s for s in observer.look().sources if s.record.role.value == "relay"], "relay")
    others = [run("pull", "m", *at, "--wait", "60") for _ in range(2)]
    until(lambda: len([p for p in observer.look().pulls if p.layers_ready]) == 3, "three pulls")
    first.signal(signal.SIGKILL)
    for command in others:
        report = command.json()
        assert command.wait() == EXIT_OK
        assert sum(path["bytes"] for path in report["paths"]) == MODEL_NBYTES


def test_a_reader_that_waits_in_vain_reports_the_busy_source(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    # Alone, by name: it has nowhere else to go.
    source = serve(run, weights, "m", coordinator, "--max-readers", "1",
                   "--max-bandwidth", "1MB/s")  # fmt: skip
    endpoint = source.json()["endpoint"]
    at = ("--from", f"peer={endpoint}", "--transport", "tcp", "--json")
    first = run("pull", "m", *at)
    until(lambda: [s for s in observer.look().sources if s.readers], "reader")
    second = run("pull", "m", *at, "--wait", "1")
    assert second.wait() == EXIT_NO_SOURCE
    error = second.json()["error"]
    assert endpoint in error["message"] and "as many readers as it admits" in error["message"]
    assert first.process.poll() is None  # no reader was disturbed


def test_a_waiting_pull_ends_when_it_is_closed(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    serve(run, weights, "m", coordinator, "--max-readers", "1", "--max-bandwidth", "1MB/s")
    at = ("--coordinator", coordinator, "--transport", "tcp", "--json")
    first = run("pull", "m", *at)
    until(lambda: [s for s in observer.look().sources if s.readers], "reader")
    settings = config.load({"wait_s": 600}, environ={"HOME": "/nonexistent"})
    with (
        api.pull("m", coordinator=coordinator, transport="tcp", settings=settings) as pull,
        pytest.raises(TimeoutError),
    ):
        pull.wait(0.7)
    assert pull.report is None
    assert first.process.poll() is None


def test_the_sources_of_a_process_take_bounds_from_the_call(
    coordinator: str, weights: Path, settings: config.Settings
) -> None:
    with (
        api.serve(
            weights,
            model="m",
            coordinator=coordinator,
            max_readers=2,
            max_bandwidth="80MB/s",
            settings=settings,
        ) as source,
        api.pull("m", peer=source.endpoint, transport="shm", attach=False) as pull,
    ):
        assert pull.wait(30).bytes == MODEL_NBYTES


# -- mx top ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_pull_is_seen_by_layer_and_its_source_by_rate(
    run: Run, coordinator: str, weights: Path, observer: api.Observer, transport: str
) -> None:
    served = serve(run, weights, "m", coordinator, "--max-bandwidth", "5MB/s").json()
    pull = run("pull", "m", "--coordinator", coordinator, "--transport", transport, "--no-attach",
               "--json")  # fmt: skip
    seen = until(lambda: [p for p in observer.look("m").pulls if p.layers_ready], "layer")[0]
    assert seen.phase is PullPhase.RUNNING and seen.pid == pull.process.pid
    assert seen.layers == LAYERS and 0 < seen.done_bytes < seen.nbytes == MODEL_NBYTES
    assert seen.sources == (served["endpoint"],)
    assert observer.look("other").pulls == ()

    origin = until(
        lambda: [
            s
            for s in observer.look().sources
            if s.record.endpoint == served["endpoint"] and s.gb_per_s > 0
        ],
        "rate",
    )[0]
    assert origin.readers == 1
    assert origin.gb_per_s < 1

    top = run("top", "--coordinator", coordinator, "--json")
    shown = top.json()
    assert top.wait() == EXIT_OK
    (pulling,) = shown["pulls"]
    assert pulling["pull_id"] == seen.pull_id and pulling["sources"] == [served["endpoint"]]
    assert {s["endpoint"] for s in shown["sources"]} >= {served["endpoint"]}

    assert pull.wait(60) == EXIT_OK
    ended = until(lambda: [p for p in observer.look().pulls if p.phase.value != "running"], "end")
    assert ended[0].phase is PullPhase.COMPLETE and ended[0].layers_ready == LAYERS
    until(lambda: not observer.look().pulls, "oblivion")


def test_a_pull_that_is_killed_is_soon_forgotten(
    run: Run, coordinator: str, weights: Path, observer: api.Observer
) -> None:
    serve(run, weights, "m", coordinator, "--max-bandwidth", "5MB/s")
    pull = run("pull", "m", "--coordinator", coordinator, "--transport", "tcp")
    until(lambda: observer.look().pulls, "pull")
    pull.signal(signal.SIGKILL)
    until(lambda: [p for p in observer.look().pulls if p.phase is PullPhase.FAILED], "failure")
    until(lambda: not observer.look().pulls, "oblivion")


def test_top_prints_a_table_where_there_is_no_terminal(
    run: Run, coordinator: str, weights: Path
) -> None:
    empty = run("top", "--coordinator", coordinator)
    assert empty.wait() == EXIT_OK
    assert "no pulls" in empty.out and "no sources" in empty.out
    served = serve(run, weights, "m", coordinator).json()
    table = run("top", "m", "--once", "--coordinator", coordinator)
    assert table.wait() == EXIT_OK
    assert served["endpoint"] in table.out and "origin" in table.out and "\x1b" not in table.out


def test_top_without_a_coordinator_says_so(run: Run) -> None:
    top = run("top", "--coordinator", f"127.0.0.1:{free_port()}", "--json")
    assert top.wait() == EXIT_NO_SOURCE
    assert "no coordinator answers" in top.json()["error"]["message"]


class Screen:
    """A command in a terminal of 120 columns and 30 rows."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, slave = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from mx.cli import main; main()", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM="xterm-256color", COLUMNS="120", LINES="30", LANG="C.UTF-8"),
            start_new_session=True,
        )
        os.close(slave)

    def read(self) -> bool:
        """Read what is there now; return False at the end."""
        while select.select([self._terminal], [], [], 0.05)[0]:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # Linux's error when the other end is closed
                return False
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return True

    def until(self, found: Callable[[str], object], what: str) -> None:
        def look() -> bool:
            self.read()
            return bool(found(self.text))

        until(look, f"{what} in\n{self.text}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def test_top_shows_a_pull_as_it_goes_and_ends_quietly(
    run: Run, coordinator: str, weights: Path
) -> None:
    served = serve(run, weights, "m", coordinator, "--max-bandwidth", "5MB/s").json()
    screen = Screen("top", "--coordinator", coordinator)
    with contextlib.ExitStack() as ends:
        ends.callback(screen.end)
        screen.until(lambda text: served["endpoint"] in text, "source")
        pull = run("pull", "m", "--coordinator", coordinator, "--transport", "tcp")
        screen.until(lambda text: re.search(r"█+·+", text), "pull half done")
        screen.until(lambda text: "█" * LAYERS in text and "complete" in text, "end")
        assert pull.wait() == EXIT_OK
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(20) == EXIT_OK
        screen.read()
        assert "Traceback" not in screen.text and "rror" not in screen.text


def test_top_outlives_its_coordinator(run: Run, weights: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    daemon = run("--listen", address, daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    screen = Screen("top", "--coordinator", address)
    with contextlib.ExitStack() as ends:
        ends.callback(screen.end)
        screen.until(lambda text: "no pulls" in text, "frame")
        daemon.signal(signal.SIGKILL)
        screen.until(lambda text: "what is shown is old" in text, "note")
        again = run("--listen", address, daemon=True)
        again.until(lambda: "listens" in again.err, "listening")
        served = serve(run, weights, "m", address).json()
        screen.until(lambda text: served["endpoint"] in text, "source of the new one")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(20) == EXIT_OK


def test_top_of_a_name_that_is_not_listed_names_the_nearest(
    run: Run, coordinator: str, weights: Path
) -> None:
    serve(run, weights, "small", coordinator)
    screen = Screen("top", "smal", "--coordinator", coordinator)
    with contextlib.ExitStack() as ends:
        ends.callback(screen.end)
        screen.until(lambda text: "no sources of smal" in text, "what is not there")
        assert "nearest name" in screen.text and "small" in screen.text
        serve(run, weights, "smal", coordinator)
        screen.until(lambda text: re.search("smal .*origin", text), "its source")
