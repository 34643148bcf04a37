"""The index of folders that were hashed before."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from mx.errors import NotAllowedError
from mx.storage import folder_index
from mx.storage.folder_index import FolderIndex
from tests.support.daemon import ended, python

IDENTITY = "ab" * 32
STAMP = (1, 2, 3, 4, 5)
LATER_NS = STAMP[4] + folder_index.SETTLED_NS


def test_remembers_what_was_recorded(tmp_path: Path) -> None:
    index = FolderIndex(tmp_path / "state" / "mx")
    assert index.identity_of([STAMP]) == ""
    assert index.record([STAMP, (9, 9, 9, 9, 9)], IDENTITY, LATER_NS + 9)
    assert index.identity_of([(9, 9, 9, 9, 9), STAMP]) == IDENTITY
    assert index.identity_of([STAMP]) == ""
    file = tmp_path / "state" / "mx" / folder_index.NAME
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("field", range(5))
def test_another_stamp_is_another_folder(tmp_path: Path, field: int) -> None:
    index = FolderIndex(tmp_path / "mx")
    index.record([STAMP], IDENTITY, LATER_NS)
    other = tuple(number + (place == field) for place, number in enumerate(STAMP))
    assert index.identity_of([other]) == ""  # type: ignore[list-item]


def test_files_that_were_changed_a_moment_before_do_not_count(tmp_path: Path) -> None:
    index = FolderIndex(tmp_path / "mx")
    assert not index.record([STAMP], IDENTITY, LATER_NS - 1)
    assert index.identity_of([STAMP]) == ""
    assert not index.record([], IDENTITY, LATER_NS)
    # Nor where an entry says so.
    (tmp_path / "mx").mkdir(exist_ok=True)
    file = tmp_path / "mx" / folder_index.NAME
    file.write_text(json.dumps({"folders": [[[STAMP], IDENTITY, LATER_NS - 1]]}))
    file.chmod(0o600)
    assert index.identity_of([STAMP]) == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"folders": [1]}', '{"folders": [[[[1]], 2, 3]]}']
)
def test_what_is_no_index_is_written_anew(tmp_path: Path, text: str) -> None:
    file = tmp_path / folder_index.NAME
    file.write_text(text)
    file.chmod(0o600)
    index = FolderIndex(tmp_path)
    assert index.identity_of([STAMP]) == ""
    assert index.record([STAMP], IDENTITY, LATER_NS)
    assert index.identity_of([STAMP]) == IDENTITY


def test_an_index_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    index = FolderIndex(tmp_path)
    index.record([STAMP], IDENTITY, LATER_NS)
    file = tmp_path / folder_index.NAME
    file.chmod(0o606)
    assert index.identity_of([STAMP]) == ""
    with pytest.raises(NotAllowedError):
        index.record([STAMP], IDENTITY, LATER_NS)
    file.chmod(0o600)
    assert index.identity_of([STAMP]) == IDENTITY
    tmp_path.chmod(0o777)
    assert index.identity_of([STAMP]) == ""


def test_a_link_is_no_index(tmp_path: Path) -> None:
    index = FolderIndex(tmp_path / "mx")
    index.record([STAMP], IDENTITY, LATER_NS)
    (tmp_path / "mx").rename(tmp_path / "real")
    (tmp_path / "mx").symlink_to(tmp_path / "real")
    assert index.identity_of([STAMP]) == ""
    (tmp_path / "mx").unlink()
    (tmp_path / "mx").mkdir()
    (tmp_path / "mx" / folder_index.NAME).symlink_to(tmp_path / "real" / folder_index.NAME)
    assert index.identity_of([STAMP]) == ""
    with pytest.raises(OSError):
        index.record([STAMP], IDENTITY, LATER_NS)


def test_a_folder_is_no_index(tmp_path: Path) -> None:
    """And no descriptor of it stays open."""
    (tmp_path / folder_index.NAME).mkdir()
    index, before = FolderIndex(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        assert index.identity_of([STAMP]) == ""
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(NotAllowedError):
        index.record([STAMP], IDENTITY, LATER_NS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_another_users_index_is_not_used(tmp_path: Path) -> None:
    index = FolderIndex(tmp_path)
    index.record([STAMP], IDENTITY, LATER_NS)
    os.chown(tmp_path / folder_index.NAME, 65534, 65534)
    assert index.identity_of([STAMP]) == ""


def test_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_index, "MAX_ENTRIES", 3)
    index = FolderIndex(tmp_path)
    stamps = [(number, 0, 0, 0, 0) for number in range(5)]
    for stamp in stamps:
        index.record([stamp], IDENTITY, LATER_NS)
    assert [bool(index.identity_of([each])) for each in stamps] == [False, False, True, True, True]
    monkeypatch.setattr(folder_index, "MAX_BYTES", 300)
    index.record([STAMP], IDENTITY, LATER_NS)
    assert (tmp_path / folder_index.NAME).stat().st_size <= 300
    assert index.identity_of([STAMP]) == IDENTITY


_RECORDING = """
import sys
from pathlib import Path
from mx.storage.folder_index import FolderIndex
first, at = int(sys.argv[2]), 10**10
for number in range(first, first + 20):
    assert FolderIndex(Path(sys.argv[1])).record([(number, 0, 0, 0, 0)], "ab" * 32, at)
"""


def test_several_processes_at_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as closing:
        processes = [
            closing.enter_context(ended(python(_RECORDING, str(tmp_path / "mx"), str(first))))
            for first in (0, 100, 200)
        ]
        assert [process.wait() for process in processes] == [0, 0, 0]
    index = FolderIndex(tmp_path / "mx")
    for first in (0, 100, 200):
        for number in range(first, first + 20):
            assert index.identity_of([(number, 0, 0, 0, 0)]) == IDENTITY
    assert sorted(os.listdir(tmp_path / "mx")) == [".folders.json.lock", "folders.json"]


def test_waits_until_files_are_old_enough() -> None:
    now_ns = time.time_ns()
    assert folder_index.settles_in_s([(0, 0, 0, 0, now_ns - 10**10)]) == 0
    assert folder_index.settles_in_s([(0, 0, 0, 0, now_ns + 10**10)]) > 10
