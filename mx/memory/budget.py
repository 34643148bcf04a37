"""How much memory there is, asked before it is taken."""

from __future__ import annotations

from pathlib import Path

from mx.errors import CapacityError
from mx.units import format_bytes


def available_nbytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What can be allocated without swapping, in bytes: MemAvailable, and what the cgroup
    (v2, each level up to the root) leaves of its limit, whichever is less."""
    available = 1 << 62
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        own = next(
            line[3:]
            for line in (proc / "self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return available
    folder = cgroup / own.strip().lstrip("/")
    while folder.is_relative_to(cgroup):
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            # What the page cache holds counts as used but is given back under pressure.
            cache = sum(
                int(line.split()[1])
                for line in (folder / "memory.stat").read_text().splitlines()
                if line.startswith(("inactive_file ", "active_file "))
            )
        except (OSError, ValueError):
            pass
        else:
            if limit != "max":
                available = min(available, max(0, int(limit) - used + cache))
        folder = folder.parent
    return available


def require(nbytes: int, what: str) -> None:
    """Raise CapacityError if `nbytes` are not to be had for `what`."""
    available = available_nbytes()
    if nbytes > available:
        raise CapacityError(
            f"{what} needs {format_bytes(nbytes)} of memory and {format_bytes(available)} are free",
            hint="free memory, raise the container's limit, or use a machine with more",
        )
