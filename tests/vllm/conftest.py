"""These tests run real engines, in the environment that `make test-vllm` makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import daemon
from tests.vllm.checkpoints import write_checkpoint

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the module's checkpoints and logs."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def checkpoint(place: Path) -> Path:
    """A small Llama."""
    return write_checkpoint(place / "small", seed=1)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """The address of a coordinator in a process of its own."""
    with daemon(lease_s=2.0) as (_, address):
        yield address
