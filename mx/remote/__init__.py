"""The pack of stores elsewhere: object stores, those of other distributions, and the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mx.stores import BUILT_IN, Opening, WeightStore, load_factory, shown_url

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

    factory = load_factory(url)
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
