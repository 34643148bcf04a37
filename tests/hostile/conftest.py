"""Fixtures that the attacks begin with: weights, a coordinator with an honest source, processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.site import CONFIG, Site, Started, Weights
from tests.support.command_fixtures import commands_are_forked, run
from tests.support.commands import commands, serve, start_coordinator

__all__ = ["commands_are_forked", "run"]  # fixtures


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights.write(tmp_path_factory.mktemp("weights") / "m")


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The same names and shapes, such as another training step's."""
    return Weights.write(tmp_path_factory.mktemp("others") / "m", seed=1)


@pytest.fixture(scope="session")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The right weights beside another configuration."""
    evil = CONFIG.replace(b"llama", b"alpaca")
    return Weights.write(tmp_path_factory.mktemp("files") / "m", side_file=evil)


@pytest.fixture(scope="module")
def site(weights: Weights) -> Iterator[Site]:
    with commands() as start:
        coordinator, _ = start_coordinator(start)
        source = serve(start, weights.folder, "m", coordinator)
        yield Site(weights, coordinator, source.json()["endpoint"])


@pytest.fixture
def start(weights: Weights) -> Iterator[Started]:
    started = Started(weights)
    yield started
    started.end()
