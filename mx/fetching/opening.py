"""Opens stores on threads, whose work ends soon when it is cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mx.core.layout_rules import oldest
from mx.core.types import ManifestRef, Packaging
from mx.errors import MxError, NotAllowedError
from mx.fetching.options import PullOptions
from mx.runtime import in_thread, uncut
from mx.storage.stores import CheckpointStore

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint

log = logging.getLogger(__name__)

T = TypeVar("T")


async def stoppable(
    work: Callable[[Callable[[], bool]], T], over: threading.Event | None = None
) -> T:
    """Await `work` on a thread. If the caller is cancelled, what `work` was given returns True from
    then on, and the cancellation is passed on once `work` has ended. `over`, if given, is the event
    that it asks, which is set then."""
    over = over or threading.Event()
    return await uncut(in_thread(work, over.is_set), over.set)


async def open_store(
    store: CheckpointStore, options: PullOptions, over: threading.Event | None = None
) -> Checkpoint:
    """Open a store. Once `over` is set, reads of what was opened end soon. Raises as
    `CheckpointStore.open`."""
    from mx.stores import Opening

    loop = asyncio.get_running_loop()

    opened: list[Checkpoint] = []

    def work(cancelled: Callable[[], bool]) -> Checkpoint:
        opened.append(store.open(Opening(cancelled, loop, options.store_timeout_s)))
        return opened[0]

    try:
        return await stoppable(work, over)
    except asyncio.CancelledError:
        for each in opened:
            await uncut(in_thread(each.close))
        raise


async def stored_files(
    options: PullOptions, packaging: Packaging
) -> tuple[str, Mapping[bytes, bytes]] | None:
    """Return the first store (its place) that has all of these side files, and its files by digest;
    None if none has."""
    for store in options.stores if options.from_sources else ():
        try:
            checkpoint = await open_store(store, options)
        except MxError:  # the sources' error says more
            continue
        await uncut(in_thread(checkpoint.close))
        documents = checkpoint.side_documents
        if all(side.digest in documents for side in packaging.side_files):
            return store.place, documents
    return None


async def layout_version(options: PullOptions, listed: ManifestRef | None) -> int | None:
    """Return the layout version of a model that others are to read from here: where no coordinator
    names one, the oldest, which the release before plans too. None for any.

    Args:
        options: The pull's.
        listed: What the coordinator has answered; None if it was not asked.
    """
    if listed is not None:
        return listed.layout_version
    if not options.hold:
        return None
    if options.coordinator is None:
        return oldest()
    from mx.wire.locate import Locator

    try:
        async with Locator(options) as locator:
            return await locator.layout_version(options.key)
    except NotAllowedError:  # nor could it be registered
        raise
    except MxError as error:  # to pull needs no coordinator; the registration will say it
        log.debug("no layout version is known: %s", error)
        return oldest()
