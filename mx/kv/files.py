"""Keeps the blocks of a pool in files: beyond what memory has room for, and beyond the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mx import config, namekey
from mx.errors import ConfigError, MxError
from mx.kv.index import KvEntry
from mx.kv.layout import KvMemory
from mx.kv.names import ID_BYTES, KvKey
from mx.kv.proof import secret_of
from mx.kv.segments import MOST_ROWS, SUFFIX, Segment, is_shelf, read_index
from mx.log import event
from mx.storage.locks import flock
from mx.storage.osfile import close_file, write_error

log = logging.getLogger(__name__)

#: About the size of a segment, and after how long without a further block it is ended.
SEGMENT_BYTES, IDLE_S = 64 << 20, 2.0
#: How long nothing is written after the disk has failed.
AGAIN_S = 15.0
#: Of a segment that is being written. One that no process has locked for so long is removed.
_PARTIAL, _STALE_S = ".mx-partial", 60.0
_OWN_NAME = re.compile(rf"[0-9a-f]{{16}}({SUFFIX}|{_PARTIAL})".replace(".", r"\."))
#: How long `close` waits for a disk that does not answer.
CLOSE_S = 30.0


@dataclass
class _PartialSegment:
    """A segment that is being written."""

    path: Path
    fd: int
    names: list[bytes]
    digests: list[bytes]


class KvBlocks(Protocol):
    """Blocks that are kept in files; a `KvPool` is one."""

    @property
    def name(self) -> str:
        """Return the model's name."""

    @property
    def form(self) -> KvKey:
        """Return the form of the blocks."""

    @property
    def memory(self) -> KvMemory:
        """Return where they are."""

    def entry_of(self, block: bytes) -> KvEntry | None:
        """Return where a block is and its digests; None if it is not there."""


