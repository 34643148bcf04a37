"""Compile caches and CUDA graphs, which travel with a model's weights.

    with mx.artifacts.use("llama-8b", trust="trust.toml") as used:
        ...  # an engine starts, here or in a child process
        print(used.report())

They are code: off unless asked for, signed by a publisher whom the target's trust file names,
checked before a byte is written. docs/artifacts.md says what a publisher can do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.artifacts.carry import find, serve
    from mx.artifacts.publishing import publish
    from mx.artifacts.recording import note, record
    from mx.artifacts.using import Obtained, Used, obtain, use

_HOMES = {
    "Obtained": "using",
    "Used": "using",
    "find": "carry",
    "note": "recording",
    "obtain": "using",
    "publish": "publishing",
    "record": "recording",
    "serve": "carry",
    "use": "using",
}

__all__ = ["Obtained", "Used", "find", "note", "obtain", "publish", "record", "serve", "use"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mx.artifacts' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mx.artifacts.{home}"), name)
    globals()[name] = value
    return value
