"""What the pull machine asks of its caller."""

from __future__ import annotations

from dataclasses import dataclass

from mx.core.striping import Part
from mx.errors import MxError


@dataclass(frozen=True, slots=True)
class Assign:
    """Read these parts through this lane."""

    connection: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Every part of the chunk has landed: compare its digest, say `verified` or `corrupt`."""

    chunk: int


@dataclass(frozen=True, slots=True)
class LayerReady:
    layer: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Every layer is ready."""


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Close this lane: its source sent wrong bytes too often, or it is far too slow."""

    connection: int
    reason: MxError


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing is left that could finish the pull. `causes` are the lanes' last errors."""

    causes: tuple[MxError, ...]


Command = Assign | Check | LayerReady | Complete | DropConnection | Fail
