"""A checkpoint's file on disk: its header, and its bytes, read with O_DIRECT where that works."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mx.buffers import address_of
from mx.core.types import Layout
from mx.errors import CheckpointError
from mx.storage.header import MAX_HEADER_BYTES, FileTensor, Places, StoredFile, fail, parse_header
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.storage.mounts import is_local
from mx.storage.osfile import close_file, open_regular, read_error
from mx.units import KIB, align_up

#: Alignment of offsets, lengths and addresses for O_DIRECT; enough for every disk.
DIRECT_ALIGNMENT_BYTES = 4096
#: Before Linux 6.3 what a drive writes to private memory while this process forks may be lost: the
#: pages that it writes to can become the child's.
_FORKS_ARE_SAFE = [int(n) for n in re.findall(r"\d+", os.uname().release)[:2]] >= [6, 3]
#: What is shorter is copied.
_IN_PLACE_BYTES = 64 * KIB
#: Sectors are what addresses are aligned to where the kernel does not say it; else reads fail.
_AT_FDCWD, _STATX_DIOALIGN, _DIO_MEM_ALIGN, _SECTOR_BYTES = -100, 0x2000, 0x98, 512
#: File systems date a change by a clock that stands still for up to 10 ms: of two changes within
#: that time the second one leaves no trace.
_CLOCK_STEP_NS = 20_000_000

#: (device, inode, size, mtime_ns, ctime_ns) of a file.
Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Properties of a file that differ after it was changed.

    Stamps are compared without `ctime_ns`, which a new link or another mode changes, too.
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int = field(default=0, compare=False)

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """Return the stamp of the file with this status."""
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    @property
    def exact(self) -> Stamp:
        """All of its fields. On a disk of this machine no change of the file leaves them alone."""
        return (self.device, self.inode, self.nbytes, self.mtime_ns, self.ctime_ns)


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A `StoredFile` on a disk of this machine."""

    path: str
    location: Path
    stamp: FileStamp
    metadata: dict[str, str] | None
    tensors: tuple[FileTensor, ...]

    @property
    def device(self) -> int:
        """The number of the drive (st_dev) that it is on."""
        return self.stamp.device

    def open(self) -> DiskBytes:
        """Open the file. Raises as `StoredFile.open`."""
        return DiskBytes(self)


def read_tensor_file(location: Path, path: str) -> DiskFile:
    """Read and check one file's header.

    Args:
        location: Where to read the file.
        path: Its path relative to the checkpoint.

    Raises:
        CheckpointError: The header is malformed; the message names the file and the place.
        ConfigError: This user may not read the file.
        LocalError: The disk fails.
    """
    try:
        with open(open_regular(location), "rb") as file:
            status = settled(file.fileno())
            prefix = file.read(8)
            nbytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                fail(location, f"it has {len(prefix)} bytes, too few for a header's length")
            if prefix + file.read(len(LFS_MAGIC) - 8) == LFS_MAGIC:
                raise lfs_pointer(location)
            file.seek(8)
            if nbytes > MAX_HEADER_BYTES:
                fail(location, f"its header would have {nbytes} bytes; 100 MB is the most")
            header = file.read(nbytes)
    except OSError as error:
        raise read_error(error, location) from error
    if len(header) < nbytes:
        fail(location, f"it ends at byte {8 + len(header)}, inside its header of {nbytes} bytes")
    metadata, tensors = parse_header(header, location, status.st_size)
    return DiskFile(path, location, FileStamp.of(status), metadata, tensors)


def settled(fd: int) -> os.stat_result:
    """Return the status of an open file, once any later change will change the status, too.

    Waits 20 ms at most, where the file was changed a moment ago, and until what was written to it
    is on the disk: a page of a shared map that is to be written back can change without a trace.

    Raises:
        OSError: The disk fails.
    """
    status = os.fstat(fd)
    age_ns = time.time_ns() - status.st_ctime_ns
    if 0 <= age_ns < _CLOCK_STEP_NS:
        time.sleep((_CLOCK_STEP_NS - age_ns) / 1e9)
        status = os.fstat(fd)
    if is_local(fd):
        os.fdatasync(fd)  # after the status: what is changed in between differs from it
    return status


