"""Finds the files that make up a checkpoint on disk, and checks that they agree."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mx.core.layout import TensorSpec
from mx.core.naming import natural_key
from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX, bad_path, bad_path_set
from mx.core.types import Alias, PackagedFile, Packaging
from mx.errors import CheckpointError, ConfigError
from mx.storage.disk_file import read_tensor_file
from mx.storage.header import MAX_HEADER_BYTES, StoredFile
from mx.storage.hints import no_checkpoint_file, no_checkpoint_folder
from mx.storage.osfile import open_regular, read_error
from mx.storage.shards import check_index, owners_of, ties, weight_map
from mx.storage.side_files import read_side_files

# The files that transformers and diffusers look for, in their order; other files beside these (a
# second precision, an adapter) are not part of the checkpoint.
_USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers, but not yet its tensors, were read and checked.

    `side_documents` are the side files' bytes by digest. `left_out` has, by name, the files that
    are not transferred, with the reason.
    """

    root: Path
    files: tuple[StoredFile, ...]
    aliases: tuple[Alias, ...]
    packaging: Packaging
    side_documents: dict[bytes, bytes] = field(repr=False)
    left_out: dict[str, str] = field(repr=False)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor, in file order."""
        return tuple(tensor.spec for file in self.files for tensor in file.tensors)


def open_checkpoint(path: Path) -> Checkpoint:
    """Find and check the safetensors files at `path`: one file, or a folder of them.

    A folder is read as transformers or diffusers read it: `model.safetensors`, else the shards of
    an index, else all of its safetensors files. A single file has no side files.

    Args:
        path: A safetensors file, or a folder.

    Raises:
        ConfigError: There is no such file at `path`, or this user may not read it.
        CheckpointError: A file is malformed, missing or contradicts another; the message names
            the file and the place.
        LocalError: The disk fails.
    """
    if path.is_dir():
        try:
            shards, index_path = _find_shards(path)
        except OSError as error:
            raise read_error(error, path) from error
    elif path.exists():
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
    reason = next(filter(None, map(bad_path, shards)), None) or bad_path_set(shards)
    if reason is not None:
        hint = "rename the file"
        raise CheckpointError(f"{root}: a safetensors file's name {reason}", hint=hint)
    files = tuple(read_tensor_file(root / shard, shard) for shard in shards)
    owners = owners_of(files)
    if index_path is not None:
        check_index(root / index_path, files, _read_index(root / index_path))
    if path.is_dir():
        try:
            side_files, documents, left_out = read_side_files(root, index_path, shards)
        except OSError as error:
            raise read_error(error, root) from error
    else:
        side_files, documents, left_out = (), {}, {}
    packaged = tuple(
        PackagedFile(file.path, file.metadata, tuple(t.spec.name for t in file.tensors))
        for file in files
    )
    packaging = Packaging(packaged, side_files)
    return Checkpoint(root, files, ties(files, owners), packaging, documents, left_out)


def _find_shards(root: Path) -> tuple[list[str], str | None]:
    """Return the tensor files' paths below `root`, in order, and the index that names them."""
    names = sorted((e.name for e in os.scandir(root) if e.name[0] != "."), key=natural_key)
    chosen = next((name for name in _USUAL if name in names), None)
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if chosen is None and len(indices) > 1:
        raise ConfigError(
            f"{root} has several indices: {', '.join(indices)}",
            hint="keep one, or put each model into a folder of its own",
        )
    if chosen is None and indices:
        chosen = indices[0]
    if chosen is not None and not chosen.endswith(INDEX_SUFFIX):
        return [chosen], None
    if chosen is not None:
        shards = sorted(set(_read_index(root / chosen).values()), key=natural_key)
        return shards, chosen
    shards = [name for name in names if name.endswith(TENSOR_SUFFIX)]
    if not shards:
        raise no_checkpoint_folder(root)
    return shards, None


def _read_index(location: Path) -> dict[str, str]:
    """Return the weight map of an index: tensor name -> shard path. Raises CheckpointError."""
    try:
        with open(open_regular(location), "rb") as file:
            data = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise read_error(error, location) from error
    return weight_map(data, str(location))
