"""Opens checkpoint files and turns the system's errors into errors for the user."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from mx.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    LocalError,
    MxError,
    OutputError,
)


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor; the caller closes it.

    Args:
        path: The file.
        flags: Further flags of `os.open`.

    Raises:
        CheckpointError: It is a pipe, a device or a folder; a pipe's writer is not waited for.
        OSError: The open fails.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not an ordinary file")
    return fd


def close_file(fd: int) -> None:
    """Close a file that was read, or what was written to which is durable or of no use: where a
    file system is gone that fails, as all else has before."""
    with contextlib.suppress(OSError):
        os.close(fd)


def read_error(error: OSError, path: Path) -> MxError:
    """Return the typed error for a failed open or read of a checkpoint's file."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        hint = "a shard is missing or a link is broken: download the checkpoint again"
        return CheckpointError(f"{path} is not there", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"this user may not read {path}", hint="check its permissions")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return LocalError(f"{path}: too many open files", hint="raise the limit: ulimit -n")
    return LocalError(f"{path} could not be read: {error.strerror}", hint="check the disk")


def write_error(error: OSError, path: Path) -> MxError:
    """Return the typed error for a failed create or write of an output file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(f"{path}: {error.strerror}", hint="free space or name another `out`")
    hint = "choose an `out` on a disk that works"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "choose an `out` that this user may write to"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit on open files: ulimit -n"
    return OutputError(f"{path} could not be written: {error.strerror}", hint=hint)
