"""What Hugging Face's cache says of files in it: the repository, the commit, and of large ones the
sha256, by which they are named."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mx.errors import CheckpointError, ClosedError, NotAllowedError
from mx.storage.disk_file import FileStamp, settled
from mx.storage.folder_index import FolderIndex
from mx.storage.osfile import open_regular, read_error
from mx.threads import Threads
from mx.units import MIB

#: The index of blobs that were compared, beside that of folders.
INDEX = "blobs.json"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PIECE_BYTES = 4 * MIB


@dataclass(frozen=True)
class HubFiles:
    """Files in the cache: by path the sha256 that a file's blob is named by, in hexadecimal, and
    the blob. `commit` is "" where the folder is not a snapshot."""

    repository: str = ""
    commit: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    blobs: Mapping[str, Path] = field(default_factory=dict)


def hub_files(root: Path, paths: Iterable[str]) -> HubFiles:
    """Return what the cache says of a folder's files; nothing of files elsewhere.

    Args:
        root: The folder: a snapshot, or one of links into the blobs of one repository.
        paths: The files.
    """
    found = {path: Path(os.path.realpath(root / path)) for path in paths}
    blobs = {path: file for path, file in found.items() if _repository(file.parent)}
    repositories = {_repository(file.parent) for file in blobs.values()}
    if len(repositories) != 1:
        return HubFiles()
    base = root.absolute()
    commits = [each.name for each in (base, *base.parents) if each.parent.name == "snapshots"]
    named = {path: file for path, file in blobs.items() if _SHA256.fullmatch(file.name)}
    digests = {path: file.name for path, file in named.items()}
    return HubFiles(repositories.pop(), "".join(commits[:1]), digests, named)


def _repository(folder: Path) -> str:
    """Return ORGANISATION/NAME of the repository whose blobs are in a folder; "" for another."""
    kind, dashes, name = folder.parent.name.partition("--")
    known = folder.name == "blobs" and kind in ("models", "datasets", "spaces")
    return name.replace("--", "/") if known and dashes else ""


def check_blobs(
    files: HubFiles, state: Path, cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Compare blobs with the sha256 that they are named by, but for those that were compared
    before and have not changed since. Blocks.

    Args:
        files: What `hub_files` has found.
        state: The user's state folder, which remembers what was compared.
        cancelled: Called while reading; returning True stops it.

    Raises:
        CheckpointError: One differs.
        ConfigError, LocalError: One can't be read.
        ClosedError: `cancelled` returned True.
    """
    index = FolderIndex(state, INDEX)
    with Threads(2, "mx-sha256") as pool:
        checks = [
            pool.submit(_check, path, blob, index, cancelled) for path, blob in files.blobs.items()
        ]
        for check in checks:
            check.result()


def _check(path: str, blob: Path, index: FolderIndex, cancelled: Callable[[], bool]) -> None:
    try:
        with open(open_regular(blob), "rb", buffering=0) as file:
            stamps = [FileStamp.of(settled(file.fileno())).exact]
            if index.identity_of(stamps) == blob.name:
                return
            began_ns, hasher = time.time_ns(), hashlib.sha256()
            buffer = memoryview(bytearray(_PIECE_BYTES))
            while nbytes := file.readinto(buffer):
                if cancelled():
                    raise ClosedError("comparing was cancelled")
                hasher.update(buffer[:nbytes])
            unchanged = [FileStamp.of(os.fstat(file.fileno())).exact] == stamps
    except OSError as error:
        raise read_error(error, blob) from error
    if hasher.hexdigest() != blob.name:
        raise CheckpointError(
            f"{path} is not what was downloaded: {blob} has the sha256 {hasher.hexdigest()}",
            hint="remove that file, and download the model again",
        )
    if unchanged:
        with contextlib.suppress(OSError, NotAllowedError):  # it is compared again next time
            index.record(stamps, blob.name, began_ns)
