"""Finds the files that make up a checkpoint on disk, and checks that they agree."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mx import packs
from mx.core.layout import TensorSpec
from mx.core.naming import natural_key
from mx.core.notes import Notes, adapter_base
from mx.core.packaging import ADAPTER, ADAPTER_WEIGHTS, RANK, TENSOR_SUFFIX
from mx.core.types import Alias, PackagedFile, Packaging
from mx.errors import CheckpointError, ConfigError
from mx.storage.companions import take_companions
from mx.storage.copies import check_copies
from mx.storage.disk_file import DiskFile, read_tensor_file
from mx.storage.header import MAX_HEADER_BYTES, StoredFile, fail
from mx.storage.hints import no_checkpoint_file, no_checkpoint_folder
from mx.storage.hub_blobs import HubFiles, hub_files
from mx.storage.osfile import open_regular, read_error
from mx.storage.shards import (
    Oddity,
    check_paths,
    chosen_files,
    file_oddities,
    index_oddities,
    owners_of,
    shards_of,
    ties,
    weight_map,
)
from mx.storage.side_files import SideFiles, read_side_file, take_side_files, walk

if TYPE_CHECKING:
    from mx.stores import WeightStore

log = logging.getLogger(__name__)

#: How many threads read from a disk.
DISK_THREADS = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers, but not yet its tensors, were read and checked.

    `side_documents` are the side files' bytes by digest. `left_out` has, by name, the files that
    are not transferred, with the reason. `oddities` are what is odd about it, and was logged.
    `companions` are further tensor files by path; the packaging gets them once they are hashed
    (`mx.storage.load`). `store` is where it is read, if it is not on a disk of this machine.
    With an `identity` its weights have to have that.
    """

    root: Path | str
    files: tuple[StoredFile, ...]
    aliases: tuple[Alias, ...]
    packaging: Packaging
    side_documents: dict[bytes, bytes] = field(repr=False)
    left_out: dict[str, str] = field(repr=False)
    oddities: tuple[Oddity, ...] = ()
    companions: tuple[tuple[str, StoredFile], ...] = ()
    store: WeightStore | None = field(default=None, repr=False)
    identity: bytes = b""

    @property
    def threads(self) -> int:
        """How many reads at a time are worth while."""
        return DISK_THREADS if self.store is None else self.store.threads

    @property
    def reads_devices(self) -> bool:
        """True if its files' `read_exactly` takes views of a GPU's memory, too."""
        return getattr(self.store, "reads_devices", False) is True

    def close(self) -> None:
        """Close its store, when nothing reads there any more. Idempotent; blocks."""
        if self.store is not None:
            self.store.close()

    def companion(self, path: str) -> Checkpoint:
        """Return a companion as a checkpoint of its own.

        Raises:
            CheckpointError: There is none of this path.
        """
        for each, file in self.companions:
            if each == path:
                folder = path.rpartition("/")[0]
                root = f"{self.root}/{folder}" if isinstance(self.root, str) else self.root / folder
                found = assembled(root, (file,), None, None, ((), {}, {}))
                return replace(found, store=self.store)
        raise CheckpointError(
            f"{self.root} has no companion {path}", hint="the folder has changed: serve it again"
        )

    @property
    def notes(self) -> bytes:
        """What a source says of it beside its manifest."""
        sizes = {path: sum(t.end - t.begin for t in f.tensors) for path, f in self.companions}
        hub = self.hub
        notes = Notes(
            self.left_out,
            repository=hub.repository,
            commit=hub.commit,
            sha256=hub.sha256,
            companions=sizes,
            base=self._base(),
        )
        return notes.encode()

    def _base(self) -> str:
        """Return the model that these weights adapt; "" if they are not an adapter of PEFT's."""
        if [file.path for file in self.files] != [ADAPTER_WEIGHTS]:
            return ""
        digests = [side.digest for side in self.packaging.side_files if side.path == ADAPTER]
        return adapter_base(self.side_documents[digests[0]]) if digests else ""

    @cached_property
    def hub(self) -> HubFiles:
        """What Hugging Face's cache says of the files, if they are in it."""
        if isinstance(self.root, str):
            return HubFiles()
        sides = [side.path for side in self.packaging.side_files]
        paths = [*(file.path for file in self.files), *(path for path, _ in self.companions)]
        return hub_files(self.root, [*paths, *sides])

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor, in file order."""
        found = {tensor.spec.name: tensor.spec for file in self.files for tensor in file.tensors}
        return tuple(found.values())


def open_checkpoint(
    path: Path, follow: Collection[Path] = (), weights: Collection[str] = ()
) -> Checkpoint:
    """Find and check the safetensors files at `path`: one file, or a folder of them.

    A folder is read as transformers or diffusers read it: `model.safetensors`, else the shards of
    an index, else all of its safetensors files. A single file has no side files. Where index and
    files disagree, the files count, as they do there; what is odd is logged.

    Args:
        path: A safetensors file, or a folder.
        follow: Folders that links of side files may lead to; see `walk`.
        weights: Patterns of the paths of copies of the main weights that travel, too.

    Raises:
        ConfigError: There is no such file at `path`, this user may not read it, or a pattern fits
            nothing.
        CheckpointError: A file is malformed, missing or contradicts another; the message names
            the file and the place.
        LocalError: The disk fails.
    """
    if os.path.isfile(path / RANK) and (opened := packs.optional("mx.snapshots.reading:opened")):
        found: Checkpoint = opened(path)
        return found
    files, index_path = tensor_files(path)
    root = path if path.is_dir() else path.parent
    shards = [file.path for file in files]
    shard_of = None if index_path is None else read_index(root / index_path)
    left_out: dict[str, str] = {}
    listed: list[tuple[str, Path]] = [(path.name, path)]
    if path.is_dir():
        try:
            listed = walk(root, shards, follow, left_out)
        except OSError as error:
            raise read_error(error, root) from error

    def open_file(name: str, location: Path) -> StoredFile:
        return read_tensor_file(location, name)

    companions = take_companions(listed, open_file, files, weights, left_out)
    taken = [*shards, *(each for each, _ in companions)]
    side = take_side_files(listed, read_side_file, taken, left_out)
    checkpoint = assembled(root, files, index_path, shard_of, side)
    return replace(checkpoint, companions=companions)


def tensor_files(path: Path) -> tuple[tuple[DiskFile, ...], str | None]:
    """Return the safetensors files at `path`, whose headers were read, and the name of the index
    that names them, if any.

    Args:
        path: As for `open_checkpoint`, which says how files are chosen.

    Raises:
        ConfigError, CheckpointError, LocalError: As `open_checkpoint`.
    """
    if os.path.isdir(path):  # unlike `Path.is_dir` False, too, below a folder that may not be read
        try:
            shards, index_path = _find_shards(path)
        except OSError as error:
            raise read_error(error, path) from error
    elif os.path.exists(path):
        if not path.is_file():  # a pipe: opening it would wait for its writer
            hint = "name a checkpoint's folder or file"
            raise ConfigError(f"{path} is not an ordinary file", hint=hint)
        if path.suffix != TENSOR_SUFFIX:
            try:
                raise no_checkpoint_file(path)
            except OSError as error:
                raise read_error(error, path) from error
        shards, index_path = [path.name], None
    else:
        raise ConfigError(f"{path} is not there", hint="name the folder or file of a checkpoint")
    root = path if path.is_dir() else path.parent
    check_paths(shards, str(root))
    return tuple(read_tensor_file(root / shard, shard) for shard in shards), index_path


def assembled(
    root: Path | str,
    files: Sequence[StoredFile],
    index_path: str | None,
    shard_of: dict[str, str] | None,
    side: SideFiles,
) -> Checkpoint:
    """Return the checkpoint that these files make up.

    Args:
        root: Where they are.
        files: The files, whose headers were checked.
        index_path: The index that names them, if any.
        shard_of: Its content.
        side: The side files.

    Raises:
        CheckpointError, ConfigError: They hold no tensors, or different ones of one name.
        LocalError, StoreError: Reading fails, where several files hold one tensor.
    """
    if not any(file.tensors for file in files):
        fail(files[0].location, "it holds no tensors", hint="nothing to serve: name the right file")
    owners, copies = owners_of(files)
    check_copies(copies)
    oddities = file_oddities(files, copies) if len(files) > 1 else []
    if shard_of is not None and index_path is not None:
        oddities += index_oddities(index_path, files, shard_of)
    for oddity in oddities:
        log.warning("%s/%s: %s", root, oddity.path, oddity.what)
    packaged = tuple(
        PackagedFile(file.path, file.metadata, tuple(t.spec.name for t in file.tensors))
        for file in files
    )
    side_files, documents, left_out = side
    packaging = Packaging(packaged, side_files)
    aliases = ties(files, owners)
    found = root, tuple(files), aliases, packaging, documents, left_out
    return Checkpoint(*found, oddities=tuple(oddities))


def _find_shards(root: Path) -> tuple[list[str], str | None]:
    """Return the tensor files' paths below `root`, in order, and the index that names them."""
    names = sorted((e.name for e in os.scandir(root) if e.name[0] != "."), key=natural_key)
    shards, index = chosen_files(names, str(root))
    if index is not None:
        return shards_of(read_index(root / index)), index
    if not shards:
        raise no_checkpoint_folder(root)
    return shards, None


def read_index(location: Path) -> dict[str, str]:
    """Return the weight map of an index: tensor name -> shard path.

    Args:
        location: The index.

    Raises:
        CheckpointError: It is malformed, names a path that is not allowed, or is not there.
        ConfigError, LocalError: As `open_checkpoint`.
    """
    try:
        with open(open_regular(location), "rb") as file:
            data = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise read_error(error, location) from error
    return weight_map(data, str(location))