class KvFiles:
    """Writes blocks of a pool to a folder, on a thread of its own, whose blocks `KvReader` reads
    with `files`. Close it: then what was kept is there, and is durable.

    Several processes may write to the same folder. Methods are thread-safe.
    """

    def __init__(
        self,
        pool: KvBlocks,
        folder: str | Path,
        budget_bytes: int,
        *,
        settings: config.Settings | None = None,
    ) -> None:
        """
        Args:
            pool: The pool, or other blocks; it outlives this.
            folder: The folder, of this user alone; it is made if it is not there.
            budget_bytes: What all files in it may have. The segments that were not read for longest
                make room.
            settings: As for `KvPool.open`.

        Raises:
            ConfigError: The key is not for KV blocks, or `budget_bytes` has no room for a block.
            MxError: The folder can't be made.
        """
        memory, self._pool, self._root = pool.memory, pool, Path(folder)
        if memory.gpu is not None:
            raise ConfigError(
                "KV blocks are written to files from memory of the host",
                hint="copy them to a pool there",
            )
        self._budget_bytes = budget_bytes
        self._secret = secret_of(namekey.load(settings or config.load()), pool.name)
        parts = tuple(each.nbytes for each in memory.rows)
        self._segment = Segment(pool.form.encode(), memory.first_head, memory.heads, parts, 1)
        row = self._segment.row_nbytes + self._segment.index_row_nbytes
        rows = min(SEGMENT_BYTES, budget_bytes // 4) // row
        self._rows = max(1, min(rows, MOST_ROWS))
        self._full = replace(self._segment, count=self._rows)
        if self._full.nbytes() > budget_bytes:
            raise ConfigError(
                f"{budget_bytes} bytes of files have no room for a KV block of {row} bytes"
            )
        self._folder = self._root / self._segment.folder()
        try:
            for each in (self._root, self._folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, self._folder) from error
        self.written = 0  # blocks that are in files
        self.error: MxError | None = None  # why some are not
        self._partial: _PartialSegment | None = None
        self._kept: dict[str, frozenset[bytes]] = {}  # by segment
        self._again_s = 0.0
        self._process = os.getpid()
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="mx-kv-files", daemon=True)
        self._thread.start()

    def keep(self, block: bytes) -> None:
        """Write a block, which the pool lists, if it is listed still when its turn comes."""
        if os.getpid() == self._process and self._queue.qsize() < 2 * self._pool.memory.slots:
            self._queue.put(block)

    def close(self, wait_s: float | None = CLOSE_S) -> None:
        """Write what was to be kept, and end. Idempotent; does nothing in a forked child.

        Args:
            wait_s: How long to wait for the disk; None for as long as it takes.
        """
        if os.getpid() == self._process and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(wait_s)
            if self._thread.is_alive():
                log.warning("KV blocks could not be written to %s in time", self._folder)

    # -- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                block = self._queue.get(timeout=IDLE_S if self._partial is not None else None)
            except queue.Empty:
                self._guarded(self._end)
                continue
            if block is None:
                break
            if time.monotonic() >= self._again_s:
                self._guarded(functools.partial(self._write, block))
        self._guarded(self._end)

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            self._drop()
            self._again_s = time.monotonic() + AGAIN_S
            self.error = write_error(error, self._folder)
            event(log, "kv.not_kept", level=logging.WARNING, text=str(self.error))

    def _write(self, block: bytes) -> None:
        entry = self._pool.entry_of(block)
        if entry is None or any(block in each for each in self._kept.values()):
            return
        partial = self._partial or self._begin()
        if block in partial.names:
            return
        segment, at = self._segment, len(partial.names)
        begin = len(segment.header()) + at * segment.row_nbytes
        memory = self._pool.memory
        for part in memory.parts(entry.slot):
            for run in part:
                _write_whole(partial.fd, run, begin)
                begin += len(run)
        # Else the slot may have been written meanwhile: the next block takes this row.
        if self._pool.entry_of(block) is entry:
            partial.names.append(block)
            partial.digests.append(entry.digests)
        if len(partial.names) == self._rows:
            self._end()

    def _begin(self) -> _PartialSegment:
        self._make_room()
        path = self._folder / (secrets.token_hex(8) + _PARTIAL)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._partial = _PartialSegment(path, fd, [], [])
        flock(fd, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(fd, 0, self._full.nbytes())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        return self._partial

    def _end(self) -> None:
        if (partial := self._partial) is None:
            return
        if partial.names:
            segment = replace(self._segment, count=len(partial.names))
            index = b"".join([*partial.names, *partial.digests])
            header = segment.header()
            begin = len(header) + segment.count * segment.row_nbytes
            _write_whole(partial.fd, header, 0)
            _write_whole(partial.fd, index + segment.seal(self._secret, index), begin)
            os.ftruncate(partial.fd, segment.nbytes())
            os.fdatasync(partial.fd)
            path = partial.path.with_suffix(SUFFIX)
            partial.path.rename(path)
            self._kept[path.name] = frozenset(partial.names)
            self.written += segment.count
        self._drop()

    def _drop(self) -> None:
        """Remove what is not renamed."""
        partial, self._partial = self._partial, None
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.path.unlink()
            close_file(partial.fd)

    def _make_room(self) -> None:
        """Remove segments that were not read for longest, and what others have left, so that a
        further one fits; see which blocks are in files. Raises OSError: it does not."""
        found = sorted(self._files())
        left = sum(nbytes for _, nbytes, _ in found) + self._full.nbytes() - self._budget_bytes
        for changed_s, nbytes, path in found:
            stale = path.suffix == _PARTIAL and time.time() - changed_s > _STALE_S
            if (path.suffix == SUFFIX and left > 0) or (stale and _is_abandoned(path)):
                path.unlink(missing_ok=True)
                left -= nbytes
        if left > 0:
            raise OSError(errno.ENOSPC, "other segments that are being written leave no room")
        there = {each.name for _, _, each in found if each.parent == self._folder}
        self._kept = {name: self._kept.get(name) or self._names(name) for name in there}

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._root.glob("*/*"):
            # Nothing else is ever removed: the folder may have been another one's.
            if not is_shelf(path.parent) or not _OWN_NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path

    def _names(self, name: str) -> frozenset[bytes]:
        try:
            found, _, index = read_index(self._folder / name, self._secret)
        except (OSError, MxError):
            return frozenset()
        names = range(0, found.count * ID_BYTES, ID_BYTES)
        return frozenset(index[at : at + ID_BYTES] for at in names)


def _is_abandoned(path: Path) -> bool:
    """Return True if no process of this machine writes a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)


def _write_whole(fd: int, data: bytes | memoryview, at: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
