"""Reads the JSON, text and tokenizer files that are transferred with a checkpoint's tensors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from mx.core.digest import document_digest
from mx.core.packaging import (
    DIGESTS,
    INDEX_SUFFIX,
    MAX_SIDE_FILE_BYTES,
    MAX_SIDE_FILES,
    MAX_SIDE_FILES_BYTES,
    TENSOR_SUFFIX,
    bad_link_target,
    bad_path_set,
    bad_side_content,
    bad_side_path,
    is_newer,
)
from mx.core.types import SideFile
from mx.errors import ConfigError, MxError
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.storage.osfile import open_regular, read_error
from mx.storage.shards import shards_of, weight_map
from mx.units import format_bytes

L = TypeVar("L")

#: How many levels of folders are searched (sentence-transformers have 1_Pooling/).
MAX_DEPTH = 3
MAX_ENTRIES = 10_000
#: Diffusers' older variants have model.safetensors.fp16.index.json.
_INDEX = re.compile(r".*\.index(\.\w+)?\.json", re.S)

#: Files by path, their bytes by digest, and the reasons why others are left out.
SideFiles = tuple[tuple[SideFile, ...], dict[bytes, bytes], dict[str, str]]


def read_side_files(root: Path) -> SideFiles:
    """Read the files below `root` that may be transferred with weights that are not there.

    Raises:
        LocalError, ConfigError, CheckpointError: A file that may be transferred can't be read.
        OSError: A folder can't be listed.
    """
    left_out: dict[str, str] = {}
    return take_side_files(walk(root, (), (), left_out), read_side_file, (), left_out)


def read_side_file(location: Path) -> bytes:
    """Return the bytes of a file that `walk` has found, or at least one more than may be
    transferred. A folder that has become a link meanwhile is not followed.

    Raises:
        LocalError, ConfigError, CheckpointError: It can't be read.
    """
    try:
        with open(open_regular(location, os.O_NOFOLLOW), "rb") as file:
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != str(location):
                raise OSError(errno.ENOENT, "it was moved or replaced meanwhile")
            return file.read(MAX_SIDE_FILE_BYTES + 1)
    except OSError as error:
        raise read_error(error, location) from error


def walk(
    root: Path, taken: Collection[str], follow: Collection[Path], left_out: dict[str, str]
) -> list[tuple[str, Path]]:
    """Return the files below `root`, as their paths and where to read them, in the order that a pin
    covers.

    Args:
        root: The checkpoint's folder.
        taken: The paths of its main tensor files.
        follow: Folders that links of side files may lead to, beside `root` and, where the tensor
            files are links into it, the `blobs` of one repository in Hugging Face's cache.
        left_out: Gets what is not a file that may be read, with the reasons.

    Raises:
        OSError: A folder can't be listed.
    """
    return [*_Walk(root, taken, follow, left_out).files()]


def take_side_files(
    files: Iterable[tuple[str, L]],
    read: Callable[[L], bytes],
    taken: Collection[str],
    left_out: dict[str, str],
) -> SideFiles:
    """Read those of a checkpoint's files that may be transferred.

    Args:
        files: The files' paths, in the order of a folder's walk, and where to read them.
        read: Returns a file's bytes, or at least one more than may be transferred.
        taken: The paths of the tensor files that are transferred.
        left_out: Files that are left out already, with the reasons; gets the others.

    Raises:
        CheckpointError: A file is a git-LFS pointer.
        MxError: What `read` raises.
    """
    found: list[SideFile] = []
    documents: dict[bytes, bytes] = {}
    total = 0
    listed = dict(files)
    # What loaders can't do without finds room whatever else is there.
    for path in sorted(listed, key=lambda each: not _is_needed(each)):
        if path in taken or path in left_out or path == DIGESTS:
            continue
        location = listed[path]
        reason = bad_side_path(path)
        if reason is None and len(found) == MAX_SIDE_FILES:
            reason = f"comes after the first {MAX_SIDE_FILES}"
        data = b""
        if reason is None:
            data = read(location)
            if len(data) > MAX_SIDE_FILE_BYTES or total + len(data) > MAX_SIDE_FILES_BYTES:
                reason = f"is larger than {format_bytes(MAX_SIDE_FILE_BYTES)}, or all are together"
            else:
                if data.startswith(LFS_MAGIC):
                    raise lfs_pointer(str(location))
                reason = bad_side_content(path, data)
        if reason is None and _INDEX.fullmatch(path) and not _is_index_of(path, data, taken):
            reason = "is an index of files that are not transferred"
        if reason is None and bad_path_set([*taken, *(s.path for s in found), path]) is not None:
            reason = "has another file's name, except for upper and lower case"
        if reason is not None:
            left_out[path] = reason
            continue
        total += len(data)
        digest = document_digest(data)
        documents[digest] = data
        found.append(SideFile(path, len(data), digest, is_newer(path, data)))
    order = {path: place for place, path in enumerate(listed)}
    found.sort(key=lambda side: (side.newer, order[side.path]))  # as a packaging has them
    return tuple(found), documents, left_out


def _is_needed(path: str) -> bool:
    return path.rpartition("/")[2] == "config.json" or path.endswith(INDEX_SUFFIX)


def _is_index_of(path: str, data: bytes, taken: Collection[str]) -> bool:
    """Return True if an index names only tensor files that are taken."""
    folder = path.rpartition("/")[0]
    try:
        named = shards_of(weight_map(data, path))
    except MxError:
        return False
    return all(f"{folder}/{name}".lstrip("/") in taken for name in named)


def resolved_folders(follow: Collection[str | Path]) -> list[Path]:
    """Return the folders that links may lead to, without links in their paths.

    Raises:
        ConfigError: One is not there, or no folder.
    """
    found = [Path(os.path.realpath(each)) for each in follow]
    for given, folder in zip(follow, found, strict=True):
        if not folder.is_dir():
            raise ConfigError(
                f"{given} is not a folder", hint="`follow` names folders that links may lead to"
            )
    return found


class _Walk:
    """A walk through a checkpoint's folder, level by level, in a fixed order."""

    def __init__(
        self,
        root: Path,
        taken: Collection[str],
        follow: Collection[Path],
        left_out: dict[str, str],
    ) -> None:
        self._base = Path(os.path.realpath(root))
        self._follow = follow
        self._left_out = left_out
        self._blobs = _blobs_of(self._base, taken)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield each file as (relative path, where to read it); name what no file is."""
        folders = [("", 0)]
        entries_left = MAX_ENTRIES
        while folders:
            prefix, depth = folders.pop(0)
            with os.scandir(self._base / prefix) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
            if prefix and not entries:
                self._left_out[prefix] = "is empty"
            entries_left -= len(entries)
            if entries_left < 0:
                for left, _ in ((prefix, depth), *folders):
                    self._left_out[left or "./"] = f"comes after the first {MAX_ENTRIES} files"
                return
            for entry in entries:
                path = prefix + entry.name
                if entry.is_symlink():
                    location = Path(os.path.realpath(entry.path))
                    reason = self._bad_link(location, is_tensors=path.endswith(TENSOR_SUFFIX))
                    if reason is None:
                        yield path, location
                    else:
                        self._left_out[path] = reason
                elif entry.is_file(follow_symlinks=False):
                    yield path, Path(entry.path)
                elif not entry.is_dir(follow_symlinks=False):
                    self._left_out[path] = "is not an ordinary file"
                elif entry.name[0] == ".":
                    self._left_out[path + "/"] = "is hidden"
                elif depth >= MAX_DEPTH:
                    self._left_out[path + "/"] = f"is more than {MAX_DEPTH} folders deep"
                else:
                    folders.append((path + "/", depth + 1))

    def _bad_link(self, location: Path, *, is_tensors: bool) -> str | None:
        """Return why a link from the checkpoint's folder to `location` may not be followed. Tensors
        may be anywhere: what is not a safetensors file is refused.

        A folder from a stranger could link config.json to a private key, which serving would
        publish. So a link is followed only inside the folder and below folders that the user has
        named, to files that could travel under their own names too; and, where the weights
        themselves are links into it, into the blobs folder of one repository in Hugging Face's
        cache, which holds only files that were downloaded for it.
        """
        if location.is_dir():
            return "is a link to a folder"
        if not location.is_file():
            return "is a link to nothing"
        if is_tensors:
            return None
        for folder in (self._base, *self._follow):
            if location.is_relative_to(folder):
                reason = bad_link_target(location.relative_to(folder).as_posix())
                return None if reason is None else f"is a link to a file that {reason}"
        if location.parent in self._blobs and not location.name.startswith("."):
            return None
        return "is a link that leaves the folder"


def _blobs_of(base: Path, taken: Collection[str]) -> set[Path]:
    """Return the folder of a repository's blobs that a snapshot, or its tensor files, belong to."""
    snapshots = {each.parent for each in (base, *base.parents) if each.parent.name == "snapshots"}
    homes = {Path(os.path.realpath(base / path)).parent for path in taken}
    found = {each.parent / "blobs" for each in snapshots}
    if len(homes) == 1:  # all of them are of one repository
        found |= homes
    return {each for each in found if each.name == "blobs" and "--" in each.parent.name}
