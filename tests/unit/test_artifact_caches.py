"""The folders of compile caches: what travels, and how it is laid out: whole, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mx.artifacts import caches
from mx.artifacts.caches import CacheFile, check_files, hold, is_whole, lay_out, scan, variables
from mx.errors import ArtifactError, CapacityError, ConfigError, LocalError
from mx.private import check_private
from tests.support.privileges import NOBODY, as_nobody, as_root, done

CONTENTS = {
    "inductor/ab/cab.main.so": b"\x7fELF object",
    "inductor/fxgraph/x/fx/entry": b"graph",
    "triton/KEY/kernel.cubin": b"cubin",
    "vllm/torch_compile_cache/0123456789/rank_0_0/backbone/cache_key_factors.json": b"{}",
}
FILES = [
    CacheFile(path, len(data), path.endswith(".so")) for path, data in sorted(CONTENTS.items())
]


def read(index: int) -> bytes:
    return CONTENTS[FILES[index].path]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of this user alone."""
    folder = tmp_path / "caches"
    folder.mkdir(mode=0o700)
    return folder


def put(root: Path, path: str, data: bytes = b"x", mode: int = 0o644) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)
    return file


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_is_laid_out_is_what_was_scanned(place: Path) -> None:
    assert lay_out(FILES, read, place / "set") is True
    assert contents(place / "set") == CONTENTS
    assert scan(place / "set") == FILES
    assert os.listdir(place) == ["set"]
    for at in (place / "set", *(place / "set").rglob("*")):
        mode = stat.S_IMODE(at.lstat().st_mode)
        assert mode == (0o700 if at.is_dir() or at.suffix == ".so" else 0o600), at


def test_only_what_others_can_use_travels(tmp_path: Path) -> None:
    for path in (
        "inductor/ab/x.py", "inductor/locks/x.lock", "inductor/ab/.12.34.tmp",
        "inductor/ab/__pycache__/x.cpython-311.pyc", "triton/KEY/lock", "triton/KEY/x.json",
        "triton/KEY/tmp.pid_1_abc/x.json", "vllm/modelinfos/x.json",
        "vllm/torch_compile_cache/0/rank_0_0/a/x.py", "record.json",
    ):  # fmt: skip
        put(tmp_path, path)
    assert [file.path for file in scan(tmp_path)] == [
        "inductor/ab/x.py", "triton/KEY/x.json", "vllm/torch_compile_cache/0/rank_0_0/a/x.py",
    ]  # fmt: skip


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    def refused(root: Path, name: str) -> None:
        with pytest.raises(ArtifactError, match=name):
            scan(root)

    for name in ("link", "folder_link", "pipe"):
        put(tmp_path / name, "inductor/ab/x.py")
    (tmp_path / "link/inductor/ab/secret.py").symlink_to("/etc/passwd")
    refused(tmp_path / "link", "secret")
    (tmp_path / "folder_link/inductor/etc").symlink_to("/etc")
    refused(tmp_path / "folder_link", "etc")
    os.mkfifo(tmp_path / "pipe/inductor/ab/pipe")
    refused(tmp_path / "pipe", "pipe")
    (tmp_path / "top").mkdir()
    (tmp_path / "top/inductor").symlink_to(tmp_path / "link/inductor")
    refused(tmp_path / "top", "inductor")


HOSTILE = (
    "", "x", "inductor", "/inductor/x", "inductor//x", "inductor/", "inductor/./x", "inductor/../x",
    "../inductor/x", "other/x", "record.json/x", "inductor/a\nb", "inductor/a\x1b[2J",
    "inductor/\0",
    "inductor/a\\b", "inductor/é", unicodedata.normalize("NFD", "inductor/é"), "inductor/\u202ex",
    "inductor/" + "x" * 256, "inductor/" + "x/" * 15 + "x", "inductor/" + "x/" * 600 + "x",
    "inductor/a b", "inductor/a:b", "Inductor/x", "inductor/\udcff",
)  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_name_is_refused_before_anything_is_written(place: Path, path: str) -> None:
    with pytest.raises(ArtifactError):
        lay_out([*FILES, CacheFile(path, 1, False)], lambda _: b"x", place / "set")
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    "other",
    ["inductor/ab/cab.main.so", "inductor/AB/other", "inductor/ab/CAB.main.so", "inductor/ab",
     "inductor/ab/cab.main.so/x", "triton/key/kernel.cubin"],
)  # fmt: skip
def test_two_names_that_may_be_one_place_are_refused(other: str) -> None:
    with pytest.raises(ArtifactError):
        check_files([*FILES, CacheFile(other, 1, False)])
    with pytest.raises(ArtifactError):
        check_files([CacheFile(other, 1, False), *FILES])


