"""Where a checkpoint may be kept besides in other processes' memory: the steps of a pull's chain
that come after its peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mx import packs
from mx.contexts import Undo
from mx.errors import ConfigError

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint
    from mx.stores import ListedFile, Opening

SNAPSHOT, DISK, HUB, OBJECTS = "snapshot", "disk", "hub", "objects"


class CheckpointStore(Protocol):
    """A checkpoint's place. `step` is the name of its step in the chain, `place` names it for
    people."""

    @property
    def step(self) -> str: ...
    @property
    def place(self) -> str: ...

    def open(self, opening: Opening) -> Checkpoint:
        """Find the checkpoint, and read and check its headers and side files. Blocks. The caller
        closes it.

        Raises:
            ConfigError: There is none, this user may not read it, or an extra is missing.
            CheckpointError: It is malformed.
            StoreError: The store does not answer, or fails.
            LocalError: The disk fails.
            ClosedError: `opening.cancelled` returned True.
        """


@dataclass(frozen=True, slots=True)
class DiskStore:
    """A checkpoint on this machine's disk: a safetensors file, or a folder.

    It is a `mx.stores.WeightStore` too. `open` does not go by `list` and `read`: files of this
    machine are read into place by O_DIRECT, and which links are followed goes by the weights.
    """

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

    def list(self) -> Iterable[ListedFile]:
        """List as `WeightStore.list` does."""
        from mx.storage.disk_listing import listed_files

        return listed_files(self.path)

    def read(self, file: ListedFile, offset: int, view: memoryview) -> int:
        """Read as `WeightStore.read` does."""
        from mx.storage.disk_listing import read_listed

        return read_listed(self.path, file, offset, view)

    def close(self) -> None:
        """Do nothing: nothing is open."""


@dataclass(frozen=True, slots=True)
class UrlStore:
    """A checkpoint in a store that a URL names: see `mx.stores`."""

    url: str = field(repr=False)
    step: str = OBJECTS

    @property
    def place(self) -> str:
        from mx.stores import shown_url

        return shown_url(self.url)

    def open(self, opening: Opening) -> Checkpoint:
        """List it, and read its files' headers. Raises as `CheckpointStore.open`."""
        opener = packs.optional("mx.remote:open_checkpoint")
        if opener is None:
            why = "`object_url` needs the pack mx.remote, which is not there"
            raise ConfigError(why, hint="install mx as a whole")
        opened: Checkpoint = opener(self.url, opening)
        return opened


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

    def open(self, opening: Opening) -> Checkpoint:
        """Open it. Raises as `CheckpointStore.open`."""
        checkpoint = self.store.open(opening)
        with Undo(checkpoint.close):
            return checkpoint.companion(self.path)
