"""`--wait`: no source yet, or no longer; the pull goes on when one comes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts
from mx import api
from mx.cli.outcome import EXIT_INTERRUPTED
from mx.errors import (
    EXIT_INCOMPLETE,
    EXIT_NO_SOURCE,
    EXIT_OK,
    ConfigError,
    CoordinatorError,
    IncompleteError,
    UnknownModelError,
)
from tests.integration.halfway import NEAR, SHAPES, Net, kill, net_of
from tests.support.commands import Run, RunIn, free_port, serve, start_coordinator
from tests.support.outcomes import error_of, until
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.long]


# -- at the start ---------------------------------------------------------------------------------


def test_a_pull_that_is_there_first(run: Run, checkpoint: Path) -> None:
    """Before the coordinator, and before the source."""
    address = f"127.0.0.1:{free_port()}"
    with api.pull("m", coordinator=address, wait_s=50) as pull:
        until(lambda: pull.progress().phase == "waiting for a source", "a pull that waits")
        start_coordinator(run, port=int(address.rpartition(":")[2]))
        time.sleep(0.5)
        serve(run, checkpoint, "m", address)
        assert pull.wait(30).layers == 10
        assert same(pull.state_dict(), load_file(checkpoint))


def test_a_named_peer_that_is_not_there_yet(run: Run, checkpoint: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with api.pull("m", peer=address, wait_s=50, attach=False) as pull:
        time.sleep(0.5)
        run(
            "serve", str(checkpoint), "--model", "m", "--listen", address,
            "--coordinator", start_coordinator(run)[0],
        )  # fmt: skip
        assert pull.wait(30).layers == 10


def test_a_wait_in_vain_says_what_was_lacking(run: Run, coordinator: str) -> None:
    with api.pull("m", coordinator=coordinator, wait_s=0.5) as pull:
        error = error_of(pull)
    assert isinstance(error, UnknownModelError)
    assert error.exit_code == EXIT_NO_SOURCE
    assert "(waited 500 ms)" in str(error)
    none_opened = f"127.0.0.1:{free_port()}"
    with api.pull("m", coordinator=none_opened, wait_s=0.5) as pull:
        error = error_of(pull)
    assert type(error) is CoordinatorError
    assert "(waited 500 ms)" in str(error)
    command = run("pull", "m", "--coordinator", coordinator, "--wait", "0.5", "--json")
    assert command.wait() == EXIT_NO_SOURCE
    assert "(waited 500 ms)" in command.err


def test_what_waits_for_a_name_that_is_not_listed_names_the_nearest(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "llama-8b", coordinator)
    command = run("pull", "lama-8b", "--coordinator", coordinator, "--wait", "3")
    assert command.wait() == EXIT_NO_SOURCE
    assert command.err.count("nearest name: llama-8b\n") == 1, command.err
    other = run("pull", "zzz", "--coordinator", coordinator, "--wait", "2")
    assert other.wait() == EXIT_NO_SOURCE
    assert "waiting for a source of zzz" in other.err and "nearest" not in other.err


def test_errors_that_no_waiting_would_mend_end_the_pull_at_once(coordinator: str) -> None:
    with api.pull("m@nothing", coordinator=coordinator, wait_s=600) as pull:
        assert isinstance(error_of(pull), ConfigError)
    with pytest.raises(ConfigError):
        api.pull("m", coordinator=coordinator, wait_s=-1)
    with pytest.raises(ConfigError):
        api.pull("m", coordinator=coordinator, wait_s=float("nan"))


def test_closing_a_pull_that_waits(coordinator: str) -> None:
    with api.pull("m", coordinator=coordinator, wait_s=600) as pull:
        until(lambda: pull.progress().phase == "waiting for a source", "a pull that waits")
    assert pull.report is None


def test_ctrl_c_at_a_pull_that_waits(run: Run, coordinator: str) -> None:
    command = run("pull", "m", "--coordinator", coordinator, "--wait", "600")
    command.until(lambda: "waiting for a source" in command.err, "a pull that waits")
    command.signal(signal.SIGINT)
    assert command.wait() == EXIT_INTERRUPTED
    assert "Traceback" not in command.err


# -- in the middle, between two hosts -------------------------------------------------------------


@pytest.fixture
def net(hosts: Hosts, run_in: RunIn, tmp_path: Path) -> Net:
    return net_of(hosts, run_in, tmp_path)


@pytest.mark.parametrize(("port", "named"), [(7701, False), (7702, False), (7701, True)])
def test_the_only_source_is_killed_and_started_again(
    net: Net, tmp_path: Path, port: int, named: bool
) -> None:
    net.start_coordinator()
    source = net.serve(7701)
    where = f"peer={net.link.address(NEAR)}:7701" if named else "peer"
    before = net.sent_nbytes()
    pull = net.pull("--wait", "60", "--out", str(tmp_path / "out"), "--from", where)
    net.until_sent(pull, 0.6)
    kill(source)
    time.sleep(0.5)
    net.serve(port)
    report = pull.json()
    assert pull.wait() == EXIT_OK
    assert same(load_file(tmp_path / "out" / "model.safetensors"), load_file(net.weights))
    assert sum(path["bytes"] for path in report["paths"]) == net.nbytes
    # What came from one address is one path, though two processes gave it.
    assert len(report["paths"]) == (1 if port == 7701 else 2)
    assert report["retries"] > 0
    # What had come is not read again; what was on its way is.
    assert net.sent_nbytes() - before < 1.4 * net.nbytes


def test_the_only_source_is_stopped_and_another_comes(net: Net) -> None:
    net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "60")
    net.until_sent(pull, 0.3)
    source.signal(signal.SIGSTOP)
    net.serve(7702)
    report = pull.json()
    assert {path["source"].rpartition(":")[2] for path in report["paths"]} == {"7701", "7702"}


def test_a_source_that_comes_during_a_pull_takes_over(net: Net) -> None:
    """Without `--wait`: it is found beside the one that is being read."""
    net.start_coordinator()
    source = net.serve(7701)
    net.hosts.throttle(net.link, 10, NEAR)
    pull = net.pull()
    net.until_sent(pull, 0.1)
    net.serve(7702)
    net.until_sent(pull, 0.15)
    kill(source)
    net.hosts.throttle(net.link, 100, NEAR)
    report = pull.json()
    assert {path["source"].rpartition(":")[2] for path in report["paths"]} == {"7701", "7702"}


def test_a_source_that_was_stopped_goes_on(net: Net) -> None:
    net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "60", "--stall-timeout-s", "1")
    net.until_sent(pull, 0.5)
    source.signal(signal.SIGSTOP)
    time.sleep(6)  # longer than any pull waits for a stopped source
    assert pull.process.poll() is None
    source.signal(signal.SIGCONT)
    assert pull.json()["bytes"] == net.nbytes


def test_all_other_processes_are_killed_and_come_back(net: Net) -> None:
    """The coordinator remembers nothing of before."""
    coordinator = net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "60")
    net.until_sent(pull, 0.5)
    kill(coordinator)
    kill(source)
    time.sleep(1)
    net.start_coordinator()
    net.serve(7702)
    assert pull.json()["bytes"] == net.nbytes
    assert pull.wait() == EXIT_OK


def test_several_pulls_wait_for_the_same_source(net: Net) -> None:
    """They exchange what they have, and read the rest from the new one."""
    net.start_coordinator()
    source = net.serve(7701)
    pulls = [net.pull("--wait", "60") for _ in range(2)]
    net.until_sent(pulls[0], 0.8)
    kill(source)
    time.sleep(1)
    net.serve(7702)
    for pull in pulls:
        assert pull.json()["bytes"] == net.nbytes
        assert pull.wait() == EXIT_OK


def test_a_wait_in_vain_says_how_far_it_came(net: Net) -> None:
    net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "2")
    net.until_sent(pull, 0.5)
    kill(source)
    assert pull.wait(30) == EXIT_INCOMPLETE
    assert "of 10 layers" in pull.err
    assert "no other source came within 2 s" in pull.err
    assert "Traceback" not in pull.err


def test_a_source_of_other_weights_is_not_read_from(net: Net) -> None:
    coordinator = net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "12")
    net.until_sent(pull, 0.5)
    kill(source)
    kill(coordinator)  # which would remember the model of that name
    net.start_coordinator()
    write_checkpoint(net.weights, SHAPES, seed=1)
    net.serve(7702)
    assert pull.wait(60) == EXIT_INCOMPLETE
    assert "no other source came within 12 s" in pull.err


def test_ctrl_c_in_the_middle_of_a_wait(net: Net) -> None:
    net.start_coordinator()
    source = net.serve(7701)
    pull = net.pull("--wait", "600")
    net.until_sent(pull, 0.5)
    kill(source)
    time.sleep(2)
    assert pull.process.poll() is None
    pull.signal(signal.SIGINT)
    assert pull.wait() == EXIT_INTERRUPTED
    assert "Traceback" not in pull.err


def test_without_a_wait_the_end_comes_at_once(
    run: Run, coordinator: str, large_checkpoint: Path
) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, "--max-bandwidth", "200MB/s")
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        next(pull.layers())
        source.signal(signal.SIGKILL)
        error = error_of(pull)
    assert isinstance(error, IncompleteError)
    assert "no other source" not in str(error)
