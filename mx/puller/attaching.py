"""Mapping a source's memory in place of copying it."""

from __future__ import annotations

from mx.core.planner import Way
from mx.core.types import Manifest
from mx.errors import (
    ConfigError,
    LocalError,
    MxError,
    NoSourceError,
    NotAllowedError,
    PeerUntrustedError,
    SourceError,
)
from mx.puller.delivery import Delivery
from mx.puller.links import Link, Links
from mx.puller.report import PathReport
from mx.puller.state import PullState
from mx.runtime import in_thread, uncut
from mx.transport import Span


async def attach(
    links: Links, way: Way, nbytes: int, causes: list[MxError]
) -> tuple[Link | None, Span | None]:
    """A link if it could be opened, and the source's memory if it could be mapped; why not goes
    into `causes`."""
    try:
        link = await links.open(way, nbytes)
    except ConfigError:
        raise
    except MxError as error:
        causes.append(error)
        return None, None
    try:
        return link, await links.attach(link, nbytes)
    except NotAllowedError as error:
        causes.append(error)
        return link, None
    except SourceError as error:
        causes.append(error)
        return None, None


async def deliver_attached(
    manifest: Manifest, way: Way, view: Span, delivery: Delivery, state: PullState, *, strong: bool
) -> PathReport:
    """Every layer of memory that was attached by `way` is there: checked, if `strong`, and told."""
    for index in range(len(manifest.layout.layers)):
        if strong:
            await uncut(in_thread(delivery.attached, view, index))
        else:
            delivery.attached(view, index)
    return PathReport(
        way.transport,
        way.source.endpoint,
        manifest.layout.payload_nbytes,
        state.last_layer_s(),
        attached=True,
    )


def nobody(model: str, causes: list[MxError]) -> MxError:
    """No way to any source could be opened."""
    if causes and all(isinstance(cause, LocalError) for cause in causes):
        return causes[-1]
    untrusted = causes and all(isinstance(cause, PeerUntrustedError) for cause in causes)
    kind = PeerUntrustedError if untrusted else NoSourceError
    return kind(
        f"no source of {model} could be opened: "
        + "; ".join(dict.fromkeys(str(cause) for cause in causes)),
        hint="mx sources shows who is registered",
    )
