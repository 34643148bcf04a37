"""Which memory files other processes map, as procfs tells it."""

from __future__ import annotations

import os
from pathlib import Path

from mx.fleet.cache_keeper import mapped_elsewhere
from mx.memory.arena import MemfdArena

_OTHER = "7f00-7f10 rw-p 00000000 00:01 {} /memfd:other (deleted)"
_OURS = "7f00-7f10 rw-p 00000000 00:01 {} /memfd:mx:a b (deleted)"


def process(proc: Path, pid: int, parent: int, *maps: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "maps").write_text("".join(f"{line}\n" for line in maps))
    (folder / "stat").write_text(f"{pid} (a ) name) S {parent} 1 1")


def test_other_processes_count_and_own_children_do_not(tmp_path: Path) -> None:
    process(tmp_path, 11, 1, _OURS.format(5), _OURS.format(6))
    process(tmp_path, 12, os.getpid(), _OURS.format(7))
    process(tmp_path, 13, 1, _OTHER.format(8), "7f00-7f10 r--p 00000000 08:01 9 /usr/lib/x")
    process(tmp_path, os.getpid(), 1, _OURS.format(8))
    (tmp_path / "14").mkdir()  # it has ended meanwhile
    (tmp_path / "self").mkdir()
    process(tmp_path, 15, 1, _OURS.format(5), _OURS.format(5))
    assert mapped_elsewhere({5, 7, 8, 9}, tmp_path) == {5: 2}  # processes, not maps
    assert mapped_elsewhere((), tmp_path) == {}


def test_an_arena_without_maps() -> None:
    arena = MemfdArena(4096, name="test")
    try:
        assert arena.memfd is not None
        assert mapped_elsewhere({os.fstat(arena.memfd).st_ino}) == {}
    finally:
        arena.release()
