"""vLLM starts from other replicas, or from a peer that holds a checkpoint, and lends what it loads.

The load format is `mx-peer`. vLLM finds the plugin by its entry point. docs/vllm.md has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.engines.vllm.files import fetch_files
    from mx.engines.vllm.plugin import register
    from mx.engines.vllm.worker import changing, status

__all__ = ["changing", "fetch_files", "register", "status"]

#: Where each name is. vLLM and torch are imported when one is used.
_MODULES = {
    "changing": "worker",
    "fetch_files": "files",
    "register": "plugin",
    "status": "worker",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
