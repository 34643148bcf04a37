"""Arenas on real memory: what is sealed stays, what is private stays private."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from mx.errors import CapacityError, ClosedError, LocalError
from mx.memory import budget
from mx.memory.arena import (
    HUGE_PAGE_BYTES,
    SEALS,
    HostArena,
    MemfdArena,
    address_of,
)
from mx.units import MIB


def test_host_arena_is_aligned_and_writable() -> None:
    arena = HostArena(5 * MIB + 123)
    assert arena.address % HUGE_PAGE_BYTES == 0
    assert arena.view.nbytes == 5 * MIB + 123
    arena.view[-1] = 7
    assert arena.view[-1] == 7
    arena.release()


def test_views_outlive_their_arena() -> None:
    arena = HostArena(MIB)
    kept = arena.view[10:20]
    kept[:] = b"0123456789"
    arena.release()
    assert bytes(kept) == b"0123456789"


def test_sealed_memfd_cannot_change_by_any_way() -> None:
    arena = MemfdArena(2 * MIB)
    arena.view[:4] = b"mxmx"
    arena.seal()
    assert arena.sealed
    assert arena.memfd is not None
    assert fcntl.fcntl(arena.memfd, fcntl.F_GET_SEALS) & SEALS == SEALS
    assert bytes(arena.view[:4]) == b"mxmx"
    assert arena.view.readonly
    with pytest.raises(PermissionError):
        os.pwrite(arena.memfd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.memfd, MIB)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.memfd, MIB)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    arena.release()


def test_private_views_do_not_see_each_other() -> None:
    arena = MemfdArena(MIB)
    arena.view[:2] = b"ab"
    arena.seal()
    one, other = arena.private_view(), arena.private_view()
    one[:2] = b"XY"
    assert bytes(other[:2]) == b"ab"
    assert bytes(arena.view[:2]) == b"ab"
    arena.release()
    assert bytes(one[:2]) == b"XY"


def test_a_private_view_made_early_sees_what_is_filled_later() -> None:
    arena = MemfdArena(MIB)
    private = arena.private_view()
    arena.view[:3] = b"abc"
    arena.seal()  # a private map does not hinder it
    assert bytes(private[:3]) == b"abc"
    arena.release()


def test_a_forgotten_view_hinders_the_seal() -> None:
    arena = MemfdArena(MIB)
    kept = arena.view[:10]
    with pytest.raises(LocalError, match="outlived"):
        arena.seal()
    del kept
    arena.release()


def test_empty_arenas() -> None:
    host = HostArena(0)
    assert host.view.nbytes == 0
    host.release()
    memfd = MemfdArena(0)
    memfd.seal()
    assert memfd.private_view().nbytes == 0
    memfd.release()
    memfd.release()
    with pytest.raises(ClosedError):
        memfd.private_view()


def test_too_large_is_said_before_anything_is_taken() -> None:
    with pytest.raises(CapacityError, match="are free"):
        HostArena(1 << 50)
    with pytest.raises(CapacityError, match="are free"):
        MemfdArena(1 << 50)


def test_a_cgroup_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 1000 kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n")
    (cgroup / "a/b").mkdir(parents=True)
    (cgroup / "a/memory.max").write_text("500000\n")
    (cgroup / "a/memory.current").write_text("300000\n")
    (cgroup / "a/memory.stat").write_text("anon 1\ninactive_file 50000\nactive_file 1000\n")
    (cgroup / "a/b/memory.max").write_text("max\n")
    (cgroup / "a/b/memory.current").write_text("1\n")
    (cgroup / "a/b/memory.stat").write_text("")
    assert budget.available_nbytes(proc, cgroup) == 251000
    (cgroup / "a/memory.max").write_text("max\n")
    assert budget.available_nbytes(proc, cgroup) == 1024000


def test_address_of_read_only_and_empty_views() -> None:
    data = b"abcdef"
    view = memoryview(data)
    assert address_of(view[2:]) == address_of(view) + 2
    assert address_of(memoryview(b"")) == 0


def test_a_frozen_arena_keeps_its_addresses_and_bytes_and_is_sealed() -> None:
    arena = MemfdArena(3 << 20)
    arena.view[:5] = b"bytes"
    address, reader = arena.address, memoryview(arena.view).toreadonly()
    arena.freeze()
    arena.freeze()  # once more changes nothing
    assert arena.address == address
    assert bytes(reader[:5]) == bytes(arena.view[:5]) == b"bytes"
    assert arena.view.readonly
    assert arena.memfd is not None
    assert fcntl.fcntl(arena.memfd, fcntl.F_GET_SEALS) == SEALS
    with pytest.raises(PermissionError):
        os.write(arena.memfd, b"x")
    private = arena.private_view()
    private[:5] = b"other"
    assert bytes(reader[:5]) == b"bytes"
    del private, reader
    arena.release()


def test_an_arena_that_somebody_else_can_write_to_is_not_frozen() -> None:
    arena = MemfdArena(1 << 20)
    assert arena.memfd is not None
    other = mmap.mmap(arena.memfd, 1 << 20)
    with pytest.raises(LocalError, match="sealed"):
        arena.freeze()
    other.close()
    arena.release()
