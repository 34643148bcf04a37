"""The journal of an output: an append-only file of short lines that says what is on disk.

The first line names the manifest. Each later one names a layer and is appended after that layer
was made durable. A line begins with its checksum, so that a line torn by a crash is ignored. The
journal is only a hint: a pull that resumes from it hashes the layers that it finds.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

from mx.contexts import Undo
from mx.core.types import ManifestRef
from mx.storage.osfile import close_file

_LAYER = b"layer "
#: The most text of a line, after 16 digits of checksum and a space.
_MOST_TEXT_BYTES = 512
_MOST_DIGITS = 9
#: The pause between two syncs, as a multiple of the time that the first one took.
SPARING = 4.0

log = logging.getLogger(__name__)


def heading(ref: ManifestRef) -> bytes:
    """Return the first line of a journal of this manifest.

    It differs for other weights, places or files.
    """
    parts = (ref.identity.hex(), ref.layout.hex(), ref.packaging.hex())
    return " ".join(("mx-journal 3", *(part or "-" for part in parts))).encode()


def read(
    path: Path | str, ref: ManifestRef, layers: int, *, folder: int | None = None
) -> set[int] | None:
    """Return the layers that a journal names, ignoring lines that are damaged.

    Args:
        path: The journal.
        ref: The manifest that it has to be of.
        layers: How many layers the manifest has.
        folder: A descriptor of the folder that `path` is relative to.

    Returns:
        The indices of the layers; None if there is no journal, or it is of another manifest.

    Raises:
        OSError: The journal can't be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with open(fd, "rb") as file:
        # Layers may be named repeatedly; an honest journal is not longer than this.
        data = file.read((layers + 64) * _MOST_TEXT_BYTES)
    texts = [text for line in data.split(b"\n")[:-1] if (text := _text(line)) is not None]
    if not texts or texts[0] != heading(ref):
        return None
    found = set()
    for text in texts[1:]:
        number = text.removeprefix(_LAYER)
        if text.startswith(_LAYER) and number.isdigit() and len(number) <= _MOST_DIGITS:
            found.add(int(number))
    return {layer for layer in found if layer < layers}


def _text(line: bytes) -> bytes | None:
    digest, _, text = line.partition(b" ")
    if len(text) > _MOST_TEXT_BYTES or digest != _checksum(text):
        return None
    return text


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


class Journal:
    """A journal to append to; `close` it.

    `path`, `ref` and `folder` are as for `read`; `new` creates the file, which must not exist yet.
    Raises OSError.
    """

    def __init__(
        self, path: Path | str, ref: ManifestRef, *, new: bool, folder: int | None = None
    ) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(
            path, flags | (os.O_CREAT | os.O_EXCL if new else 0), 0o666, dir_fd=folder
        )
        with Undo(self.close):
            # A newline ends a line that a crash tore, so that the next line is whole.
            self._append([heading(ref)] if new else [], before=b"" if new else b"\n")

    def add(self, layers: Iterable[int]) -> None:
        """Record durably that these layers are on disk. Raises OSError."""
        self._append([_LAYER + b"%d" % layer for layer in layers])

    def _append(self, texts: Iterable[bytes], before: bytes = b"") -> None:
        data = before + b"".join(_checksum(text) + b" " + text + b"\n" for text in texts)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_file(fd)


class Records:
    """Makes layers durable and records them in a journal; thread-safe; `close` it.

    The journal is new unless one claims layers already. `layers` are those that it names and that
    were not found wrong. Syncing takes only a small part of the time: layers that are not recorded
    when the process dies are pulled again.
    """

    def __init__(
        self,
        path: Path | str,
        ref: ManifestRef,
        claimed: Iterable[int],
        *,
        folder: int | None = None,
    ) -> None:
        self.layers = set(claimed)
        self._journal: Journal | None = None
        try:
            self._journal = Journal(path, ref, new=not self.layers, folder=folder)
        except OSError as error:  # this run goes on; only a later one has less to resume from
            log.warning("written layers are not recorded for a later run: %s", error)
        self._lock = threading.Lock()
        self._unsynced: dict[int, set[int]] = {}  # layer -> descriptors
        self._next_s = 0.0

    def wrote(self, layer: int, fds: set[int]) -> None:
        """Record a layer that was written.

        Args:
            layer: The layer's index.
            fds: Descriptors of the files that it was written to; they stay open until `close`.

        Raises:
            OSError: The layer can't be made durable.
        """
        with self._lock:
            self._unsynced[layer] = fds
            began_s = time.monotonic()
            if began_s >= self._next_s:
                self._sync()
                now_s = time.monotonic()
                self._next_s = now_s + SPARING * (now_s - began_s)

    def _sync(self) -> None:
        batch, self._unsynced = self._unsynced, {}
        for fd in set().union(*batch.values()):
            os.fdatasync(fd)
        if self._journal is None or not batch:
            return
        try:
            self._journal.add(batch)
        except OSError as error:  # as above
            log.warning("written layers are not recorded for a later run: %s", error)
            self._journal.close()
            self._journal = None
        else:
            self.layers.update(batch)

    def close(self) -> None:
        """Record the layers that were written, and close the journal. Idempotent."""
        with self._lock:
            try:
                self._sync()
            except OSError as error:
                log.warning("the last layers are not recorded for a later run: %s", error)
            if self._journal is not None:
                self._journal.close()
                self._journal = None
