"""Mapping a source's memory in place of copying it."""

from __future__ import annotations

from mx.core.planner import SourcePath
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
from mx.runtime import in_thread, uncut
from mx.target.connector import Connector, OpenPath
from mx.target.delivery import Delivery
from mx.target.events import EventLog
from mx.target.report import PathReport
from mx.transport import Span


async def attach(
    connector: Connector, path: SourcePath, nbytes: int, causes: list[MxError]
) -> tuple[OpenPath | None, Span | None]:
    """A link if it could be opened, and the source's memory if it could be mapped; why not goes
    into `causes`."""
    try:
        opened = await connector.open(path, nbytes)
    except ConfigError:
        raise
    except MxError as error:
        causes.append(error)
        return None, None
    try:
        return opened, await connector.attach(opened, nbytes)
    except NotAllowedError as error:
        causes.append(error)
        return opened, None
    except SourceError as error:
        causes.append(error)
        return None, None


async def deliver_attached(
    manifest: Manifest,
    path: SourcePath,
    view: Span,
    delivery: Delivery,
    state: EventLog,
    *,
    strong: bool,
) -> PathReport:
    """Every layer of memory that was attached by `way` is there: checked, if `strong`, and told."""
    for index in range(len(manifest.layout.layers)):
        if strong:
            await uncut(in_thread(delivery.attached, view, index))
        else:
            delivery.attached(view, index)
    return PathReport(
        path.transport,
        path.source.endpoint,
        manifest.layout.payload_nbytes,
        state.last_layer_s(),
        attached=True,
    )


def none_opened(model: str, causes: list[MxError]) -> MxError:
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
