"""The weights in a folder of this machine, for comparison with what a peer serves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from mx.contexts import Undo
from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX
from mx.errors import CheckpointError, MxError
from mx.storage.disk_file import DiskFile, FileStamp, Stamp
from mx.storage.header import FileTensor
from mx.storage.mounts import is_local
from mx.storage.osfile import close_file, open_regular, read_error
from mx.storage.safetensors import read_index, tensor_files
from mx.storage.shards import shards_of

SAMPLE_BYTES = 4096
#: How files with weights are called, whatever can read them.
_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".h5", ".msgpack", ".tensors",
)  # fmt: skip
#: Files that are called so, and hold something else.
_OTHER = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")


def has_weights(path: Path) -> bool:
    """Return True if a path is a file, or a folder with files of weights or an index of some that
    are there, or one that can't be listed and so may have some; False if there is nothing."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if any(name.endswith(_SUFFIXES) and name not in _OTHER for name in names):
        return True
    return any(_has_shards(path, name) for name in names if name.endswith(INDEX_SUFFIX))


def _has_shards(folder: Path, index: str) -> bool:
    """Return True if a file that an index names is there, maybe in a folder below, or if the index
    can't be read."""
    try:
        return any((folder / shard).exists() for shard in shards_of(read_index(folder / index)))
    except (MxError, OSError):
        return True


@dataclass(frozen=True)
class Sample:
    """A few bytes of one tensor, which begin at `offset` in it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: bytes


class OwnWeights:
    """The safetensors files of a folder, which are open. `close` them."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: A safetensors file, or a folder of them.

        Raises:
            ConfigError, CheckpointError, LocalError: As `open_checkpoint`.
        """
        self.path = path
        self._files: dict[str, DiskFile] = {}
        self._fds: dict[str, int] = {}
        self._tensors: dict[str, tuple[str, FileTensor]] = {}
        with Undo(self.close):
            for file in tensor_files(path)[0]:
                try:
                    self._fds[file.path] = open_regular(file.location)
                except OSError as error:
                    raise read_error(error, file.location) from error
                self._files[file.path] = file
                self._tensors |= {each.spec.name: (file.path, each) for each in file.tensors}
            #: The folder's safetensors files that are not among them, such as shards beside a
            #: `model.safetensors`. Engines choose differently, and may read those.
            self.others = _others(path, self._files)
            if not self.unchanged():
                raise CheckpointError(f"the files of {path} are being changed")

    def unchanged(self) -> bool:
        """Return True if no file was changed since its header was read."""
        return all(
            FileStamp.of(os.fstat(fd)).exact == self._files[name].stamp.exact
            for name, fd in self._fds.items()
        )

    @property
    def stamps(self) -> tuple[Stamp, ...]:
        """The stamps of all files; () if a file system's stamps prove nothing."""
        if not all(is_local(fd) for fd in self._fds.values()):
            return ()
        return tuple(file.stamp.exact for file in self._files.values())

    def sample(self, name: str) -> Sample | None:
        """Return 4 KiB of a tensor, at a place that is drawn anew; None if there is no such tensor.

        Raises:
            LocalError, CheckpointError: They can't be read.
        """
        if name not in self._tensors:
            return None
        path, tensor = self._tensors[name]
        nbytes = tensor.end - tensor.begin
        offset = secrets.randbelow(max(1, nbytes - SAMPLE_BYTES + 1))
        wanted = min(SAMPLE_BYTES, nbytes)
        try:
            data = os.pread(self._fds[path], wanted, tensor.begin + offset)
        except OSError as error:
            raise read_error(error, self._files[path].location) from error
        if len(data) < wanted:
            raise CheckpointError(f"{self._files[path].location} has become too short")
        return Sample(tensor.spec.dtype, tuple(tensor.spec.shape), offset, data)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            close_file(self._fds.popitem()[1])


def _others(path: Path, files: Container[str]) -> tuple[str, ...]:
    if not path.is_dir():
        return ()
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise read_error(error, path) from error
    found = (name for name in names if name.endswith(TENSOR_SUFFIX) and name[0] != ".")
    return tuple(name for name in found if name not in files)


def stamps_in(folder: Path) -> tuple[Stamp, ...]:
    """Return the stamps of a folder's weights, as `OwnWeights.stamps`; () if they can't be read."""
    try:
        own = OwnWeights(folder)
    except MxError:
        return ()
    try:
        return own.stamps
    finally:
        own.close()
