"""What a writer leaves, and what the next one makes of that."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mx.core.types import Manifest, ManifestRef, PackagedFile
from mx.errors import CapacityError
from mx.storage import journal
from mx.storage.journal import Journal
from mx.storage.writer import CheckpointWriter
from tests.support.checkpoints import make_arena, manifest_of, write_side_file

LAYERS = 4
NBYTES = 70_000
REF = ManifestRef(bytes(32), bytes([1] * 32), bytes([2] * 32), (1, 1, 1))


class Setting:
    """A model of four layers, and a place to write it to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "place" / "out"
        self.partial = folder / "place" / ".out.mx-partial"
        self.weights = self.partial / "files" / "model.safetensors"
        self.journal = self.partial / "journal"
        self.out.parent.mkdir()
        self.manifest, self.arena = self.model(0)

    def model(self, first: int) -> tuple[Manifest, memoryview]:
        source = self.folder / f"source{first}"
        source.mkdir()
        tensors = {
            f"model.layers.{i}.mlp.w": torch.full((NBYTES,), first + i + 1, dtype=torch.uint8)
            for i in range(LAYERS)
        }
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        (source / "config.json").write_text("{}")
        return manifest_of(source)

    def space(self, arena: memoryview, layer: int) -> memoryview:
        place = self.manifest.layout.layers[layer]
        return arena[place.arena_offset : place.arena_offset + place.nbytes]

    def writer(self, keep: bool = True) -> CheckpointWriter:
        return CheckpointWriter(self.out, self.manifest, keep=keep)

    def write(self, writer: CheckpointWriter, *layers: int) -> None:
        for layer in layers:
            writer.write_layer(layer, self.space(self.arena, layer))

    def leave(self, *layers: int) -> None:
        """A writer ends that has written these."""
        writer = self.writer()
        self.write(writer, *layers)
        writer.abort()
        assert writer.kept == len(layers)

    def finish(self, writer: CheckpointWriter) -> set[int]:
        """Go on as a pull does, to the end. Returns the layers that were found right."""
        found, again = set(), make_arena(self.manifest.layout)
        for layer in sorted(writer.claimed):
            space = self.space(again, layer)
            writer.read_layer(layer, space)
            right = bytes(space) == bytes(self.space(self.arena, layer))
            writer.have_layer(layer, right)
            if right:
                found.add(layer)
        self.write(writer, *range(LAYERS))
        for side in self.manifest.packaging.side_files:
            write_side_file(writer, side.path, self.manifest.documents[side.digest])
        writer.commit()
        source = self.folder / "source0"
        for name in ("model.safetensors", "config.json"):
            assert (self.out / name).read_bytes() == (source / name).read_bytes()
        assert {path.name for path in self.out.iterdir()} == {"model.safetensors", "config.json"}
        assert list(self.out.parent.iterdir()) == [self.out]
        return found


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_writer_goes_on_from_what_another_left(setting: Setting) -> None:
    setting.leave(2, 0)
    writer = setting.writer()
    assert writer.claimed == {0, 2}
    assert writer.kept == 2
    assert writer.layers == LAYERS
    assert setting.finish(writer) == {0, 2}


def test_a_tensor_in_two_files_is_written_again(setting: Setting) -> None:
    """Of its two copies one would be read back over the other, and hide what is wrong with that."""
    copy = PackagedFile("copy.safetensors", None, ("model.layers.1.mlp.w",))
    packaging = setting.manifest.packaging
    packaging = packaging._replace(files=(*packaging.files, copy))
    setting.manifest = replace(setting.manifest, packaging=packaging)
    setting.leave(0, 1)
    with setting.weights.open("r+b") as file:
        file.seek(-3 * NBYTES, os.SEEK_END)
        file.write(b"wrong")
    writer = setting.writer()
    assert writer.claimed == {0}
    writer.have_layer(0, True)
    setting.write(writer, *range(LAYERS))
    for side in packaging.side_files:
        write_side_file(writer, side.path, setting.manifest.documents[side.digest])
    writer.commit()
    assert load_file(setting.out / copy.path)["model.layers.1.mlp.w"].eq(2).all()
    source = setting.folder / "source0" / "model.safetensors"
    assert (setting.out / source.name).read_bytes() == source.read_bytes()


def test_what_is_left_grows(setting: Setting) -> None:
    setting.leave(0)
    writer = setting.writer()
    setting.write(writer, 3)
    writer.abort()
    assert writer.kept == 2
    assert setting.finish(setting.writer()) == {0, 3}


