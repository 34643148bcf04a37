"""Source records for tests: real documents, real digests, no source behind them."""

from __future__ import annotations

import uuid

from mx.core.digest import document_digest
from mx.core.topology import Place
from mx.core.types import (
    AddressTable,
    ManifestRef,
    ModelKey,
    Region,
    SourceRecord,
    SourceRole,
    SourceState,
    TableRow,
)
from mx.units import MIB


def make_documents(
    weights: str, *, layout: str = "layout", files: str = "packaging", nbytes: int = 64
) -> list[bytes]:
    """Return the documents of a manifest, in order: identity, layout, and packaging if there are
    `files`."""
    texts = [f"identity {weights}", layout, *([files] if files else [])]
    return [text.encode().ljust(nbytes, b".") for text in texts]


def make_ref(documents: list[bytes], *, chunk_nbytes: int = MIB) -> ManifestRef:
    identity, layout, packaging = [*documents, b""][:3]
    return ManifestRef(
        document_digest(identity),
        document_digest(layout),
        chunk_nbytes,
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
    chunk_nbytes: int = MIB,
) -> SourceRecord:
    """Return a contiguous source of four layers in 1 MiB, or with `rows` a scattered one in
    16 TiB."""
    ref = make_ref(documents, chunk_nbytes=chunk_nbytes)
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
        table=AddressTable(ref.layout, (region,), rows, held),
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
