"""Real vLLM engines whose folder has weights: a peer's are taken only if they are the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from tests.vllm.checkpoints import CONFIG, bare, write_checkpoint
from tests.vllm.hosts import EngineError, Host, host, same

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.fixture(scope="module")
def engine(coordinator: str, place: Path) -> Iterator[Host]:
    with host(coordinator, place / "folders.log", VLLM_LOGGING_LEVEL="INFO") as found:
        yield found


def ordinary(engine: Host, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = engine.do("start", str(folder), load_format="auto")
    return found


@pytest.mark.slow
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


@pytest.mark.slow
def test_files_that_were_replaced_in_place(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """One element is another, and size and time of change are as before: the folder's own weights
    are loaded. As long as the files are those that were served, the source's are."""
    folder = write_checkpoint(tmp_path / "replaced", seed=13)
    reference = ordinary(engine, folder)
    weights = folder / "model.safetensors"
    with mx.serve(folder, coordinator=coordinator) as source:
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


def test_a_pin_of_weights_alone(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """Who serves the weights has a configuration of his own, which vLLM does not get."""
    from safetensors.torch import load_file

    folder = write_checkpoint(tmp_path / "pinned", seed=14)
    reference = ordinary(engine, folder)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 0.5}))
    tensors = load_file(folder / "model.safetensors")
    with mx.serve(tensors, model="pinned", coordinator=coordinator, files=theirs) as source:
        pinned = f"pinned@{source.identity_hex}"
        with pytest.raises(EngineError, match="ConfigError.*weights alone.*NAME@PIN"):
            engine.do("start", pinned)
        # With files of one's own.
        extra = {"model": pinned}
        assert same(
            engine.do("start", str(bare(folder)), model_loader_extra_config=extra), reference
        )
        assert engine.status()["loads"] == {"checkpoint": 1}
        with pytest.raises(EngineError, match="pin"):
            engine.do("start", str(folder), model_loader_extra_config={"model": "no@" + "ab" * 32})


def test_a_pin_with_files_and_a_revision(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """By the pin that covers the files, and by `--revision`, vLLM starts by name alone."""
    folder, other = (
        write_checkpoint(tmp_path / name, seed=15 + at) for at, name in enumerate("ab")
    )
    reference = ordinary(engine, folder)
    with (
        mx.serve(other, model="r", coordinator=coordinator),
        mx.serve(folder, model="r", revision="abc", coordinator=coordinator) as source,
    ):
        for name, more in ((f"r@{source.pinned[-64:]}", {}), ("r", {"revision": "abc"})):
            assert same(engine.do("start", name, **more), reference)
            assert engine.status()["loads"] == {"checkpoint": 1}
        with pytest.raises(EngineError):
            engine.do("start", "r", revision="other")


def test_files_that_vllm_reads_instead(engine: Host, coordinator: str, tmp_path: Path) -> None:
    """A `model.safetensors` lies beside an index and its shards: a source reads the one, vLLM the
    others."""
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "both", seed=17)
    other = load_file(write_checkpoint(tmp_path / "shards", seed=18) / "model.safetensors")
    save_file(other, str(folder / "part.safetensors"), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    reference = ordinary(engine, folder)
    with mx.serve(folder, coordinator=coordinator):
        assert same(engine.do("start", str(folder)), reference)
        assert engine.status()["loads"] == {"ordinary": 1}
