"""Sources by name, and paths to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mx.core.paths import Medium, Rail
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.core.types import AddressTable, ManifestRef, ModelKey, SourceRecord

REF = ManifestRef(b"i" * 32, b"l" * 32, b"p" * 32, (1, 1, 1))


def source(
    name: str, transports: tuple[str, ...] = ("shm", "tcp"), there: Place | None = None
) -> SourceRecord:
    """Return a source of this name, on a host of the same name unless it is `there`."""
    return SourceRecord(
        source_id=name,
        model=ModelKey("m"),
        ref=REF,
        endpoint=f"{name}:1",
        place=there or Place(hostname=name),
        generation=1,
        table=AddressTable(REF.layout, ()),
        transports=transports,
    )


def on_one_host(name: str) -> SourceRecord:
    """A source on one host with all others: a pull reads from one of them at a time."""
    return replace(source(name), endpoint=f"host:{ord(name[0])}")


A, B = on_one_host("a"), on_one_host("b")


def path(record: Any, transport: str, rail: int = 0) -> SourcePath:
    """Return a path over the network to a source, by one of the rails."""
    pair = Rail(f"l{rail}", f"10.0.{rail}.2", f"r{rail}", f"10.0.{rail}.1", 1.0)
    return SourcePath(record, transport, 1.0, False, "", Medium.NETWORK, pair)


TCP0, TCP1, UCX0, OTHER = path(A, "tcp", 0), path(A, "tcp", 1), path(A, "ucx", 0), path(B, "tcp", 0)
LATER = path(on_one_host("later"), "tcp", 0)