def test_too_many_and_too_large_are_refused() -> None:
    with pytest.raises(ArtifactError, match="files"):
        check_files([CacheFile(f"triton/{n}", 0, False) for n in range(caches.MAX_FILES + 1)])
    half = caches.MAX_BYTES // 2
    check_files([CacheFile(f"triton/{n}", half, False) for n in range(2)])
    with pytest.raises(ArtifactError, match="more than 4"):
        check_files([CacheFile(f"triton/{n}", half + 1, False) for n in range(2)])
    with pytest.raises(ArtifactError):
        check_files([CacheFile("triton/x", -1, False)])


@given(st.lists(st.text(st.sampled_from("ab./~-\\A\n\0é"), max_size=12), max_size=8))
def test_names_that_pass_are_distinct_places_inside(tails: list[str]) -> None:
    files = [CacheFile(f"inductor/{tail}", 0, False) for tail in tails]
    try:
        check_files(files)
    except ArtifactError:
        return
    places = {os.path.normpath(os.path.join("/root", file.path)).lower() for file in files}
    assert len(places) == len(files)
    assert all(place.startswith("/root/inductor/") for place in places)
    assert not any(
        one != other and other.startswith(one + "/") for one in places for other in places
    )


def test_triton_finds_a_kernels_files_where_they_are_laid_out(place: Path) -> None:
    """Its real cache: a list of absolute paths, of which those that do not exist are left out."""
    pytest.importorskip("triton")
    there = place / "there"
    code = """
import sys
from triton.runtime.cache import FileCacheManager
manager = FileCacheManager("KEY")
if sys.argv[1] == "put":
    group = {name: manager.put(name.encode(), name) for name in ("k.cubin", "k.json")}
    manager.put_group("k.json", group)
else:
    print(sorted(manager.get_group("k.json").items()))
"""

    def run(root: Path, what: str) -> str:
        environ = {**os.environ, **variables(root)}
        return subprocess.run([sys.executable, "-c", code, what], env=environ, text=True,
                              check=True, capture_output=True).stdout  # fmt: skip

    run(there, "put")
    files = scan(there)
    assert [file.path for file in files] == [
        "triton/KEY/__grp__k.json", "triton/KEY/k.cubin", "triton/KEY/k.json",
    ]  # fmt: skip
    data = [(there / file.path).read_bytes() for file in files]
    there.rename(place / "gone")
    root = place / "here"
    lay_out(files, data.__getitem__, root)
    assert is_whole(root, files, [blake3(each).digest() for each in data])
    found = [(name, str(root / "triton/KEY" / name)) for name in ("k.cubin", "k.json")]
    assert run(root, "get") == f"{found}\n"


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"child_paths": []}', b'{"child_paths": {"../../x": "y"}}',
     b'{"child_paths": {"/etc/passwd": "y"}}', b"[" * 100_000, b"\xff", b"1" * (2 << 20)],
)  # fmt: skip
def test_a_list_of_tritons_that_is_none_lays_nothing_out(place: Path, text: bytes) -> None:
    file = CacheFile("triton/K/__grp__k.json", len(text), False)
    with pytest.raises(ArtifactError, match="grp"):
        lay_out([file], lambda _: text, place / "set")
    assert os.listdir(place) == []


def test_paths_in_a_list_of_tritons_never_lead_elsewhere(place: Path) -> None:
    text = json.dumps({"child_paths": {"k.cubin": "/etc/passwd"}}).encode()
    lay_out([CacheFile("triton/K/__grp__k.json", len(text), False)], lambda _: text, place / "set")
    found = json.loads((place / "set/triton/K/__grp__k.json").read_text())
    assert found == {"child_paths": {"k.cubin": str(place / "set/triton/K/k.cubin")}}


def test_one_that_is_there_is_used(place: Path) -> None:
    assert lay_out(FILES, read, place / "set")
    put(place / "set", "inductor/ab/compiled_since.so")

    def unread(index: int) -> bytes:
        raise AssertionError(index)

    assert lay_out(FILES, unread, place / "set") is False
    assert (place / "set/inductor/ab/compiled_since.so").exists()


def spoil(root: Path, how: str) -> None:
    path = root / FILES[0].path
    if how == "removed":
        path.unlink()
    elif how == "shortened":
        os.truncate(path, 0)
    elif how == "link":
        path.rename(root / "elsewhere")
        path.symlink_to(root / "elsewhere")
    else:
        path.write_bytes(b"z" * FILES[0].nbytes)


