"""Checks the `reuse` argument of `pull`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mx.core.reuse import ReusableWeights
from mx.errors import ConfigError

if TYPE_CHECKING:
    from mx.core.pages import Pages
    from mx.core.types import Manifest
    from mx.views import View


class Holder(Protocol):
    """An object that has weights in memory: a `Pull` or a `Source` of this process."""

    @property
    def manifest(self) -> Manifest | None: ...

    @property
    def pages(self) -> Pages | None:
        """The block digests that are known; None if there is no manifest."""

    def memory(self) -> View:
        """Wait for the weights and return them as the manifest's arena lays them out, in one place
        or in several."""


def held_by(reuse: Holder | Sequence[Holder]) -> list[ReusableWeights]:
    """Return the weights of each holder in `reuse`, waiting for those that still arrive.

    Args:
        reuse: One holder or several.

    Raises:
        ConfigError: An element is neither a pull nor a source, or has no weights.
        MxError: An error that a holder's `memory` raises.
    """
    holders = [*reuse] if isinstance(reuse, Sequence) else [reuse]
    found = []
    for holder in holders:
        if not hasattr(holder, "memory"):
            raise ConfigError(f"`reuse` must be a pull or a source, not {holder!r}")
        view, manifest, pages = holder.memory(), holder.manifest, holder.pages
        if getattr(holder, "subset", None) is not None:
            raise ConfigError("`reuse` must hold a whole model, not some tensors of one")
        if manifest is None or pages is None:
            raise ConfigError("`reuse` has no weights")
        found.append(ReusableWeights(manifest, pages, view))
    return found