class DiskBytes:
    """The `StoredBytes` of a `DiskFile`."""

    def __init__(self, file: DiskFile) -> None:
        """
        Args:
            file: The file, as its header was read.

        Raises:
            CheckpointError, ConfigError, LocalError: As `StoredFile.open`.
        """
        self._file = file
        self._fd = self._direct_fd = -1
        try:
            self._fd = open_regular(file.location)
            self._direct_fd = _open_direct(file)
            self._memory_alignment = 1 if self._direct_fd < 0 else memory_alignment(file.location)
            self.check_unchanged()
        except OSError as error:
            self.close()
            raise read_error(error, file.location) from error
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> int:
        return self._file.stamp.device

    @property
    def direct_fd(self) -> int:
        """The descriptor that reads by O_DIRECT; -1 where the file system has no such thing."""
        return self._direct_fd

    def read_exactly(self, view: memoryview, position: int, nbytes: int) -> None:
        """Read as `StoredBytes.read_exactly` does."""
        fd = self._fd if self._direct_fd < 0 else self._direct_fd
        done = 0
        while done < nbytes:
            try:
                with view[done:] as rest:
                    got = os.preadv(fd, [rest], position + done)
            except OSError as error:
                if error.errno == errno.EINVAL and fd == self._direct_fd:
                    # Some file systems allow O_DIRECT but require another alignment.
                    fd = self._fd
                    continue
                raise read_error(error, self._file.location) from error
            done += got
            if got and done < nbytes and fd == self._direct_fd:
                # Later reads have to be aligned, so read the last, partial page again.
                got -= done % DIRECT_ALIGNMENT_BYTES
                done -= done % DIRECT_ALIGNMENT_BYTES
            if got <= 0:
                raise CheckpointError(
                    f"{self._file.location} ends at byte {position + done}, "
                    f"and had {self._file.stamp.nbytes} when it was opened",
                    hint="it was truncated while it was read: restore it and try again",
                )

    def window(self, begin: int, end: int, buffer: memoryview) -> memoryview:
        """Read into the buffer, from and to a page's boundary."""
        base = begin - begin % DIRECT_ALIGNMENT_BYTES
        with buffer[: align_up(end - base, DIRECT_ALIGNMENT_BYTES)] as pages:
            self.read_exactly(pages, base, end - base)
        return buffer[begin - base : end - base]

    def scatter(
        self, begin: int, end: int, buffer: memoryview, places: Places
    ) -> tuple[memoryview, list[tuple[int, int]]]:
        """Read by one call, whole pages to their places where the addresses allow it."""
        unit = DIRECT_ALIGNMENT_BYTES if self._direct_fd >= 0 else 1
        at = base = begin - begin % unit
        parts: list[memoryview] = []
        there: list[tuple[int, int]] = []
        try:
            for position, view in places:
                low, high = align_up(position, unit), (position + len(view)) // unit * unit
                fits = high - low >= _IN_PLACE_BYTES and (unit == 1 or _FORKS_ARE_SAFE)
                if fits and not (address_of(view) + low - position) % self._memory_alignment:
                    parts += [buffer[at - base : low - base]] if at < low else []
                    parts.append(view[low - position : high - position])
                    there.append((low - position, high - position))
                    at = high
                else:
                    there.append((0, 0))
            if at < end:
                parts.append(buffer[at - base : align_up(end, unit) - base])
            self._read_parts(parts, base, end)
        finally:
            for part in parts:
                part.release()
        return buffer[begin - base : end - base], there

    def _read_parts(self, parts: list[memoryview], position: int, end: int) -> None:
        got = 0
        try:
            fd = self._fd if self._direct_fd < 0 else self._direct_fd
            got = os.preadv(fd, parts, position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise read_error(error, self._file.location) from error
            self._memory_alignment = DIRECT_ALIGNMENT_BYTES  # enough for every disk
        for part in parts:  # of a short read those that are not whole
            if got < min(len(part), end - position):
                self.read_exactly(part, position, min(len(part), end - position))
            got -= len(part)
            position += len(part)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file changed since its header was read."""
        if any(each != self._file.stamp for each in self._stamps()):
            raise CheckpointError(
                f"{self._file.location} changed while it was read",
                hint="wait until it is completely written, then try again",
            )

    def stamp(self) -> Stamp | None:
        """Return the stamp of the file that was read, from its header on; None if it may have been
        changed since, or is on a file system whose stamps prove nothing."""
        exact = self._file.stamp.exact
        same = all(each.exact == exact for each in self._stamps())
        return exact if same and is_local(self._fd) else None

    def _stamps(self) -> list[FileStamp]:
        try:
            return [FileStamp.of(os.fstat(fd)) for fd in self._descriptors()]
        except OSError as error:
            raise read_error(error, self._file.location) from error

    def _descriptors(self) -> list[int]:
        return [fd for fd in (self._fd, self._direct_fd) if fd >= 0]

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptors = self._descriptors()
        self._fd = self._direct_fd = -1
        for fd in descriptors:
            close_file(fd)


def memory_alignment(location: Path) -> int:
    """Return what addresses are multiples of for O_DIRECT, as the file system says (Linux 6.1)."""
    status = ctypes.create_string_buffer(256)
    name = os.fsencode(location)
    ctypes.CDLL(None).statx(_AT_FDCWD, name, 0, _STATX_DIOALIGN, status)
    mask, nbytes = struct.unpack_from(f"I{_DIO_MEM_ALIGN - 4}xI", status)
    return (nbytes or DIRECT_ALIGNMENT_BYTES) if mask & _STATX_DIOALIGN else _SECTOR_BYTES


def arena_shift(files: Iterable[StoredFile], layout: Layout) -> int:
    """Return how many bytes after a page an arena is to begin, for most of these files to be read
    into place. Tensors stay aligned to 8 bytes, as in the files."""
    place_of = {t.name: layout.layers[t.layer].arena_offset + t.offset for t in layout.tensors}
    nbytes_of: Counter[int] = Counter()
    for file in files:
        if isinstance(file, DiskFile):
            unit = memory_alignment(file.location)
            for tensor in file.tensors:
                shift = (tensor.begin - place_of[tensor.spec.name]) % unit
                nbytes_of[0 if shift % 8 else shift] += tensor.end - tensor.begin
    return max(nbytes_of, key=nbytes_of.__getitem__, default=0)


def _open_direct(file: DiskFile) -> int:
    try:
        return open_regular(file.location, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has no O_DIRECT
            return -1
        raise
