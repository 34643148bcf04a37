"""Ids of the Hugging Face hub, and models in the cache that its library keeps, without it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from mx.core.packaging import TENSOR_SUFFIX
from mx.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def is_hub_id(text: str) -> bool:
    """Return True if this is the form of a repository's id: NAME or ORGANISATION/NAME."""
    return _ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def hub_name(text: str) -> str:
    """Return ORGANISATION/NAME of ORGANISATION/NAME[@REVISION]; "" if it is not of that form, or
    there is a file or folder of that path."""
    name = text.partition("@")[0]
    return name if "/" in name and is_hub_id(name) and not Path(text).exists() else ""


def cached_snapshot(cache: Path, text: str) -> Path:
    """Return the folder of a model in the cache.

    Args:
        cache: The cache.
        text: ORGANISATION/NAME[@REVISION]; the revision is a branch, tag or commit, by default
            main.

    Raises:
        ConfigError: It is not there, or without weights.
    """
    name, _, revision = text.partition("@")
    model = cache / "--".join(["models", *name.split("/")])
    commit = revision = revision or "main"
    if ".." not in revision and not revision.startswith("/"):
        with contextlib.suppress(OSError, ValueError):  # it may be a commit
            commit = (model / "refs" / revision).read_text(encoding="ascii").strip()
        found = model / "snapshots" / commit
        if "/" not in commit and any(found.glob(f"*{TENSOR_SUFFIX}")):
            return found
    raise ConfigError(
        f"there is no {text} here: neither as a path, nor with its weights in Hugging Face's cache "
        f"at {cache}",
        hint=f"get it with huggingface_hub (hf download {name}), or name a folder",
    )
