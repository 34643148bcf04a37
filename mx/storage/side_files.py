"""Reads the JSON, text and tokenizer files that are transferred with a checkpoint's tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from mx.core.digest import document_digest
from mx.core.packaging import (
    MAX_SIDE_FILE_BYTES,
    MAX_SIDE_FILES,
    MAX_SIDE_FILES_BYTES,
    TENSOR_SUFFIX,
    bad_path_set,
    bad_side_content,
    bad_side_path,
)
from mx.core.types import SideFile
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.storage.osfile import open_regular, read_error
from mx.units import format_bytes

L = TypeVar("L")

#: How many levels of folders are searched (sentence-transformers have 1_Pooling/).
MAX_DEPTH = 3
MAX_ENTRIES = 10_000


#: Files by path, their bytes by digest, and the reasons why others are left out.
SideFiles = tuple[tuple[SideFile, ...], dict[bytes, bytes], dict[str, str]]


def read_side_files(root: Path, index_path: str | None, taken: Collection[str]) -> SideFiles:
    """Read the files below `root` that may be transferred.

    Args:
        root: The checkpoint's folder.
        index_path: The shard index in use, the only index that is transferred.
        taken: The paths of the tensor files.

    Raises:
        LocalError, ConfigError, CheckpointError: A file that may be transferred can't be read.
        OSError: A folder can't be listed.
    """

    def read(location: Path) -> bytes:
        try:
            with open(open_regular(location), "rb") as file:
                return file.read(MAX_SIDE_FILE_BYTES + 1)
        except OSError as error:
            raise read_error(error, location) from error

    left_out: dict[str, str] = {}
    return take_side_files(_walk(root, left_out), read, index_path, taken, left_out)


def take_side_files(
    files: Iterable[tuple[str, L]],
    read: Callable[[L], bytes],
    index_path: str | None,
    taken: Collection[str],
    left_out: dict[str, str],
) -> SideFiles:
    """Read those of a checkpoint's files that may be transferred.

    Args:
        files: The files' paths, in the order of a folder's walk, and where to read them.
        read: Returns a file's bytes, or at least one more than may be transferred.
        index_path: The shard index in use, the only index that is transferred.
        taken: The paths of the tensor files.
        left_out: Files that are left out already, with the reasons; gets the others.

    Raises:
        CheckpointError: A file is a git-LFS pointer.
        MxError: What `read` raises.
    """
    found: list[SideFile] = []
    documents: dict[bytes, bytes] = {}
    total = 0
    for path, location in files:
        reason = bad_side_path(path)
        if reason is None and path.endswith(".index.json") and path != index_path:
            reason = "is an index of files that are not transferred"
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
        if reason is None and bad_path_set([*taken, *(s.path for s in found), path]) is not None:
            reason = "has another file's name, except for upper and lower case"
        if reason is not None:
            if not path.endswith(TENSOR_SUFFIX) and not path.startswith("."):
                left_out[path] = reason
            continue
        total += len(data)
        digest = document_digest(data)
        documents[digest] = data
        found.append(SideFile(path, len(data), digest))
    return tuple(found), documents, left_out


def _walk(root: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield each file below `root` as (relative path, where to read it), in a fixed order."""
    base = Path(os.path.realpath(root))
    folders = [("", 0)]
    entries_left = MAX_ENTRIES
    while folders:
        prefix, depth = folders.pop(0)
        with os.scandir(base / prefix) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            entries_left -= 1
            if entries_left < 0:
                left_out[prefix or "."] = f"has more than {MAX_ENTRIES} files below it"
                return
            path = prefix + entry.name
            if entry.is_symlink():
                location = Path(os.path.realpath(entry.path))
                if not location.is_file():
                    continue
                if _may_follow(base, location):
                    yield path, location
                else:
                    left_out[path] = "is a link that leaves the folder"
            elif entry.is_file(follow_symlinks=False):
                yield path, Path(entry.path)
            elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH and entry.name[0] != ".":
                folders.append((path + "/", depth + 1))


def _may_follow(base: Path, location: Path) -> bool:
    """Return True if a link from the checkpoint's folder to `location` may be followed.

    A folder from a stranger could link config.json to a private key, which serving would publish,
    so links that leave the folder are left out. Hugging Face's cache is the exception: a snapshot
    there has only links into the blobs folder of the same repository, which holds only files that
    were downloaded for it.
    """
    if location.is_relative_to(base):
        return True
    return base.parent.name == "snapshots" and location.is_relative_to(base.parent.parent / "blobs")
