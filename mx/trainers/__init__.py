"""The pack of trainers: weights that are sharded over ranks are served as one model, and followed.

Each rank lends its shards where they are (`mx.serve` of DTensors, which calls `serve_part`), as a
part of the model. Together they are one model under one name, which readers pull as any other. See
docs/trainers.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.trainers.serving import WholeSource, serve_part

__all__ = ["WholeSource", "serve_part"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. Raises AttributeError."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'mx.trainers' has no attribute {name!r}")
    return getattr(importlib.import_module("mx.trainers.serving"), name)
