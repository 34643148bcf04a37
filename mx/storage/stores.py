"""Where a checkpoint may be kept besides in other processes' memory: the steps of a pull's chain
that come after its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint

DISK, HUB, OBJECTS = "disk", "hub", "objects"


@dataclass(frozen=True, slots=True)
class Opening:
    """What opening a store may need.

    `cancelled` returns True once the pull is closed; `loop` runs requests; `timeout_s` is how long
    one request may take, or may make no progress.
    """

    cancelled: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    timeout_s: float


class CheckpointStore(Protocol):
    """A checkpoint's place. `step` is the name of its step in the chain, `place` names it for
    people, and `threads` is how many reads at a time are worth while."""

    @property
    def step(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def threads(self) -> int: ...

    def open(self, opening: Opening) -> Checkpoint:
        """Find the checkpoint, and read and check its headers and side files. Blocks.

        Raises:
            ConfigError: There is none, this user may not read it, or an extra is missing.
            CheckpointError: It is malformed.
            StoreError: The store does not answer, or fails.
            LocalError: The disk fails.
            ClosedError: `opening.cancelled` returned True.
        """


@dataclass(frozen=True, slots=True)
class DiskStore:
    """A checkpoint on this machine's disk: a safetensors file, or a folder."""

    path: Path
    step: str = DISK
    threads: int = 2

    @property
    def place(self) -> str:
        return str(self.path)

    def open(self, opening: Opening) -> Checkpoint:
        """Open it. Raises as `CheckpointStore.open`."""
        from mx.storage.safetensors import open_checkpoint

        return open_checkpoint(self.path)


@dataclass(frozen=True, slots=True)
class CompanionStore:
    """A further tensor file of a checkpoint in another store, as a checkpoint of its own."""

    store: CheckpointStore
    path: str

    @property
    def step(self) -> str:
        return self.store.step

    @property
    def place(self) -> str:
        return f"{self.store.place}/{self.path}"

    @property
    def threads(self) -> int:
        return self.store.threads

    def open(self, opening: Opening) -> Checkpoint:
        """Open it. Raises as `CheckpointStore.open`."""
        return self.store.open(opening).companion(self.path)
