"""Fills a folder beside its final place, and renames it there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mx import forks, users
from mx.contexts import Undo
from mx.core.types import Manifest
from mx.errors import CapacityError, ConfigError, OutputError
from mx.storage import folders
from mx.storage.locks import Lock
from mx.storage.osfile import write_error
from mx.units import format_bytes

_SUFFIX = ".mx-partial"
_FILES = "files"
_CLAIM = "lock"
#: How files are called that were removed while they were open, and for how long.
_HIDDEN, _HIDDEN_S = (".nfs", ".fuse_hidden"), 1.0
JOURNAL = "journal"
#: The extended attribute of a folder that says what was pulled there.
_RECORD = "user.mx.pulled"
#: And the one of its tensors: the first bytes of the layout's digest, then those of each root, as
#: many as the file system has room for.
_TENSORS = "user.mx.tensors"
_LAYOUT_BYTES, _ROOT_BYTES = 8, (8, 4, 2)
#: How many times the partial folder is made anew if it vanishes between two steps.
_TRIES = 100

log = logging.getLogger(__name__)


def recorded(folder: Path) -> str:
    """Return what `Staging.record` has recorded on a folder; "" for nothing."""
    try:
        return os.getxattr(folder, _RECORD).decode(errors="replace")
    except OSError:
        return ""


def differing(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names of the tensors that are not what `Staging.record_tensors` has recorded on a
    folder; none where it has no record of tensors of these names and shapes.

    Args:
        folder: What was pulled.
        manifest: Of what it holds now.
    """
    try:
        recorded_as = os.getxattr(folder, _TENSORS)
    except OSError:
        return []
    for nbytes in _ROOT_BYTES:
        if len(recorded_as) == len(_of_tensors(manifest, nbytes)):
            break
    else:
        return []
    if recorded_as[:_LAYOUT_BYTES] != manifest.ref.layout[:_LAYOUT_BYTES]:
        return []
    were = [recorded_as[at : at + nbytes] for at in range(_LAYOUT_BYTES, len(recorded_as), nbytes)]
    now = zip(manifest.layout.tensors, manifest.roots, were, strict=True)
    return [tensor.name for tensor, root, was in now if root[:nbytes] != was]


def _of_tensors(manifest: Manifest, nbytes: int) -> bytes:
    layout = manifest.ref.layout[:_LAYOUT_BYTES]
    return layout + b"".join(root[:nbytes] for root in manifest.roots)


def _is_staged(fd: int, link: str) -> bool:
    """Return True if this descriptor is the lock, or of a file that is being written."""
    return any(part.startswith(".") and part.endswith(_SUFFIX) for part in link.split("/"))


forks.recognise(_is_staged)


