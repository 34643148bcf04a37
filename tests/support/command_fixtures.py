"""Fixtures of the tests that start our commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import forkserver
from tests.support.commands import Command, commands, environment


@pytest.fixture(scope="session", autouse=True)
def commands_are_forked() -> Iterator[None]:
    """Most commands are forks of one process, which has imported what they import."""
    with forkserver.running(environment()):
        yield


@pytest.fixture(scope="session")
def torch_is_forked() -> Iterator[None]:
    """Code that `forkserver.python` runs with "torch" is a fork of what has imported it."""
    with forkserver.running(environment(), "torch"):
        yield


@pytest.fixture
def run() -> Iterator[Callable[..., Command]]:
    """Start commands that end with the test."""
    with commands() as start:
        yield start
