"""Distributions beside mx, which a test puts into a folder, and commands that find them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.commands import Command, environment


class PackCommand(Command):
    """One of our commands in an interpreter of its own, which finds the pack."""

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-c", f"from mx.cli import {entry}; {entry}()"]


def install(there: Path, modules: dict[str, str], entries: str) -> dict[str, str]:
    """Put a distribution into a folder; return an environment that has it."""
    for path, text in modules.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text(text)
    metadata = there / "extra-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entries)
    clean = environment()
    return clean | {"PYTHONPATH": f"{there}{os.pathsep}{clean['PYTHONPATH']}"}
