"""Pulls a model's companions: the further tensor files of its folder, each a variant of its own. On
the loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from mx.core.types import Companion, ModelKey
from mx.core.variant import companion_variant
from mx.errors import (
    EXIT_NO_SOURCE,
    ClosedError,
    IncompleteError,
    MxError,
    PeerProtocolError,
    UnknownModelError,
)
from mx.fetching.attempt import Context
from mx.fetching.delivery import Delivery
from mx.fetching.edition import Edition
from mx.fetching.events import EventLog
from mx.fetching.options import PullOptions
from mx.fetching.report import CompanionReport, PullReport
from mx.fetching.resolver import describe, retry_until_found
from mx.runtime import in_thread, uncut
from mx.storage.stores import CompanionStore
from mx.text import listed
from mx.wire.locate import Locator


async def pull_companions(
    context: Context,
    options: PullOptions,
    delivery: Delivery,
    model: ModelKey,
    endpoints: Sequence[str],
) -> list[CompanionReport]:
    """Pull the companions that a delivery writes, one after the other, into its folder.

    Args:
        context: The context of the pull of the main weights.
        options: The options of that pull, with the sources and stores that may have companions.
        delivery: What writes the main weights.
        model: The main weights' key.
        endpoints: The sources (HOST:PORT) that have served the main weights: they are asked where
            the coordinator does not answer.

    Returns:
        What came.

    Raises:
        IncompleteError: No source has a companion; what has come stays for another pull.
        MxError: As a pull.
    """
    found = []
    for number, companion in enumerate(delivery.companions):
        context.log.phase = f"companion {companion.path}"
        folder = await in_thread(delivery.companion_folder, number)
        if folder is None:  # an earlier pull has left all of it there
            found.append(CompanionReport(companion.path, companion.nbytes, companion.pin, 0.0))
            continue
        asked = _options_of(options, model, companion)
        asked = replace(asked, out=folder)
        try:
            report = await _from_anywhere(context, asked, endpoints)
        except MxError as error:
            if error.exit_code != EXIT_NO_SOURCE:
                raise
            raise IncompleteError(
                f"the main weights of {model} are here, and its companion {companion.path} is not: "
                f"{error.message}",
                hint=error.hint,
            ) from error
        if report.pin != companion.pin:
            raise PeerProtocolError(f"the companion {companion.path} came as {report.pin}")
        sources = list(dict.fromkeys(path.source for path in report.paths))
        found.append(
            CompanionReport(
                companion.path, companion.nbytes, companion.pin, report.seconds, sources
            )
        )
    return found


async def companion_options(options: PullOptions, path: str) -> PullOptions:
    """Look a model up, and return the options to pull one of its companions.

    Args:
        options: The options to pull the model.
        path: The companion's path.

    Raises:
        UnknownModelError: The model has no such companion.
        MxError: As `mx.fetching.resolver.describe`.
    """
    if not options.from_sources:
        stores = tuple(CompanionStore(store, path) for store in options.stores)
        return replace(options, stores=stores)
    async with Locator(options) as locator:
        located, manifest = await retry_until_found(
            lambda: describe(locator), options.wait_s, lambda: None
        )
    companions = {each.path: each for each in manifest.packaging.companions}
    if path not in companions:
        there = listed([*companions])
        raise UnknownModelError(
            f"{located.model} has no companion {path}",
            hint=f"it has {there}" if there else "it has none: its folder's weights are one model",
        )
    return _options_of(options, located.model, companions[path])


def _options_of(options: PullOptions, model: ModelKey, companion: Companion) -> PullOptions:
    """Return options for a companion in place of the main weights. It is found by its pin, which
    the files of the main weights name; so no owner need vouch for it."""
    return replace(
        options,
        name=f"{model.name}@{companion.pin}",
        revision="",
        variant=companion_variant(model.variant, companion.path),
        stores=tuple(CompanionStore(store, companion.path) for store in options.stores),
        owners=(),
        allow_older=False,
        companions=False,  # a lie could name more and more, each with some of its own
    )


async def _from_anywhere(
    context: Context, options: PullOptions, endpoints: Sequence[str]
) -> PullReport:
    """Pull from what the coordinator lists, or from one of these sources; then wait."""
    # None of this is for the memory or the readers of the main weights.
    alone = replace(
        options,
        into=None,
        device="cpu",
        hold=False,
        host=None,
        host_modules=(),
        reuse=[],
        follow=False,
        cache="",
        wait_s=0.0,
    )
    ways = [alone]
    if options.from_sources and options.peer is None:
        ways += [replace(alone, peer=each, coordinator=None) for each in endpoints]
        ways += [replace(alone, wait_s=options.wait_s)] if options.wait_s else []
    error: MxError | None = None
    for way in ways:
        try:
            return await _pulled(context, way)
        except MxError as failure:
            if failure.exit_code != EXIT_NO_SOURCE:
                raise
            error = error or failure
    assert error is not None
    raise error


async def _pulled(context: Context, options: PullOptions) -> PullReport:
    from mx.fetching.job import Job  # which imports this

    log = EventLog(time.monotonic())
    job = Job(options, context.transports, log, context.closed)
    try:
        await job.run()
        return log.wait_end(0.0)
    finally:
        await uncut(_freed(job.edition, job.leave()))


async def _freed(edition: Edition, leaving: Awaitable[None]) -> None:
    await leaving
    edition.end(ClosedError("the companion is written"))
    await edition.files.close()
    edition.release()
