"""Service managers are told when a command serves, and when it ends (sd_notify)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx import api
from tests.support.commands import Run, environment, free_port, start_coordinator

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """A service manager's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(60)
        yield sock


def told(sock: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in sock.recv(4096).decode().splitlines())


def test_a_coordinator_is_ready_once_it_answers(run: Run, tmp_path: Path) -> None:
    where = str(tmp_path / "notify")
    with manager(where) as sock:
        address = f"127.0.0.1:{free_port()}"
        command = run("--listen", address, daemon=True, env=environment(NOTIFY_SOCKET=where))
        assert told(sock) == {"READY": "1", "STATUS": f"listening on {address}"}
        assert api.list_models(coordinator=address) == []  # at once
        command.signal(signal.SIGTERM)
        assert told(sock) == {"STOPPING": "1"}
        assert command.wait() == 0


def test_a_source_is_ready_once_it_is_registered(run: Run, checkpoint: Path) -> None:
    name = f"mx-test-{os.getpid()}"
    coordinator, _ = start_coordinator(run)
    with manager(f"\0{name}") as sock:  # in the abstract namespace
        env = environment(NOTIFY_SOCKET=f"@{name}")
        command = run(
            "serve", str(checkpoint), "--model", "m", "--coordinator", coordinator, env=env
        )
        assert told(sock) == {"READY": "1", "STATUS": "serving m"}
        (listed,) = api.list_models(coordinator=coordinator)
        assert listed.sources == 1
        command.signal(signal.SIGINT)
        assert told(sock) == {"STOPPING": "1"}
        assert command.wait() == 0


def test_a_cache_is_ready_once_it_listens(run: Run, tmp_path: Path) -> None:
    coordinator, _ = start_coordinator(run)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    where, cache = str(tmp_path / "notify"), str(folder / "cache.sock")
    with manager(where) as sock:
        env = environment(NOTIFY_SOCKET=where)
        at = ("--coordinator", coordinator, "--memory", "64MB", "--cache-socket", cache)
        command = run("serve", "--cache", *at, env=env)
        assert told(sock) == {"READY": "1", "STATUS": f"caching at {cache}"}
        assert run("cache", "--cache-socket", cache).wait() == 0
        command.signal(signal.SIGTERM)
        assert told(sock) == {"STOPPING": "1"}
        assert command.wait() == 0


def test_a_manager_that_is_not_there_stops_nothing(run: Run, tmp_path: Path) -> None:
    for nowhere in (str(tmp_path / "nothing"), "@" + "x" * 200, "\udcff"):
        address = f"127.0.0.1:{free_port()}"
        env = environment(NOTIFY_SOCKET=nowhere)
        command = run("--listen", address, daemon=True, env=env)
        command.until(lambda: "NOTIFY_SOCKET" in command.err, "a word about the manager")  # noqa: B023
        assert api.list_models(coordinator=address) == []
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


def test_a_manager_that_reads_nothing_stops_nothing(run: Run, tmp_path: Path) -> None:
    where = str(tmp_path / "notify")
    with manager(where), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"x" * 512, where)
        address = f"127.0.0.1:{free_port()}"
        command = run("--listen", address, daemon=True, env=environment(NOTIFY_SOCKET=where))
        command.until(lambda: "is not told" in command.err, "a word about the manager")
        assert api.list_models(coordinator=address) == []
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
