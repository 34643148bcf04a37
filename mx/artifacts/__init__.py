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

from mx.packs import ASKING, LOGGING, Pack

if TYPE_CHECKING:
    from mx.artifacts.carry import find, serve
    from mx.artifacts.publishing import publish
    from mx.artifacts.recording import note, record
    from mx.artifacts.using import Obtained, Used, obtain, use

PACK = Pack(
    modules={"artifacts": "mx.artifacts", "graphs": "mx.graphs"},
    verbs={"artifacts": "mx.artifacts.verbs:app"},
    additions={"serve": "mx.artifacts.additions:SERVED", "pull": "mx.artifacts.additions:PULLED"},
    takes={
        "artifacts_list": ASKING,
        "artifacts_pull": (*ASKING, "trust", *LOGGING),
        "artifacts_check": ("trust",),
    },
)

_HOMES = {
    "carry": ("find", "serve"),
    "publishing": ("publish",),
    "recording": ("note", "record"),
    "using": ("Obtained", "Used", "obtain", "use"),
}

__all__ = ["Obtained", "Used", "find", "note", "obtain", "publish", "record", "serve", "use"]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"mx.artifacts.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'mx.artifacts' has no attribute {name!r}")
