"""What a pull needs so that others can read from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mx.core.types import Manifest, ModelKey, SourceRecord
from mx.memory.arena import Arena
from mx.swarm.node import Node


class RelayHost(Protocol):
    """Lets others read what a pull has received so far. On the loop."""

    async def start(self, key: ModelKey, manifest: Manifest, arena: Arena, node: Node) -> None:
        """Listen, and offer the arena, of which nothing is held yet."""

    def record(self) -> SourceRecord | None:
        """How others find it; None before it listens."""

    async def register(self, coordinator: str) -> None:
        """Be listed. Raises CoordinatorError."""

    def hold(self, layers: Sequence[tuple[int, int]]) -> None:
        """These layers are there, as half-open ranges."""

    async def advertise(self) -> None:
        """Tell the coordinator what is held. Raises CoordinatorError."""

    async def close(self) -> None:
        """Let nobody read any more. Idempotent."""


#: Makes the host of the relay that has this source id.
MakeRelay = Callable[[str], RelayHost]
