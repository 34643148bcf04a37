"""KV blocks move as weights do: the pack, and what programs use of it.

An engine registers the memory of its KV cache once (`KvMemory`, `KvPool`) and lists blocks by
names that say what is in them (`BlockNames`, `KvKey`). Other processes that hold the key of the
model's name read these blocks into slots of their own (`KvReader`). See docs/kv.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mx.packs import Pack

if TYPE_CHECKING:
    from mx.kv.fetch import KvFetch
    from mx.kv.files import KvFiles
    from mx.kv.freezing import freeze_blocks
    from mx.kv.layout import KvMemory
    from mx.kv.names import BlockNames, KvKey, configuration_digest
    from mx.kv.pool import KvPool
    from mx.kv.proof import secret_of
    from mx.kv.reader import KvReader

__all__ = [
    "BlockNames",
    "KvFetch",
    "KvFiles",
    "KvKey",
    "KvMemory",
    "KvPool",
    "KvReader",
    "configuration_digest",
    "freeze_blocks",
    "secret_of",
]

PACK = Pack(services=("mx.kv.service:service",))

_PLACES = {
    "BlockNames": "mx.kv.names",
    "KvFetch": "mx.kv.fetch",
    "KvFiles": "mx.kv.files",
    "KvKey": "mx.kv.names",
    "KvMemory": "mx.kv.layout",
    "KvPool": "mx.kv.pool",
    "KvReader": "mx.kv.reader",
    "configuration_digest": "mx.kv.names",
    "freeze_blocks": "mx.kv.freezing",
    "secret_of": "mx.kv.proof",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. Raises AttributeError."""
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module 'mx.kv' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
