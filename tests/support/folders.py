"""What folders hold."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mx.core.packaging import DIGESTS
from mx.core.types import Manifest
from mx.storage.load import hash_opened
from mx.storage.safetensors import open_checkpoint


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint."""
    return hash_opened(open_checkpoint(folder), threads=1).manifest


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file by its path in the folder, but for the digests that a pull
    writes beside weights."""
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {path: file.read_bytes() for path, file in found.items() if path != DIGESTS}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    """Return the folder, with these files in it, and weights."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def missing(folder: Path, out: Path) -> set[str]:
    """Return what `diff -r` finds only in the first folder; fail if it finds anything else, but for
    the digests that a pull writes beside weights."""
    command = ["diff", "-r", "--no-dereference", str(folder), str(out)]
    found = set()
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        if line.endswith((" is a regular file", " is a regular empty file")):  # a followed link
            one, other = line.removeprefix("File ").split(" is a symbolic link while file ")
            copy = other.rpartition(" is a regular ")[0]
            assert Path(one).read_bytes() == Path(copy).read_bytes(), line
            continue
        assert line.startswith("Only in "), line
        where, _, name = line.removeprefix("Only in ").partition(": ")
        path = Path(where, name)
        if path == out / DIGESTS.partition("/")[0]:
            continue
        assert path.is_relative_to(folder), line
        inner = path.relative_to(folder).as_posix()
        found.add(inner + "/" if path.is_dir() and not path.is_symlink() else inner)
    return found


def covers(named: Iterable[str], absent: Iterable[str]) -> bool:
    """Return True if each absent path is named, or is a folder all of whose files are; and if
    nothing else is named."""
    names, gone = set(named), set(absent)
    for path in gone:
        if path not in names and not (
            path.endswith("/") and any(name.startswith(path) for name in names)
        ):
            return False
    return all(
        name in gone or any(path.endswith("/") and name.startswith(path) for path in gone)
        for name in names
    )


def named(answer: dict[str, Any]) -> dict[str, str]:
    return {each["path"]: each["reason"] for each in answer["left_out"]}
