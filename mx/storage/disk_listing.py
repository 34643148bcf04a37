"""Lists and reads a checkpoint on this machine's disk by the contract of `mx.stores`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from mx.core.packaging import TENSOR_SUFFIX
from mx.storage.disk_file import DiskBytes, DiskFile, FileStamp
from mx.storage.osfile import read_error
from mx.storage.side_files import walk
from mx.stores import ListedFile


def listed_files(path: Path) -> list[ListedFile]:
    """Return the files at a path; their versions are their stamps.

    Raises:
        CheckpointError, ConfigError, LocalError: As `read_error` says.
    """
    found = [(path.name, path)]
    try:
        if path.is_dir():
            weights = [each.name for each in path.glob(f"*{TENSOR_SUFFIX}")]
            found = walk(path, weights, (), {})
        stamps = [(name, FileStamp.of(os.stat(location))) for name, location in found]
    except OSError as error:
        raise read_error(error, path) from error
    return [
        ListedFile(name, stamp.nbytes, " ".join(map(str, stamp.exact))) for name, stamp in stamps
    ]


def read_listed(path: Path, file: ListedFile, offset: int, view: memoryview) -> int:
    """Fill a view with bytes of a file at a path. Raises as `mx.stores.WeightStore.read`."""
    location = (path if path.is_dir() else path.parent) / file.path
    stamp = FileStamp(*map(int, file.version.split()))
    nbytes = max(0, min(len(view), stamp.nbytes - offset))
    with closing(DiskBytes(DiskFile(file.path, location, stamp, None, ()))) as data:
        data.read_exactly(view, offset, nbytes)
        data.check_unchanged()
    return nbytes
