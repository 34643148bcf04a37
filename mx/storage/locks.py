"""Locks of folders and files that several processes may write to, on whatever file system.

The kernel's lock (flock) goes with its process. Some file systems have none, and on those of a
network or of a program (FUSE) other machines may not see it. There a lock is, besides, a *claim*: a
file that is made exclusively, and says which process made it. A claim whose process is gone counts
no more. Of a process elsewhere that can't be known: it writes to its claim every few seconds, and
one that has been silent for a minute may be taken over, of which its owner learns before it writes
on. Who takes over a claim first makes one for that: so of several exactly one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from mx.contexts import Undo
from mx.storage.mounts import is_shared
from mx.users import BOOT_ID, namespace, process_start_ticks

#: How often the owner of a claim writes to it.
BEAT_S = 5.0
#: A claim of a process elsewhere that is silent for so long may be taken over.
SILENT_S = 60.0

#: What file systems without flock say.
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOST_BYTES = 300
#: How often a claim that vanishes meanwhile is made, and how many claims on claims there may be.
_TRIES, _MOST_DEEP = 100, 4


def flock(fd: int, how: int) -> bool:
    """Lock an open file or folder with the kernel's lock.

    Args:
        fd: Its descriptor; the lock goes with it.
        how: As for `fcntl.flock`.

    Returns:
        False if the file system has no such locks.

    Raises:
        BlockingIOError: Another has it.
    """
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True


class Lock:
    """The exclusive lock of an open file or folder; `release` it before that is closed."""

    def __init__(self, fd: int, name: str, folder: int, *, beats: bool = True) -> None:
        """
        Args:
            fd: A descriptor of what is locked.
            name: What the claim is called, where one is needed.
            folder: A descriptor of the folder that it is made in.
            beats: False if the lock is released long before `SILENT_S`.

        Raises:
            BlockingIOError: Another process has the lock, or another lock of this one.
            OSError: It can't be obtained.
        """
        works = flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._claim: _LockFile | None = None
        if not works or is_shared(fd):
            self._claim = _LockFile(folder, name, beats=beats)

    def check(self) -> None:
        """Raise OSError if another machine has taken the lock over."""
        if self._claim is not None and not self._claim.is_held():
            raise OSError(
                errno.ESTALE, "it was left alone for too long, and another machine writes to it now"
            )

    def release(self) -> None:
        """Let others have it. Idempotent; does nothing in a forked child."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()


@dataclass(frozen=True, slots=True)
class _LockClaim:
    """What a claim says, and how long ago it was written to, by the clock of the file system."""

    text: str
    age_s: float

    @property
    def is_dead(self) -> bool:
        try:
            boot, pids, pid, ticks, _ = self.text.split()
            if boot == BOOT_ID and int(pids) == namespace("pid"):
                return process_start_ticks(int(pid)) != int(ticks)
        except ValueError:
            pass  # it is being written, or its process ended before it was
        return self.age_s > SILENT_S


class _LockFile:
    def __init__(self, folder: int, name: str, *, beats: bool) -> None:
        self._name, self._pid = name, os.getpid()
        self._text = _taken(folder, name)
        self._folder = os.dup(folder)
        self._lock = threading.Lock()
        self._is_held, self._beaten_s = True, time.monotonic()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        if beats:
            thread = threading.Thread(target=self._beats, name="mx-claim", daemon=True)
            with Undo(self.release):
                thread.start()
            self._thread = thread

    def is_held(self) -> bool:
        if self._is_held and time.monotonic() - self._beaten_s > SILENT_S / 2:
            self._beat()  # this process was stopped, or its disk was
        return self._is_held

    def _beats(self) -> None:
        while not self._ends.wait(BEAT_S) and self._is_held:
            self._beat()

    def _beat(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._ends.is_set():
                return
            # Not kept open: NFS and FUSE would keep the file, and its folder, after its removal.
            with _opened(self._folder, self._name) as (fd, text):
                self._is_held = text == self._text
                if self._is_held:
                    os.utime(fd)
            self._beaten_s = time.monotonic()

    def release(self) -> None:
        if os.getpid() != self._pid:
            return
        self._ends.set()
        with self._lock, contextlib.suppress(OSError):
            with _opened(self._folder, self._name) as (_, text):
                pass
            if text == self._text:
                os.unlink(self._name, dir_fd=self._folder)
        os.close(self._folder)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _taken(folder: int, name: str, deep: int = 0) -> str:
    """Make a claim, and return what it says. Raises BlockingIOError if there is one."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            return _made(folder, name)
        found = _read(folder, name)
        if found is None:
            continue
        if not found.is_dead or deep == _MOST_DEEP:
            break
        over = f"{name}-{blake3(found.text.encode()).hexdigest()[:16]}"
        _taken(folder, over, deep + 1)
        try:
            # Only who has `over` may remove what was found. Another may have, and be done.
            again = _read(folder, name)
            if again is not None and again.text == found.text and again.is_dead:
                os.unlink(name, dir_fd=folder)
        finally:
            os.unlink(over, dir_fd=folder)
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _made(folder: int, name: str) -> str:
    pid = os.getpid()
    us = (BOOT_ID or "-", namespace("pid"), pid, process_start_ticks(pid), secrets.token_hex(8))
    text = " ".join(map(str, us))
    fresh = f"{name}.{us[-1]}"
    _write(folder, fresh, text)
    try:
        # A process that is killed meanwhile leaves no claim without content, which had to age.
        os.link(fresh, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # there are no such links here
        _write(folder, name, text)
    finally:
        os.unlink(fresh, dir_fd=folder)
    return text


def _write(folder: int, name: str, text: str) -> None:
    """Make a file. Raises FileExistsError."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb", buffering=0) as file:  # some say only at its end that there is no room
            file.write(text.encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[tuple[int, str]]:
    """Give a descriptor of a claim, -1 if there is none, and what it says."""
    try:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=folder)
    except FileNotFoundError:
        yield -1, ""
        return
    try:
        yield fd, os.read(fd, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def _read(folder: int, name: str) -> _LockClaim | None:
    """Return what a claim says; None if there is none."""
    with _opened(folder, name) as (fd, text):
        if fd < 0:
            return None
        written_s = os.fstat(fd).st_mtime
    probe = f"{name}.{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
    try:
        return _LockClaim(text, os.fstat(fd).st_mtime - written_s)
    finally:
        os.close(fd)
        os.unlink(probe, dir_fd=folder)
