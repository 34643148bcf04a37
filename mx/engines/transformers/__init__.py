"""transformers: models that are served by peers and by this host's cache.

Each name imports its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.engines.transformers.patched import counts, patch, unpatch

_HOMES = {
    "counts": "mx.engines.transformers.patched",
    "patch": "mx.engines.transformers.patched",
    "unpatch": "mx.engines.transformers.patched",
}

__all__ = ["counts", "patch", "unpatch"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