@pytest.mark.parametrize("how", ["removed", "shortened", "link"])
def test_one_that_is_not_whole_is_laid_out_anew_unless_it_is_in_use(place: Path, how: str) -> None:
    root = place / "set"
    lay_out(FILES, read, root)
    spoil(root, how)
    with hold(root), pytest.raises(LocalError, match="uses it"):
        lay_out(FILES, read, root)
    assert lay_out(FILES, read, root) is True
    assert contents(root) == CONTENTS
    assert os.listdir(place) == ["set"]


def test_what_is_whole(place: Path) -> None:
    root = place / "set"
    digests = [blake3(read(index)).digest() for index in range(len(FILES))]
    assert not is_whole(root, FILES, digests)
    lay_out(FILES, read, root)
    assert is_whole(root, FILES, digests)
    for how in ("removed", "shortened", "link", "other bytes"):
        os.rename(root, place / how)
        lay_out(FILES, read, root)
        spoil(root, how)
        assert not is_whole(root, FILES, digests), how


def test_vllms_own_list_may_grow(place: Path) -> None:
    path = "vllm/torch_compile_cache/0123456789/rank_0_0/backbone/vllm_compile_cache.py"
    file = CacheFile(path, 2, False)
    lay_out([file], lambda _: b"{}", place / "set")
    (place / "set" / path).write_text("{'more': 1}")
    assert is_whole(place / "set", [file], [blake3(b"{}").digest()])


def test_a_file_of_another_size_lays_nothing_out(place: Path) -> None:
    with pytest.raises(ArtifactError):
        lay_out(FILES, lambda index: read(index) + b"x", place / "set")
    assert os.listdir(place) == []


def test_an_error_of_the_reader_lays_nothing_out(place: Path) -> None:
    for error in (LocalError("no"), KeyboardInterrupt()):

        def fail(index: int, error: BaseException = error) -> bytes:
            if index == 2:
                raise error
            return read(index)

        with pytest.raises(type(error)):
            lay_out(FILES, fail, place / "set")
        assert os.listdir(place) == []


def test_leftovers_of_a_killed_process_are_removed(place: Path, tmp_path: Path) -> None:
    """Only what no process is at work on, and never what a link leads to."""
    code = """
import os, sys
from pathlib import Path
from mx.artifacts.caches import CacheFile, lay_out
def read(index):
    if index:
        os.kill(os.getpid(), 9)
    return b"x"
lay_out([CacheFile(f"triton/{n}", 1, False) for n in range(2)], read, Path(sys.argv[1]))
"""
    ended = subprocess.run([sys.executable, "-c", code, place / "set"], check=False)
    assert ended.returncode == -9
    [left] = os.listdir(place)
    assert (place / left / "triton/0").read_bytes() == b"x"
    victim = put(tmp_path, "victim/file")
    name = ".set." + "0" * 16
    (place / name).symlink_to(victim.parent)
    busy = place / (".set." + "1" * 16)
    busy.mkdir()
    put(place, ".other.0000000000000000/x")
    fd = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        lay_out(FILES, read, place / "set")
    finally:
        os.close(fd)
    assert sorted(os.listdir(place)) == sorted([name, busy.name, "set", ".other.0000000000000000"])
    assert victim.exists()
    os.rename(place / "set", place / "first")
    lay_out(FILES, read, place / "set")
    assert not busy.exists()


