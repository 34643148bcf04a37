"""What folders hold."""

from __future__ import annotations

from pathlib import Path


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file by its path in the folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
