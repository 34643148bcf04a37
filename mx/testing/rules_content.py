"""Conformance rules about what is believed unverified: attached memory, and digests vouched for."""

from __future__ import annotations

from mx.testing.bench import Bench, BenchSource, require
from mx.testing.harness import GENERATION
from mx.transport import BLOCK_DIGEST_BYTES, MAX_CONTENT_BYTES, Session, Vouching
from mx.units import MIB

WANTED = b"the weights"
#: As long as a label may be, with an end that padding could hide.
LONGEST = WANTED.ljust(MAX_CONTENT_BYTES, b"\0")


def refuses_other_weights(bench: Bench) -> None:
    """Where memory is believed, `open` refuses a source that does not state the grant's label for
    the grant's generation. A grant without a label is for any."""
    source = bench.source(MIB, content=WANTED)
    session = bench.open(source, content=WANTED)
    view = bench.destination(MIB)
    bench.succeed(bench.read(session, 0, 0, view))
    require(bench.peek(view) == source.memories[0].expected, "wrong bytes came")
    path = bench.transport.reach(bench.harness.here, bench.harness.there)
    if not (path is not None and path.attach) and not isinstance(session, Vouching):
        return
    for stated, wanted in (
        (b"other weights", WANTED),
        (WANTED[:-1], WANTED),
        (WANTED + b"\0", WANTED),
        (WANTED, WANTED + b"\0"),
        (LONGEST, WANTED),
        (LONGEST, LONGEST[:-1]),
        (b"", WANTED),
    ):
        other = bench.source(4096, content=stated)
        _refused(bench, other, wanted, GENERATION, f"{stated!r} was taken for {wanted!r}")
        bench.succeed(bench.read(bench.open(other), 0, 0, bench.destination(4096)))
    _refused(bench, source, WANTED, GENERATION + 1, "a label was taken for a later generation's")
    source.exposure.set_generation(GENERATION)
    bench.succeed(bench.read(bench.open(source, content=WANTED), 0, 0, bench.destination(64)))
    source.exposure.set_generation(GENERATION + 1)
    for generation in (GENERATION, GENERATION + 1):
        _refused(bench, source, WANTED, generation, "memory that has changed kept its label")
    source.exposure.set_generation(GENERATION)
    _refused(bench, source, WANTED, GENERATION, "memory that has changed got its label back")


def _refused(
    bench: Bench, source: BenchSource, content: bytes, generation: int, message: str
) -> None:
    grant_id, ticket = source.grant()
    what = bench.refuses(grant_id, ticket, source.sizes, generation=generation, content=content)
    require(not what, f"{message}: {what}")


def vouches(bench: Bench) -> None:
    """Where a session is `Vouching`, its digests are those that the source states for the grant's
    label, or None. A view of them is read-only, and stays good after the end of both sides."""
    digests = bench.random.randbytes(1000 * BLOCK_DIGEST_BYTES)
    source = bench.source(4096, content=WANTED, block_digests=digests)
    session = bench.open(source, content=WANTED)
    if not isinstance(session, Vouching):
        return
    view = session.vouched_digests()
    stated = view is not None and view.tobytes() == digests
    require(stated, "the digests are not those that the source states")
    require(_vouched(bench.open(source)) is None, "digests are vouched for, whatever they are of")
    silent = bench.source(4096, content=WANTED)
    found = _vouched(bench.open(silent, content=WANTED))
    require(found is None, "digests are vouched for, and the source states none")
    session.close()
    require(session.join(bench.harness.deadline_s), "join waits for a view of the digests")
    require(session.vouched_digests() is None, "a closed session vouches for digests")
    source.exposure.close()
    require(source.exposure.join(bench.harness.deadline_s), "the exposure's join did not return")
    assert view is not None
    try:
        require(view.tobytes() == digests, "the digests have changed at their session's end")
        require(view.readonly, "the digests can be written to")
    except ValueError:
        require(False, "a view of the digests ended with its session")


def _vouched(session: Session) -> memoryview | None:
    assert isinstance(session, Vouching)
    return session.vouched_digests()
