"""Disks that answer as others than this machine's do: a library that is loaded before all others
changes the kernel's answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refused(const char *name) {
    const char *number = getenv(name);
    if (number == NULL) return 0;
    errno = atoi(number);
    return 1;
}

int flock(int fd, int operation) {
    return refused("DISK_FLOCK") ? -1 : (int)syscall(SYS_flock, fd, operation);
}

int fsync(int fd) {
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISDIR(status.st_mode) && refused("DISK_FSYNC")) return -1;
    return (int)syscall(SYS_fsync, fd);
}
"""


def other_disk(folder: Path, *, flock: int = 0, fsync: int = 0) -> dict[str, str]:
    """Return the environment of processes whose disk refuses flock, or fsync of folders.

    Args:
        folder: Where to compile the library.
        flock: The errno that flock gives; 0 leaves it as it is.
        fsync: Likewise, that of fsync of a folder.
    """
    library = folder / "disk.so"
    if not library.exists():
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
        subprocess.run(compiler, input=_SHIM, text=True, check=True)
    found = {"LD_PRELOAD": str(library)}
    if flock:
        found["DISK_FLOCK"] = str(flock)
    if fsync:
        found["DISK_FSYNC"] = str(fsync)
    return found
