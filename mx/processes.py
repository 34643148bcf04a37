"""What tells one process of this machine from all others: its kernel, pid and start time."""

from __future__ import annotations

import os
from pathlib import Path

try:
    #: What identifies the running kernel; "" if it can't be known.
    BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
except OSError:
    BOOT_ID = ""


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of a kind, such as "pid"; 0 if it can't be
    known."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def process_start_ticks(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, or 0 if the process is gone, or waits to be reaped.

    The pid and this number identify a process even if its pid is reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name is in brackets, and may itself contain spaces and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
