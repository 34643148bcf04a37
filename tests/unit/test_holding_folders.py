"""A folder that a pull wrote, and that something has changed since, is served with a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mx.api.holding import hold
from mx.core.types import ModelKey
from mx.storage.staging import _RECORD


@pytest.mark.parametrize("changed", [True, False])
def test_a_changed_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: bool
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    held = hold(tmp_path, ModelKey("m"), "cpu")
    pin = held.manifest.ref.pin.hex()
    held.arena.release()
    record = f"{'0' * 64 if changed else pin} {held.manifest.ref.identity.hex()}"
    os.setxattr(tmp_path, _RECORD, record.encode())
    hold(tmp_path, ModelKey("m"), "cpu").arena.release()
    said = [each for each in caplog.records if each.name == "mx.api.holding"]
    assert len(said) == changed
    assert all(str(tmp_path) in each.getMessage() for each in said)
