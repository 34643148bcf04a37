"""Layers that an earlier pull wrote: read back, hashed, and believed chunk by chunk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.types import Packaging
from mx.errors import OutputError
from mx.storage import locks
from mx.storage.output import Output
from mx.storage.reader import fill_from_tensors
from tests.support.checkpoints import make_arena
from tests.support.manifests import in_chunks

#: One layer: a small tensor, a large one, two small ones, none.
SIZES = {"a": 300, "b": 3 * BLOCK_BYTES + 5, "c": 70, "d": 7, "e": 0}
CONTENTS = {f"model.layers.0.mlp.{name}": name.encode() * size for name, size in SIZES.items()}


def unexpected(error: BaseException) -> None:
    raise error


class Setting:
    """A model of one layer, written beside `out` by a pull that was cut off."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        specs = [TensorSpec(name, "U8", (len(data),)) for name, data in CONTENTS.items()]
        layout = plan_layout(specs)
        self.arena = make_arena(layout)
        views = {name: memoryview(data) for name, data in CONTENTS.items()}
        filled = fill_from_tensors(views, layout, self.arena)
        self.manifest = in_chunks(encode(layout, Packaging(), filled.roots), 2 * BLOCK_BYTES)
        output = self.output()
        output.layer_ready(0, self.arena)
        for future in output._futures:
            future.result()
        assert "1 of 1 layers" in output.abort()

    def output(self, on_error: Callable[[BaseException], None] = unexpected) -> Output:
        return Output(self.out, self.manifest, on_error, lambda layer: None, keep=True)

    def spoil(self, name: str, at: int) -> None:
        """Change a byte of a tensor on disk."""
        path = self.out.parent / ".out.mx-partial" / "files" / "model.safetensors"
        written = path.read_bytes()
        begin = written.index(CONTENTS[name])
        with path.open("r+b") as file:
            file.seek(begin + at)
            file.write(b"!")

    def chunks_of(self, name: str) -> set[int]:
        (tensor,) = (t for t in self.manifest.layout.tensors if t.name == name)
        return set(self.manifest.grid.chunks_of(0, tensor.offset, tensor.offset + tensor.nbytes))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_what_is_right_comes_back(setting: Setting) -> None:
    output = setting.output()
    assert output.left == [0]
    again = make_arena(setting.manifest.layout)
    assert output.read_back(0, again) == list(setting.manifest.grid.of_layer(0))
    assert again == setting.arena
    output.finish()
    assert setting.out.is_dir()


@pytest.mark.parametrize(
    ("name", "at"), [("a", 0), ("b", 0), ("b", 3 * BLOCK_BYTES + 4), ("c", 69), ("d", 3)]
)
def test_a_chunk_with_part_of_a_wrong_tensor_is_not_believed(
    name: str, at: int, setting: Setting
) -> None:
    name = f"model.layers.0.mlp.{name}"
    setting.spoil(name, at)
    output = setting.output()
    again = make_arena(setting.manifest.layout)
    wrong = setting.chunks_of(name)
    assert output.read_back(0, again) == [
        index for index in setting.manifest.grid.of_layer(0) if index not in wrong
    ]
    assert output.abort() == ""  # a layer that is wrong in part is written again


def test_an_output_that_another_machine_has_taken_over_gets_no_companion(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    for write in (False, True):
        errors: list[BaseException] = []
        output = setting.output(errors.append)
        assert output.companion_folder(0) is not None
        lock = setting.out.parent / ".out.mx-partial" / "lock"
        lock.write_text("another machine's")
        monkeypatch.setattr(locks, "SILENT_S", 0.0)
        if write:
            output.layer_ready(0, setting.arena)
        with pytest.raises(OutputError, match="another machine writes to it now"):
            output.companion_folder(0)
        assert len(errors) == write
        output.abort()
        monkeypatch.undo()
        lock.unlink()
        monkeypatch.setattr(fcntl, "flock", missing)
