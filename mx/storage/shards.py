"""What the files of one checkpoint say together: the shard index, the tensors' files, the ties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mx.core.canonical import read_json
from mx.core.layout import contiguous_strides
from mx.core.naming import natural_key
from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX, bad_path, bad_path_set, bad_tensor_name
from mx.core.types import Alias
from mx.errors import CheckpointError, ConfigError, ManifestError
from mx.storage.header import FileTensor, StoredFile
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
# What PEFT loads of a folder that has an adapter's configuration.
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Oddity:
    """What is odd about one file of a checkpoint, which loads all the same."""

    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that two files hold: `first`, which is read, and `second`."""

    first: StoredFile
    here: FileTensor
    second: StoredFile
    there: FileTensor


def chosen_files(names: Sequence[str], where: str) -> tuple[list[str], str | None]:
    """Return which of a folder's files are its checkpoint, as transformers, diffusers and PEFT
    choose.

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
    if chosen is None and "adapter_config.json" in names and _ADAPTER in names:
        chosen = _ADAPTER
    if chosen is not None:
        return ([], chosen) if chosen.endswith(INDEX_SUFFIX) else ([chosen], None)
    return [name for name in names if name.endswith(TENSOR_SUFFIX)], None


def shards_of(shard_of: dict[str, str]) -> list[str]:
    """Return the tensor files that an index names, in order."""
    return sorted(set(map(shard_path, shard_of.values())), key=natural_key)


def shard_path(written: str) -> str:
    """Return the path that an index writes for a shard, without its "./"."""
    return "/".join(part for part in written.split("/") if part != ".")


def check_paths(shards: Sequence[str], where: str) -> None:
    """Raise CheckpointError if files of these names can't be created in one folder."""
    reason = next(filter(None, map(bad_path, shards)), None) or bad_path_set(shards)
    if reason is not None:
        raise CheckpointError(
            f"{where}: a safetensors file's name {reason}", hint="rename the file"
        )


def weight_map(data: bytes, location: str) -> dict[str, str]:
    """Return the weight map of an index, with its paths as they are written (`shard_path`) and
    checked.

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
        reason = bad_path(shard_path(shard)) if isinstance(shard, str) else "is not a string"
        if reason is None and not shard.endswith(TENSOR_SUFFIX):
            reason = f"does not end in {TENSOR_SUFFIX}"
        if reason is not None:
            raise CheckpointError(
                f"{location}: the shard of {shown(name)}, {shown(str(shard))}, {reason}"
            )
    return found


def index_oddities(
    index_path: str, files: Iterable[StoredFile], shard_of: dict[str, str]
) -> list[Oddity]:
    """Return where an index and its files disagree. What the files hold is what is loaded.

    Args:
        index_path: The index.
        files: The files that it names.
        shard_of: Its weight map.
    """
    places: dict[str, list[str]] = {}
    for file in files:
        for name in (*(tensor.spec.name for tensor in file.tensors), *(file.metadata or ())):
            places.setdefault(name, []).append(file.path)
    found: dict[str, list[str]] = {}
    for name, written in shard_of.items():
        shard, held_in = shard_path(written), places.get(name)
        if shard != written:
            found.setdefault("it writes a path with './': ", []).append(shown(written))
        if held_in is None:
            found.setdefault("it names tensors that no file holds: ", []).append(shown(name))
        elif shard not in held_in:
            what = f"{shown(name)} is in {held_in[0]}, not in {shard}"
            found.setdefault("it names another file than holds a tensor: ", []).append(what)
    for file in files:
        unnamed = [t.spec.name for t in file.tensors if t.spec.name not in shard_of]
        if unnamed:
            found[f"it does not name tensors of {file.path}: "] = list(map(shown, unnamed))
    return [Oddity(index_path, what + _several(names)) for what, names in found.items()]


def file_oddities(files: Iterable[StoredFile], copies: Sequence[Copy]) -> list[Oddity]:
    """Return which files hold no tensors, or tensors that an earlier file holds, too."""
    found = [Oddity(file.path, "it holds no tensors") for file in files if not file.tensors]
    pairs: dict[tuple[str, str], list[str]] = {}
    for copy in copies:
        names = pairs.setdefault((copy.second.path, copy.first.path), [])
        names.append(shown(copy.here.spec.name))
    for (second, first), names in pairs.items():
        what = f"it holds tensors that {first} holds, too, with the same bytes: "
        found.append(Oddity(second, what + _several(names)))
    return found


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def owners_of(files: Iterable[StoredFile]) -> tuple[dict[str, StoredFile], list[Copy]]:
    """Return the first file that holds each tensor, by name, and the further copies.

    Raises:
        ConfigError: Two files hold tensors of one name and another dtype or shape.
    """
    owners: dict[str, StoredFile] = {}
    first: dict[str, FileTensor] = {}
    copies: list[Copy] = []
    for file in files:
        for tensor in file.tensors:
            name = tensor.spec.name
            owner, one = owners.setdefault(name, file), first.setdefault(name, tensor)
            if owner is file:
                continue
            if one.spec != tensor.spec:
                raise ambiguous(Copy(owner, one, file, tensor), "another dtype or shape")
            copies.append(Copy(owner, one, file, tensor))
    return owners, copies


def ambiguous(copy: Copy, differs: str) -> ConfigError:
    """Return the error for a tensor of which two files hold different ones."""
    return ConfigError(
        f"tensor {shown(copy.here.spec.name)} is in {copy.first.path} and in {copy.second.path} "
        f"with {differs} (bytes {copy.here.begin}..{copy.here.end} and "
        f"{copy.there.begin}..{copy.there.end}), so which is meant can't be known",
        hint="remove one of the two tensors, or name one file, or move one model elsewhere",
    )


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
            # Every writer adds an entry "format", which is not a tie even if a tensor is named
            # "pt".
            if spec is None or name in owners or name == "format":
                continue
            if name in found and found[name].target == target:
                continue  # the tensor is in two files, and so is what is tied to it
            reason = "comes from two files" if name in found else bad_tensor_name(name)
            if reason is not None:
                raise CheckpointError(f"{file.location}: the tied name {shown(name)} {reason}")
            stride = contiguous_strides(spec.shape)
            found[name] = Alias(name, target, spec.dtype, spec.shape, 0, stride)
    return tuple(found.values())
