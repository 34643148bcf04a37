"""Checks how much memory is free before it is allocated."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mx.errors import CapacityError
from mx.units import format_bytes

_PLENTY = 1 << 62


class _CgroupFiles(NamedTuple):
    """The names of the files of one version of cgroups.

    `cache` are the lines of memory.stat that count the page cache, children included.
    """

    limit: str
    used: str
    cache: tuple[str, ...]


_V1 = _CgroupFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file ", "total_active_file "),
)
_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file ", "active_file "))


def available_nbytes(proc: Path = Path("/proc"), root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping.

    That is MemAvailable, or what the process's cgroups (v1 and v2, each level up to the mount)
    leave of their limits, if that is less.

    Args:
        proc: Where procfs is mounted.
        root: The folder that absolute paths start at.
    """
    available = _PLENTY
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        for folder, files in _levels(proc, root):
            # Some levels have no limit, such as the topmost, or can't be read.
            with contextlib.suppress(OSError, ValueError):
                available = min(available, _left(folder, files))
    return available


def _left(folder: Path, files: _CgroupFiles) -> int:
    """Return the free bytes of a cgroup. Raises OSError or ValueError if it has no limit."""
    # Without a limit v1 reports a number larger than any machine's memory.
    limit = int((folder / files.limit).read_text())
    used = int((folder / files.used).read_text())
    # The page cache counts as used, but the kernel frees it under pressure.
    cache = sum(
        int(line.split()[1])
        for line in (folder / "memory.stat").read_text().splitlines()
        if line.startswith(files.cache)
    )
    return max(0, limit - used + cache)


def _levels(proc: Path, root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield each level of the process's cgroups that may limit its memory. Raises OSError."""
    own = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own[_V2] = path
        elif "memory" in controllers.split(","):
            own[_V1] = path
    for mounted, mount, files in _mounts(proc):
        if files not in own:
            continue
        its = Path(own[files])
        # In a container the mount may show only what is below the container's own cgroup, or a
        # cgroup of another container: then only its topmost level is visible.
        shown = its.relative_to(mounted) if its.is_relative_to(mounted) else Path()
        top = root / mount.relative_to("/")
        folder = top / shown
        while folder.is_relative_to(top):
            yield folder, files
            folder = folder.parent


def _mounts(proc: Path) -> Iterator[tuple[Path, Path, _CgroupFiles]]:
    """Yield (mounted cgroup, mount point, files) of each hierarchy that may limit memory.

    Raises OSError.
    """
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        mounted, mount = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        if kind[0] == "cgroup2":
            yield mounted, mount, _V2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield mounted, mount, _V1


def _unescaped(path: str) -> str:
    """Return a path that the kernel escaped (a space is \\040) as it is."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def require(nbytes: int, what: str) -> None:
    """Check that `nbytes` of memory are free.

    Args:
        nbytes: The bytes that are needed.
        what: What needs them, for the error.

    Raises:
        CapacityError: Fewer are free.
    """
    available = available_nbytes()
    if nbytes > available:
        raise CapacityError(
            f"{what} needs {format_bytes(nbytes)} of memory and {format_bytes(available)} are free",
            hint="free memory, raise the container's limit, or use a machine with more",
        )
