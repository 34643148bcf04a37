"""Reading small files of the kernel's, any of which may be missing or refuse to be read."""

from __future__ import annotations

from pathlib import Path

SYS = Path("/sys")


def text(path: Path) -> str:
    """The file's content without outer spaces; "" if there is none to be had."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # also what a network driver says of the speed of a link that is down
        return ""


def number(path: Path, unknown: int) -> int:
    """The decimal number in the file, or `unknown`."""
    try:
        return int(text(path))
    except ValueError:
        return unknown


def names(path: Path) -> list[str]:
    """What is in a directory, sorted; nothing if it is not there."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
