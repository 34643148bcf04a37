"""Which memory files other processes of this user map."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path

#: How the kernel names the memory files of mx in the list of a process's maps.
_NAME = b"/memfd:mx:"


def mapped_elsewhere(inodes: Collection[int], proc: Path = Path("/proc")) -> Counter[int]:
    """Return which memory files processes other than this one and its children map, and how many.

    Processes that this one may not look into, such as those of another container, are not seen.

    Args:
        inodes: The numbers of the files, as `os.fstat` has them.
        proc: Where procfs is mounted.

    Returns:
        The number of processes that map a file, for each that any does.
    """
    own, found = os.getpid(), Counter[int]()
    if not inodes:
        return found
    for entry in os.listdir(proc):
        if not entry.isdigit() or int(entry) == own:
            continue
        try:
            listed = _listed(proc / entry / "maps", inodes)
            if listed and _parent(proc / entry / "stat") != own:
                found.update(listed)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _listed(maps: Path, inodes: Collection[int]) -> set[int]:
    # The fields: addresses, permissions, offset, device, inode, name.
    lines = [line for line in maps.read_bytes().splitlines() if _NAME in line]
    return {inode for line in lines if (inode := int(line.split(maxsplit=5)[4])) in inodes}


def _parent(stat: Path) -> int:
    # The command's name is in brackets, and may itself contain spaces and brackets.
    return int(stat.read_bytes().rpartition(b")")[2].split()[1])
