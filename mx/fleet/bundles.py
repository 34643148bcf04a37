"""Lists bundles, the ranks that make a whole, and waits until one is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from mx import config, runtime
from mx.api.common import check_type, variant_text
from mx.api.listing import ask, asking
from mx.core.answers import BundleStatus
from mx.core.reference import ModelReference, parse_reference
from mx.core.types import CHECKPOINT
from mx.core.variant import ProcessingKey, members_of, membership
from mx.errors import BundleIncompleteError, ConfigError, CoordinatorError
from mx.units import format_seconds
from mx.wire.client import CoordinatorClient

#: Seconds between two questions, at first, and at most.
_FIRST_S = 0.1
_LONGEST_S = 1.0
#: The most missing ranks that a message names.
_MAX_SHOWN = 8


def list_bundles(
    model: str = "",
    *,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> list[BundleStatus]:
    """Return the bundles that the coordinator knows, and which of their ranks are missing.

    Args:
        model: NAME or NAME:REVISION, with [VARIANT] or without; empty lists all.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        CoordinatorError: The coordinator does not answer.
        ConfigError: `model` or a setting is wrong.
    """
    wanted = _wanted(model, "", "")
    found = ask(lambda client: client.list_bundles(wanted.name), coordinator, settings)
    return [each for each in found if _fits(each, wanted)]


def wait_for_bundle(
    model: str,
    *,
    revision: str = "",
    variant: str | ProcessingKey = "",
    timeout_s: float | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> BundleStatus:
    """Block until a whole source serves every rank of a bundle.

    The ranks of a replica then pull NAME:REVISION with the revision of the answer: all get the same
    one, even if an update comes meanwhile.

    Args:
        model: NAME or NAME:REVISION. NAME alone is the revision that it means.
        revision: The revision, where `model` names none.
        variant: Any rank of the bundle, or its key with `*` for the ranks ("tp=*/2"). If empty,
            "checkpoint", or the only bundle that is listed.
        timeout_s: Seconds to wait; None waits for ever.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The complete bundle.

    Raises:
        BundleIncompleteError: Ranks were missing for `timeout_s`; it names them.
        CoordinatorError: The coordinator did not answer.
        ConfigError: An argument is wrong, or NAME alone has several bundles.
    """
    wanted = _checked(model, revision, variant, timeout_s)
    return ask(lambda client: _until_complete(client, wanted, timeout_s), coordinator, settings)


async def wait_for_bundle_async(
    model: str,
    *,
    revision: str = "",
    variant: str | ProcessingKey = "",
    timeout_s: float | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> BundleStatus:
    """Wait as `wait_for_bundle` does, without blocking the caller's event loop.

    Args:
        model: As for `wait_for_bundle`.
        revision: As there.
        variant: As there.
        timeout_s: As there.
        coordinator: As there.
        settings: As there.

    Returns:
        The complete bundle.

    Raises:
        MxError: As `wait_for_bundle`.
    """
    wanted = _checked(model, revision, variant, timeout_s)
    found = settings or config.load()
    asked = runtime.submit(
        lambda: asking(
            lambda client: _until_complete(client, wanted, timeout_s), coordinator, found
        )
    )
    return await asyncio.wrap_future(asked)


def _checked(
    model: str, revision: str, variant: str | ProcessingKey, timeout_s: float | None
) -> ModelReference:
    if timeout_s is not None:
        check_type("timeout_s", timeout_s, (int, float), "it is a number of seconds, or None")
    wanted = _wanted(model, revision, variant_text(variant))
    if not wanted.name:
        raise ConfigError("`model` is empty", hint="it is NAME or NAME:REVISION")
    return wanted


def _wanted(model: str, revision: str, variant: str) -> ModelReference:
    check_type("model", model, str, "it is NAME or NAME:REVISION")
    wanted = parse_reference(model, revision=revision, variant=variant)
    if wanted.pin:
        raise ConfigError(
            f"{model!r} pins the weights of one rank, not a bundle",
            hint="write NAME or NAME:REVISION",
        )
    return wanted


def _fits(bundle: BundleStatus, wanted: ModelReference) -> bool:
    return (
        wanted.name in ("", bundle.name)
        and wanted.revision in ("", bundle.revision)
        and (not wanted.variant or membership(wanted.variant).bundle == bundle.variant)
    )


def _chosen(bundles: Sequence[BundleStatus], wanted: ModelReference) -> BundleStatus | None:
    """Return the bundle that a reference means, None if it is not listed. Raises ConfigError."""
    found = [each for each in bundles if _fits(each, wanted) and (wanted.revision or each.named)]
    if len(found) > 1:
        checkpoint = [each for each in found if each.variant == CHECKPOINT]
        if not checkpoint:
            listed = " · ".join(each.variant for each in found[:5])
            raise ConfigError(
                f"{wanted.name} has {len(found)} bundles", hint=f"choose with `variant`: {listed}"
            )
        found = checkpoint
    return found[0] if found else None


async def _until_complete(
    client: CoordinatorClient, wanted: ModelReference, timeout_s: float | None
) -> BundleStatus:
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _FIRST_S
    while True:
        found, failure = None, None
        try:
            found = _chosen(await client.list_bundles(wanted.name), wanted)
        except CoordinatorError as error:
            if type(error) is not CoordinatorError:
                raise
            failure = error
        if found is not None and found.complete:
            return found
        left_s = pause_s if until_s is None else until_s - time.monotonic()
        if left_s <= 0:
            raise failure or _incomplete(found, wanted, timeout_s or 0.0)
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_S)


def _incomplete(
    found: BundleStatus | None, wanted: ModelReference, waited_s: float
) -> BundleIncompleteError:
    waited = f" (waited {format_seconds(waited_s)})" if waited_s else ""
    hint = "start a source of each rank; mx models shows which are there"
    if found is None:
        name = f"{wanted.name}:{wanted.revision}" if wanted.revision else wanted.name
        if not wanted.variant:
            return BundleIncompleteError(f"{name} is not listed{waited}", hint=hint)
        bundle = membership(wanted.variant).bundle
        return BundleIncompleteError(
            f"{name}[{bundle}] is not listed{waited}", hint=hint, missing=tuple(members_of(bundle))
        )
    shown = " · ".join(found.missing[:_MAX_SHOWN])
    shown += " …" if found.missing_count > _MAX_SHOWN else ""
    return BundleIncompleteError(
        f"{found} lacks {found.missing_count} of its {found.ranks} ranks: {shown}{waited}",
        hint=hint,
        missing=found.missing,
    )
