"""transformers: models that are built at once and compute while their layers arrive.

    model = mx.engines.transformers.load("llama-8b")
    model.generate(...)  # waits for each layer when it comes to it

Each of these names imports its module, and with it torch and transformers, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.engines.compiling import compile_counts
    from mx.engines.transformers.arrival import Loading
    from mx.engines.transformers.graphs import Decode, Decoding, decoding
    from mx.engines.transformers.kv import KvCaches
    from mx.engines.transformers.loader import load, loading
    from mx.engines.transformers.patched import counts, patch, unpatch

_HOMES = {
    "Decode": "mx.engines.transformers.graphs",
    "Decoding": "mx.engines.transformers.graphs",
    "KvCaches": "mx.engines.transformers.kv",
    "Loading": "mx.engines.transformers.arrival",
    "compile_counts": "mx.engines.compiling",
    "counts": "mx.engines.transformers.patched",
    "decoding": "mx.engines.transformers.graphs",
    "load": "mx.engines.transformers.loader",
    "loading": "mx.engines.transformers.loader",
    "patch": "mx.engines.transformers.patched",
    "unpatch": "mx.engines.transformers.patched",
}

__all__ = [
    "Decode",
    "Decoding",
    "KvCaches",
    "Loading",
    "compile_counts",
    "counts",
    "decoding",
    "load",
    "loading",
    "patch",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mx.engines.transformers' has no attribute {name!r}")
    from mx.engines.transformers.extra import transformers

    transformers()  # fails with what to install
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
