"""Distributions of others, in a folder that a child process or this one has on its path."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import Command, environment


class InstalledCommand(Command):
    """One of our commands in an interpreter of its own, which finds what is installed."""

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-c", f"from mx.cli import {entry}; {entry}()"]


def put(there: Path, modules: dict[str, str], entries: str, name: str = "extra") -> None:
    """Put a distribution into a folder: its modules by path, and its entry points."""
    for path, text in modules.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text(text)
    metadata = there / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entries)


def having(there: Path) -> dict[str, str]:
    """Return the environment of a child that has what is in a folder."""
    clean = environment()
    return clean | {"PYTHONPATH": f"{there}{os.pathsep}{clean['PYTHONPATH']}"}


def install(there: Path, modules: dict[str, str], entries: str) -> dict[str, str]:
    """Put a distribution into a folder; return an environment that has it."""
    put(there, modules, entries)
    return having(there)


@contextmanager
def installed_commands() -> Iterator[Callable[..., Command]]:
    """Give what starts commands by their arguments and `env`; all end with the block."""
    started: list[Command] = []

    def start(*arguments: str, env: dict[str, str]) -> Command:
        started.append(InstalledCommand(*arguments, env=env))
        return started[-1]

    yield start
    for command in reversed(started):
        command.end()
