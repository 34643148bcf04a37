"""Locks where flock works, and claims where it does not: of several that try at once one has it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mx.storage import locks
from mx.storage.folder_index import locked
from mx.storage.locks import Lock
from mx.users import BOOT_ID, namespace, process_start_ticks
from tests.support.daemon import ROOT
from tests.support.disks import other_disk

#: Tries for a lock each time it is told to, and says whether it has it; then releases it.
_TRIES = """
import os, sys
from mx.storage.locks import Lock
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "try":
        folder = os.open(sys.argv[1], os.O_RDONLY)
        try:
            lock = Lock(folder, "claim", folder)
            print("has it", flush=True)
        except BlockingIOError:
            os.close(folder)
            print("not", flush=True)
    else:
        lock.release()
        os.close(folder)
        print("released", flush=True)
"""
#: A process of another machine, which no pid here tells of.
_ELSEWHERE = "5fb2cd17-0b4c-4c0c-9b4e-7d7b0b1f9d5a 4026531836 7 99 0123456789abcdef"

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture(params=[0, errno.ENOSYS, errno.ENOLCK], ids=["flock", "ENOSYS", "ENOLCK"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start a process that tries for a lock, on a disk with and without flock."""
    disk = other_disk(tmp_path, flock=request.param) if request.param else {}
    place = tmp_path / "place"
    place.mkdir()
    started: list[subprocess.Popen[str]] = []

    def started_one() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _TRIES, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **disk},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield started_one
    for process in started:
        process.kill()
        process.communicate()


def told(word: str, *processes: subprocess.Popen[str]) -> list[str]:
    """Tell processes something at once, and return what they say."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in processes if process.stdout]


def tried(*processes: subprocess.Popen[str]) -> list[str]:
    """Have processes try at once, and return what they say."""
    return told("try", *processes)


def test_one_of_several_has_it(start: Start) -> None:
    processes = [start() for _ in range(4)]
    for _ in range(20):
        said = tried(*processes)
        assert sorted(said) == ["has it", "not", "not", "not"]
        owner = processes[said.index("has it")]
        assert tried(*(each for each in processes if each is not owner)) == ["not"] * 3
        assert told("release", owner) == ["released"]


def test_one_of_several_takes_it_from_a_killed_one(start: Start) -> None:
    processes = [start() for _ in range(4)]
    for _ in range(5):
        dead = start()
        assert tried(dead) == ["has it"]
        dead.kill()  # not reaped yet: it is a zombie
        deadline_s = time.monotonic() + 30
        while (said := tried(*processes)) == ["not"] * 4 and time.monotonic() < deadline_s:
            pass  # it dies, or several met while they took it
        assert sorted(said) == ["has it", "not", "not", "not"]
        assert told("release", processes[said.index("has it")]) == ["released"]


def test_a_stopped_process_keeps_it(start: Start) -> None:
    stopped, other = start(), start()
    assert tried(stopped) == ["has it"]
    stopped.send_signal(signal.SIGSTOP)
    assert tried(other) == ["not"]


# -- claims of processes elsewhere -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A folder on a disk without flock."""

    def missing(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def claim(folder: Path, text: str, silent_s: float) -> Path:
    path = folder / "claim"
    path.write_text(text)
    then_s = time.time() - silent_s
    os.utime(path, (then_s, then_s))
    return path


@pytest.mark.parametrize(
    "text", [_ELSEWHERE, "", "torn 1", "5fb2cd17 x y z 0"], ids=["far", "empty", "torn", "strange"]
)
def test_a_silent_claim_may_be_taken(text: str, folder: int, tmp_path: Path) -> None:
    claim(tmp_path, text, locks.SILENT_S / 2)
    with pytest.raises(BlockingIOError):
        Lock(folder, "claim", folder)
    path = claim(tmp_path, text, locks.SILENT_S + 5)
    lock = Lock(folder, "claim", folder)
    assert path.read_text() != text
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_another_process_has_by_now(folder: int, tmp_path: Path) -> None:
    pid = os.getpid()
    ours = f"{BOOT_ID} {namespace('pid')} {pid} {process_start_ticks(pid)} 00"
    claim(tmp_path, ours, 1000)  # its process runs, however silent
    with pytest.raises(BlockingIOError):
        Lock(folder, "claim", folder)
    claim(tmp_path, f"{BOOT_ID} {namespace('pid')} {pid} 1 00", 0)
    Lock(folder, "claim", folder).release()


def test_the_owner_writes_to_its_claim(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    lock = Lock(folder, "claim", folder)
    path = tmp_path / "claim"
    os.utime(path, (0, 0))
    deadline_s = time.monotonic() + 30
    while path.stat().st_mtime == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert path.stat().st_mtime > 0
    lock.release()
    lock.release()
    assert not path.exists()
    assert "mx-claim" not in {thread.name for thread in threading.enumerate()}


def test_who_was_silent_learns_that_it_was_taken(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(folder, "claim", folder, beats=False)
    lock.check()
    taken = claim(tmp_path, _ELSEWHERE, 0)
    monkeypatch.setattr(locks, "SILENT_S", 0.0)
    with pytest.raises(OSError, match="another machine writes to it now"):
        lock.check()
    lock.release()
    assert taken.read_text() == _ELSEWHERE


def test_several_take_a_silent_claim_at_once(folder: int, tmp_path: Path) -> None:
    """Threads, since a claim is a process's and a lock's alike: exactly one has it, each time."""
    for _ in range(30):
        claim(tmp_path, _ELSEWHERE, locks.SILENT_S + 5)
        start, found = threading.Barrier(4), list[Lock]()

        def take(start: threading.Barrier = start, found: list[Lock] = found) -> None:
            start.wait()
            for _ in range(50):  # who met another that takes it over tries again
                try:
                    found.append(Lock(folder, "claim", folder))
                except BlockingIOError:
                    continue
                return

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1
        found[0].release()
        assert list(tmp_path.iterdir()) == []


def test_the_index_of_folders_is_locked(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mx.storage.folder_index.LOCK_S", 0.05)
    with locked(folder, "x.json"), pytest.raises(TimeoutError), locked(folder, "x.json"):
        pass
    with locked(folder, "x.json"):
        pass
