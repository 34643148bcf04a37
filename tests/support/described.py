"""What a source makes of tensors that it copies."""

from __future__ import annotations

from typing import Any

from mx.core.layout import TensorSpec
from mx.core.types import Alias
from mx.memory import torch_source


def describe(what: Any) -> tuple[list[TensorSpec], list[Alias], dict[str, memoryview]]:
    """Return the specs, the aliases and the bytes of a module's or a mapping's tensors."""
    found = torch_source.describe(what)
    return found.specs, found.aliases, found.views()
