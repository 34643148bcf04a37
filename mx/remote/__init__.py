"""The pack of stores elsewhere: object stores, those of other distributions, and the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mx.errors import ConfigError
from mx.packs import LOAD_FAILURES
from mx.stores import BUILT_IN, Opening, WeightStore, load_of, shown_url
from mx.text import plain

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint

__all__ = ["open_checkpoint", "open_url"]


def open_url(url: str, opening: Opening) -> WeightStore:
    """Open the store of a URL. Blocks.

    Args:
        url: The URL.
        opening: How long a call may take, and whether the pull was closed.

    Returns:
        The store; one of another distribution is held to the contract.

    Raises:
        ConfigError: There is none for its scheme, or it can't be used.
        StoreError, ClosedError: It can't be opened.
    """
    from mx.remote.guarded import GuardedStore

    factory = _factory(url)
    if url.partition(":")[0].lower() in BUILT_IN:
        return factory(url, opening)  # its calls end by themselves, and are not copied
    return GuardedStore(lambda: factory(url, opening), shown_url(url), opening)


def open_checkpoint(url: str, opening: Opening) -> Checkpoint:
    """Open a URL's store, and read and check its headers and side files.

    Args:
        url: The URL.
        opening: As for `open_url`.

    Raises:
        MxError: As `open_url`, and as `mx.storage.stores.CheckpointStore.open`.
    """
    from mx.remote.ranged import open_listed

    return open_listed(open_url(url, opening))


def _factory(url: str) -> Callable[[str, Opening], WeightStore]:
    """Import and return what opens a URL.

    Raises:
        ConfigError: There is no store for it, or it can't be imported.
    """
    scheme, load = urlsplit(url).scheme, load_of(url)
    factory: Any = None
    try:
        factory = load()
        why = "its entry point can't be called"
    except LOAD_FAILURES as error:
        why = f"{type(error).__name__}: {error}"
    if callable(factory):
        made: Callable[[str, Opening], WeightStore] = factory
        return made
    raise ConfigError(
        f"the store for {scheme}:// can't be used: {plain(why)}",
        hint="install what it needs, or another version of the distribution that brings it",
    )
