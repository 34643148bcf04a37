"""Owners of names in tests of the coordinator's machines, to which a commitment is only a value."""

from __future__ import annotations

from dataclasses import replace

from blake3 import blake3

from mx.core.ownership import Receipt
from mx.core.types import SourceRecord, SourceRole


def commitment_of(owner: bytes) -> bytes:
    """Return the commitment of an owner, who is named by any bytes."""
    return blake3(owner).digest()


def owned(record: SourceRecord, owner: bytes) -> SourceRecord:
    """Return a record as a holder of an owner's key registers it. A relay has no commitment."""
    origin = record.role is SourceRole.ORIGIN
    return replace(record, commitment=commitment_of(owner) if origin else b"")


def plain(record: SourceRecord) -> SourceRecord:
    """Return a record without what says whose it is."""
    return replace(record, commitment=b"", by_owner=False)


def receipt_of(
    record: SourceRecord, owner: bytes, *, issued_s: float = 1.0, base: str = "", newest: int = 0
) -> Receipt:
    """Return the receipt that a coordinator gave for a record's model in an earlier life."""
    commitment, identity = commitment_of(owner), record.ref.identity
    return Receipt(record.model, identity, commitment, base, newest, issued_s)
