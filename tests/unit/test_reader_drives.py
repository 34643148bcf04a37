"""Reads in flight, by drive: many where each takes long, and none waits for another drive."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mx.core.manifest import plan_layout
from mx.core.read_depth import MOST_READS
from mx.errors import LocalError
from mx.storage import reader
from mx.storage.disk_file import DiskBytes
from mx.storage.reader import fill
from mx.storage.safetensors import open_checkpoint
from mx.units import MIB
from mx.views import ScatteredView
from tests.support.checkpoints import content, make_arena, write_mixed
from tests.support.crafted import crafted


def test_reads_that_take_long_are_many_but_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = 100
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted([("w", "U8", [spans * MIB], b"")]))
    os.truncate(path, path.stat().st_size + spans * MIB)  # sparse
    monkeypatch.setattr(reader, "SPAN_BYTES", MIB)
    real, lock = DiskBytes.scatter, threading.Lock()
    running, most = 0, 0

    def slow(self: DiskBytes, *arguments: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return real(self, *arguments)

    monkeypatch.setattr(DiskBytes, "scatter", slow)
    checkpoint = open_checkpoint(path)
    layout = plan_layout(checkpoint.specs)
    nowhere = ScatteredView.over((), (), layout.arena_nbytes)
    fill(checkpoint, layout, nowhere, copy=lambda place, data: None)
    assert MOST_READS // 2 < most <= MOST_READS
    assert not [each for each in threading.enumerate() if each.name.startswith("mx-read")]


def test_no_drive_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the fast one is there before the first read of the slow one ends."""
    tensors = write_mixed(tmp_path)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        fast = Path(other)
        two = tmp_path / "two.safetensors"
        (fast / two.name).write_bytes(two.read_bytes())
        two.unlink()
        two.symlink_to(fast / two.name)
        checkpoint = open_checkpoint(tmp_path)
        layout = plan_layout(checkpoint.specs)
        device = os.stat(fast).st_dev
        assert device != os.stat(tmp_path).st_dev
        left = sum(
            tensor.end - tensor.begin for file in checkpoint.files if file.path == two.name
            for tensor in file.tensors
        )  # fmt: skip
        over = threading.Event()
        real = DiskBytes.scatter

        def window(self: DiskBytes, *arguments: Any) -> Any:
            if self.device != device:
                assert over.wait(60)
            return real(self, *arguments)

        monkeypatch.setattr(DiskBytes, "scatter", window)
        arena = make_arena(layout)
        fill(checkpoint, layout, arena, progress=lambda done: over.set() if done >= left else None)
        assert content(arena, layout) == tensors


def test_a_drive_that_fails_ends_the_reads_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were begun as more helped."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted([("w", "U8", [64 * MIB], b"")]))
    os.truncate(path, path.stat().st_size + 64 * MIB)
    monkeypatch.setattr(reader, "SPAN_BYTES", MIB)

    def failing(self: DiskBytes, *arguments: Any) -> Any:
        time.sleep(0.06)
        begin, end, buffer, _ = arguments
        if end > 32 * MIB:
            raise LocalError("no answer")
        return buffer[: end - begin], []

    monkeypatch.setattr(DiskBytes, "scatter", failing)
    checkpoint = open_checkpoint(path)
    layout = plan_layout(checkpoint.specs)
    nowhere = ScatteredView.over((), (), layout.arena_nbytes)
    with pytest.raises(LocalError, match="no answer"):
        fill(checkpoint, layout, nowhere, copy=lambda place, data: None)
    assert not [each for each in threading.enumerate() if each.name.startswith("mx-read")]
