"""The conformance rule about encryption."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mx.errors import MxError
from mx.testing.bench import Bench, require
from mx.testing.certificates import PRINCIPAL, certificates
from mx.testing.harness import PEER
from mx.testing.rules_paths import network_path
from mx.transport import Authenticating, TlsFiles
from mx.units import KIB, MIB

#: An endpoint that no certificate of the suite names.
ELSEWHERE = "elsewhere.test:7601"
#: Pieces of the memory that are so long do not occur on the wire by accident.
_PIECE_BYTES = 32


def encrypts(bench: Bench) -> None:
    """With TLS no byte of the memory goes over the network in the clear, a reader without the
    right certificate gets none, and a source without it, or whose certificate names other hosts
    than that of its endpoint, is not read from. A grant that was bound to a principal is of use to
    that one alone. A path whose data TLS can't cover is `plain`, and so `trusting`."""
    path = network_path(bench)
    if path is None:  # as `reach` says: nothing leaves the host
        return
    if path.plain:
        require(path.trusting, "a path is `plain`, and not `trusting`: nothing asks for trust")
        return
    with tempfile.TemporaryDirectory(prefix="mx-suite-") as folder:
        ours, theirs = certificates(Path(folder))
        _look_at_the_wire(bench, ours)
        # It trusts our authority: only the other side can find that it is a stranger's.
        shown = TlsFiles(theirs.certificate, theirs.key, ours.authority)
        strange = "a certificate of another authority"
        for reader, what in ((None, "no certificate"), (shown, strange)):
            require(not _reads(bench, ours, reader), f"a reader with {what} got the bytes")
        require(not _reads(bench, shown, ours), f"a source with {strange} was read from")
        elsewhere = "a certificate that does not name the host of its endpoint"
        require(
            not _reads(bench, ours, ours, peer=ELSEWHERE),
            f"a source with {elsewhere} was read from",
        )
        if isinstance(bench.source(MIB, tls=ours).exposure, Authenticating):
            require(_reads(bench, ours, ours, principal=PRINCIPAL), "its own grant is refused")
            other = "of another principal"
            require(
                not _reads(bench, ours, ours, principal=f"else.{PRINCIPAL}"),
                f"a reader with the ticket {other} got the bytes",
            )
        if bench.harness.tls is None:
            require(not _reads(bench, None, ours), "a source without TLS was read from with TLS")


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


def _reads(
    bench: Bench,
    of_source: TlsFiles | None,
    of_reader: TlsFiles | None,
    *,
    peer: str = PEER,
    principal: str = "",
) -> bool:
    """Return True if a reader with these files gets the bytes of a source with those, on a grant
    that is bound to a principal, if one is given."""
    source = bench.source(MIB, tls=of_source)
    grant_id, ticket = source.grant()
    if principal and isinstance(source.exposure, Authenticating):
        source.exposure.bind(grant_id, principal)
    view = bench.destination(MIB)
    try:
        session = bench.open_ticket(grant_id, ticket, source.sizes, tls=of_reader, peer=peer)
        bench.finish(bench.read(session, 0, 0, view))
    except MxError:
        pass
    return bench.peek(view) == source.memories[0].expected
