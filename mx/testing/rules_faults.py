"""Conformance rules about peers that die, stop, block, send wrong data or revoke grants."""

from __future__ import annotations

from collections.abc import Callable

from mx.errors import PeerTimeoutError, SourceError
from mx.testing.bench import Bench, require
from mx.testing.harness import GENERATION
from mx.testing.memory import pattern
from mx.transport import Span
from mx.units import MIB


def peer_dies(bench: Bench) -> None:
    """A source killed in the middle of a read is an error that names it; so are later reads."""
    remote, session = bench.remote(bench.harness.big_nbytes)
    running = bench.held_read(session, bench.destination(bench.harness.big_nbytes), "running")
    queued = [
        bench.read(session, 0, 0, bench.destination(MIB), tag=f"queued {n}") for n in range(4)
    ]
    remote.kill()
    running.release()
    bench.failure(running, SourceError, "running")
    # Another stream may have served these before the source died.
    bench.finish(*queued)
    for n, sink in enumerate(queued):
        if sink.failures:
            bench.failure(sink, SourceError, f"queued {n}")
    later = bench.read(session, 0, 0, bench.destination(64), tag="later")
    bench.failure(later, SourceError, "later")


def peer_stops(bench: Bench) -> None:
    """A source that is stopped, not dead, runs into the deadline, if it is needed at all."""
    nbytes = bench.harness.big_nbytes
    remote, session = bench.remote(nbytes)
    view = bench.destination(nbytes)
    running = bench.held_read(session, view, "running")
    remote.stop()
    running.release()
    bench.finish(running)
    if running.failures:
        bench.failure(running, PeerTimeoutError, "running")
    session.close()
    require(session.join(bench.harness.deadline_s), "join waits for a stopped source")


def peer_resumes(bench: Bench) -> None:
    """Bytes of a source that paused for less than the deadline are right."""
    nbytes = bench.harness.big_nbytes
    remote, session = bench.remote(nbytes)
    view = bench.destination(nbytes)
    running = bench.held_read(session, view, "running")
    remote.stop()
    running.release()
    remote.resume()
    bench.succeed(running)
    seed = bench.last_seed
    require(bench.peek(view) == pattern(nbytes, seed), "a source that paused sent wrong bytes")


def short_read(bench: Bench) -> None:
    """A source that ends in good order in the middle of a read has not done it."""
    source = bench.source(bench.harness.big_nbytes)
    session = bench.open(source)
    running = bench.held_read(session, bench.destination(source.sizes[0]), "running")
    source.exposure.close()
    running.release()
    bench.failure(running, SourceError, "running")


def fences(bench: Bench) -> None:
    """A read that fails for the peer's sake is out of reach: what is put there then stays."""
    nbytes = bench.harness.big_nbytes
    for ending in ("killed", "revoked", "changed"):
        if ending == "killed":
            remote, session = bench.remote(nbytes)
        else:
            source = bench.source(nbytes)
            grant_id, ticket = source.grant()
            session = bench.open_ticket(grant_id, ticket, source.sizes, tls=bench.harness.tls)
        views = [bench.destination(nbytes), bench.destination(MIB), bench.destination(MIB)]

        # At the moment a read ends its destination is wiped, as a new owner would.
        def wiping(view: Span) -> Callable[[], None]:
            return lambda: bench.poke(view, bytes(len(view)))

        sinks = [bench.sink(hold=not n, on_end=wiping(view)) for n, view in enumerate(views)]
        for n, view in enumerate(views):
            bench.read(session, 0, 0, view, tag=f"chunk {n}", sink=sinks[n])
        bench.wait(sinks[0].held, "a read's first bytes did not land")
        if ending == "killed":
            remote.kill()
        elif ending == "revoked":
            source.exposure.revoke(grant_id)
        else:
            source.exposure.set_generation(GENERATION + 1)
        sinks[0].release()
        bench.finish(*sinks)
        session.close()
        require(session.join(bench.harness.deadline_s), "join did not return")
        wiped = all(bench.peek(view) == bytes(len(view)) for view in views)
        require(wiped, f"{ending}: memory was written to after its read had failed")


def clogged_reader(bench: Bench) -> None:
    """A reader that stops taking bytes holds up neither other readers nor the source's end."""
    source = bench.source(bench.harness.big_nbytes)
    clogged, other = bench.open(source), bench.open(source)
    held = bench.held_read(clogged, bench.destination(source.sizes[0]))
    bench.succeed(*(bench.read(other, 0, n, bench.destination(MIB)) for n in range(6)))
    source.exposure.close()
    require(
        source.exposure.join(bench.harness.deadline_s), "the source can't end: a reader clogs it"
    )
    held.release()
    bench.finish(held)


def revoked(bench: Bench) -> None:
    """A revoked grant's running reads are cut and new ones refused; other grants go on."""
    source = bench.source(bench.harness.big_nbytes)
    grant_id, ticket = source.grant("mine")
    session = bench.open_ticket(grant_id, ticket, source.sizes, tls=bench.harness.tls)
    other = bench.open(source)
    source.exposure.revoke("unknown")
    running = bench.held_read(session, bench.destination(source.sizes[0]), "running")
    source.exposure.revoke("mine")
    running.release()
    bench.failure(running, SourceError, "running")
    later = bench.read(session, 0, 0, bench.destination(64), tag="later")
    bench.failure(later, SourceError, "later")
    require(not (what := bench.refuses(grant_id, ticket, source.sizes)), f"revoked: {what}")
    bench.succeed(bench.read(other, 0, 0, bench.destination(MIB)))


def wrong_tickets(bench: Bench) -> None:
    """A ticket with another secret, of an ended source, or of garbage opens nothing."""
    source = bench.source(4096)
    grant_id, ticket = source.grant()
    noise = bench.random.randbytes
    for name, bad in (
        ("another secret", bench.harness.tamper(ticket)),
        ("nothing", b""),
        ("half a ticket", ticket[: len(ticket) // 2]),
        ("an empty object", b"{}"),
        ("a list", b"[1, 2]"),
        ("deep nesting", b"[" * 100_000),
        *((f"noise {n}", noise(n * 7)) for n in range(1, 20)),
    ):
        what = bench.refuses(grant_id, bad, source.sizes)
        require(not what, f"with {name} for a ticket: {what}")
    session = bench.open_ticket(grant_id, ticket, source.sizes, tls=bench.harness.tls)
    bench.succeed(bench.read(session, 0, 0, bench.destination(4096)))
    source.exposure.close()
    require(source.exposure.join(bench.harness.deadline_s), "the exposure's join did not return")
    what = bench.refuses(grant_id, ticket, source.sizes)
    require(not what, f"with an ended source's ticket: {what}")
