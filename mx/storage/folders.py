"""Opens folders and files by descriptor, without following links or resolving a path twice."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mx import users

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC
#: As many as the kernel follows.
_MOST_LINKS = 40


def open_folder(name: str, parent: int | None = None) -> int:
    """Return a descriptor of the folder `name`; the caller closes it.

    Args:
        name: A path, or one name below `parent`.
        parent: A descriptor of the folder that holds it.

    Raises:
        OSError: It does not exist, or is not a folder (a link to a folder is not one).
    """
    return os.open(name, _FOLDER, dir_fd=parent)


@contextmanager
def opened(name: str, parent: int | None = None) -> Iterator[int]:
    """Give a descriptor as `open_folder` does, and close it at the end of the block."""
    fd = open_folder(name, parent)
    try:
        yield fd
    finally:
        os.close(fd)


class ForeignLinkError(Exception):
    """A path leads through a link of another user, `uid`, who may point it elsewhere."""

    def __init__(self, path: str, uid: int) -> None:
        super().__init__(path)
        self.path = path
        self.uid = uid


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A path without links: `below` names what is missing under the folder `folder`, and then the
    last name of the path, whether that exists or not. `fd` is a descriptor of that folder, which
    the caller closes; it allows no more than to open what is below."""

    fd: int
    folder: str
    below: tuple[str, ...]


def resolve(path: str) -> ResolvedPath:
    """Follow the links in a path as the kernel does, but none that belongs to a user other than
    this one and root. What was checked is what is followed.

    Args:
        path: The path; what it names need not exist.

    Raises:
        ForeignLinkError: A link in it belongs to another user.
        OSError: It can't be followed.
    """
    ahead = _names(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    folder: list[str] = []
    links = 0
    at = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while ahead:
            name = ahead.popleft()
            if name == "..":
                at = _moved(at, os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=at))
                del folder[-1:]
                continue
            try:
                found = os.open(name, os.O_PATH | _FILE, dir_fd=at)
            except FileNotFoundError:
                return _below(at, folder, [name, *ahead])
            with _closing(found):
                status = os.fstat(found)
                if stat.S_ISLNK(status.st_mode):
                    if not users.is_own(status.st_uid, or_root=True):
                        raise ForeignLinkError("/" + "/".join([*folder, name]), status.st_uid)
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    target = os.readlink("", dir_fd=found)
                    if target.startswith("/"):
                        folder.clear()
                        at = _moved(at, os.open("/", os.O_PATH | os.O_CLOEXEC, dir_fd=at))
                    ahead.extendleft(reversed(_names(target)))
                elif not ahead:
                    return _below(at, folder, [name])
                elif not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                else:
                    at = _moved(at, os.dup(found))
                    folder.append(name)
        name = folder.pop() if folder else ""  # it ends with "..", or is a link to "/"
        at = _moved(at, os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=at))
        return _below(at, folder, [name] if name else [])
    except BaseException:
        os.close(at)
        raise


def _names(path: str) -> deque[str]:
    return deque(name for name in path.split("/") if name not in ("", "."))


def _moved(before: int, now: int) -> int:
    os.close(before)
    return now


def _below(fd: int, folder: list[str], names: list[str]) -> ResolvedPath:
    rest = os.path.normpath("/".join(names)) if names else "."
    if rest == "." or rest.startswith(".."):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return ResolvedPath(fd, "/" + "/".join(folder), tuple(rest.split("/")))


@contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def open_file(root: int, path: str, flags: int) -> int:
    """Return a descriptor of the file `path` below the folder `root`; the caller closes it.

    Args:
        root: A descriptor of a folder.
        path: A relative path with forward slashes that `bad_path` accepts.
        flags: Flags of `os.open`; with O_CREAT missing folders of `path` are created too.

    Raises:
        OSError: As `os.open`; also if a folder of `path` is a link.
    """
    *folders, name = path.split("/")
    at = os.dup(root)
    try:
        for folder in folders:
            if flags & os.O_CREAT and find(folder, at) is None:
                os.mkdir(folder, dir_fd=at)
            at, before = open_folder(folder, at), at
            os.close(before)
        return os.open(name, flags | _FILE, 0o666, dir_fd=at)
    finally:
        os.close(at)


def find(name: str, parent: int) -> os.stat_result | None:
    """Return the status of `name` below `parent`, of a link itself; None if there is nothing."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_at(fd: int, name: str, parent: int) -> bool:
    """Return True if `name` below `parent` is the open folder or file `fd`."""
    status = find(name, parent)
    return status is not None and os.path.samestat(status, os.fstat(fd))


def empty(fd: int, *, but: str, ignore_errors: bool = False) -> None:
    """Remove everything in the open folder `fd`, but what has this name.

    Raises:
        OSError: Something can't be removed, unless `ignore_errors`.
    """
    for name in os.listdir(fd):
        if name == but:
            continue
        try:
            status = find(name, fd)
            if status is not None and stat.S_ISDIR(status.st_mode):
                shutil.rmtree(name, dir_fd=fd, ignore_errors=ignore_errors)
            elif status is not None:
                os.unlink(name, dir_fd=fd)
        except OSError:
            if not ignore_errors:
                raise


def is_private(found: int, parent: int) -> bool:
    """Return True if only this user may use a file or folder.

    Some file systems report another owner or mode than the one that was set (a squashed root,
    CIFS). In doubt a new file, held by its descriptor, shows what the file system reports.

    Args:
        found: A descriptor of the file or folder.
        parent: A descriptor of the folder that holds it.

    Raises:
        OSError: The new file can't be created.
    """
    status = os.fstat(found)
    ours, loose = users.is_own(status.st_uid, found), stat.S_IMODE(status.st_mode) & 0o077
    if ours and not loose:
        return True
    name = f".mx-{secrets.token_hex(8)}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FILE, 0o600, dir_fd=parent)
    try:
        own = os.fstat(fd)
        alike = users.have_one_owner(status, own) and ours == users.is_own(own.st_uid, fd)
        if is_at(fd, name, parent):
            os.unlink(name, dir_fd=parent)
    finally:
        os.close(fd)
    return alike and (not loose or bool(stat.S_IMODE(own.st_mode) & 0o077))


def others_may_replace(parent: int) -> bool:
    """Return True if every user may rename every entry of this folder."""
    mode = os.fstat(parent).st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def sync(root: int) -> None:
    """Make a folder and all folders below it durable. Raises OSError."""
    for _, _, _, fd in os.fwalk(".", dir_fd=root):
        sync_entries(fd)


def sync_entries(folder: int) -> None:
    """Make an open folder's own entries durable, where its file system has that for folders.
    Raises OSError."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