def test_of_two_that_lay_out_the_same_one_wins(place: Path) -> None:
    """Both are in the middle at the same time; what is there is whole, once."""
    both = threading.Barrier(2)
    results: list[bool] = []

    def meet(index: int) -> bytes:
        if index == len(FILES) - 1:
            both.wait(30)
        return read(index)

    threads = [
        threading.Thread(target=lambda: results.append(lay_out(FILES, meet, place / "set")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    assert contents(place / "set") == CONTENTS
    assert os.listdir(place) == ["set"]


def test_a_folder_that_another_process_removed_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made and not locked yet: the other process took it for what a dead one had left."""
    opened: list[Path] = []
    really = os.open

    def late(path: str | Path, *arguments: Any, **more: Any) -> int:
        if isinstance(path, Path) and path.name.startswith(".set."):
            if not opened:
                path.rmdir()
            opened.append(path)
        return really(path, *arguments, **more)

    monkeypatch.setattr(os, "open", late)
    assert caches.lay_out([CacheFile("triton/a", 3, False)], lambda n: b"abc", place / "set")
    assert (place / "set/triton/a").read_bytes() == b"abc"
    assert len(opened) == 2 and opened[0] != opened[1]


def test_many_processes_lay_out_the_same(place: Path) -> None:
    code = """
import sys
from pathlib import Path
from mx.artifacts.caches import CacheFile, lay_out
files = [CacheFile(f"triton/{n % 7}/{n}", 1000, False) for n in range(300)]
sys.stdin.readline()
print(lay_out(files, lambda n: bytes([n % 251]) * 1000, Path(sys.argv[1])))
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, place / "set"], text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]  # fmt: skip
    said = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        said.append(out)
    assert sorted(said) == ["False\n"] * 3 + ["True\n"]
    assert os.listdir(place) == ["set"]
    assert len(contents(place / "set")) == 300


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this container may not mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_left_as_it_was(small_disk: Path) -> None:
    files = [CacheFile(f"triton/{n}", 100_000, False) for n in range(20)]
    with pytest.raises(CapacityError, match="No space") as caught:
        lay_out(files, lambda n: bytes(100_000), small_disk / "set")
    assert caught.value.hint
    assert os.listdir(small_disk) == []
    assert os.statvfs(small_disk).f_bavail * 4096 > 900_000


def test_a_disk_that_runs_no_code_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match="noexec"):
        lay_out(FILES, read, small_disk / "set")
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_write_to_is_refused(place: Path, mode: int) -> None:
    place.chmod(mode)
    with pytest.raises(ConfigError, match="other users may write"):
        lay_out(FILES, read, place / "set")
    assert os.listdir(place) == []
    inside = place / "inside"
    inside.mkdir(mode=0o700)
    if mode == 0o1777:  # as /tmp: there others can't replace what is ours
        lay_out(FILES, read, inside / "set")
    else:
        with pytest.raises(ConfigError, match=f"{place}: its mode"):
            lay_out(FILES, read, inside / "set")
        assert os.listdir(inside) == []


def test_folders_that_are_made_are_private_whatever_the_umask(place: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from mx.artifacts.caches import CacheFile, lay_out
os.umask(0)
lay_out([CacheFile("triton/x", 1, False)], lambda _: b"x", Path(sys.argv[1]))
"""
    root = place / "a/b/set"
    subprocess.run([sys.executable, "-c", code, root], check=True)
    for at in (place / "a", place / "a/b", root, root / "triton"):
        assert stat.S_IMODE(at.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "triton/x").stat().st_mode) == 0o600


def test_one_laid_out_that_others_write_to_is_refused(place: Path) -> None:
    lay_out(FILES, read, place / "set")
    (place / "set").chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write"):
        lay_out(FILES, read, place / "set")
    with pytest.raises(ConfigError, match="other users may write"):
        is_whole(place / "set", FILES)


@as_root
def test_another_users_folder_is_refused(place: Path, tmp_path: Path) -> None:
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        check_private(place)
    inside = place / "inside"
    inside.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"{place} belongs"):
        check_private(inside)
    os.chown(place, 0, 0)
    check_private(inside)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(inside)
    check_private(shared / "link")
    os.chown(shared / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match="link of another user"):
        check_private(shared / "link")


@as_root
def test_another_user_can_neither_read_nor_add_to_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    for above in tmp_path.parents[:2]:
        above.chmod(0o711)
    lay_out(FILES, read, tmp_path / "set")
    code = f"""
for path in ({FILES[0].path!r}, "new"):
    try:
        open(os.path.join(sys.argv[1], path), "wb" if path == "new" else "rb")
    except PermissionError:
        print("no")
"""
    assert done(as_nobody(code, tmp_path / "set")) == "no\nno\n"


def test_links_are_followed_as_the_system_follows_them(place: Path) -> None:
    (place / "real/inner").mkdir(parents=True)
    (place / "real/inner").chmod(0o700)
    (place / "one").symlink_to("real/inner/../inner")
    (place / "two").symlink_to(place / "one")
    check_private(place / "two" / "new")
    (place / "real/inner").chmod(0o722)
    with pytest.raises(ConfigError, match="real/inner"):
        check_private(place / "two" / "new")
    (place / "loop").symlink_to("loop")
    with pytest.raises(ConfigError):
        check_private(place / "loop")
    put(place, "file")
    with pytest.raises(ConfigError, match="not a folder"):
        check_private(place / "file")


def test_where_a_path_ends_is_checked_however_it_is_written(place: Path) -> None:
    (place / "inner").mkdir()
    (place / "here").symlink_to(".")
    (place / "inner/up").symlink_to("..")
    place.chmod(0o1777)  # on the way it may be so
    check_private(place / "inner")
    for each in ("inner/..", "here", "inner/up"):
        with pytest.raises(ConfigError, match="other users may write"):
            check_private(place / each)


def test_a_folder_that_was_just_taken_away_is_not_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its opening and its lock another process lays it out anew."""
    root = place / "set"
    lay_out(FILES, read, root)
    real = fcntl.flock

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            root.rename(place / "gone")
            root.mkdir(mode=0o700)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileNotFoundError), hold(root):
        pass
