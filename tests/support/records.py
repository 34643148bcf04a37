"""Source records for tests: real manifests, real digests, no source behind them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

from mx.core.digest import document_digest
from mx.core.layout import TensorSpec, plan_layout
from mx.core.manifest import encode
from mx.core.ownership import Receipt
from mx.core.registry import RegisteredSource, Registry
from mx.core.topology import Place
from mx.core.types import (
    AddressTable,
    Intent,
    Manifest,
    ManifestRef,
    ModelKey,
    PackagedFile,
    Packaging,
    Region,
    Registration,
    SourceRecord,
    SourceRole,
    SourceState,
    TableRow,
)
from mx.namekey import NameKey
from mx.wire import client as client_module
from mx.wire.client import CoordinatorClient
from mx.wire.rows import encode_rows


@cache
def _manifest(weights: str, files: str, nbytes: int) -> Manifest:
    fill = "x" * 1000
    names = [
        f"layers.{number % 4}.{number:07}.{fill}"[: 18 + nbytes // 4]
        for number in range(max(4, nbytes // 1000))
    ]
    planned = plan_layout([TensorSpec(name, "F32", (4,)) for name in names])
    file = PackagedFile(f"{files}.safetensors", None, tuple(names))
    roots = {name: document_digest(f"{weights} {name}".encode()) for name in names}
    return encode(planned, Packaging((file,)) if files else Packaging(), roots)


def make_documents(weights: str, *, files: str = "packaging", nbytes: int = 64) -> list[bytes]:
    """Return the documents of a manifest of four layers, in order: identity, layout, and packaging
    if there are `files`. `nbytes` is about the size of the first two."""
    made = _manifest(weights, files, nbytes)
    return [made.documents[digest] for digest, _ in made.ref.documents]


def make_ref(documents: list[bytes]) -> ManifestRef:
    identity, layout, packaging = [*documents, b""][:3]
    return ManifestRef(
        document_digest(identity),
        document_digest(layout),
        document_digest(packaging) if packaging else b"",
        (len(identity), len(layout), len(packaging)),
    )


def by_digest(documents: list[bytes]) -> dict[bytes, bytes]:
    return {document_digest(document): document for document in documents}


def make_record(
    documents: list[bytes],
    *,
    name: str = "llama",
    revision: str = "main",
    variant: str = "checkpoint",
    source_id: str = "",
    generation: int = 1,
    held: tuple[tuple[int, int], ...] = ((0, 4),),
    rows: tuple[TableRow, ...] = (),
    role: SourceRole = SourceRole.ORIGIN,
    state: SourceState = SourceState.SERVING,
    endpoint: str = "127.0.0.1:7700",
) -> SourceRecord:
    """Return a contiguous source of four layers in 1 MiB, or with `rows` a scattered one in
    16 TiB, whose document of rows is `encode_rows(rows)`."""
    ref = make_ref(documents)
    digest = document_digest(encode_rows(rows)) if rows else b""
    region = (
        Region(0, "cpu", 0x7F0000000000, 1 << 44)
        if rows
        else Region(0, "cpu", 0x7F0000000000, 1 << 20, (0, 4))
    )
    return SourceRecord(
        source_id=source_id or str(uuid.uuid4()),
        model=ModelKey(name, revision, variant),
        ref=ref,
        endpoint=endpoint,
        place=Place(boot_id="b", hostname="h", uid=1, pid=2, addresses=("127.0.0.1",)),
        generation=generation,
        table=AddressTable(
            ref.layout, (region,), (), held, row_count=len(rows), rows_digest=digest
        ),
        transports=("shm", "tcp"),
        role=role,
        state=state,
    )


def scattered_rows(count: int) -> tuple[TableRow, ...]:
    """Return rows as a live engine has them: one a tensor, a few a layer, all over a region."""
    return tuple(
        TableRow(i // 8, (i % 8) << 24, (1 << 20) + i, 0, (i * 7919 % count) << 24)
        for i in range(count)
    )


def registration(record: SourceRecord, secret: bytes, **intent: Any) -> Registration:
    """Return what a source asks for; `intent` has the fields of `Intent`."""
    return Registration(record, secret, Intent(**intent))


def register_source(
    registry: Registry,
    now: float,
    record: SourceRecord,
    secret: bytes,
    *,
    receipt: Receipt | None = None,
    address: str = "",
    **intent: Any,
) -> RegisteredSource:
    """Register a source with the machine. `receipt` is what the coordinator has read."""
    asked = registration(record, secret, **intent)
    return registry.register(now, asked, receipt=receipt, address=address)


async def register_at(
    client: CoordinatorClient,
    record: SourceRecord,
    documents: Mapping[bytes, bytes],
    *,
    source_secret: bytes,
    name_key: NameKey | None = None,
    **intent: Any,
) -> client_module.RegisterAnswer:
    """Register a source at a coordinator."""
    asked = registration(record, source_secret, **intent)
    return await client.register(asked, documents, name_key=name_key)
