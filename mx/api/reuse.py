"""What may be given as `reuse` to `pull`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mx.core.types import Manifest
from mx.errors import ConfigError
from mx.target.prefill import Held


class Holder(Protocol):
    """Has weights in host memory: a `Pull` or a `Source` of this process."""

    @property
    def manifest(self) -> Manifest | None: ...

    def buffer(self) -> memoryview:
        """The weights, as an arena of the manifest lays them out; blocks until they are there."""


def held_by(reuse: Holder | Sequence[Holder], device: str) -> list[Held]:
    """The weights of each. Raises ConfigError for what has none, or for a pull into a GPU, and
    what `buffer` raises."""
    holders = [*reuse] if isinstance(reuse, Sequence) else [reuse]
    if holders and device != "cpu":
        raise ConfigError("a pull into a GPU can't reuse what is in host memory")
    found = []
    for holder in holders:
        if not hasattr(holder, "buffer"):
            raise ConfigError(f"`reuse` is a pull or a source, and not {holder!r}")
        view, manifest = holder.buffer(), holder.manifest
        if manifest is None:
            raise ConfigError("`reuse` has no weights")
        found.append(Held(manifest, view))
    return found
