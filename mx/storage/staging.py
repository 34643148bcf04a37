"""A folder that is filled beside its final place and appears there whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from mx import forks
from mx.errors import CapacityError, ConfigError
from mx.storage.osfile import write_error
from mx.units import format_bytes

_SUFFIX = ".mx-partial"


def _is_staged(fd: int, link: str) -> bool:
    """Is this descriptor the lock, or of what is being written?"""
    return any(part.startswith(".") and part.endswith(_SUFFIX) for part in link.split("/"))


forks.recognise(_is_staged)


class Staging:
    """`.NAME.mx-partial` beside `out`, held under a lock while this process fills it: `files` is
    what appears at `out`, `journal` whatever the caller keeps beside.

    The lock (flock, on the folder itself) dies with the process, so the next run for the same
    `out` can tell a killed run's leftovers, which it goes on from or clears, from a running one's,
    which it leaves alone. Raises ConfigError where `out` is in use or no place for a folder,
    OutputError or CapacityError where the file system refuses.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.parent / f".{self.out.name}{_SUFFIX}"
        self.files = self.folder / "files"
        self.journal = self.folder / "journal"
        self._made: list[Path] = []  # parents, innermost last
        self._fd = -1
        _check_free(self.out)
        try:
            self._make_parents()
            self._lock()
        except OSError as error:
            self.discard()
            raise write_error(error, Path(error.filename or self.folder)) from error
        except BaseException:
            self.discard()
            raise

    def clear(self) -> None:
        """Begin with empty `files`, whatever an earlier run left. Raises OSError."""
        with os.scandir(self.folder) as leftovers:
            for entry in leftovers:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        self.files.mkdir()

    def left_over(self, sizes: Mapping[str, int]) -> bool:
        """Are just these ordinary files there, of these sizes, this user's and under no other
        name? What else there is is removed; side files are written again. Raises OSError."""
        found: set[str] = set()
        inner: list[Path] = []
        if not _is_folder(self.files):
            return False
        for root, folders, names in os.walk(self.files):
            inner += [Path(root, name) for name in folders]
            if not all(_is_folder(Path(root, name)) for name in folders):
                return False
            for name in names:
                path = Path(root, name)
                status, file = path.lstat(), str(path.relative_to(self.files))
                alone = status.st_nlink == 1 and status.st_uid == os.geteuid()
                if not stat.S_ISREG(status.st_mode) or not alone:
                    return False
                if file not in sizes:
                    path.unlink()
                elif status.st_size == sizes[file]:
                    found.add(file)
        for folder in reversed(inner):
            if not os.listdir(folder):
                folder.rmdir()
        return len(found) == len(sizes)

    def require(self, nbytes: int) -> None:
        """Raise CapacityError unless the file system has `nbytes` bytes free for this user, beyond
        what `files` takes already."""
        taken = (path.lstat() for path in self.files.rglob("*"))
        nbytes -= sum(s.st_blocks * 512 for s in taken if stat.S_ISREG(s.st_mode))
        status = os.statvfs(self.folder)
        free = status.f_bavail * status.f_frsize
        if nbytes > free:
            raise CapacityError(
                f"{self.out} needs {format_bytes(nbytes)}, and its disk has "
                f"{format_bytes(free)} free",
                hint="free space or name an --out on another disk",
            )

    def publish(self) -> None:
        """Make `files` durable and rename them to `out`. Raises OSError, or ConfigError if
        something has appeared at `out` meanwhile; then all is still there."""
        for root, _, _ in os.walk(self.files):
            _sync(Path(root))
        try:
            os.rename(self.files, self.out)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _check_free(self.out)
            raise
        self._made.clear()
        self.discard()
        _sync(self.out.parent)

    def release(self) -> None:
        """Leave everything where it is, for another run. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._made.clear()

    def leave(self) -> None:
        """As it was found: after this was only made to see whether it can be."""
        if self._fd >= 0 and os.listdir(self.folder):
            self.release()
        else:
            self.discard()

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


def _is_folder(path: Path) -> bool:
    """And no link to one?"""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


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
