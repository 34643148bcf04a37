"""Tensors that are served bring a folder's configuration along: `serve(files=)`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mx
from mx.errors import ConfigError
from tests.support.daemon import daemon


@pytest.mark.parametrize("copy", [True, False])
def test_files_travel_with_tensors(tmp_path: Path, copy: bool) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "weights.bin").write_bytes(b"never sent")
    tensors = {"layer.weight": torch.arange(6.0)}
    out = tmp_path / "out"
    with (
        daemon() as (_, coordinator),
        mx.serve(tensors, model="x", coordinator=coordinator, files=folder, copy=copy) as source,
    ):
        with mx.pull("x", coordinator=coordinator, out=out) as pull:
            pull.wait()
        assert (out / "config.json").read_text() == '{"model_type": "x"}'
        assert sorted(each.name for each in out.iterdir()) == ["config.json", "model.safetensors"]
        if not copy:  # a new revision has them, too
            with source.changing():
                tensors["layer.weight"].add_(1)
            with mx.pull("x:main.2", coordinator=coordinator, files_only=True) as pull:
                assert pull.files() == {"config.json": b'{"model_type": "x"}'}


def test_files_of_a_checkpoint_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a checkpoint's files travel with it"):
        mx.serve(tmp_path, files=tmp_path)


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with daemon() as (_, coordinator), pytest.raises(ConfigError, match="nowhere"):
        mx.serve(
            {"a": torch.zeros(1)}, model="x", coordinator=coordinator, files=tmp_path / "nowhere"
        )
