"""Tells disks of this machine, whose kernel sees and dates every change, from other places."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mx.text import plain

#: Those on disks, whose kernel code keeps device, inode, size, mtime and ctime itself, and dates a
#: write to a shared map once the page has been written back. Not of them: network file systems,
#: where others change files behind the kernel's back; FUSE, where a program makes all of it up;
#: tmpfs and ramfs, which never write a page back; and images, whose times are their maker's.
_LOCAL = {
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "reiserfs"),
    *("xfs", "zfs"),
}
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_local(fd: int) -> bool:
    """Return True if an open file is on a file system that is known to date every change."""
    return file_system_of(fd) in _LOCAL


def is_shared(fd: int) -> bool:
    """Return True unless an open file is on a file system that is this machine's alone: that of a
    network, of a program (FUSE), or one that is not known."""
    return file_system_of(fd) not in _LOCAL | {"tmpfs", "ramfs"}


def file_system_of(fd: int) -> str:
    """Return the type of the file system that an open file is on; "" if it can't be known."""
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:
        return ""
    found = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    return "" if found is None else _mounted(0, found[1])[0]


def drive_of(device: int) -> str:
    """Return what is mounted as the device of this number (st_dev): vda1, or HOST:FOLDER; its major
    and minor number where that can't be known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return _mounted(2, number)[1].removeprefix("/dev/") or number


def _mounted(column: int, value: str) -> tuple[str, str]:
    """Return the file system's type, and what is mounted, of the first mount with this value in a
    column of its line; "" if there is none."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ", 3)[column : column + 1] == [value] and after:
            names = [_ESCAPE.sub(lambda match: chr(int(match[1], 8)), n) for n in after.split(" ")]
            return names[0], plain(names[1] if len(names) > 1 else "")
    return "", ""
