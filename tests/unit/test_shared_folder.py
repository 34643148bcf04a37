"""An output in a folder that other users may write to: nothing of theirs gets into it.

The other user is a real one: processes of `nobody`, which only root can start.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mx.core.types import Manifest
from mx.errors import ConfigError, OutputError
from mx.storage.writer import CheckpointWriter
from tests.support.checkpoints import manifest_of, write_side_file
from tests.support.privileges import NOBODY, as_nobody, as_root, done


@pytest.fixture
def shared() -> Iterator[Path]:
    """As /tmp is: every user may write, and rename only what is theirs."""
    folder = Path(tempfile.mkdtemp(prefix="mx-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Manifest, memoryview]:
    source = tmp_path / "source"
    source.mkdir()
    tensors = {f"model.layers.{i}.w": torch.full((70_000,), i, dtype=torch.uint8) for i in (0, 1)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text("{}")
    return source, *manifest_of(source)


def write(writer: CheckpointWriter, model: tuple[Path, Manifest, memoryview]) -> None:
    _, manifest, arena = model
    for index, layer in enumerate(manifest.layout.layers):
        writer.write_layer(index, arena[layer.arena_offset : layer.arena_offset + layer.nbytes])
    for side in manifest.packaging.side_files:
        write_side_file(writer, side.path, manifest.documents[side.digest])


def is_copy(out: Path, source: Path) -> bool:
    names = sorted(path.name for path in source.iterdir())
    return sorted(path.name for path in out.iterdir()) == names and all(
        (out / name).read_bytes() == (source / name).read_bytes() for name in names
    )


@as_root
@pytest.mark.parametrize(
    "make",
    [
        "os.mkdir(sys.argv[1])",
        "os.mkdir(sys.argv[1], 0o700)",
        "os.mkdir(sys.argv[1]); os.mkdir(sys.argv[1] + '/files'); os.chmod(sys.argv[1], 0o777)",
        "os.mkdir(sys.argv[1] + '.x'); os.symlink(sys.argv[1] + '.x', sys.argv[1])",
        "os.mkfifo(sys.argv[1])",
        "open(sys.argv[1], 'w').close()",
    ],
)
@pytest.mark.parametrize("keep", [True, False])
def test_what_another_user_prepared_is_not_adopted(
    make: str, keep: bool, shared: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    partial = shared / ".out.mx-partial"
    done(as_nobody(make, partial))
    before = sorted(path.name for path in shared.rglob("*"))
    with pytest.raises(OutputError, match=r"mx-partial .*nothing is written") as caught:
        CheckpointWriter(shared / "out", model[1], keep=keep)
    assert "remove it" in caught.value.hint
    assert sorted(path.name for path in shared.rglob("*")) == before
    if make == "os.mkdir(sys.argv[1])":
        assert "the user nobody" in caught.value.message


@as_root
def test_another_user_sees_and_changes_nothing_meanwhile(
    shared: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    swap = """
partial, tried = sys.argv[1], 0
while not os.path.exists(sys.argv[2]):
    for act in (
        lambda: os.listdir(partial),
        lambda: os.rename(partial, partial + '.away'),
        lambda: os.rename(partial + '/files', partial + '/gone'),
        lambda: os.open(partial, os.O_RDONLY),
        lambda: os.open(partial + '/files/model.safetensors', os.O_WRONLY),
    ):
        try:
            act()
        except OSError:
            continue
        print('did', act.__code__.co_consts, flush=True)
    tried += 1
    if tried == 100:
        print('tried', flush=True)
"""
    writer = CheckpointWriter(shared / "out", model[1])
    other = as_nobody(swap, writer.folder, shared / "out")
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "tried\n"
        write(writer, model)
        writer.commit()
        assert done(other) == ""
    finally:
        if other.poll() is None:
            other.kill()
            other.communicate()
    assert is_copy(shared / "out", model[0])


@as_root
def test_a_writer_among_swaps_ends_with_its_own_files_or_an_error(
    shared: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    """Where the folder lets every user rename everything, its files are still its own."""
    shared.chmod(0o777)
    swap = """
