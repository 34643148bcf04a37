"""Refuses folders that other users could put code into."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mx import users
from mx.errors import ConfigError

_MAX_LINKS = 40


def check_private(folder: Path) -> None:
    """Refuse a folder that other users could put code into.

    Args:
        folder: The folder. If it does not exist, the folders on the way to it that do are checked.

    Raises:
        ConfigError: It, or a folder or link on the way to it, belongs to another user than this
            process's and root, or others may write to it. A folder on the way may be sticky, as
            /tmp is.
    """
    found = _checked_way(folder)
    if found is not None:
        _check_owned(found, last=True)


def check_way(file: Path) -> None:
    """Refuse a file that other users could replace.

    Args:
        file: The file. Its own owner and mode are not checked, nor whether it exists.

    Raises:
        ConfigError: A folder or link on the way to it is another user's than this process's and
            root, or others may write to one that is not sticky.
    """
    _checked_way(file, to_file=True)


def _checked_way(path: Path, *, to_file: bool = False) -> Path | None:
    """Return where a path leads, through folders and links that were checked; None if nothing is
    there."""
    waiting = list(reversed(path.absolute().parts))
    at = Path(waiting.pop())
    links = 0
    _check_owned(at, last=False)
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at.parent
            continue
        at = at / part
        try:
            status = at.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{at} could not be looked at: {error.strerror}") from error
        if not stat.S_ISLNK(status.st_mode):
            if waiting or not to_file:
                _check_owned(at, last=False)
            continue
        links += 1
        if not users.is_own(status.st_uid, or_root=True) or links > _MAX_LINKS:
            raise ConfigError(f"{at} is a link of another user", hint="name another folder")
        target = Path(os.readlink(at))
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        at = Path("/") if target.is_absolute() else at.parent
    return at


def _check_owned(folder: Path, *, last: bool) -> None:
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a folder", hint="name another folder")
    if not users.is_own(status.st_uid, folder, or_root=not last):
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid}, who could put something else there",
            hint="name one in a folder of this user",
        )
    if mode & 0o022 and (last or not mode & stat.S_ISVTX):
        raise ConfigError(
            f"other users may write to {folder}: its mode is {mode:04o}, and caches are code",
            hint=f"chmod go-w {folder}, if no other user has written to it; else name another",
        )


def private_folder(folder: Path) -> Path:
    """Return a folder's absolute path, once it is there for this user alone.

    Args:
        folder: The folder, which is made if it is missing, with those on the way to it.

    Raises:
        ConfigError: As `check_private`, or it can't be made.
    """
    folder = folder.absolute()
    check_private(folder)
    try:
        for each in (*reversed(folder.parents), folder):  # none by the umask
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be made: {error.strerror}", hint="name a folder of this user"
        ) from error
    check_private(folder)
    return folder
