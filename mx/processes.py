"""What tells one process of this machine from all others: its kernel, pid and start time."""

from __future__ import annotations

import os
from pathlib import Path


def boot_id() -> str:
    """Return what identifies the running kernel; "" if it can't be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of a kind, such as "pid"; 0 if it can't be
    known."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def process_start_ticks(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, or 0 if the process is gone.

    The pid and this number identify a process even if its pid is reused.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int, ticks: int) -> bool:
    """Return True unless this process has ended, or waits to be reaped."""
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == ticks and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; none if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The command name is in brackets, and may itself contain spaces and brackets.
    return stat[stat.rindex(")") + 2 :].split()
