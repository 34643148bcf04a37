"""Where processes of one host and user meet: a unix socket in a folder that only the user may use.

The folder is /run/user/UID/mx, or /tmp/mx-UID where that does not exist, whatever the environment
says. Its owner and mode are checked, so that who answers there is the same user.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from mx import users
from mx.errors import NotAllowedError

CACHE_SOCKET = "cache.sock"
#: The longest path of a unix socket.
_MOST_CHARS = 107
_ANOTHER = "name a path in a folder of yours with `cache_socket`"


def default_folder() -> Path:
    """Return the folder of this user's sockets. It need not exist."""
    user = users.own()
    run = Path(f"/run/user/{user}")
    with contextlib.suppress(OSError):
        if users.is_own(run.stat(follow_symlinks=False).st_uid, run):
            return run / "mx"
    return Path(f"/tmp/mx-{user}")


def cache_socket(where: str) -> Path:
    """Return the path of the cache's socket.

    Args:
        where: "auto" for the one in the user's folder, or a path.
    """
    return default_folder() / CACHE_SOCKET if where == "auto" else Path(where).absolute()


def make_folder(socket: Path) -> None:
    """Make the folder of a socket, and check it.

    Raises:
        NotAllowedError: The folder can't be made, or others may use it.
    """
    try:
        socket.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NotAllowedError(
            f"the folder {socket.parent} can't be made: {error.strerror}",
            hint=_ANOTHER,
        ) from error
    check_folder(socket)


def check_folder(socket: Path) -> None:
    """Check that only this user may use the folder of a socket.

    Raises:
        NotAllowedError: Others may, it is not a folder, or the path is too long for a socket.
    """
    folder = socket.parent
    try:
        status = folder.stat(follow_symlinks=False)
    except OSError as error:
        raise NotAllowedError(
            f"the folder {folder} can't be used: {error.strerror}", hint=_ANOTHER
        ) from error
    private = users.is_own(status.st_uid, folder) and not stat.S_IMODE(status.st_mode) & 0o077
    if not stat.S_ISDIR(status.st_mode) or not private:
        raise NotAllowedError(
            f"other users may use {folder}, or it is not a folder: a cache's socket would not be "
            "safe there",
            hint="make it yours alone (chmod 700), or name another path with `cache_socket`",
        )
    if len(os.fsencode(socket)) > _MOST_CHARS:
        raise NotAllowedError(
            f"{socket} is longer than the {_MOST_CHARS} bytes that a socket's path may have",
            hint="name a shorter path with `cache_socket`",
        )


def socket_in_use(where: str) -> str:
    """Return the path of the cache's socket, "" if there is no cache or none is to be used.

    Args:
        where: As for `cache_socket`, or "off".

    Raises:
        NotAllowedError: Others may use its folder.
    """
    if where == "off":
        return ""
    socket = cache_socket(where)
    try:
        if not stat.S_ISSOCK(socket.stat().st_mode):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:  # another user may have made the folder
        raise NotAllowedError(f"{socket} can't be used: {error.strerror}", hint=_ANOTHER) from error
    check_folder(socket)
    return str(socket)
