"""`--out` of a pull of files only: all of them, or nothing."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mx.core.digest import document_digest
from mx.core.types import PackagedFile, Packaging, SideFile
from mx.errors import CapacityError, ConfigError, DigestError, IntegrityError, MxError, OutputError
from mx.storage.staged_writer import FilesWriter
from tests.support.folders import tree

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"[]" * 1_000_000,
    "1_Pooling/config.json": b"{}",
    "1_Pooling/same.json": b"{}",
    "empty.txt": b"",
}


def packaging(files: dict[str, bytes]) -> Packaging:
    sides = [SideFile(path, len(data), document_digest(data)) for path, data in files.items()]
    return Packaging((PackagedFile("model.safetensors", None, ("w",)),), tuple(sides))


def write(writer: FilesWriter, data: bytes, piece: int = 1 << 20) -> None:
    for offset in range(0, max(1, len(data)), piece):
        writer.write_page(document_digest(data), offset, data[offset : offset + piece])


def write_all(writer: FilesWriter, files: dict[str, bytes] = FILES) -> None:
    for data in set(files.values()):
        write(writer, data)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for outputs; whatever a test does, it leaves only what it created."""
    folder = tmp_path / "place"
    folder.mkdir()
    yield folder
    assert {path.name for path in folder.iterdir()} <= {"out"}


def test_the_files_appear_together(place: Path) -> None:
    out = place / "out"
    with FilesWriter(out, packaging(FILES)) as writer:
        write_all(writer)
        assert not out.exists()
        assert stat.S_IMODE(os.stat(writer.folder).st_mode) == 0o700
        writer.finish()
    assert tree(out) == FILES


def test_pages_that_begin_anew_replace_those_before(place: Path) -> None:
    right = FILES["tokenizer.json"]
    chosen = random.Random(5)
    with FilesWriter(place / "out", packaging({"tokenizer.json": right})) as writer:
        for _ in range(3):  # sources that died after some pages, or lied
            wrong = chosen.randbytes(len(right))
            writer.write_page(document_digest(right), 0, wrong[: chosen.randrange(1 << 20)])
        write(writer, right, 300_000)
        writer.finish()
    assert tree(place / "out") == {"tokenizer.json": right}


def test_a_file_that_is_missing_or_wrong_leaves_nothing(place: Path) -> None:
    with FilesWriter(place / "out", packaging(FILES)) as writer, pytest.raises(OutputError):
        write(writer, FILES["config.json"])
        writer.finish()
    assert list(place.iterdir()) == []
    right = FILES["config.json"]
    with (
        pytest.raises(DigestError, match=r"config\.json"),
        FilesWriter(place / "out", packaging({"config.json": right})) as writer,
    ):
        writer.write_page(document_digest(right), 0, right[::-1])
        writer.finish()
    with (
        pytest.raises(IntegrityError, match="longer"),
        FilesWriter(place / "out", packaging({"config.json": right})) as writer,
    ):
        writer.write_page(document_digest(right), 0, right + b" ")


def test_content_and_indices_are_checked_as_in_a_checkpoint(place: Path) -> None:
    for path, data, why in (
        ("config.json", b"\x80\x04pickled", "pickle"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "x.safetensors"}}', "names x"),
    ):
        with (
            pytest.raises(IntegrityError, match=why),
            FilesWriter(place / "out", packaging({path: data})) as writer,
        ):
            write(writer, data)
            writer.finish()
    good = b'{"weight_map": {"w": "model.safetensors"}}'
    files = {"model.safetensors.index.json": good}
    with FilesWriter(place / "out", packaging(files)) as writer:
        write(writer, good)
        writer.finish()
    assert tree(place / "out") == files


def test_an_output_in_use_is_left_alone(place: Path) -> None:
    (place / "out").mkdir()
    (place / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        FilesWriter(place / "out", packaging(FILES))
    (place / "out" / "mine").unlink()
    with FilesWriter(place / "out", packaging(FILES)) as writer:
        with pytest.raises(ConfigError, match="another mx"):
            FilesWriter(place / "out", packaging(FILES))
        write_all(writer)
        (place / "out" / "late").touch()
        with pytest.raises(ConfigError, match="not empty"):
            writer.finish()
    assert tree(place / "out") == {"late": b""}


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(place)

    def full(path: Any) -> Any:
        return os.statvfs_result((status.f_bsize, 4096, *status[2:4], 10, *status[5:10]))

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(CapacityError, match="free"):
        FilesWriter(place / "out", packaging(FILES))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, CapacityError), (errno.EIO, OutputError)]
)
def test_a_disk_that_fails_leaves_nothing(
    call: str, code: int, kind: type[MxError], place: Path
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind) as caught:
        patch.setattr(os, call, failing)
        with FilesWriter(place / "out", packaging(FILES)) as writer:
            write_all(writer)
            writer.finish()
    assert caught.value.hint
    assert list(place.iterdir()) == []


def test_what_a_pull_of_the_weights_left_is_removed(place: Path) -> None:
    (left := place / ".out.mx-partial").mkdir(mode=0o700)
    (left / "files").mkdir()
    (left / "files" / "model.safetensors").write_bytes(b"some layers")
    with FilesWriter(place / "out", packaging(FILES)) as writer:
        write_all(writer)
        writer.finish()
    assert tree(place / "out") == FILES
