"""How much memory there is, asked before it is taken."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mx.errors import CapacityError
from mx.units import format_bytes

_PLENTY = 1 << 62


class _Files(NamedTuple):
    """What one version of cgroups calls them: the limit, what is used of it, and the lines of
    memory.stat that count what the page cache holds, children included."""

    limit: str
    used: str
    cache: tuple[str, ...]


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file ", "total_active_file "),
)
_V2 = _Files("memory.max", "memory.current", ("inactive_file ", "active_file "))


def available_nbytes(proc: Path = Path("/proc"), root: Path = Path("/")) -> int:
    """Return what can be allocated without swapping, in bytes: MemAvailable, and what the
    process's cgroups (v1 and v2, each level up to the mount) leave of their limits, whichever is
    less.

    Args:
        proc: where procfs is.
        root: what the paths in it begin at.
    """
    available = _PLENTY
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        for folder, files in _levels(proc, root):
            # A level without a limit, such as the uppermost, or one that is hidden from us.
            with contextlib.suppress(OSError, ValueError):
                available = min(available, _left(folder, files))
    return available


def _left(folder: Path, files: _Files) -> int:
    """Raises OSError or ValueError where there is no limit."""
    # v1 says a number that no machine has where there is none.
    limit = int((folder / files.limit).read_text())
    used = int((folder / files.used).read_text())
    # What the page cache holds counts as used but is given back under pressure.
    cache = sum(
        int(line.split()[1])
        for line in (folder / "memory.stat").read_text().splitlines()
        if line.startswith(files.cache)
    )
    return max(0, limit - used + cache)


def _levels(proc: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """Each level of the process's cgroups that may limit its memory. Raises OSError."""
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
        # cgroup that was made for another one: then its uppermost level is all there is to see.
        shown = its.relative_to(mounted) if its.is_relative_to(mounted) else Path()
        top = root / mount.relative_to("/")
        folder = top / shown
        while folder.is_relative_to(top):
            yield folder, files
            folder = folder.parent


def _mounts(proc: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """(cgroup that is mounted, where, its files) of each hierarchy that may have a memory
    controller. Raises OSError."""
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
    """As the kernel writes paths: a space is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def require(nbytes: int, what: str) -> None:
    """Raise CapacityError if `nbytes` are not to be had for `what`."""
    available = available_nbytes()
    if nbytes > available:
        raise CapacityError(
            f"{what} needs {format_bytes(nbytes)} of memory and {format_bytes(available)} are free",
            hint="free memory, raise the container's limit, or use a machine with more",
        )
