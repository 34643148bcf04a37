"""Looks for sources of a pull's model, before it is read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from mx import trace
from mx.core import manifest as manifests
from mx.core.planner import Plan
from mx.core.types import Manifest
from mx.errors import (
    CoordinatorError,
    MxError,
    NoSourceError,
    PeerLostError,
    PeerTimeoutError,
    UnknownModelError,
)
from mx.memory.collector import paused
from mx.runtime import in_thread
from mx.units import format_seconds
from mx.wire.client import LocatedModel
from mx.wire.locate import Locator

log = logging.getLogger(__name__)

T = TypeVar("T")

#: With no source to read from, the first pause between look-ups, which doubles each time,
FIRST_S = 0.2
#: up to this.
LONGEST_S = 2.0


class FoundPaths(NamedTuple):
    """A model, and the paths to sources that hold all of it (none, if only parts are held)."""

    located: LocatedModel
    manifest: Manifest
    paths: Plan


async def describe(locator: Locator) -> tuple[LocatedModel, Manifest]:
    """Look the model up once, and fetch its manifest, even if no source can be reached.

    Raises:
        UnknownModelError, CoordinatorError, SourceError, ManifestError.
    """
    located = await locate(locator)
    return located, await fetch_manifest(locator, located)


async def locate(locator: Locator) -> LocatedModel:
    """Look the model up once, at the coordinator or at the peer that the user named.

    Raises:
        UnknownModelError, CoordinatorError, SourceError; ManifestError if it is not its owner's.
    """
    with trace.span("pull.locate", model=locator.name) as span:
        located = await locator.locate()
        if locator.where.owners:
            from mx.fetching.owners import check  # most pulls name none

            await in_thread(check, locator.where, located)
        span.set(sources=len(located.sources))
    return located


async def fetch_manifest(locator: Locator, located: LocatedModel) -> Manifest:
    """Fetch the manifest of a model that was looked up.

    Raises:
        CoordinatorError, SourceError, ManifestError.
    """
    with trace.span("pull.manifest", nbytes=sum(located.ref.sizes)):
        documents = await locator.documents(located)
        # JSON of 50,000 tensors takes a while: off the loop, which has leases to renew.
        manifest = await in_thread(paused()(manifests.decode), located.ref, documents)
        notes = b""
        for source in located.sources:
            if source.ref.packaging == located.ref.packaging:  # it has the same files
                notes = notes or source.notes
        return replace(manifest, vouch=located.vouch, notes=notes)


async def retry_until_found(
    attempt: Callable[[], Awaitable[T]], wait_s: float, on_wait: Callable[[], None]
) -> T:
    """Return the result of `attempt`, which is repeated for up to `wait_s` while it fails only for
    want of a source; `on_wait` is called before each pause. Raises its last error."""
    until_s = time.monotonic() + wait_s
    pause_s = FIRST_S
    while True:
        try:
            return await attempt()
        except MxError as error:
            left_s = until_s - time.monotonic()
            if not _may_pass(error):
                raise
            if left_s <= 0:
                if wait_s > 0:
                    error.message += f" (waited {format_seconds(wait_s)})"
                raise
        on_wait()
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_S)


def _may_pass(error: MxError) -> bool:
    """Return True if the error may pass when a source comes, or the coordinator."""
    none_opened = (NoSourceError, PeerLostError, PeerTimeoutError, UnknownModelError)
    return isinstance(error, none_opened) or type(error) is CoordinatorError
