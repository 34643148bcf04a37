"""Key files: 32 random bytes that only their owner may read. Made once, whichever process is first.

A file is opened without following a link, and believed only if it is a regular file of this user
that no other may read or write. It is made under another name and then linked to its own, so that
no process reads a part of it, and of processes that make it at the same time all get the same one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path

from mx import users
from mx.errors import ConfigError
from mx.log import event

log = logging.getLogger(__name__)

KEY_BYTES = 32
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


#: The most bytes of a file with certificates.
_MOST_BYTES = 1 << 20


def read(path: Path, nbytes: int = KEY_BYTES) -> bytes:
    """Return the key in a file.

    Args:
        path: The file.
        nbytes: How many it has; 0 for any number, up to a MiB.

    Raises:
        FileNotFoundError: There is none.
        OSError: It can't be opened.
        ConfigError: It is not a key file, or others may have read or written it.
    """
    try:
        fd = os.open(path, _READ)  # neither a link nor the writer of a FIFO is waited for
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise ConfigError(
            f"the key file {path} is a link, or no file",
            hint="name a key file of your own, not a link to one",
        ) from error
    try:
        status = os.fstat(fd)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the key file {path} is not a file", hint="name a file")
        if not users.is_own(status.st_uid, fd):
            raise ConfigError(
                f"the key file {path} belongs to user {status.st_uid}, and this process is of user "
                f"{users.own()}",
                hint="copy it to a file of this user with mode 0600",
            )
        if mode & 0o077:
            raise ConfigError(
                f"other users may use the key file {path}: its mode is {mode:04o}",
                hint=f"chmod 600 {path}, if no other user has read it; else make a new one",
            )
        data = os.read(fd, _MOST_BYTES)
        if len(data) != status.st_size or nbytes not in (0, status.st_size):
            raise ConfigError(
                f"the key file {path} has {status.st_size} bytes, and a key {nbytes}",
                hint="make one with `mx keygen FILE`",
            )
        return data
    finally:
        os.close(fd)


def make(path: Path, key: bytes = b"") -> bytes:
    """Make a key file, and its folder if that is missing; return the key.

    Args:
        path: The file.
        key: The key; b"" for a random one.

    Raises:
        FileExistsError: There is a file of that name.
        OSError: It can't be kept there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = key or os.urandom(KEY_BYTES)
    temporary = path.parent / f".{path.name}.{os.urandom(8).hex()}"
    fd = os.open(temporary, _MAKE, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            if os.write(fd, key) != len(key):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return key


def read_or_make(path: Path) -> bytes:
    """Return the key in a file, which is made if there is none.

    Raises:
        ConfigError: As `read`.
        OSError: It can't be kept there.
    """
    try:
        return read(path)
    except FileNotFoundError:
        pass
    try:
        return make(path)
    except FileExistsError:  # another process was faster
        return read(path)


def kept(path: Path, *, named: str = "") -> tuple[bytes, str]:
    """Return the key in a file, which is made if there is none and it can be kept there.

    Args:
        path: The file.
        named: Where the user has named it; "" if it is the default one. A file that the user has
            named has to be right.

    Returns:
        The key, and "". If the default file can't be kept: a random key, and why.

    Raises:
        ConfigError: There is a file, and it is not a key file of this user alone; or the one that
            the user has named can't be made.
    """
    try:
        if not named:
            require_own_folder(path)
        missing = not os.path.lexists(path)
        key = read_or_make(path)
        if named and missing:  # perhaps the name is misspelt, and this key another than was meant
            event(log, "key.made", text=f"{named}: there was no key file {path}, and one was made")
        return key, ""
    except OSError as error:
        why = f"{path} can't be kept: {error.strerror or error}"
        if named:
            raise ConfigError(f"{named}: the key file {why}", hint="name another file") from error
        return os.urandom(KEY_BYTES), why
    except ConfigError as error:
        if named:
            error.message = f"{named}: {error.message}"
        raise


def require_own_folder(path: Path) -> None:
    """Raise PermissionError if a default file would be below another user's folder, as with another
    user's HOME: also if this user has folders of its own in there, as root may."""
    folder = next(each for each in path.parents if each.exists())
    _require_owner(folder)
    base = path.parent.parent  # $XDG_STATE_HOME, or ~/.local/state
    home = (base.parent, base.parent.parent) if base.parts[-2:] == (".local", "state") else ()
    for folder in (path.parent, base, *home):
        if folder.exists():
            _require_owner(folder, or_root=True)


def _require_owner(folder: Path, *, or_root: bool = False) -> None:
    status = folder.stat()
    if not users.is_own(status.st_uid, folder, or_root=or_root):
        raise PermissionError(errno.EPERM, f"{folder} belongs to user {status.st_uid}")
