"""Commands of another version of mx."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.commands import Command, environment, free_port

NEWER = """
import mx.core.versions
mx.core.versions.WIRE_VERSION += 2
mx.core.versions.WIRE_MIN_VERSION += 2
"""


class Other(Command):
    """One of our commands in an mx of another version."""

    def __init__(self, change: str, *arguments: str, daemon: bool = False, **env: str) -> None:
        self.change = change
        super().__init__(*arguments, daemon=daemon, env=environment(**env))

    def command(self, entry: str) -> list[str]:
        # Not a fork: what imports a name that is changed is to find the changed one.
        return super().command(entry)


RunOther = Callable[..., Other]


@pytest.fixture
def run_other() -> Iterator[RunOther]:
    """Start commands of another version, the change first; they end with the test."""
    started: list[Other] = []

    def start(change: str, *arguments: str, daemon: bool = False) -> Other:
        started.append(Other(change, *arguments, daemon=daemon))
        return started[-1]

    yield start
    for command in reversed(started):
        command.end()


def other_coordinator(run_other: RunOther, change: str, port: int | None = None) -> str:
    address = f"127.0.0.1:{port or free_port()}"
    command = run_other(change, "--listen", address, daemon=True)
    command.until(lambda: "listens on" in command.err, "listening")
    return address