def test_nothing_is_left_of_nothing(setting: Setting) -> None:
    setting.leave()
    assert list(setting.out.parent.iterdir()) == []


def test_without_keep_nothing_is_used_or_left(setting: Setting) -> None:
    setting.leave(0, 1)
    writer = setting.writer(keep=False)
    assert writer.claimed == frozenset()
    setting.write(writer, 0, 1)
    writer.abort()
    assert writer.kept == 0
    assert list(setting.out.parent.iterdir()) == []


def test_a_layer_that_is_there_is_not_written_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.leave(0, 1, 2, 3)
    writer = setting.writer()
    writer.have_layer(1, True)
    written: list[int] = []
    real = os.pwrite

    def counting(fd: int, data: Any, position: int) -> int:
        written.append(len(data))
        return real(fd, data, position)

    monkeypatch.setattr(os, "pwrite", counting)
    setting.write(writer, 1)
    assert written == []
    setting.write(writer, 0)
    assert written == [NBYTES]
    writer.abort()


def test_layers_found_wrong_are_no_longer_counted(setting: Setting) -> None:
    setting.leave(0, 1)
    writer = setting.writer()
    writer.have_layer(0, False)
    writer.have_layer(1, True)
    writer.abort()
    assert writer.kept == 1
    assert setting.finish(setting.writer()) == {0, 1}


