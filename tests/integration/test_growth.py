"""Pulls that open more connections while they run: all that there may be, whatever is measured."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mx import api, config
from mx.core import growth
from tests.support.outcomes import until
from tests.support.tensors import same

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("torch_is_forked"),
]


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"LOOK_S": 0.01, "WINDOW_S": 0.0, "WINDOW_NBYTES": 1, "FASTER": -1.0}
    for name, value in values.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_file({f"model.layers.{n}.weight": torch.rand(1024, 1024) for n in range(8)}, path)
    return path


@contextmanager
def served(saved: Path, coordinator: str, max_bandwidth: str) -> Iterator[str]:
    settings = replace(config.load(environ={"HOME": "/nonexistent"}))
    with api.serve(
        saved, model="m", coordinator=coordinator, max_bandwidth=max_bandwidth, settings=settings
    ):
        yield coordinator


@pytest.fixture
def slow(coordinator: str, saved: Path) -> Iterator[str]:
    """A pull takes two seconds at least."""
    with served(saved, coordinator, "16MB/s"):
        yield coordinator


@pytest.fixture
def endless(coordinator: str, saved: Path) -> Iterator[str]:
    """A pull takes half a minute at least."""
    with served(saved, coordinator, "1MB/s"):
        yield coordinator


def connections() -> int:
    return sum(re.fullmatch(r"mx-tcp-\d+", each.name) is not None for each in threading.enumerate())


def test_a_pull_opens_all_connections_that_it_may(slow: str, saved: Path) -> None:
    with api.pull("m", coordinator=slow, transport="tcp") as pull:
        until(lambda: connections() == growth.MOST_STREAMS or None, "connections")
        pull.wait(60)
        assert same(pull.state_dict(), load_file(saved))
    until(lambda: not connections() or None, "their end")


def test_a_number_stays_that_number(slow: str, saved: Path) -> None:
    seen = set()
    with api.pull("m", coordinator=slow, transport="tcp", streams=3) as pull:
        pull.on_layer(lambda _: seen.add(connections()))
        pull.wait(60)
    assert seen == {3}


@pytest.mark.parametrize("streams", [2, 5, 14])
def test_a_pull_is_closed_while_it_opens_connections(endless: str, streams: int) -> None:
    pull = api.pull("m", coordinator=endless, transport="tcp")
    until(lambda: connections() >= streams or None, "connections")
    pull.close()
    until(lambda: not connections() or None, "their end")
