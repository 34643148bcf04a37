"""Asks this host's cache, if there is one, to hold a model before it is pulled: the pull then
attaches to the cache's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mx.errors import MxError
from mx.log import event
from mx.wire.cache import CacheClient, CachedModelAddress, WantedModel

if TYPE_CHECKING:
    from mx.fetching.options import PullOptions

log = logging.getLogger(__name__)


async def ask_cache(
    options: PullOptions, on_progress: Callable[[int, int], None]
) -> CachedModelAddress | None:
    """Ask the cache to hold the model of a pull, and wait until it does.

    Without the cache the pull goes on by itself, so that nothing but a cancellation is raised.

    Args:
        options: The pull's options, with the path of the cache's socket.
        on_progress: Called with (bytes so far, bytes in all) of the cache's own pull.

    Returns:
        Where the cache holds it; None, which is logged with the reason.
    """
    wanted = WantedModel(options.name, options.revision, options.variant, options.coordinator or "")
    try:
        async with CacheClient(options.cache, timeout_s=options.connect_timeout_s) as client:
            found = await client.hold(wanted, on_progress)
    except MxError as error:
        log.warning("the cache is of no use, and the pull goes on without it: %s", error.message)
        return None
    if isinstance(found, str):
        event(log, "cache.not_held", model=options.name, reason=found)
        return None
    event(log, "cache.held", model=str(found.model), endpoint=found.endpoint)
    return found