partial, out, away = sys.argv[1], sys.argv[2], sys.argv[1] + '.away'
print('ready', flush=True)
while os.path.exists(sys.argv[3]):
    try:
        os.rename(partial, away)
        os.mkdir(partial)
        os.mkdir(partial + '/files')
        open(partial + '/files/model.safetensors', 'w').write('forged')
        os.rename(partial, partial + '.forged')
        os.rename(away, partial)
        shutil.rmtree(partial + '.forged')
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial + '.forged', ignore_errors=True)
        try:
            os.rename(away, partial)
        except OSError:
            pass
"""
    go_on = shared / "go-on"
    go_on.touch()
    go_on.chmod(0o600)
    other = as_nobody(swap, shared / ".out.mx-partial", shared / "out", go_on)
    outcomes = []
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for _ in range(40):
            try:
                with CheckpointWriter(shared / "out", model[1]) as writer:
                    write(writer, model)
                    writer.commit()
            except (OutputError, ConfigError) as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("whole")
                assert is_copy(shared / "out", model[0])
                shutil.rmtree(shared / "out")
            assert not (shared / "out").exists()
    finally:
        go_on.unlink()
        other.communicate(timeout=60)
    assert len(outcomes) == 40


def test_a_folder_swapped_before_the_end_is_noticed(
    tmp_path: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    place = tmp_path / "place"
    writer = CheckpointWriter(place / "out", model[1])
    write(writer, model)
    writer.folder.rename(tmp_path / "taken")
    (writer.folder / "files").mkdir(parents=True)
    (writer.folder / "files" / "model.safetensors").write_text("forged")
    with pytest.raises(OutputError, match="moved or replaced"):
        writer.commit()
    assert not (place / "out").exists()
    assert (writer.folder / "files" / "model.safetensors").read_text() == "forged"


def test_a_parent_swapped_before_the_end_is_noticed(
    tmp_path: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    (tmp_path / "place").mkdir()
    writer = CheckpointWriter(tmp_path / "place" / "out", model[1])
    write(writer, model)
    (tmp_path / "place").rename(tmp_path / "taken")
    (tmp_path / "place").mkdir()
    with pytest.raises(OutputError, match="moved or replaced"):
        writer.commit()
    assert list((tmp_path / "place").iterdir()) == []
    assert list((tmp_path / "taken").iterdir()) == []


def test_ones_own_folder_that_others_may_enter_is_not_adopted(
    tmp_path: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    partial = tmp_path / ".out.mx-partial"
    partial.mkdir()
    partial.chmod(0o775)
    with pytest.raises(OutputError, match="mode 0775"):
        CheckpointWriter(tmp_path / "out", model[1])
    assert partial.is_dir()


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_what_appears_has_the_modes_that_the_umask_says(
    umask: int, tmp_path: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    before = os.umask(umask)
    try:
        with CheckpointWriter(tmp_path / "out", model[1]) as writer:
            assert stat.S_IMODE(writer.folder.stat().st_mode) == 0o700
            write(writer, model)
            writer.commit()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_parent_that_can_not_be_safe_is_warned_of(
    mode: int,
    warned: bool,
    tmp_path: Path,
    model: tuple[Path, Manifest, memoryview],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    with caplog.at_level(logging.WARNING):
        CheckpointWriter(place / "out", model[1]).abort()
    assert [record.getMessage().startswith("every user may") for record in caplog.records] == [
        True
    ] * warned


@as_root
def test_a_file_system_that_shows_another_owner_is_no_other_user(
    shared: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    """As for a root that NFS squashes: what this process makes belongs to nobody."""
    shared.chmod(0o777)
    code = f"""
