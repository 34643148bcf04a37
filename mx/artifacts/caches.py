"""The folders of compile caches: which files travel, and how they are laid out at a target.

A cache has three parts, the first words of its files' paths: `inductor` and `triton`, of
torch.compile, and `vllm`, of which only its torch_compile_cache travels. Locks, temporary files and
Python's own bytecode stay behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from mx.core.json_bounds import check_json
from mx.errors import ArtifactError, CapacityError, ConfigError, LocalError, OutputError
from mx.private import check_private, private_folder
from mx.storage.locks import flock
from mx.text import shown
from mx.units import GIB, MIB, format_bytes

COMPONENTS = ("inductor", "triton", "vllm")
#: CUDA graphs are recorded beside caches, and travel in sets of their own, which are not laid out.
GRAPHS = "graphs"
MAX_FILES = 20_000
MAX_BYTES = 4 * GIB
_MAX_PATH_CHARS = 1024
_MAX_PARTS = 16
#: The name of one file or folder. Nothing outside ASCII: no two spellings of one name.
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.+=@,~-]{1,255}", re.ASCII)
_VLLM = "torch_compile_cache"
#: What engines leave that no other process can use.
_STAYS = re.compile(r"locks?|__pycache__|precompiled_headers|tmp\..*|.*\.(lock|tmp|pyc)")
#: Triton's list of a kernel's files has absolute paths; all are of the folder that has the list.
_TRITON_GROUP = re.compile(r"(?:.*/)?__grp__[^/]*\.json")
#: Files that change where they are laid out, or by an engine's adding to them.
_CHANGES = re.compile(_TRITON_GROUP.pattern + r"|(?:.*/)?vllm_compile_cache\.py")
_MAX_GROUP_BYTES = _READ_BYTES = MIB
#: Whether Inductor compiles its C++ header once for all.
PRECOMPILED_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
_MAX_TRIES = 8
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One file of a cache: `path` is relative and has "/" between its parts."""

    path: str
    nbytes: int
    executable: bool


