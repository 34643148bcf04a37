"""Writes a checkpoint's side files into a staged folder, and renames it in one step: alone, or
beside the tensor files of `mx.storage.writer`."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from blake3 import blake3

from mx.core.packaging import SideContent, is_index
from mx.core.types import Packaging, SideFile
from mx.errors import DigestError, IntegrityError, OutputError
from mx.storage.shards import shards_of, weight_map
from mx.storage.staging import Staging
from mx.units import MIB


class StagedWriter:
    """The folder `out` while its files are written: what both kinds of output have in common.

    Nothing appears at `out` before `commit`; `abort`, and every error raised here, leave nothing
    behind that the subclass does not keep. The methods may be called from several threads;
    `commit` once the others have returned, `abort` at any time. Also a context manager, which
    aborts unless committed.

    Raises:
        ConfigError: `out` is in use, or can't be a folder.
        CapacityError: The disk is too small.
        OutputError: Writing fails.
    """

    def __init__(
        self, out: Path, side_files: Collection[SideFile], tensor_files: Collection[str]
    ) -> None:
        """
        Args:
            out: The folder to make.
            side_files: The side files, all of which are to be written.
            tensor_files: The paths that an index among them may name.
        """
        self._side_files = {side.path: side for side in side_files}
        self._tensor_files = frozenset(tensor_files)
        self._lock = threading.Lock()
        self._active = 0  # calls that use the descriptors right now
        self._ended = False
        self._staging = Staging(out)

    @property
    def folder(self) -> Path:
        """The folder that holds everything until `commit`."""
        return self._staging.folder

    def write_side_page(self, path: str, offset: int, data: bytes) -> None:
        """Write bytes of one of the side files, in order.

        Args:
            path: The side file.
            offset: Where `data` begins in it; 0 begins the file anew.
            data: The bytes.

        Raises:
            IntegrityError: The manifest names no such bytes.
            MxError: As the class.
        """
        with self._using():
            side = self._side_files.get(path)
            if side is None:
                raise IntegrityError(f"the manifest names no side file {path} to be written")
            if offset + len(data) > side.nbytes:
                raise IntegrityError(f"the side file {path} is longer than the manifest says")
            flags = os.O_WRONLY | (0 if offset else os.O_CREAT | os.O_TRUNC)
            with open(self._staging.open_file(path, flags), "wb", buffering=0) as file:
                while data:
                    written = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[written:], offset + written

    def finish_side_file(self, path: str) -> None:
        """Check a side file whose bytes were written, and make it durable.

        Raises:
            DigestError: The bytes are not those that the manifest names.
            IntegrityError: A file with such content may not be written.
            MxError: As the class.
        """
        with self._using():
            side = self._side_files.get(path)
            if side is None:
                raise IntegrityError(f"the manifest names no side file {path} to be written")
            with open(self._staging.open_file(path, os.O_RDONLY), "rb") as file:
                reason = _check(file, side)
                if reason is not None:
                    raise IntegrityError(f"the side file {path} {reason}, so it is not written")
                if is_index(path):
                    file.seek(0)
                    self._check_index(path, file.read())
                os.fsync(file.fileno())
        with self._lock:
            del self._side_files[path]

    def commit(self) -> None:
        """Make everything durable and rename it to `out`.

        Raises:
            OutputError: Something was not written.
            MxError: As the class.
        """
        with self._using():
            missing = self._missing()
            if missing:
                raise OutputError(f"{missing} were not written", hint="pull again")
            self._sync()
            self._staging.publish()
            self._ended = True
            self._published()
            self._staging.discard()

    def abort(self) -> None:
        """Remove what was written, or leave what the subclass keeps for another run.

        That happens at once, or when the last running call ends. Idempotent; does nothing after
        `commit`.
        """
        with self._lock:
            self._ended = True
            if not self._active:
                self._clean_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Guard a use of the files.

        An error inside ends the output and is raised as an error about it. What was written is
        cleaned up once no other call uses a descriptor.
        """
        with self._lock:
            if self._ended:
                raise OutputError(f"{self._staging.out} was abandoned or is already written")
            self._active += 1
        failed = True
        try:
            with self._staging.errors():
                yield
            failed = False
        finally:
            with self._lock:
                self._active -= 1
                self._ended = self._ended or failed
                if self._ended and not self._active:
                    self._clean_up()

    # -- what subclasses add --------------------------------------------------------------------

    def _missing(self) -> str:
        """Return what is missing from the output, "" for nothing."""
        return f"{len(self._side_files)} side files" if self._side_files else ""

    def _sync(self) -> None:
        """Make durable what no other method has."""

    def _published(self) -> None:
        """Let go of what a later run would have needed."""

    def _clean_up(self) -> None:
        self._staging.discard()

    def _check_index(self, path: str, data: bytes) -> None:
        folder = path.rpartition("/")[0]
        named = {f"{folder}/{name}".lstrip("/") for name in shards_of(weight_map(data, path))}
        strange = named - self._tensor_files
        if strange:
            raise IntegrityError(f"the index {path} names {min(strange)}, which is not pulled")


class FilesWriter(StagedWriter):
    """Writes a checkpoint's side files alone as the folder `out`. What a pull of the weights has
    left beside `out` is removed.

    Raises:
        MxError: As `StagedWriter`.
    """

    def __init__(self, out: Path, packaging: Packaging) -> None:
        super().__init__(out, packaging.side_files, packaging.tensor_files)
        self._paths_of: dict[bytes, list[str]] = {}
        for side in packaging.side_files:
            self._paths_of.setdefault(side.digest, []).append(side.path)
        with self._using():
            self._staging.clear()
            self._staging.require(sum(side.nbytes for side in packaging.side_files))
            self._staging.warn()

    def write_page(self, digest: bytes, offset: int, data: bytes) -> None:
        """Write some bytes of each side file with this digest; at offset 0 they begin anew. Blocks.

        Raises:
            MxError: As `write_side_page`.
        """
        for path in self._paths_of[digest]:
            self.write_side_page(path, offset, data)

    def finish(self) -> None:
        """Check every side file, and commit. Blocks.

        Raises:
            MxError: As `finish_side_file` and `commit`.
        """
        for path in list(self._side_files):
            self.finish_side_file(path)
        self.commit()


def _check(file: BinaryIO, side: SideFile) -> str | None:
    """Return why the file may not be written, or None. Raises DigestError."""
    content, hasher, nbytes = SideContent(side.path), blake3(), 0
    while piece := file.read(MIB):
        hasher.update(piece)
        content.update(piece)
        nbytes += len(piece)
    if nbytes != side.nbytes or hasher.digest() != side.digest:
        raise DigestError(f"the side file {side.path} is not the one that the manifest names")
    return content.finish()
