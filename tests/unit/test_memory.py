"""Arenas on real memory: what is sealed stays, what is private stays private."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.buffers import HUGE_PAGE_BYTES
from mx.errors import CapacityError, ClosedError, LocalError
from mx.memory import budget
from mx.memory.arena import HostArena, MemfdArena
from mx.units import MIB
from tests.support.daemon import ended, python

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


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
    with pytest.raises(LocalError, match="can't be sealed: a view of it is left"):
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


def test_the_descriptor_of_an_arena_that_can_not_be_mapped_is_closed_once() -> None:
    class Sparse(MemfdArena):
        require_memory = False

    with pytest.raises(CapacityError, match="could not be created") as caught:
        Sparse(1 << 62)
    free = os.open("/dev/null", os.O_RDONLY)  # the first free number
    del caught  # with its traceback goes the arena
    gc.collect()
    assert os.path.exists(f"/proc/self/fd/{free}")
    os.close(free)


def write_all(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_cgroup_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    write_all(proc, meminfo="MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    mount = "24 18 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    write_all(proc / "self", cgroup="0::/a/b\n", mountinfo=mount)
    stat = "anon 1\ninactive_file 50000\nactive_file 1000\n"
    write_all(cgroup / "a", memory__max="500000\n", memory__current="300000\n", memory__stat=stat)
    write_all(cgroup / "a/b", memory__max="max\n", memory__current="1\n", memory__stat="")
    assert budget.available_nbytes(proc, tmp_path) == 251000
    (cgroup / "a/memory.max").write_text("max\n")
    assert budget.available_nbytes(proc, tmp_path) == 1024000


V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 {mounted} /sys/fs/cgroup/of\\040memory rw,relatime shared:1 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    ("mounted", "own", "levels"),
    [
        ("/", "/docker/c1", ["docker/c1", "docker", "."]),
        ("/docker/c1", "/docker/c1", ["."]),  # a container without a namespace of cgroups
        ("/docker/c1", "/docker/c1/inner", ["inner", "."]),
        ("/docker/c1", "/elsewhere", ["."]),
    ],
)
def test_a_limit_of_cgroup_v1_counts_on_each_level_that_is_shown(
    tmp_path: Path, mounted: str, own: str, levels: list[str]
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "sys/fs/cgroup/of memory"
    write_all(proc, meminfo="MemAvailable:    1000 kB\n")
    listed = f"4:cpu,cpuacct:/elsewhere\n3:devices,memory:{own}\n0::/\n"
    write_all(proc / "self", cgroup=listed, mountinfo=V1_MOUNTS.format(mounted=mounted))
    none = "9223372036854771712\n"
    stat = "total_inactive_file 50000\ntotal_active_file 1000\ninactive_file 7\n"
    for level in levels:
        write_all(
            cgroup / level,
            memory__limit_in_bytes=none,
            memory__usage_in_bytes="300000\n",
            memory__stat=stat,
        )
    assert budget.available_nbytes(proc, tmp_path) == 1024000
    for level in levels:
        limit = cgroup / level / "memory.limit_in_bytes"
        limit.write_text("500000\n")
        assert budget.available_nbytes(proc, tmp_path) == 251000
        limit.write_text(none)


@pytest.fixture
def v1_cgroup() -> Iterator[Path]:
    """A cgroup of v1's memory controller, with a limit of 120 MB."""
    folder = Path(f"/sys/fs/cgroup/memory/mx-test-{os.getpid()}")
    if not folder.parent.joinpath("memory.limit_in_bytes").exists():
        pytest.skip("needs the memory controller of cgroup v1")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"can't make a cgroup: {error.strerror}")
    try:
        folder.joinpath("memory.limit_in_bytes").write_text(str(120 * 1000 * 1000))
        yield folder
    finally:
        folder.rmdir()


def test_memory_beyond_a_limit_of_cgroup_v1_is_refused_not_fatal(v1_cgroup: Path) -> None:
    code = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from mx.errors import CapacityError
from mx.memory.arena import HostArena
small = HostArena(20_000_000)
small.view[:] = bytes(1) * 20_000_000
try:
    large = HostArena(400_000_000)
except CapacityError:
    sys.exit(5)
for begin in range(0, 400_000_000, 1_000_000):
    large.view[begin : begin + 1_000_000] = bytes(1_000_000)
"""
    with ended(python(code, str(v1_cgroup))) as process:
        assert process.wait(60) == 5


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


def test_an_arena_with_another_writable_map_is_not_frozen() -> None:
    arena = MemfdArena(1 << 20)
    assert arena.memfd is not None
    other = mmap.mmap(arena.memfd, 1 << 20)
    with pytest.raises(LocalError, match="sealed"):
        arena.freeze()
    other.close()
    arena.release()
