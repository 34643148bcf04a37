"""A folder that is filled beside its final place and appears there whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

from mx.errors import CapacityError, ConfigError
from mx.storage.osfile import write_error
from mx.units import format_bytes


class Staging:
    """`.NAME.mx-partial` beside `out`, held under a lock while this process fills it.

    The lock (flock, on the folder itself) dies with the process, so the next run for the same
    `out` can tell a killed run's leftovers, which it removes, from a running one's, which it
    leaves alone. Raises ConfigError where `out` is in use or no place for a folder, OutputError
    or CapacityError where the file system refuses.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.parent / f".{self.out.name}.mx-partial"
        self._made: list[Path] = []  # parents, innermost last
        self._fd = -1
        _check_free(self.out)
        try:
            self._make_parents()
            self._lock()
            with os.scandir(self.folder) as leftovers:  # of a run that was killed
                for entry in leftovers:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
        except OSError as error:
            self.discard()
            raise write_error(error, Path(error.filename or self.folder)) from error
        except BaseException:
            self.discard()
            raise

    def require(self, nbytes: int) -> None:
        """Raise CapacityError unless the file system has `nbytes` bytes free for this user."""
        status = os.statvfs(self.folder)
        free = status.f_bavail * status.f_frsize
        if nbytes > free:
            raise CapacityError(
                f"{self.out} needs {format_bytes(nbytes)}, and its disk has "
                f"{format_bytes(free)} free",
                hint="free space or name an --out on another disk",
            )

    def publish(self) -> None:
        """Make the folder durable and rename it to `out`. Raises OSError, or ConfigError if
        something has appeared at `out` meanwhile; then the folder is still there."""
        for root, _, _ in os.walk(self.folder):
            _sync(Path(root))
        try:
            os.rename(self.folder, self.out)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _check_free(self.out)
            raise
        os.close(self._fd)
        self._fd = -1
        self._made.clear()
        _sync(self.out.parent)

    def discard(self) -> None:
        """Remove the folder, and the parents that were made for it. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1
        while self._made:
            try:
                self._made.pop().rmdir()
            except OSError:  # someone else uses it by now
                return

    def _make_parents(self) -> None:
        missing = []
        parent = self.out.parent
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made.append(parent)

    def _lock(self) -> None:
        while True:
            self.folder.mkdir(mode=0o777, exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.folder, flags)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise ConfigError(
                    f"another mx is writing to {self.out} right now",
                    hint="wait for it, stop it, or name another --out",
                ) from None
            # Whoever held the lock may have removed or renamed the folder just before.
            if self.folder.exists() and os.path.samestat(os.fstat(fd), os.stat(self.folder)):
                self._fd = fd
                return
            os.close(fd)


def _check_free(out: Path) -> None:
    if os.path.ismount(out):
        raise ConfigError(
            f"{out} is where a disk is mounted, and can't be replaced in one step",
            hint=f"name a folder in it: --out {out}/NAME",
        )
    if out.is_dir():
        if os.listdir(out):
            raise ConfigError(f"{out} is not empty", hint="remove it, or name another --out")
    elif out.exists():
        raise ConfigError(f"{out} is a file", hint="name a folder that is not there yet")


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
