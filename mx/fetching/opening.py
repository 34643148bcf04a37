"""Opens stores on threads, whose work ends soon when it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mx.core.types import Packaging
from mx.errors import MxError
from mx.fetching.options import PullOptions
from mx.runtime import in_thread
from mx.storage.stores import CheckpointStore, Opening

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint

T = TypeVar("T")


async def stoppable(
    work: Callable[[Callable[[], bool]], T], over: threading.Event | None = None
) -> T:
    """Await `work` on a thread. If the caller is cancelled, what `work` was given returns True from
    then on, and the cancellation is passed on once `work` has ended. `over`, if given, is the event
    that it asks, which is set then."""
    over = over or threading.Event()
    task = asyncio.ensure_future(in_thread(work, over.is_set))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        over.set()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


async def open_store(
    store: CheckpointStore, options: PullOptions, over: threading.Event | None = None
) -> Checkpoint:
    """Open a store. Once `over` is set, reads of what was opened end soon. Raises as
    `CheckpointStore.open`."""
    loop = asyncio.get_running_loop()

    def work(cancelled: Callable[[], bool]) -> Checkpoint:
        return store.open(Opening(cancelled, loop, options.store_timeout_s))

    return await stoppable(work, over)


async def stored_files(
    options: PullOptions, packaging: Packaging
) -> tuple[str, Mapping[bytes, bytes]] | None:
    """Return the first store (its place) that has all of these side files, and its files by digest;
    None if none has."""
    for store in options.stores if options.from_sources else ():
        try:
            documents = (await open_store(store, options)).side_documents
        except MxError:  # the sources' error says more
            continue
        if all(side.digest in documents for side in packaging.side_files):
            return store.place, documents
    return None