class Staging:
    """The folder `.NAME.mx-partial` beside `out`, which this process fills under a lock.

    Its folder `files` is what appears at `out`; its `journal` is for the caller.

    The lock, on the folder itself, dies with the process. The next run for the same `out`
    can therefore tell what a killed run left, which it resumes from or clears, from the folder of
    a running one, which it leaves alone.

    The folder belongs to this user alone (mode 0700); a folder that another user put in its place
    is refused. Everything below it is reached through descriptors, so that a user who may rename
    entries of the parent can't redirect it.

    Raises:
        ConfigError: `out` is in use, or can't be a folder.
        OutputError: The file system refuses, or the partial folder is another user's.
        CapacityError: The disk is full.
    """

    def __init__(self, out: Path) -> None:
        where = _resolve(out)
        self.out = Path(where.folder, *where.below)
        self._name = f".{self.out.name}{_SUFFIX}"
        self.folder = self.out.parent / self._name
        self.files = self.folder / _FILES
        self._made: list[tuple[int, str]] = []  # (its parent's descriptor, name), innermost last
        self._fd = self._files = -1
        self._held: Lock | None = None
        self._parent = where.fd
        with Undo(self.discard), self.errors():
            _check_free(self.out)
            self._open_parent(where.below[:-1])
            self._lock()

    @property
    def fd(self) -> int:
        """A descriptor of the partial folder, which holds the journal."""
        return self._fd

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn system errors inside the block into errors about the output; that this process has
        lost its lock is one."""
        try:
            if self._held is not None:
                self._held.check()
            yield
        except OSError as error:
            # Names are relative to a descriptor; those of files are below `files`.
            name = error.filename if isinstance(error.filename, str) else ""
            path = self.files / name if self._files >= 0 and name else self.out
            raise write_error(error, path) from error

    def warn(self) -> None:
        """Log a warning if another user may rename the output, or a folder that it is in."""
        for folder in self.out.parents:
            status = os.stat(folder)
            if not users.is_own(status.st_uid, folder, or_root=True):
                log.warning(
                    "%s belongs to %s, who may rename or replace its files: name an `out` in a "
                    "folder of yours",
                    folder,
                    _user(status.st_uid),
                )
                return
        if folders.others_may_replace(self._parent):
            log.warning(
                "every user may rename or replace what is in %s: the output is safe only until it "
                "is complete; chmod o-w or +t that folder, or name another `out`",
                self.out.parent,
            )

    def clear(self) -> None:
        """Remove what an earlier run left and begin with empty `files`. Raises OSError."""
        self._close_files()
        folders.empty(self._fd, but=_CLAIM)
        os.mkdir(_FILES, dir_fd=self._fd)
        self._files = folders.open_folder(_FILES, self._fd)

    def left_over(self, sizes: Mapping[str, int]) -> bool:
        """Return True if an earlier run left all of these files, so that they can be resumed.

        Each must be an ordinary file of this user, of that size, with a single name. Other files
        are removed; side files are written again.

        Args:
            sizes: Sizes in bytes by path.

        Raises:
            OSError: The folder can't be read or cleaned.
        """
        self._close_files()
        try:
            self._files = folders.open_folder(_FILES, self._fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise
        own = os.fstat(self._fd)
        found: set[str] = set()
        for root, inner, names, fd in os.fwalk(".", topdown=False, dir_fd=self._files):
            for name in names:
                status, file = os.lstat(name, dir_fd=fd), os.path.normpath(f"{root}/{name}")
                alone = status.st_nlink == 1 and users.have_one_owner(status, own)
                if not stat.S_ISREG(status.st_mode) or not alone:
                    return False
                if file not in sizes:
                    os.unlink(name, dir_fd=fd)
                elif status.st_size == sizes[file]:
                    found.add(file)
            for name in inner:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
                    return False
                with folders.opened(name, fd) as below:
                    left = os.listdir(below)
                if not left:
                    os.rmdir(name, dir_fd=fd)
        return len(found) == len(sizes)

    def open_file(self, path: str, flags: int) -> int:
        """Return a descriptor of the file `path` in `files`, as `folders.open_file` does."""
        return folders.open_file(self._files, path, flags)

    def move_in(self, source: str, path: str) -> None:
        """Move a file of the partial folder to `path` in `files`. Raises OSError."""
        os.close(folders.open_file(self._files, path, os.O_CREAT | os.O_WRONLY))
        os.rename(source, path, src_dir_fd=self._fd, dst_dir_fd=self._files)

    def require(self, nbytes: int) -> None:
        """Check that the file system has room for `files` to grow to `nbytes` bytes.

        Raises:
            CapacityError: Too little is free for this user.
        """
        for _, _, names, fd in os.fwalk(".", dir_fd=self._files):
            nbytes -= sum(os.lstat(name, dir_fd=fd).st_blocks * 512 for name in names)
        status = os.statvfs(self._fd)
        free = status.f_bavail * status.f_frsize
        if nbytes > free:
            raise CapacityError(
                f"{self.out} needs {format_bytes(nbytes)}, and its disk has "
                f"{format_bytes(free)} free",
                hint="free space or name an `out` on another disk",
            )

    def record(self, text: str) -> None:
        """Record on the folder itself what was pulled there, where the file system can (as an
        extended attribute): `recorded` reads it."""
        with contextlib.suppress(OSError):
            os.setxattr(self._files, _RECORD, text.encode())

    def record_tensors(self, manifest: Manifest) -> None:
        """Record what was pulled of each tensor, likewise: `differing` reads it."""
        for nbytes in _ROOT_BYTES:
            with contextlib.suppress(OSError):
                os.setxattr(self._files, _TENSORS, _of_tensors(manifest, nbytes))
                return

    def publish(self) -> None:
        """Make `files` durable and rename them to `out`; `discard` the rest once it is closed.

        Raises:
            OSError: The file system refuses.
            ConfigError: Something has appeared at `out` meanwhile; `files` is unchanged.
            OutputError: A folder was moved meanwhile.
        """
        folders.sync(self._files)
        if not folders.is_at(self._fd, self._name, self._parent):
            self._moved(self.folder)
        if not folders.is_at(self._files, _FILES, self._fd):
            self._moved(self.files)
        try:
            there = os.path.samestat(os.stat(self.out.parent), os.fstat(self._parent))
        except OSError:
            there = False
        if not there:
            self._moved(self.out.parent)
        try:
            os.rename(_FILES, self.out.name, src_dir_fd=self._fd, dst_dir_fd=self._parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _check_free(self.out)
            raise write_error(error, self.out) from error
        if not folders.is_at(self._files, self.out.name, self._parent):
            self._moved(self.out)
        folders.sync_entries(self._parent)
        self._forget_made()

    def release(self) -> None:
        """Unlock the folder and leave it for another run. Idempotent."""
        self._forget_made()
        self._close()

    def leave(self) -> None:
        """Restore what was found, after the folder was made only to see if that is possible."""
        if self._fd >= 0 and set(os.listdir(self._fd)) - {_CLAIM}:
            self.release()
        else:
            self.discard()

    def discard(self) -> None:
        """Remove the folder, and the parents that were made for it. Idempotent."""
        if self._fd >= 0 and self._is_held():
            try:
                folders.empty(self._fd, but=_CLAIM, ignore_errors=True)
                self._unlock()  # last: another run may use the folder from here on
                if folders.is_at(self._fd, self._name, self._parent):
                    self._remove()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    log.warning("%s could not be removed: %s", self.folder, error.strerror)
        self._close()
        with contextlib.suppress(OSError):  # another process uses it meanwhile
            for parent, name in reversed(self._made):
                os.rmdir(name, dir_fd=parent)
        self._forget_made()

    def _remove(self) -> None:
        """Remove the partial folder, once no removed file is kept in it: NFS and FUSE keep one,
        under a hidden name, while it is open, and learn of its end a moment later."""
        until_s = time.monotonic() + _HIDDEN_S
        while time.monotonic() < until_s:
            if not any(name.startswith(_HIDDEN) for name in os.listdir(self._fd)):
                break
            time.sleep(0.01)
        os.rmdir(self._name, dir_fd=self._parent)

    def _moved(self, path: Path) -> NoReturn:
        raise OutputError(
            f"{path} was moved or replaced while it was in use",
            hint="pull again, to an `out` that no other user may change",
        )

    def _forget_made(self) -> None:
        while self._made:
            os.close(self._made.pop()[0])

    def _close_files(self) -> None:
        fd, self._files = self._files, -1
        if fd >= 0:
            os.close(fd)

    def _is_held(self) -> bool:
        try:
            assert self._held is not None
            self._held.check()
        except OSError:
            return False
        return True

    def _unlock(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _close(self) -> None:
        fds, self._fd, self._parent = (self._parent, self._fd), -1, -1
        with contextlib.ExitStack() as ends:  # all of these, also where one fails
            for fd in filter(lambda fd: fd >= 0, fds):
                ends.callback(os.close, fd)
            ends.callback(self._unlock)
            self._close_files()

    def _open_parent(self, missing: tuple[str, ...]) -> None:
        self._parent, before = folders.open_folder(".", self._parent), self._parent
        os.close(before)
        for name in missing:
            with contextlib.suppress(FileExistsError):  # made just now, by another process
                os.mkdir(name, dir_fd=self._parent)
                self._made.append((os.dup(self._parent), name))
            self._parent, before = folders.open_folder(name, self._parent), self._parent
            os.close(before)

    def _lock(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):  # an earlier run's, or another user's
                os.mkdir(self._name, 0o700, dir_fd=self._parent)
            try:
                fd = folders.open_folder(self._name, self._parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                    raise
                self._not_ours(folders.find(self._name, self._parent))
            try:
                if not folders.is_private(fd, self._parent):
                    self._not_ours(os.fstat(fd))
                self._held = Lock(fd, _CLAIM, fd)
                # The previous holder of the lock may just have removed or renamed the folder.
                if folders.is_at(fd, self._name, self._parent):
                    self._fd = fd
                    return
            except FileNotFoundError:  # the folder was removed meanwhile
                os.close(fd)
                continue
            except BlockingIOError:
                os.close(fd)
                raise ConfigError(
                    f"another mx is writing to {self.out} right now",
                    hint="wait for it, stop it, or name another `out`",
                ) from None
            except BaseException:
                os.close(fd)
                raise
            self._unlock()
            os.close(fd)
        self._moved(self.folder)

    def _not_ours(self, status: os.stat_result | None) -> NoReturn:
        """Raise the OutputError that says what is in the partial folder's place."""
        if status is None or not stat.S_ISDIR(status.st_mode):
            what = "is where the output is first written, and is not a folder"
        elif not users.is_own(status.st_uid, self.folder):
            what = f"belongs to {_user(status.st_uid)}, who may change its files"
        else:
            what = f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise OutputError(
            f"{self.folder} {what}, so nothing is written to it",
            hint="check it and remove it, or name another `out`",
        )


