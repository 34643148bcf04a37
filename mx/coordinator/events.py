"""The coordinator's log of its sources: which ones register, drain and end."""

from __future__ import annotations

import logging
from typing import Any

from mx.core.changes import ChangeKind, Tail
from mx.core.types import ModelKey
from mx.core.variant import companion_path
from mx.log import event

log = logging.getLogger(__name__)


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
