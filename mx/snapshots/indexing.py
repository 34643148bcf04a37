"""Keeps the digests of a folder that was hashed, for pulls from it: beside its weights, if it is
this user's own folder, else in his state folder, where they are found by what is asked for, or by
the stamps of the files."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mx import config, users
from mx.core.packaging import DIGESTS
from mx.errors import LocalError, MxError
from mx.snapshots.digests import MAX_BYTES, WrittenDigests, read_beside
from mx.storage import folder_index
from mx.storage.folder_index import FolderIndex
from mx.storage.own_weights import stamps_in

if TYPE_CHECKING:
    from mx.api.verifying import VerifiedFolder
    from mx.storage.load import HashedCheckpoint

_FOLDER, _SUFFIX = "digests", ".mx"
#: How many models' digests are kept in the state folder.
MOST_KEPT = 100
#: The longest wait for files to be old enough that a change of them is seen.
_MOST_WAIT_S = 3.0


class IndexedFolder(NamedTuple):
    """A folder that was hashed: where its digests are ("": they were not written, and why not), and
    whether engines know from now on, by its files' stamps, what it holds."""

    found: VerifiedFolder
    digests: str
    why_not: str
    remembered: bool


def index_folder(
    folder: str | Path,
    pin: str = "",
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> IndexedFolder:
    """Hash all weights in a folder, and keep the digests of their blocks. Blocks.

    Args:
        folder: A folder of safetensors files, or such a file.
        pin: What it should hold; "": what its pull recorded, or whatever it holds.
        on_progress: Called with (bytes read, bytes in all), from other threads.

    Raises:
        CheckpointError: It holds other weights, or a file is malformed; nothing is kept.
        ConfigError: There is no checkpoint.
        LocalError: The disk fails, or is full.
    """
    from mx.api.verifying import verify_folder

    hashed: list[HashedCheckpoint] = []
    time.sleep(min(_MOST_WAIT_S, folder_index.settles_in_s(stamps_in(Path(folder)))))
    began_ns = time.time_ns()
    found = verify_folder(folder, pin, on_progress=on_progress, on_hashed=hashed.append)
    (known,) = hashed
    identity = known.manifest.ref.identity.hex()
    digests = WrittenDigests(known.manifest, known.pages.get)
    written, why_not = "", ""
    try:
        if known.manifest.packaging.companions:
            why_not = "further tensor files lie beside the weights"
        elif digests.nbytes:
            for layer in range(len(known.manifest.layout.layers)):
                digests.layer(layer, memoryview(b""))
            written = _write(Path(folder), identity, b"".join(digests.data()))
        remembered = FolderIndex(config.state_folder()).record(known.stamps, identity, began_ns)
    except OSError as error:
        raise LocalError(
            f"the digests of {folder} could not be written: {error.strerror or error}",
            hint="free space, or let mx write to the folder or to its state folder",
        ) from error
    return IndexedFolder(found, written, why_not, remembered)


def _write(folder: Path, identity: str, data: bytes) -> str:
    """Write digests to where they are looked for. Returns the file."""
    if _is_own(folder):
        name = Path(DIGESTS).name
        with _opened(folder / _FOLDER) as fd:
            folder_index.write(fd, name, data)
            os.chmod(name, 0o644, dir_fd=fd)
        return str(folder / DIGESTS)
    kept = config.state_folder() / _FOLDER
    fd = folder_index.opened(kept, make=True)
    try:
        folder_index.write(fd, identity + _SUFFIX, data)
        names = sorted(_names(kept), key=lambda name: os.stat(name, dir_fd=fd).st_mtime_ns)
        for name in names[:-MOST_KEPT]:
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    return str(kept / (identity + _SUFFIX))


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_own(folder: Path) -> bool:
    """Return True if this user alone may change a folder, and its weights are in it: of those that
    are links, another program keeps count."""
    if not folder.is_dir() or any(each.is_symlink() for each in folder.glob("*.safetensors")):
        return False
    status = folder.stat()
    own = users.is_own(status.st_uid, folder) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return own and os.access(folder, os.W_OK)


def _names(kept: Path) -> list[str]:
    return [name for name in os.listdir(kept) if name.endswith(_SUFFIX) and name[0] != "."]


def kept_digests(path: Path, expected: str) -> Iterator[bytes]:
    """Yield what digests there are of a folder or file: those beside it, and those in this user's
    state folder of what is expected, or of these very files. Blocks.

    Args:
        path: The folder or file.
        expected: An identity in hexadecimal, or how it begins; "" if it is not known.
    """
    if data := read_beside(path if path.is_dir() else path.parent):
        yield data
    kept = config.state_folder() / _FOLDER
    with contextlib.suppress(OSError, MxError):
        fd = folder_index.opened(kept, make=False)
        try:
            names = [name for name in _names(kept) if expected and name.startswith(expected)]
            if not names:
                identity = FolderIndex(config.state_folder()).identity_of(stamps_in(path))
                names = [identity + _SUFFIX] if identity else []
            data = folder_index.read(fd, names[0], MAX_BYTES) if names else b""
        finally:
            os.close(fd)
        if 0 < len(data) <= MAX_BYTES:
            yield data
