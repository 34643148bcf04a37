"""What a model needs first is read first from a disk, whatever the order in its files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mx import api, config
from mx.storage import reader
from mx.storage.disk_file import DiskBytes
from mx.storage.safetensors import open_checkpoint
from mx.units import MIB
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SETTINGS = config.load(environ={"HOME": "/nonexistent"})
LAYERS = 24


def test_early_layers_of_a_sorted_file_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_file` sorts by name: model.layers.2 comes after model.layers.19."""
    tensors = {
        f"model.layers.{layer}.mlp.{part}": torch.full((MIB,), layer, dtype=torch.uint8)
        for layer in range(LAYERS)
        for part in "abc"
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    begun: list[range] = []
    lock, scatter = threading.Lock(), DiskBytes.scatter

    def noted(file: DiskBytes, begin: int, end: int, *more: Any) -> Any:
        with lock:
            begun.append(range(begin, end))
        return scatter(file, begin, end, *more)

    monkeypatch.setattr(DiskBytes, "scatter", noted)
    monkeypatch.setattr(reader, "MOST_READS", 2)  # else many are begun before the first one ends
    ready: list[int] = []
    with api.pull("m", path=path, settings=SETTINGS) as pull:
        pull.on_layer(lambda event: ready.append(event.index))
        report = pull.wait(120)
        assert same(pull.state_dict(), load_file(path))
    assert sorted(ready) == list(range(LAYERS)) and report.defined_by == "disk"
    needed = {
        tensor.begin
        for file in open_checkpoint(path).files
        for tensor in file.tensors
        if tensor.spec.name.split(".")[2] in ("0", "1", "2", "3")
    }
    # Half of the layers stand before the fourth one in the file.
    first = begun[: LAYERS // 4]
    assert all(any(place in each for each in first) for place in needed)
