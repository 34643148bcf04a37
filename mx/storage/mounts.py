"""Tells file systems of this machine, whose kernel sees and dates every change, from others."""

from __future__ import annotations

import re
from pathlib import Path

#: Those whose kernel code keeps device, inode, size, mtime and ctime itself. On network file
#: systems others change files behind the kernel's back, and on FUSE a program makes all of it up.
_LOCAL = {
    *("bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay"),
    *("ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "xfs", "zfs"),
}
_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_local(fd: int) -> bool:
    """Return True if an open file is on a file system that is known to be of this machine."""
    return file_system_of(fd) in _LOCAL


def file_system_of(fd: int) -> str:
    """Return the type of the file system that an open file is on; "" if it can't be known."""
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
    found = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    if found is None:
        return ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ", 1)[0] == found[1] and after:
            name = after.split(" ", 1)[0]
            return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), name)
    return ""
