"""What the files of one checkpoint say together: the shard index, the tensors' files, the ties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mx.core.canonical import read_json
from mx.core.layout import contiguous_strides
from mx.core.naming import natural_key
from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX, bad_path, bad_path_set, bad_tensor_name
from mx.core.types import Alias
from mx.errors import CheckpointError, ConfigError, ManifestError
from mx.storage.header import StoredFile
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.text import shown

# The files that transformers and diffusers look for, in their order; other files beside these (a
# second precision, an adapter) are not part of the checkpoint.
_USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
)


def chosen_files(names: Sequence[str], where: str) -> tuple[list[str], str | None]:
    """Return which of a folder's files are its checkpoint, as transformers and diffusers choose.

    Args:
        names: The folder's entries, in natural order.
        where: Names the folder in errors.

    Returns:
        The tensor files, and None; or none, and the index that names them.

    Raises:
        ConfigError: There are several indices.
    """
    chosen = next((name for name in _USUAL if name in names), None)
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if chosen is None and len(indices) > 1:
        raise ConfigError(
            f"{where} has several indices: {', '.join(indices)}",
            hint="keep one, or put each model into a folder of its own",
        )
    if chosen is None and indices:
        chosen = indices[0]
    if chosen is not None:
        return ([], chosen) if chosen.endswith(INDEX_SUFFIX) else ([chosen], None)
    return [name for name in names if name.endswith(TENSOR_SUFFIX)], None


def shards_of(shard_of: dict[str, str]) -> list[str]:
    """Return the tensor files that an index names, in order."""
    return sorted(set(shard_of.values()), key=natural_key)


def check_paths(shards: Sequence[str], where: str) -> None:
    """Raise CheckpointError if files of these names can't be created in one folder."""
    reason = next(filter(None, map(bad_path, shards)), None) or bad_path_set(shards)
    if reason is not None:
        raise CheckpointError(
            f"{where}: a safetensors file's name {reason}", hint="rename the file"
        )


def weight_map(data: bytes, location: str) -> dict[str, str]:
    """Return the weight map of an index, with its paths checked.

    Args:
        data: The bytes of the index.
        location: Names the index in errors.

    Raises:
        CheckpointError: The index is malformed, names a path that is not allowed, or is a git-LFS
            pointer.
    """
    if data.startswith(LFS_MAGIC):
        raise lfs_pointer(location)
    try:
        found = read_json(data, "index").get("weight_map")
    except ManifestError as error:
        raise CheckpointError(f"{location}: {error.message}") from error
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{location} has no weight_map")
    for name, shard in found.items():
        reason = bad_path(shard) if isinstance(shard, str) else "is not a string"
        if reason is None and not shard.endswith(TENSOR_SUFFIX):
            reason = f"does not end in {TENSOR_SUFFIX}"
        if reason is not None:
            raise CheckpointError(
                f"{location}: the shard of {shown(name)}, {shown(str(shard))}, {reason}"
            )
    return found


def check_index(
    location: Path | str, files: Iterable[StoredFile], shard_of: dict[str, str]
) -> None:
    """Raise CheckpointError unless index and files name the same tensors in the same shards."""
    hint = "index and shards are from different checkpoints: download both again"
    there = {tensor.spec.name: file.path for file in files for tensor in file.tensors}
    tied = {(file.path, key) for file in files for key in (file.metadata or {})}
    for name, shard in shard_of.items():
        if there.get(name) != shard and not (name not in there and (shard, name) in tied):
            raise CheckpointError(f"{location}: {shown(name)} is not in {shard}", hint=hint)
    for name, shard in there.items():
        if name not in shard_of:
            raise CheckpointError(f"{location} does not name {shown(name)} of {shard}", hint=hint)


def owners_of(files: Iterable[StoredFile]) -> dict[str, StoredFile]:
    owners: dict[str, StoredFile] = {}
    for file in files:
        for tensor in file.tensors:
            other = owners.setdefault(tensor.spec.name, file)
            if other is not file:
                raise ConfigError(
                    f"tensor {shown(tensor.spec.name)} is in {other.path} and in {file.path}",
                    hint="two models share the folder: name one file, or move one model elsewhere",
                )
    return owners


def ties(files: Iterable[StoredFile], owners: dict[str, StoredFile]) -> tuple[Alias, ...]:
    """Return the aliases that the files' metadata names.

    safetensors.torch.save_model keeps one of several tensors that share memory, and names it in the
    metadata for each tensor that it drops.
    """
    found: dict[str, Alias] = {}
    for file in files:
        if not file.metadata:
            continue
        specs = {tensor.spec.name: tensor.spec for tensor in file.tensors}
        for name, target in file.metadata.items():
            spec = specs.get(target)
            # Every writer adds an entry "format", which is no tie even if a tensor is named "pt".
            if spec is None or name in owners or name == "format":
                continue
            reason = "comes from two files" if name in found else bad_tensor_name(name)
            if reason is not None:
                raise CheckpointError(f"{file.location}: the tied name {shown(name)} {reason}")
            stride = contiguous_strides(spec.shape)
            found[name] = Alias(name, target, spec.dtype, spec.shape, 0, stride)
    return tuple(found.values())
