"""Errors for paths without a safetensors checkpoint: what is there, and what to name instead."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mx.core.canonical import read_json
from mx.core.packaging import TENSOR_SUFFIX
from mx.errors import CheckpointError, ConfigError, MxError
from mx.storage.osfile import open_regular
from mx.units import MIB

#: The first bytes of the pointer that git-LFS leaves in place of a large file.
LFS_MAGIC = b"version https://git-lfs.github.com/spec/v1\n"
LFS_HINT = "run `git lfs install` once and `git lfs pull` in the clone, or download the file itself"

_GGUF_MAGIC = b"GGUF"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_SHARDS_HINT = "name the folder that holds the .safetensors files themselves"
#: The most folders, files or snapshots that one hint names.
_MOST_NAMED = 6


def lfs_pointer(location: Path | str) -> CheckpointError:
    """Return the error for a file that is only git-LFS's pointer to the real one."""
    return CheckpointError(
        f"{location} is a git-LFS pointer: the real file has not been downloaded", hint=LFS_HINT
    )


def no_checkpoint_file(path: Path) -> MxError:
    """Return the error for a file whose name is not that of a safetensors file.

    Raises OSError.
    """
    with open(path, "rb") as file:
        begins = file.read(len(LFS_MAGIC))
    if begins == LFS_MAGIC:
        return lfs_pointer(path)
    if begins.startswith(_GGUF_MAGIC) or path.suffix == ".gguf":
        return _gguf(path)
    if path.suffix in _PICKLED:
        return _pickled(path, path.parent)
    if path.name.endswith(".json"):
        return ConfigError(
            f"{path} is not a {TENSOR_SUFFIX} file", hint=f"name its folder: {path.parent}"
        )
    return ConfigError(
        f"{path} is not a {TENSOR_SUFFIX} file",
        hint="convert it with safetensors.torch.save_file first",
    )


def no_checkpoint_folder(root: Path) -> ConfigError:
    """Return the error for a folder with no safetensors file in it. Raises OSError."""
    with os.scandir(root) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    names = [entry.name for entry in listed]
    folders = [e.name for e in listed if e.is_dir() and not e.name.startswith(".")]
    if "snapshots" in folders:
        return _cached(root)
    if root.name == "snapshots" or any(name.startswith("models--") for name in folders):
        return _cached(root.parent if root.name == "snapshots" else root)
    inside = [root / name for name in folders if _has_tensors(root / name)]
    if "model_index.json" in names:
        if not inside:
            hint = "download its .safetensors files: its folders hold none"
            return ConfigError(f"{root} is a diffusers pipeline without weights", hint=hint)
        return ConfigError(
            f"{root} is a diffusers pipeline: each of its folders is a model of its own",
            hint=f"name one at a time: {_several(inside)}",
        )
    if inside:
        return ConfigError(
            f"{root} holds no {TENSOR_SUFFIX} file itself", hint=f"name {_several(inside)}"
        )
    of_gguf = [name for name in names if name.endswith(".gguf")]
    if of_gguf:
        return _gguf(root / of_gguf[0])
    if any(name.endswith(_PICKLED) for name in names):
        return _pickled(root, root)
    if not names:
        return ConfigError(f"{root} is empty", hint=_SHARDS_HINT)
    return ConfigError(f"{root} holds no {TENSOR_SUFFIX} file", hint=_SHARDS_HINT)


def _cached(root: Path) -> ConfigError:
    """Return the error for Hugging Face's cache, or for one repository in it."""
    snapshots = root / "snapshots"
    if not snapshots.is_dir():
        found = sorted(
            snapshot
            for repository in root.glob("models--*")
            for snapshot in (repository / "snapshots").glob("*")
            if snapshot.is_dir()
        )
        message = f"{root} is Hugging Face's cache: a checkpoint is one snapshot in it"
    else:
        found = sorted(snapshot for snapshot in snapshots.iterdir() if snapshot.is_dir())
        main = _main_of(root)
        found.sort(key=lambda snapshot: snapshot.name != main)
        message = f"{root} is a repository in Hugging Face's cache: the checkpoint is a snapshot"
        if found and found[0].name == main and len(found) > 1:
            return ConfigError(
                message, hint=f"name {found[0]} (its main), or {_several(found[1:])}"
            )
    if not found:
        return ConfigError(message, hint="it has no snapshot: download the model first")
    return ConfigError(message, hint=f"name {_several(found)}")


def _main_of(repository: Path) -> str:
    try:
        with open(repository / "refs" / "main", encoding="ascii", errors="replace") as file:
            return file.read(100).strip()
    except OSError:
        return ""


def _gguf(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a GGUF file, which mx does not read",
        hint="name the folder with the .safetensors files that it was made from",
    )


def _pickled(path: Path, folder: Path) -> ConfigError:
    """Return the error for a pickled file `path` in `folder`, or for that folder."""
    convert = (
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
    )
    if (folder / "config.json").is_file():
        model = f"transformers.{_architecture(folder)}.from_pretrained({str(folder)!r})"
        convert = f"{model}.save_pretrained(NEW_FOLDER)"
    what = "is" if path != folder else f"holds no {TENSOR_SUFFIX} file, only"
    return ConfigError(
        f"{path} {what} pickled weights, which mx never reads: they may run any code",
        hint=f"where you trust them, convert them: {convert}",
    )


def _architecture(folder: Path) -> str:
    """Return the name of the class that transformers saves this model with."""
    try:
        with open(open_regular(folder / "config.json"), "rb") as file:
            found = read_json(file.read(MIB), "config").get("architectures")
    except (OSError, MxError):
        found = None
    match found:
        case [str(name), *_] if name.isidentifier():
            return name
    return "AutoModelForCausalLM"


def _has_tensors(folder: Path) -> bool:
    try:
        return any(name.endswith(TENSOR_SUFFIX) for name in os.listdir(folder))
    except OSError:
        return False


def _several(paths: Iterable[Path]) -> str:
    *others, last = [str(path) for path in paths]
    if len(others) >= _MOST_NAMED:
        return ", ".join(others[:_MOST_NAMED]) + f" or one of {len(others) + 1 - _MOST_NAMED} more"
    return f"{', '.join(others)} or {last}" if others else last