def damage(setting: Setting) -> None:
    with setting.weights.open("r+b") as file:
        file.seek(-NBYTES // 2, os.SEEK_END)  # in the last tensor
        file.write(b"damage")


def damage_header(setting: Setting) -> None:
    with setting.weights.open("r+b") as file:
        file.write(b"\xff" * 64)


def garbage(setting: Setting) -> None:
    with setting.journal.open("ab") as file:
        file.write(b"garbage\0\xff" * 1000 + b"\n0123456789abcdef layer 3\n\n")


def stray(setting: Setting) -> None:
    (setting.weights.parent / "a" / "b").mkdir(parents=True)
    (setting.weights.parent / "a" / "b" / "x.safetensors").write_text("of another model")
    (setting.weights.parent / "config.json").write_text("half of i")


@pytest.mark.parametrize("change", [damage, damage_header, garbage, stray])
def test_what_is_damaged_is_written_again(
    setting: Setting, change: Callable[[Setting], None]
) -> None:
    setting.leave(0, 1, 3)
    change(setting)
    found = setting.finish(setting.writer())
    assert found == {0, 1} if change is damage else found == {0, 1, 3}


def tear(setting: Setting) -> None:
    os.truncate(setting.journal, setting.journal.stat().st_size - 3)


def replace_journal(setting: Setting) -> None:
    setting.journal.write_bytes(bytes(range(256)) * 4096)


def no_journal(setting: Setting) -> None:
    setting.journal.unlink()


def link_journal(setting: Setting) -> None:
    setting.journal.rename(setting.folder / "journal")
    setting.journal.symlink_to(setting.folder / "journal")


def pipe_for_a_journal(setting: Setting) -> None:
    setting.journal.unlink()
    os.mkfifo(setting.journal)


def folder_for_a_journal(setting: Setting) -> None:
    setting.journal.unlink()
    setting.journal.mkdir()


def truncate_weights(setting: Setting) -> None:
    os.truncate(setting.weights, NBYTES)


def link_weights(setting: Setting) -> None:
    setting.weights.rename(setting.folder / "precious")
    setting.weights.symlink_to(setting.folder / "precious")


def link_weights_hard(setting: Setting) -> None:
    os.link(setting.weights, setting.folder / "precious")


def folder_for_weights(setting: Setting) -> None:
    setting.weights.unlink()
    setting.weights.mkdir()


def link_files(setting: Setting) -> None:
    setting.weights.parent.rename(setting.folder / "elsewhere")
    setting.weights.parent.symlink_to(setting.folder / "elsewhere")


def link_a_folder(setting: Setting) -> None:
    (setting.weights.parent / "a").symlink_to(setting.folder)


@pytest.mark.parametrize(
    "change",
    [
        tear, replace_journal, no_journal, link_journal, pipe_for_a_journal, folder_for_a_journal,
        truncate_weights, link_weights, link_weights_hard, folder_for_weights, link_files,
        link_a_folder,
    ],
)  # fmt: skip
def test_what_can_not_be_gone_on_from_is_cleared(
    setting: Setting, change: Callable[[Setting], None]
) -> None:
    setting.leave(0)
    change(setting)
    precious = setting.folder / "precious"
    before = precious.read_bytes() if precious.exists() else b""
    elsewhere = sorted(path.name for path in setting.folder.rglob("elsewhere/*"))
    assert setting.finish(setting.writer()) == set()
    assert (precious.read_bytes() if precious.exists() else b"") == before
    assert sorted(path.name for path in setting.folder.rglob("elsewhere/*")) == elsewhere


def test_another_model_is_not_gone_on_from(setting: Setting) -> None:
    mine = setting.manifest, setting.arena
    setting.manifest, setting.arena = setting.model(9)
    setting.leave(0, 1, 2)
    setting.manifest, setting.arena = mine
    writer = setting.writer()
    assert writer.claimed == frozenset()
    assert setting.finish(writer) == set()


def test_too_small_a_disk_leaves_what_was_left(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.leave(0, 1)
    status = os.statvfs(setting.partial)
    setting.weights.write_bytes(b"")
    os.truncate(setting.weights, os.stat(setting.folder / "source0" / "model.safetensors").st_size)

    def full(path: Any) -> Any:
        return os.statvfs_result((status.f_bsize, 4096, *status[2:4], 10, *status[5:10]))

    with monkeypatch.context() as patch, pytest.raises(CapacityError):
        patch.setattr(os, "statvfs", full)
        setting.writer()
    assert setting.finish(setting.writer()) == set()  # they are kept, empty as they are


def test_what_is_there_needs_no_room(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.leave(0, 1)
    status = os.statvfs(setting.partial)

    def full(path: Any) -> Any:
        return os.statvfs_result((status.f_bsize, 4096, *status[2:4], 10, *status[5:10]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", full)
        writer = setting.writer()
    assert setting.finish(writer) == {0, 1}


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_journal_that_fails_costs_only_what_it_would_have_said(
    setting: Setting, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = setting.writer()
    setting.write(writer, 0)
    assert writer.kept == 1
    own = os.stat(setting.journal).st_ino
    real = getattr(os, call)

    def failing(fd: int, *rest: Any) -> Any:
        if os.fstat(fd).st_ino == own:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        setting.write(writer, 1, 2)
        writer.abort()
    assert writer.kept == 1
    found = setting.finish(setting.writer())
    assert 0 in found


@given(
    st.lists(st.integers(0, 9)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255))),
    st.integers(0, 400),
)
@example([1], [], 1)
def test_no_damage_to_a_journal_names_layers_that_were_not_written(
    tmp_path_factory: pytest.TempPathFactory,
    layers: list[int],
    bytes_changed: list[tuple[int, int]],
    torn_off: int,
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    made = Journal(path, REF, new=True)
    for layer in layers:
        made.add([layer])
    made.close()
    data = bytearray(path.read_bytes())
    assert journal.read(path, REF, 10) == set(layers)
    assert journal.read(path, REF, 5) == {layer for layer in layers if layer < 5}
    for at, value in bytes_changed:
        if at < len(data):
            data[at] = value
    path.write_bytes(data[: len(data) - min(torn_off, len(data))])
    left = journal.read(path, REF, 10)
    assert left is None or left <= set(layers)
    if left is None:
        return
    again = Journal(path, REF, new=False)
    again.add([7])
    again.close()
    # A line that lost nothing but its end counts again once the next one follows it.
    found = journal.read(path, REF, 10)
    assert found is not None
    assert left | {7} <= found <= set(layers) | {7}


@pytest.mark.parametrize(
    "other",
    [
        replace(REF, identity=bytes([4] * 32)),
        replace(REF, layout=bytes([4] * 32)),
        replace(REF, packaging=bytes([4] * 32)),
        replace(REF, packaging=b""),
    ],
)
def test_a_journal_of_anything_else_is_none(other: ManifestRef, tmp_path: Path) -> None:
    for mine, theirs in ((REF, other), (other, REF)):
        path = tmp_path / f"journal{mine is REF}"
        made = Journal(path, mine, new=True)
        made.add([3])
        made.close()
        assert journal.read(path, mine, 10) == {3}
        assert journal.read(path, theirs, 10) is None


def test_numbers_that_are_none_are_passed_over(tmp_path: Path) -> None:
    texts = [b"layer 3", b"layer -1", b"layer 9999999999999999999", b"layer 4x", b"../../etc"]
    texts += [b"layer 10", b"layer ", b"layer " + b"1" * 400, "layer \u0663".encode()]
    lines = [journal.heading(REF), *texts]
    path = tmp_path / "journal"
    path.write_bytes(b"".join(journal._checksum(t) + b" " + t + b"\n" for t in lines))
    assert journal.read(path, REF, 10) == {3}
