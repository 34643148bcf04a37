"""The coordinator's log of its sources: which ones register, drain and end, and which others can't
reach where they say."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Any

from mx.core.changes import ChangeKind, Tail
from mx.core.types import ModelKey
from mx.core.variant import companion_path
from mx.log import Throttle, event
from mx.wire.address import split_address

log = logging.getLogger(__name__)

#: How long a source may take to accept a connection: its registration is answered afterwards.
_DIAL_S = 1.0

#: A registration causes a connection to an address that its caller names: one per caller's address
#: in a while.
_dialled = Throttle()


async def warn_of_unreached(endpoint: str, address: str) -> None:
    """Log a warning if a source gives a private address that is not the one it calls from, and
    nothing answers there: it is behind address translation, and has not said where it is reached.

    Args:
        endpoint: The HOST:PORT that the source registers.
        address: The IP address that its call comes from, "" for none.
    """
    host, port = split_address(endpoint)
    try:
        ours, seen = ipaddress.ip_address(host), ipaddress.ip_address(address)
    except ValueError:  # a name, or a unix socket
        return
    if ours == seen or ours.is_loopback or not ours.is_private:
        return
    if _dialled.passes(address) is None:
        return
    try:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        event(
            log,
            "source.unreached",
            level=logging.WARNING,
            endpoint=endpoint,
            address=address,
            text="it can't be reached where it says: if it is behind address translation, give it "
            "`advertise` (and `data_ports`), which name where others reach it",
        )
    else:
        writer.close()


def log_changes(tail: Tail) -> None:
    """Log each registration, change of state and end, and what names have come to mean for bundles;
    not changes of layers, nor heartbeats. Of what is there as the stream begins again, how much it
    is."""
    if tail.begins_again:
        if tail.changes:
            event(log, "source.listed", sources=len(tail.changes))
        return
    for change in tail.changes:
        record, before = change.record, change.before
        who: dict[str, Any] = {
            "model": str(record.model),
            "source": record.source_id,
            "endpoint": record.endpoint,
            "role": record.role.value,
        }
        if change.kind is ChangeKind.UP:
            who["pin"] = record.ref.pin.hex()[:16]
            if record.pin_only and not companion_path(record.model.variant):
                event(log, "source.pin_only", level=logging.WARNING, **who)
            else:
                event(log, "source.registered", **who)
        elif change.kind is ChangeKind.GONE:
            event(log, "source.gone", **who, reason=change.reason)
        elif before is not None and before.pin_only and not record.pin_only:
            event(log, "source.named", **who, pin=record.ref.pin.hex()[:16])
        elif before is not None and before.state is not record.state:
            event(log, f"source.{record.state.value}", **who)
    for each in tail.meant:
        if each.revision:
            key = ModelKey(each.name, each.revision, each.bundle)
            event(log, "bundle.named", model=each.name, means=str(key))
