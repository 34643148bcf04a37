"""Measures a drive: what it gives to one read at a time and to sixteen, and what mx gets of it."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mx.core.manifest import plan_layout
from mx.core.read_depth import MOST_READS
from mx.errors import CheckpointError, ClosedError, ConfigError, MxError
from mx.operations.doctor.findings import Finding, note, ok, warning
from mx.storage.mounts import drive_of
from mx.storage.osfile import open_regular, read_error
from mx.storage.reader import SPAN_BYTES, fill
from mx.storage.safetensors import DISK_THREADS, open_checkpoint
from mx.threads import Threads
from mx.units import MIB, count, format_bytes, format_rate
from mx.views import ScatteredView

#: One measurement ends after so many bytes, or so long.
MOST_BYTES, MOST_S = 512 * MIB, 5.0
#: Fewer bytes say nothing of a drive.
_LEAST_BYTES = 32 * MIB
#: Of what the drive gives, mx should get at least so much.
_FAIR = 0.7


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What was read: by `reads` at a time, or by mx (None), with its digests."""

    reads: int | None
    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / max(self.seconds, 1e-9) / 1e9


def measure(path: Path) -> list[DiskRate]:
    """Read a file, or the largest one of a folder, past the page cache where that works. Blocks
    for some seconds, and needs 64 MiB.

    Args:
        path: A file, or a folder. Where it is a checkpoint, mx reads it, too.

    Returns:
        What was measured, mx's last.

    Raises:
        ConfigError: It is not there, is neither a file nor a folder, this user may not read it, or
            it holds too few bytes.
        LocalError: The disk fails.
    """
    file = _largest(path)
    try:
        fd = open_regular(file)
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes < _LEAST_BYTES:
                raise ConfigError(
                    f"{file} has {format_bytes(nbytes)}, too few to measure a drive with",
                    hint=f"name a file of {format_bytes(_LEAST_BYTES)} or more on that drive",
                )
            found = [_read(fd, file, reads, nbytes) for reads in (1, MOST_READS)]
        finally:
            os.close(fd)
    except OSError as error:
        raise read_error(error, file) from error
    by_mx = _read_by_mx(path)
    return found if by_mx is None else [*found, by_mx]


def findings(path: Path, rates: list[DiskRate]) -> Iterator[Finding]:
    """Say what was measured."""
    drive = drive_of(os.stat(path).st_dev)
    for each in rates:
        rate = format_rate(1e9 * each.gb_per_s)
        how = (
            "mx, which hashes it"
            if each.reads is None
            else f"{count(each.reads, 'read')} at a time"
        )
        yield ok(f"{drive} gives {rate} to {how} ({format_bytes(each.bytes)})")
    by_mx = [each for each in rates if each.reads is None]
    bare = [each.gb_per_s for each in rates if each.reads is not None]
    if not by_mx:
        yield note(f"{path} is no checkpoint: what mx gets was not measured")
    elif by_mx[0].gb_per_s < _FAIR * max(bare):
        yield warning(
            f"mx gets {by_mx[0].gb_per_s / max(bare):.0%} of what {drive} gives",
            "see whether the processors are busy: mx pull -v shows where the time goes",
        )


def _largest(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        files = [each for each in path.iterdir() if each.is_file()]
        sizes = {each: each.stat().st_size for each in files}
    except OSError as error:
        raise read_error(error, path) from error
    if not sizes:
        raise ConfigError(f"{path} holds no file", hint="name a folder with a large file, or one")
    return max(sizes, key=sizes.__getitem__)


def _read(fd: int, file: Path, reads: int, nbytes: int) -> DiskRate:
    """Read the file's spans on so many threads."""
    try:
        direct = open_regular(file, os.O_DIRECT)
    except OSError:  # the file system has none: what of it is in memory is dropped
        direct = os.dup(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    spans = deque(range(0, min(nbytes, MOST_BYTES) // SPAN_BYTES * SPAN_BYTES, SPAN_BYTES))
    lock, came = threading.Lock(), 0
    began_s = time.monotonic()

    def work() -> None:
        nonlocal came
        with mmap.mmap(-1, SPAN_BYTES) as buffer:
            while time.monotonic() < began_s + MOST_S:
                try:
                    at = spans.popleft()
                except IndexError:
                    return
                got = os.preadv(direct, [buffer], at)
                with lock:
                    came += got

    try:
        with Threads(reads, "mx-disk") as pool:
            for future in [pool.submit(work) for _ in range(reads)]:
                future.result()
        return DiskRate(reads, came, time.monotonic() - began_s)
    finally:
        os.close(direct)


def _read_by_mx(path: Path) -> DiskRate | None:
    """Read a checkpoint's first bytes as a pull does, and keep none; None if it is none."""
    try:
        checkpoint = open_checkpoint(path)
    except (CheckpointError, ConfigError):
        return None
    layout = plan_layout(checkpoint.specs, checkpoint.aliases)
    nowhere = ScatteredView.over((), (), layout.arena_nbytes)
    came, began_s = 0, time.monotonic()
    ended_s = began_s

    def progress(done_nbytes: int) -> None:
        nonlocal came, ended_s
        came, ended_s = done_nbytes, time.monotonic()

    def enough() -> bool:
        return came >= MOST_BYTES or time.monotonic() >= began_s + MOST_S

    try:
        fill(
            checkpoint,
            layout,
            nowhere,
            copy=lambda place, data: None,
            threads=DISK_THREADS,
            progress=progress,
            cancelled=enough,
        )
    except ClosedError:
        pass  # that was enough
    except MxError:
        return None
    return DiskRate(None, came, ended_s - began_s)