import ctypes, os, sys
from pathlib import Path
from mx.storage.writer import CheckpointWriter
from tests.support.checkpoints import manifest_of, write_side_file
manifest, arena = manifest_of(Path(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.setfsgid({NOBODY}); libc.setfsuid({NOBODY})
with CheckpointWriter(Path(sys.argv[2]), manifest) as writer:
    for index, layer in enumerate(manifest.layout.layers):
        writer.write_layer(index, arena[layer.arena_offset : layer.arena_offset + layer.nbytes])
    for side in manifest.packaging.side_files:
        write_side_file(writer, side.path, manifest.documents[side.digest])
    writer.commit()
"""
    command = [sys.executable, "-c", code, str(model[0]), str(shared / "out")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=120)
    assert is_copy(shared / "out", model[0])
    assert (shared / "out").stat().st_uid == NOBODY


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the other user's, open to all."""
    folder = Path(tempfile.mkdtemp(prefix="mx-theirs-"))
    folder.chmod(0o777)
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@as_root
@pytest.mark.parametrize("name", ["link", "link/out", "link/deep/out", "ours", "ours/out"])
@pytest.mark.parametrize("to", ["", "new"])
def test_nothing_is_written_through_a_link_of_another_user(
    name: str, to: str, shared: Path, theirs: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    done(as_nobody("os.symlink(sys.argv[1], sys.argv[2])", theirs / to, shared / "link"))
    (shared / "ours").symlink_to("link")
    with (
        pytest.raises(OutputError, match="link .*belongs to the user nobody") as caught,
        CheckpointWriter(shared / name, model[1]) as writer,
    ):
        write(writer, model)
        writer.commit()
    assert str(shared / "link") in caught.value.message
    assert "out" in caught.value.hint
    assert not list(theirs.iterdir())
    assert sorted(path.name for path in shared.iterdir()) == ["link", "ours"]


def test_links_of_this_user_are_followed(
    shared: Path, tmp_path: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    (tmp_path / "real").mkdir()
    (shared / "a").symlink_to(tmp_path / "source" / ".." / "real")
    (shared / "b").symlink_to("a/below")
    for out in (shared / "a" / "out", shared / "b" / "out", shared / "x" / ".." / "out"):
        with CheckpointWriter(out, model[1]) as writer:
            write(writer, model)
            writer.commit()
    for out in (tmp_path / "real" / "out", tmp_path / "real" / "below" / "out", shared / "out"):
        assert is_copy(out, model[0])


@as_root
def test_a_link_that_another_user_makes_meanwhile_is_not_followed(
    shared: Path, theirs: Path, model: tuple[Path, Manifest, memoryview]
) -> None:
    swap = """
theirs, link = sys.argv[1], sys.argv[2]
print('there', flush=True)
while not os.path.exists(sys.argv[3]):
    for act in (lambda: os.symlink(theirs, link), lambda: os.unlink(link)):
        try:
            act()
        except OSError:
            pass
"""
    other = as_nobody(swap, theirs, shared / "out", shared / "end")
    ends = set()
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        for number in range(200):
            out = shared / "out" / "deep" if number % 2 else shared / "out"
            try:
                with CheckpointWriter(out, model[1]) as writer:
                    write(writer, model)
                    writer.commit()
                assert is_copy(out, model[0])
                ends.add("written")
            except (OutputError, ConfigError):
                ends.add("refused")
            assert not list(theirs.iterdir())
            shutil.rmtree(shared / "out", ignore_errors=True)  # it follows no link
    finally:
        (shared / "end").touch()
        done(other)
    assert "refused" in ends


@as_root
@pytest.mark.parametrize("below", ["", "deep"])
def test_a_folder_of_another_user_is_warned_about(
    below: str,
    theirs: Path,
    model: tuple[Path, Manifest, memoryview],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with CheckpointWriter(theirs / below / "out", model[1]):
        pass
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    said = warning.getMessage()
    assert f"{theirs} belongs to the user nobody" in said
    assert "\n" not in said
