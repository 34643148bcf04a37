"""What of an output is on disk: a file of short lines that is only appended to.

A line says that a layer was written, and is written after that layer was made durable; the first
says of what. Each begins with its own checksum, so that one that was torn by a crash is as good as
none. Nothing in it is more than a hint where to look: who goes on from it hashes what it finds.
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

from mx.core.types import ManifestRef

_LAYER = b"layer "
#: A line is its 16 digits of checksum, a space, and at most so much text.
_MOST_TEXT_BYTES = 512
_MOST_DIGITS = 9
#: Between two syncs is this many times what the first of them took.
SPARING = 4.0

log = logging.getLogger(__name__)


def heading(ref: ManifestRef) -> bytes:
    """What the first line says of a manifest: other weights, places, chunks or files, another
    heading."""
    return b" ".join([b"mx-journal 1", *(digest.hex().encode() for digest in ref.digests)])


def read(
    path: Path | str, ref: ManifestRef, layers: int, *, folder: int | None = None
) -> set[int] | None:
    """The layers that a journal of this manifest names, of `layers`. None where there is none, or
    it is of something else. Whatever else is in it is passed over. `folder` is a descriptor that
    `path` is relative to. Raises OSError."""
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
        # A layer may be named again and again; nobody needs more than this of it.
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
    """One to append to, begun if it is not there; `path` as for `read`. `close` it. Raises
    OSError."""

    def __init__(
        self, path: Path | str, ref: ManifestRef, *, new: bool, folder: int | None = None
    ) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(
            path, flags | (os.O_CREAT | os.O_EXCL if new else 0), 0o666, dir_fd=folder
        )
        try:
            # What was torn off ends here, and the next line is whole.
            self._append([heading(ref)] if new else [], before=b"" if new else b"\n")
        except BaseException:
            self.close()
            raise

    def add(self, layers: Iterable[int]) -> None:
        """These are on disk."""
        self._append([_LAYER + b"%d" % layer for layer in layers])

    def _append(self, texts: Iterable[bytes], before: bytes = b"") -> None:
        data = before + b"".join(_checksum(text) + b" " + text + b"\n" for text in texts)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Records:
    """Makes layers durable and puts them down in a journal: a new one, unless there are layers that
    one claims already. `layers` are those that are in it and were not found wrong. From any thread.
    Keeps syncing to a small part of the time: what is not recorded when the process dies is pulled
    again, and no more. `close` it."""

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
        except OSError as error:  # only the next run, if there is one, is the poorer for it
            log.warning("what is written is not recorded: %s", error)
        self._lock = threading.Lock()
        self._unsynced: dict[int, set[int]] = {}  # layer -> descriptors
        self._next_s = 0.0

    def wrote(self, layer: int, fds: set[int]) -> None:
        """A layer was written to these descriptors, which are open until `close`. Raises OSError
        if it can't be made durable."""
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
            log.warning("what is written is not recorded: %s", error)
            self._journal.close()
            self._journal = None
        else:
            self.layers.update(batch)

    def close(self) -> None:
        """Record what was written. Idempotent."""
        with self._lock:
            try:
                self._sync()
            except OSError as error:
                log.warning("what was written last is not kept: %s", error)
            if self._journal is not None:
                self._journal.close()
                self._journal = None
