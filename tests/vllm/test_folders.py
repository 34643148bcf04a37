"""Real vLLM engines whose folder has weights: a peer's are taken only if they are the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from tests.vllm.conftest import write_checkpoint
from tests.vllm.hosts import Host, host

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.fixture(scope="module")
def engine(coordinator: str, place: Path) -> Iterator[Host]:
    with host(
        coordinator,
        place / "folders.log",
        XDG_STATE_HOME=str(place / "state"),
        VLLM_LOGGING_LEVEL="INFO",
    ) as found:
        yield found


def ordinary(engine: Host, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = engine.do("start", str(folder), load_format="auto")
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["before"] == other["before"] and one["generated"] == other["generated"])


def test_two_folders_of_one_name(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """`x/final` is served; `y/final` has weights of its own, and starts with those."""
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
    served = write_checkpoint(tmp_path / "x" / "final", seed=11)
    own = write_checkpoint(tmp_path / "y" / "final", seed=12)
    reference = ordinary(engine, own)
    with mx.serve(served, coordinator=coordinator) as source:
        assert source.model.name == "final"
        assert same(engine.do("start", str(own)), reference)
        assert engine.status()["loads"] == {"ordinary": 1}
        said = [line for line in engine.said().splitlines() if "engine.fallback" in line]
        assert len(said) == 1 and "final@" in said[0], said


def test_files_that_were_replaced_in_place(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """One element is another, and size and time of change are as before: the folder's own weights
    are loaded. As long as the files are those that were served, the source's are."""
    folder = write_checkpoint(tmp_path / "replaced", seed=13)
    reference = ordinary(engine, folder)
    weights = folder / "model.safetensors"
    with mx.serve(folder, coordinator=coordinator, model="any/name") as source:
        assert same(engine.do("start", str(folder)), reference)
        assert engine.status()["loads"] == {"checkpoint": 1}
        assert any(
            source.identity_hex in line and "INFO" in line for line in engine.said().splitlines()
        )
        before = weights.stat()
        with weights.open("r+b") as file:
            file.seek(before.st_size - 2)
            byte = file.read(1)
            file.seek(before.st_size - 2)
            file.write(bytes([byte[0] ^ 1]))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        changed = ordinary(engine, folder)
        assert changed["before"] != reference["before"]
        assert same(engine.do("start", str(folder)), changed)
        assert engine.status()["loads"] == {"ordinary": 1}
