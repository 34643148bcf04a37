"""Looks for sources of a pull's model, before it is read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mx import trace
from mx.core import manifest as manifests
from mx.core.planner import Plan
from mx.core.types import Manifest, ManifestRef, SourceRecord
from mx.errors import (
    ConfigError,
    CoordinatorError,
    LocalError,
    ManifestError,
    MxError,
    NoSourceError,
    PeerLostError,
    PeerTimeoutError,
    UnknownModelError,
)
from mx.memory.collector import paused
from mx.runtime import in_thread
from mx.units import format_seconds
from mx.wire.locate import Located, Locator

log = logging.getLogger(__name__)

T = TypeVar("T")

#: With no source to read from, the first pause between look-ups, which doubles each time,
FIRST_S = 0.2
#: up to this.
LONGEST_S = 2.0


@dataclass(frozen=True)
class Found:
    """A model, and the paths to sources that hold all of it (none, if only parts are held)."""

    located: Located
    manifest: Manifest
    paths: Plan


async def find(
    locator: Locator,
    plan: Callable[[Sequence[SourceRecord]], Plan],
    begin: Callable[[Located, Plan], None],
    *,
    relays_do: bool,
    side_files: bool,
    tried: Sequence[ManifestRef] = (),
    stores_do: bool = False,
) -> Found:
    """Look the model up once, and fetch its manifest.

    The sources of the weights may be listed in several layouts, of which strangers may have made
    some up: the first counts that describes these weights, and that a source in reach holds.

    Args:
        locator: Looks it up at the coordinator, or at the peer that the user named.
        plan: Finds the paths to sources.
        begin: Called with the paths before the manifest is fetched; again for another layout.
        relays_do: True if sources that hold only parts are enough.
        side_files: Fetch the side files too, into memory.
        tried: Manifests all of whose sources have lied: look for others.
        stores_do: True if a manifest is enough, since a store may hold the weights.

    Raises:
        UnknownModelError, CoordinatorError, SourceError, ManifestError.
    """

    out_of_reach: list[Found] = []

    async def attempt(located: Located) -> Found:
        paths = plan([source for source in located.sources if source.whole])
        begin(located, paths)
        manifest = await _manifest(locator, located)
        in_parts = [source for source in located.sources if not source.whole]
        if not paths.paths and not (relays_do and plan(in_parts).paths):
            out_of_reach.append(Found(located, manifest, paths))
            raise NoSourceError(
                f"no source of {located.key} can be reached from here: "
                + (paths.why_none() or "none is registered"),
                hint="start one with mx serve, or name one with `peer=HOST:PORT`",
            )
        return Found(located, manifest, paths)

    try:
        found = await _first(locator, attempt, tried)
    except NoSourceError:
        if not (stores_do and out_of_reach):
            raise
        found = out_of_reach[0]
    if side_files:  # later readers of this pull may write them
        sides = await locator.side_files(found.manifest, found.located)
        manifest = replace(found.manifest, documents=found.manifest.documents | sides)
        found = replace(found, manifest=manifest)
    return found


async def describe(locator: Locator) -> tuple[Located, Manifest]:
    """Look the model up once, and fetch its manifest, as `find`, even if no source can be
    reached.

    Raises:
        UnknownModelError, CoordinatorError, SourceError, ManifestError.
    """

    async def attempt(located: Located) -> tuple[Located, Manifest]:
        return located, await _manifest(locator, located)

    return await _first(locator, attempt)


async def _first(
    locator: Locator, attempt: Callable[[Located], Awaitable[T]], tried: Sequence[ManifestRef] = ()
) -> T:
    """Return the first result of `attempt` for the coordinator's answer and its alternatives,
    without those in the layout and chunk size of one in `tried`. Raises the first error if there is
    none."""
    with trace.span("pull.locate", model=locator.name) as span:
        located = await locator.locate()
        span.set(sources=len(located.sources))
    failure: MxError | None = None
    for each in (located, *locator.alternatives(located)):
        if any(each.ref.same_chunks(ref) for ref in tried):
            continue
        try:
            return await attempt(each)
        except (LocalError, ConfigError):
            raise
        except MxError as error:
            if isinstance(error, ManifestError):
                error.of_a_source = True
            failure = failure or error
            log.info("%s in layout %s: %s", each.key, each.ref.layout.hex()[:16], str(error))
    raise failure or NoSourceError(f"no other source of {located.key} is registered")


async def _manifest(locator: Locator, located: Located) -> Manifest:
    with trace.span("pull.manifest", nbytes=sum(located.ref.sizes)):
        documents = await locator.documents(located)
        # JSON of 50,000 tensors takes a while: off the loop, which has leases to renew.
        return await in_thread(paused()(manifests.decode), located.ref, documents)


async def retry_until_found(
    attempt: Callable[[], Awaitable[T]], wait_s: float, on_wait: Callable[[], None]
) -> T:
    """Return the result of `attempt`, which is repeated for up to `wait_s` while it fails only for
    want of a source, or of one that describes the weights; `on_wait` is called before each pause.
    Raises its last error."""
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
    """Return True if the error may pass when a source comes, or the coordinator. (A stranger may
    have been listed first, with a manifest that is none.)"""
    if isinstance(error, ManifestError):
        return error.of_a_source
    none_opened = (NoSourceError, PeerLostError, PeerTimeoutError, UnknownModelError)
    return isinstance(error, none_opened) or type(error) is CoordinatorError
