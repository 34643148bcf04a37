"""What this user's folders of weights were found to hold, by the stamps of their files.

A file of the user's alone, in his state folder. An entry says that files of these stamps had this
identity. It is written only for files whose last change was two seconds old when hashing began, on
file systems of this machine: a change in place gives a file another stamp then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mx import users
from mx.contexts import Undo
from mx.core.json_bounds import check_json
from mx.errors import NotAllowedError
from mx.storage.disk_file import Stamp
from mx.storage.locks import Lock

NAME = "folders.json"
#: How long ago files must have been changed when hashing begins, in nanoseconds.
SETTLED_NS = 2_000_000_000
#: How long another process may take that writes a file.
LOCK_S = 20.0
MAX_ENTRIES = 1000
MAX_BYTES = 4 << 20

#: Stamps in order, identity in hexadecimal, when hashing began.
_Entry = tuple[tuple[Stamp, ...], str, int]


class FolderIndex:
    """The index in one folder. Several processes may use it at once."""

    def __init__(self, folder: Path, name: str = NAME) -> None:
        """
        Args:
            folder: The user's state folder of mx. It need not exist.
            name: The name of its file there.
        """
        self._folder = folder
        self._name = name

    def identity_of(self, files: Collection[Stamp]) -> str:
        """Return the identity of the weights in these files, in hexadecimal; "" if it is not known,
        or nothing can be read.

        Args:
            files: The stamps of the files, which were taken when they were open.
        """
        wanted = tuple(sorted(files))
        with contextlib.suppress(OSError, NotAllowedError):
            fd = opened(self._folder, make=False)
            try:
                for stamps, identity, began_ns in reversed(_read(fd, self._name)):
                    if stamps == wanted and _settled(stamps, began_ns):
                        return identity
            finally:
                os.close(fd)
        return ""

    def record(self, files: Collection[Stamp], identity: str, began_ns: int) -> bool:
        """Remember what these files hold. Returns False if it was not written: the files
        may have changed meanwhile.

        Args:
            files: Their stamps, the same before and after they were hashed.
            identity: What was found, in hexadecimal.
            began_ns: When hashing began, in Unix time.

        Raises:
            NotAllowedError: Others may use the index or its folder.
            OSError: It can't be written.
        """
        stamps = tuple(sorted(files))
        if not _settled(stamps, began_ns):
            return False
        fd = opened(self._folder, make=True)
        try:
            with locked(fd, self._name):
                entries = [each for each in _read(fd, self._name) if each[0] != stamps]
                _write(fd, self._name, [*entries, (stamps, identity, began_ns)])
        finally:
            os.close(fd)
        return True


_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def opened(folder: Path, *, make: bool) -> int:
    """Open a folder of this user's alone, which is made if it is missing and `make` is True.

    Raises:
        NotAllowedError: Others may write to it.
        OSError: It can't be opened or made.
    """
    if make and not folder.exists():
        above = next(each for each in folder.parents if each.exists())
        if not users.is_own(above.stat().st_uid, above):
            raise NotAllowedError(
                f"{above} is another user's", hint="name a folder of yours with XDG_STATE_HOME"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with Undo(os.close, fd):
        status = os.fstat(fd)
        if not users.is_own(status.st_uid, fd) or status.st_mode & 0o022:
            raise NotAllowedError(
                f"others may write to {folder}",
                hint="make it yours alone (chmod 700), or name another XDG_STATE_HOME",
            )
    return fd


@contextlib.contextmanager
def locked(folder: int, name: str) -> Iterator[None]:
    """Keep other processes from writing a file in an opened folder, once they have ended that. One
    that was stopped is not waited for longer than `LOCK_S`. Raises as `read`."""
    lock = os.open(f".{name}.lock", os.O_RDWR | os.O_CREAT | _SAFE, 0o600, dir_fd=folder)
    try:
        _check_private(lock, name)
        until_s = time.monotonic() + LOCK_S
        while True:
            try:
                held = Lock(lock, f".{name}.claim", folder, beats=False)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f"another process has had {name} too long"
                    ) from None
            time.sleep(0.01)
        try:
            yield
        finally:
            held.release()
    finally:
        os.close(lock)


def read(folder: int, name: str, most: int) -> bytes:
    """Return up to `most` bytes and one of a file in an opened folder.

    Raises:
        NotAllowedError: Others may use it.
        OSError: It can't be read.
    """
    fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=folder)
    try:
        _check_private(fd, name)
        with open(fd, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(fd)


def write(folder: int, name: str, data: bytes) -> None:
    """Put a file into an opened folder, in the place of one of that name. Raises OSError."""
    made = f".{name}.{secrets.token_hex(8)}"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)  # else a host that stops might leave none of it
        os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made, dir_fd=folder)
        raise


def _settled(stamps: tuple[Stamp, ...], began_ns: int) -> bool:
    """Return True if each file's last change was old enough when hashing began."""
    return bool(stamps) and all(each[4] + SETTLED_NS <= began_ns for each in stamps)


def _check_private(fd: int, name: str) -> None:
    status = os.fstat(fd)
    if (
        not stat.S_ISREG(status.st_mode)
        or not users.is_own(status.st_uid, fd)
        or stat.S_IMODE(status.st_mode) & 0o077
        or status.st_nlink > 1
    ):
        raise NotAllowedError(f"others may use {name}", hint="remove it")


def _read(folder: int, name: str) -> list[_Entry]:
    """Return the entries, oldest first; none if the index is not there, or is not an index."""
    try:
        data = read(folder, name, MAX_BYTES)
    except FileNotFoundError:
        return []
    try:
        if len(data) > MAX_BYTES:
            return []
        check_json(data)
        return [_entry(each) for each in json.loads(data)["folders"]][-MAX_ENTRIES:]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []  # written anew with the next entry


def _entry(found: Any) -> _Entry:
    stamps, identity, began_ns = found
    numbers = [number for stamp in stamps for number in stamp]
    if any(type(each) is not int for each in (*numbers, began_ns)) or len(identity) != 64:
        raise ValueError("this is not an entry")
    bytes.fromhex(identity)
    return tuple(sorted((a, b, c, d, e) for a, b, c, d, e in stamps)), identity, began_ns


def _write(folder: int, name: str, entries: list[_Entry]) -> None:
    entries = entries[-MAX_ENTRIES:]
    while len(data := json.dumps({"folders": entries}).encode()) > MAX_BYTES:
        entries = entries[len(entries) // 2 or 1 :]
    write(folder, name, data)


def settles_in_s(files: Collection[Stamp]) -> float:
    """Return after how many seconds files are old enough to be hashed for the index."""
    newest = max((each[4] for each in files), default=0)
    return max(0.0, (newest + SETTLED_NS - time.time_ns()) / 1e9)
