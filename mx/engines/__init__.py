"""Engines that start while their weights arrive: each module adapts one."""

from __future__ import annotations

import importlib
from types import ModuleType

#: The engines, which are attributes of `mx.engines`, too.
_ENGINES = ("sglang", "transformers", "vllm")


def __getattr__(name: str) -> ModuleType:
    if name not in _ENGINES:
        raise AttributeError(f"module 'mx.engines' has no attribute {name!r}")
    return importlib.import_module(f"mx.engines.{name}")
