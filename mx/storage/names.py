"""Names checkpoints that the user gives no name."""

from __future__ import annotations

import re
from pathlib import Path

_SUFFIXES = (".safetensors.index.json", ".safetensors")
#: File names that say nothing about the model; the name of the folder does.
_ORDINARY = ("model", "diffusion_pytorch_model")
_CACHED = re.compile(r"models--(.+)")


def model_name_of(checkpoint: Path) -> str:
    """Return the name to serve a checkpoint under if the user gives none.

    Args:
        checkpoint: A safetensors file, its index, or a folder of them. It need not exist.

    Returns:
        The name of the folder, or of the file without its suffix, or ORG/NAME for a snapshot in a
        Hugging Face cache; "" for a path without a name, such as "/".
    """
    path = checkpoint.absolute()
    for suffix in _SUFFIXES:
        if path.name.endswith(suffix):
            stem = path.name.removesuffix(suffix)
            if stem not in _ORDINARY:
                return stem
            path = path.parent
            break
    if path.name in (".", ".."):
        path = path.resolve()
    if path.parent.name == "snapshots" and (match := _CACHED.fullmatch(path.parent.parent.name)):
        return match[1].replace("--", "/")
    return path.name