def variables(root: Path) -> dict[str, str]:
    """Return the environment variables by which engines use a cache.

    Args:
        root: The absolute path of the cache's folder.

    Returns:
        Text by name. Inductor's precompiled header is off: it has 150 MB, is not in the cache's
        folder, and each host would compile it even where all objects are found.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "VLLM_CACHE_ROOT": str(root / "vllm"),
        PRECOMPILED_HEADERS: "0",
    }


def check_files(files: Sequence[CacheFile]) -> None:
    """Check the names and sizes of a cache's files.

    Raises:
        ArtifactError: There are too many, they are too large, or a name could mean a place outside
            the cache, or the same place as another does on some file system.
    """
    if len(files) > MAX_FILES:
        raise ArtifactError(f"the cache has {len(files)} files, more than {MAX_FILES}")
    total = 0
    #: By lower-case path: the path, and whether it is a file.
    places: dict[str, tuple[str, bool]] = {}
    for file in files:
        total += file.nbytes
        if file.nbytes < 0 or total > MAX_BYTES:
            raise ArtifactError(f"the cache has more than {format_bytes(MAX_BYTES)}")
        parts = _checked_parts(file.path)
        for end in range(1, len(parts) + 1):
            place = "/".join(parts[:end]), end == len(parts)
            known = places.setdefault(place[0].lower(), place)
            if known != place or (end == len(parts) and known is not place):
                raise ArtifactError(
                    f"the cache's files {shown(known[0])} and {shown(file.path)} may be one place"
                )


def _checked_parts(path: str) -> list[str]:
    parts = path.split("/", _MAX_PARTS + 1) if len(path) <= _MAX_PATH_CHARS else []
    if (
        not 2 <= len(parts) <= _MAX_PARTS
        or parts[0] not in (*COMPONENTS, GRAPHS)
        or not all(map(_PART.fullmatch, parts))
    ):
        raise ArtifactError(
            f"{shown(path)} can't be a cache's file",
            hint=f"files are in {', '.join(COMPONENTS)} or {GRAPHS}; names are ASCII and short",
        )
    return parts


def scan(root: Path) -> list[CacheFile]:
    """Return the files of a cache that travel, sorted by path.

    Args:
        root: A folder that engines used by `variables`.

    Raises:
        ArtifactError: As `check_files`, or there is a link or a special file. It is named.
        LocalError: It can't be read.
    """
    found: list[CacheFile] = []
    try:
        for part in (*COMPONENTS, GRAPHS):
            start = root / part / _VLLM if part == "vllm" else root / part
            prefix = f"{part}/{_VLLM}" if part == "vllm" else part
            for folder in (root / part, start):
                if os.path.lexists(folder) and not stat.S_ISDIR(folder.lstat().st_mode):
                    raise ArtifactError(f"{shown(str(folder))} is not a folder")
            if os.path.lexists(start):
                _scan(start, prefix, found)
    except OSError as error:
        raise LocalError(f"{root} could not be read: {error.strerror}") from error
    check_files(found)
    return sorted(found, key=lambda file: file.path)


def _scan(folder: Path, prefix: str, found: list[CacheFile]) -> None:
    waiting = [(str(folder), prefix)]
    seen = 0
    while waiting:
        at, prefix = waiting.pop()
        with os.scandir(at) as entries:
            for entry in entries:
                seen += 1
                if len(found) > MAX_FILES or seen > 8 * MAX_FILES:
                    raise ArtifactError(f"the cache has more than {MAX_FILES} files")
                if _STAYS.fullmatch(entry.name):
                    continue
                path = f"{prefix}/{entry.name}"
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    if path.count("/") < _MAX_PARTS:
                        waiting.append((entry.path, path))
                        continue
                elif stat.S_ISREG(status.st_mode):
                    _checked_parts(path)
                    found.append(CacheFile(path, status.st_size, bool(status.st_mode & 0o100)))
                    continue
                raise ArtifactError(
                    f"{shown(path)} in the cache is neither a file nor a folder",
                    hint="record the cache again: links and special files do not travel",
                )


def lay_out(
    files: Sequence[CacheFile],
    read: Callable[[int], memoryview | bytes],
    root: Path,
    digests: Sequence[bytes] = (),
) -> bool:
    """Lay a cache out, all of it or nothing: files are written beside `root`, then renamed.

    Nothing is synced: what a loss of power leaves incomplete is laid out anew.

    Args:
        files, read: The files, and a function that returns the checked bytes of the file at an
            index.
        root: The cache's folder. If it is whole, it is used as it is, also if another process laid
            it out. One that is not is laid out anew unless it is in use (`hold`).
        digests: As for `is_whole`.

    Returns:
        True if this call has laid it out, False if it was there.

    Raises:
        ArtifactError: As `check_files`, or a file of Triton's is malformed.
        ConfigError: As `check_private`, or the file system does not execute code.
        CapacityError: The disk is full. Nothing is left there.
        LocalError: The folder is not whole and in use.
        OutputError: It can't be written. Nothing is left there.
    """
    check_files(files)
    parent = private_folder(root.parent)
    root = parent / root.name
    try:
        if os.statvfs(parent).f_flag & os.ST_NOEXEC:
            raise ConfigError(
                f"the file system of {parent} is mounted noexec, and a cache is code",
                hint="name a folder on another file system",
            )
        _remove_leftovers(root)
        for _ in range(_MAX_TRIES):
            if os.path.lexists(root):
                if is_whole(root, files, digests):
                    return False
                _take_away(root)
            if _write_and_rename(files, read, root):
                return True
    except OSError as error:
        if error.errno in _FULL:
            raise CapacityError(
                f"{root}: {error.strerror}", hint="free space or name another folder"
            ) from error
        raise OutputError(f"{root} could not be written: {error.strerror}") from error
    raise LocalError(f"{root} keeps changing", hint="name another folder")


def is_whole(root: Path, files: Sequence[CacheFile], digests: Sequence[bytes] = ()) -> bool:
    """Return True if a cache is laid out and unchanged, except that engines may have added files
    and written to lists of their own.

    Args:
        root: The cache's folder. It need not exist.
        files: The files that were laid out.
        digests: The blake3 of each; without them only sizes are looked at.

    Raises:
        ConfigError: As `check_private`.
    """
    if not os.path.lexists(root):
        return False
    check_private(root)
    for index, file in enumerate(files):
        changes = _CHANGES.fullmatch(file.path)
        try:
            status = (root / file.path).lstat()
            if not stat.S_ISREG(status.st_mode) or (
                status.st_size == 0 < file.nbytes if changes else status.st_size != file.nbytes
            ):
                return False
            if digests and not changes and digest_of(root / file.path) != digests[index]:
                return False
        except OSError:
            return False
    return True


def digest_of(path: Path) -> bytes:
    """Return the blake3 of a file. Raises OSError."""
    hasher = blake3()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as opened:
        while data := opened.read(_READ_BYTES):
            hasher.update(data)
    return hasher.digest()


def _temporary(root: Path) -> Path:
    return root.parent / f".{root.name}.{secrets.token_hex(8)}"


def _write_and_rename(
    files: Sequence[CacheFile], read: Callable[[int], memoryview | bytes], root: Path
) -> bool:
    """Write a cache beside its place and rename it. Return False if another process was faster."""
    temporary = _temporary(root)
    temporary.mkdir(mode=0o700)
    # A process that can lock such a folder may remove it: the one that made it is gone, or has not
    # locked it yet.
    try:
        fd = os.open(temporary, _FOLDER)
    except FileNotFoundError:
        return False
    try:
        flock(fd, fcntl.LOCK_EX)
        if not _is_at(fd, temporary):
            return False
        made = {""}
        for index, file in enumerate(files):
            folder = file.path.rpartition("/")[0]
            if folder not in made:
                _make_folders(temporary, folder, made)
            data = memoryview(read(index))
            if data.nbytes != file.nbytes:
                raise ArtifactError(f"{shown(file.path)} does not have the size that was announced")
            if _TRITON_GROUP.fullmatch(file.path):
                data = memoryview(_relocated(file.path, data, root))
            _write(f"{temporary}/{file.path}", data, 0o700 if file.executable else 0o600)
        try:
            temporary.rename(root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True
    finally:
        if _is_at(fd, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        os.close(fd)


def _make_folders(temporary: Path, folder: str, made: set[str]) -> None:
    parent = folder.rpartition("/")[0]
    if parent not in made:
        _make_folders(temporary, parent, made)
    os.mkdir(f"{temporary}/{folder}", 0o700)
    made.add(folder)


def _relocated(path: str, data: memoryview, root: Path) -> bytes:
    """Return Triton's list of a kernel's files with their paths here. Raises ArtifactError."""
    try:
        if data.nbytes > _MAX_GROUP_BYTES:
            raise ValueError("it is too large")
        text = bytes(data)
        check_json(text, most_nbytes=_MAX_GROUP_BYTES * 64)
        names = json.loads(text)["child_paths"]
        if not isinstance(names, dict) or not all(map(_PART.fullmatch, names)):
            raise ValueError("it names no files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{shown(path)} is not a list of Triton's: {error}") from error
    folder = root / os.path.dirname(path)
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def _write(path: str, data: memoryview, mode: int) -> None:
    fd = os.open(path, _WRITE, mode)
    try:
        while data.nbytes:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Return True if a path still leads to the open file or folder, and to nothing that replaced
    it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _take_away(root: Path) -> None:
    """Remove a folder that no engine uses. Raises LocalError if one does."""
    fd = os.open(root, _FOLDER)
    try:
        try:
            uses = "may use it" if not flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) else ""
        except BlockingIOError:
            uses = "uses it"
        if uses:  # a file system without locks can't tell
            raise LocalError(
                f"the cache in {root} has changed since it was laid out, and an engine {uses}",
                hint="end that engine and remove the cache, or name another folder",
            )
        if _is_at(fd, root):
            temporary = _temporary(root)
            root.rename(temporary)
            shutil.rmtree(temporary)
    finally:
        os.close(fd)


def _remove_leftovers(root: Path) -> None:
    """Remove what killed processes left while they laid out this cache."""
    name = re.compile(re.escape(f".{root.name}.") + "[0-9a-f]{16}")
    for entry in os.listdir(root.parent):
        if not name.fullmatch(entry):
            continue
        path = root.parent / entry
        try:
            fd = os.open(path, _FOLDER)  # never a link
        except OSError:
            continue
        try:
            if flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(fd, path):
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its process is at work
        finally:
            os.close(fd)


@contextlib.contextmanager
def hold(root: Path) -> Iterator[None]:
    """Keep a cache's folder from being laid out anew while an engine uses it. Raises OSError."""
    fd = os.open(root, _FOLDER)
    try:
        flock(fd, fcntl.LOCK_SH)
        if not _is_at(fd, root):
            raise FileNotFoundError(errno.ENOENT, "it was taken away just now")
        yield
    finally:
        os.close(fd)
