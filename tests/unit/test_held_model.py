"""A model in memory: the same digests from files and from tensors, in a sealed arena."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mx.core.grid import BLOCK_BYTES, Layer
from mx.core.layout import TensorSpec
from mx.core.pages import check_page
from mx.core.types import ModelKey
from mx.errors import CapacityError
from mx.memory.arena import MemfdArena
from mx.source.model import SourceModel, hold_checkpoint, hold_tensors
from mx.transport import host_view
from tests.support.checkpoints import content
from tests.support.crafted import crafted

TENSORS = {
    "model.embed_tokens.weight": b"e" * (2 * BLOCK_BYTES + 3),
    "model.layers.0.mlp.weight": b"w" * 300,
    "model.layers.1.mlp.weight": b"v" * BLOCK_BYTES,
    "model.norm.weight": b"",
}
KEY = ModelKey("m")


def from_files(folder: Path, *, shortcuts: bool) -> SourceModel:
    rows = [(name, "U8", [len(data)], data) for name, data in TENSORS.items()]
    (folder / "model.safetensors").write_bytes(crafted(rows, pad=5))
    return hold_checkpoint(folder, KEY, shortcuts=shortcuts, threads=2)


def from_memory(*, shortcuts: bool) -> SourceModel:
    specs = [TensorSpec(name, "U8", (len(data),)) for name, data in TENSORS.items()]
    views = {name: memoryview(data) for name, data in TENSORS.items()}
    return hold_tensors(specs, [], views, KEY, shortcuts=shortcuts)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_files_and_tensors_are_one_model(shortcuts: bool, tmp_path: Path) -> None:
    held = from_files(tmp_path, shortcuts=shortcuts), from_memory(shortcuts=shortcuts)
    layers: tuple[Layer, ...] = held[0].manifest.layout.layers
    for each in held:
        assert content(host_view(each.arena.view), each.manifest.layout) == {
            tensor.name: TENSORS[tensor.name] for tensor in each.manifest.layout.tensors
        }
        for layer in layers:
            page = each.pages.get(layer.index)
            assert page is not None
            check_page(each.manifest, layer.index, page)
        assert len(each.shortcuts) == (16 * 5 if shortcuts else 0)
        assert isinstance(each.arena, MemfdArena)
        assert each.arena.sealed
        each.arena.release()
    assert held[0].manifest.ref.identity == held[1].manifest.ref.identity
    assert held[0].manifest.roots == held[1].manifest.roots
    assert held[0].shortcuts == held[1].shortcuts


def test_an_arena_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MemfdArena] = []
    real = MemfdArena.__init__

    def remembered(self: MemfdArena, nbytes: int, *, name: str = "mx") -> None:
        real(self, nbytes, name=name)
        made.append(self)

    def failing(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(MemfdArena, "__init__", remembered)
    with pytest.raises(ValueError, match="'a' is missing"):
        hold_tensors([TensorSpec("a", "U8", (1,))], [], {}, KEY)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(CapacityError, match="memory could not be written"):
        from_files(tmp_path, shortcuts=False)
    assert [arena.memfd for arena in made] == [None, None]
