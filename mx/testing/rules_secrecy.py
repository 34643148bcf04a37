"""The conformance rule about encryption."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mx.errors import MxError
from mx.testing.bench import Bench, require
from mx.testing.certificates import certificates
from mx.testing.rules_paths import network_path
from mx.transport import TlsFiles
from mx.units import KIB, MIB

#: Pieces of the memory that are so long do not occur on the wire by accident.
_PIECE_BYTES = 32


def encrypts(bench: Bench) -> None:
    """With TLS no byte of the memory goes over the network in the clear, and a reader without the
    right certificate gets none. A path whose data TLS can't cover is `plain`, and so `trusting`."""
    path = network_path(bench)
    if path is None:  # as `reach` says: nothing leaves the host
        return
    if path.plain:
        require(path.trusting, "a path is `plain`, and not `trusting`: nothing asks for trust")
        return
    with tempfile.TemporaryDirectory(prefix="mx-suite-") as folder:
        ours, theirs = certificates(Path(folder))
        _look_at_the_wire(bench, ours)
        for stranger in (None, theirs):
            _try_to_read(bench, ours, stranger)


def _look_at_the_wire(bench: Bench, tls: TlsFiles) -> None:
    source = bench.source(MIB, tls=tls)
    grant_id, ticket = source.grant()
    view = bench.destination(MIB)
    with bench.harness.tapped(ticket) as (tapped, wire):
        session = bench.open_ticket(grant_id, tapped, source.sizes, tls=tls)
        bench.succeed(bench.read(session, 0, 0, view))
        seen = bytes(wire)
    expected = source.memories[0].expected
    require(bench.peek(view) == expected, "wrong bytes came over TLS")
    require(len(seen) >= MIB, "the data goes by another way than `Harness.tapped` looks at")
    pieces = (expected[at : at + _PIECE_BYTES] for at in range(0, MIB - _PIECE_BYTES, 64 * KIB))
    require(
        not any(piece in seen for piece in pieces),
        "with TLS on both sides, the memory's bytes are on the wire in the clear",
    )


def _try_to_read(bench: Bench, tls: TlsFiles, stranger: TlsFiles | None) -> None:
    source = bench.source(MIB, tls=tls)
    grant_id, ticket = source.grant()
    view = bench.destination(MIB)
    try:
        session = bench.open_ticket(grant_id, ticket, source.sizes, tls=stranger)
        bench.finish(bench.read(session, 0, 0, view))
    except MxError:
        pass
    who = "no certificate" if stranger is None else "a certificate of another authority"
    require(bench.peek(view) != source.memories[0].expected, f"a reader with {who} got the bytes")
