"""What luck can do to a file that is read, to a disk, and to memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mx.core.layout import TensorSpec
from mx.core.manifest import plan_layout
from mx.errors import CapacityError, CheckpointError, ClosedError, LocalError
from mx.memory.arena import MemfdArena
from mx.storage import disk_file
from mx.storage.reader import SPAN_BYTES, fill
from mx.storage.safetensors import open_checkpoint
from mx.storage.spans import ArenaWriter, SpanReader
from tests.support.checkpoints import make_arena, write_mixed


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    os.truncate(tmp_path / "two.safetensors", 5 << 20)
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        fill(checkpoint, layout, make_arena(layout))


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_while_it_is_read(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    if not direct:
        monkeypatch.setattr(disk_file, "_open_direct", lambda file: -1)

    def cut(done: int) -> None:
        os.truncate(tmp_path / "two.safetensors", 4096 + 100)

    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        fill(checkpoint, layout, make_arena(layout), progress=cut)


def test_a_file_that_is_replaced_or_written_to(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    path = tmp_path / "one.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)

    def touch(done: int) -> None:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")

    with pytest.raises(CheckpointError, match="changed"):
        fill(checkpoint, layout, make_arena(layout), progress=touch)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match="not there"):
        fill(checkpoint, layout, make_arena(layout))
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed"):
        fill(checkpoint, layout, make_arena(layout))


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    real = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset >= SPAN_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(LocalError, match="Input/output error"):
        fill(checkpoint, layout, make_arena(layout))


@pytest.mark.parametrize("after", [0, 3])
def test_cancelling_leaves_no_thread_and_no_hold_on_the_arena(after: int, tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    mapping = mmap.mmap(-1, layout.arena_nbytes)
    view = memoryview(mapping)
    calls = iter(range(1000))
    with pytest.raises(ClosedError) as caught:
        fill(checkpoint, layout, view, cancelled=lambda: next(calls) >= after)
    assert not [t for t in threading.enumerate() if t.name.startswith("mx-read")]
    view.release()
    mapping.close()  # BufferError if anything, the error's traceback included, still held it
    assert caught.value.exit_code == 1


def test_an_error_lets_go_of_the_arena(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    os.truncate(tmp_path / "two.safetensors", 5 << 20)
    mapping = mmap.mmap(-1, layout.arena_nbytes)
    view = memoryview(mapping)
    with pytest.raises(CheckpointError):
        fill(checkpoint, layout, view)
    view.release()
    mapping.close()


def test_an_arena_or_layout_that_does_not_fit(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    with pytest.raises(ValueError, match="arena"):
        fill(checkpoint, layout, make_arena(layout)[:-1])
    name = checkpoint.specs[0].name
    other = plan_layout([TensorSpec(s.name, "I8", s.shape) for s in checkpoint.specs])
    with pytest.raises(ValueError, match=name):
        SpanReader(
            checkpoint.files[0],
            other,
            {tensor.name: i for i, tensor in enumerate(other.tensors)},
            ArenaWriter(make_arena(other)),
        )


def test_a_memfd_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    arena = MemfdArena(layout.arena_nbytes)

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CapacityError, match="No space left"):
        fill(checkpoint, layout, arena.view, memfd=arena.memfd)
    arena.seal()  # LocalError if anything, the error's traceback included, still held a view
    arena.release()
