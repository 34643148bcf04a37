"""Reads small files of sysfs, any of which may be missing or unreadable."""

from __future__ import annotations

from pathlib import Path

SYS = Path("/sys")


def text(path: Path) -> str:
    """Return the file's content without outer spaces; "" if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a network driver also raises it for the speed of a link that is down
        return ""


def number(path: Path, unknown: int) -> int:
    """Return the decimal number in the file, or `unknown` if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return unknown


def names(path: Path) -> list[str]:
    """Return the names in a directory, sorted; none if it does not exist."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