def _resolve(out: Path) -> folders.ResolvedPath:
    """Return where `out` leads to. Raises OutputError."""
    try:
        return folders.resolve(str(out))
    except folders.ForeignLinkError as error:
        raise OutputError(
            f"{error.path} is a link that belongs to {_user(error.uid)}, who may point it "
            "elsewhere, so nothing is written through it",
            hint="name an `out` whose path has no link of another user",
        ) from None
    except OSError as error:
        raise write_error(error, out) from error


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _check_free(out: Path) -> None:
    if os.path.ismount(out):
        raise ConfigError(
            f"{out} is a mount point, which can't be replaced in one step",
            hint=f"name a folder in it: `out={out}/NAME`",
        )
    if out.is_symlink():
        raise ConfigError(f"{out} became a link meanwhile", hint="name another `out`")
    try:
        holds = os.listdir(out)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        hint = "name a folder that is not there yet"
        raise ConfigError(f"{out} is a file", hint=hint) from None
    if holds:
        if pin := recorded(out).partition(" ")[0]:
            raise ConfigError(
                f"{out} is not empty: a pull has written all of it there, with the pin {pin}",
                hint=f"mx verify {out} checks it; or name another `out`",
            )
        raise ConfigError(
            f"{out} is not empty, and a checkpoint is written into a new or empty folder",
            hint="name another `out`, or first move its files away",
        )
