"""Conformance rules about requirements on paths: a rail, trust, a rate."""

from __future__ import annotations

import contextlib
import threading

from mx.core.topology import Place
from mx.errors import NotAllowedError, SourceError
from mx.testing.bench import GUARD, Bench, require
from mx.transport import Compressing, Medium, Path, Rail, Sending
from mx.units import KIB, MIB

#: Two hosts with nothing in common but a network.
NEAR = Place(boot_id="boot-1", hostname="near", uid=1000, pid=1, addresses=("10.0.0.1",))
FAR = Place(boot_id="boot-2", hostname="far", uid=1000, pid=1, addresses=("10.0.0.2",))
#: An address that no machine of this network has (RFC 5737).
ELSEWHERE = "192.0.2.1"
#: All of 127/8 is this machine's.
RAIL = Rail("lo", "127.0.0.2", "lo", "127.0.0.3", 1.0, False)
NO_RAIL = Rail("lo", "127.0.0.2", "lo", "127.0.0.4", 1.0, False)


def network_path(bench: Bench) -> Path | None:
    """Return the transport's path between two hosts over a network; None: it has none."""
    path = bench.transport.reach(NEAR, FAR)
    return path if path is not None and path.medium is Medium.NETWORK else None


def uses_rails(bench: Bench) -> None:
    """Over the network, data goes between a rail's two addresses, or the session is refused."""
    if network_path(bench) is None:
        return
    source = bench.source(MIB, hosts=("127.0.0.1", RAIL.remote_address))
    session = bench.open(source, rail=RAIL)
    view = bench.destination(MIB)
    bench.succeed(bench.read(session, 0, 0, view))
    require(bench.peek(view) == source.memories[0].expected, "wrong bytes came over a rail")
    require(bench.harness.uses(RAIL, session), "data goes by another way than the rail")
    try:
        bench.open(source, rail=NO_RAIL)
    except SourceError as error:
        require(bool(error.peer), f"{error!r} does not name the peer")
    else:
        require(False, "a rail to where the source does not listen was replaced by another way")


def asks_for_trust(bench: Bench) -> None:
    """Where paths are `trusting`, neither side goes beyond loopback without `trusted_fabric`."""
    path = network_path(bench)
    if path is None or not path.trusting:
        return
    try:
        bench.source(MIB, hosts=("127.0.0.1", ELSEWHERE))
    except NotAllowedError:
        pass
    else:
        require(False, "memory is exposed beyond loopback without `trusted_fabric`")
    host = bench.harness.network_host()
    if not host:
        return
    source = bench.source(MIB, hosts=(host,), trusted_fabric=True)
    try:
        bench.open(source)
    except NotAllowedError:
        pass
    else:
        require(False, "a source beyond loopback is read from without `trusted_fabric`")
    view = bench.destination(MIB)
    bench.succeed(bench.read(bench.open(source, trusted_fabric=True), 0, 0, view))
    require(bench.peek(view) == source.memories[0].expected, "wrong bytes came")


class Allowance:
    """A limiter that lets `allowed` bytes through at once, and what comes after them never."""

    SLICE = 256 * KIB

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.taken: list[int] = []
        self.readers: set[str] = set()
        self.exhausted = threading.Event()
        self._lock = threading.Lock()

    def slice_nbytes(self, grant_id: str) -> int:
        self.readers.add(grant_id)
        return self.SLICE

    def delay_s(self, nbytes: int) -> float:
        with self._lock:
            self.taken.append(nbytes)
            if sum(self.taken) <= self.allowed:
                return 0.0
        self.exhausted.set()
        return 1e6


def keeps_to_limits(bench: Bench) -> None:
    """A `Sending` exposure sends what its limiter has let through, and counts it by grant. One that
    is `Compressing` counts what it sends, which of bytes that can't be compressed is all of them,
    and beside it what its reader gets."""
    compresses = isinstance(bench.source(MIB).exposure, Compressing)
    # The suite's memory repeats itself after more than a MiB; so much of it can't be compressed.
    nbytes, room = (MIB, 570 * KIB) if compresses else (3 * MIB + 77, MIB)
    spare = nbytes // 16 if compresses else 0  # what is added to bytes that can't be compressed
    limiter = Allowance(nbytes + room)
    source = bench.source(nbytes, limiter=limiter)
    exposure = source.exposure
    if not isinstance(exposure, Sending):
        return
    grant_id, ticket = source.grant("mine")
    session = bench.open_ticket(grant_id, ticket, source.sizes, tls=bench.harness.tls)
    bench.succeed(bench.read(session, 0, 0, bench.destination(nbytes)))
    taken = sum(limiter.taken)
    require(
        nbytes <= taken <= nbytes + spare,
        f"{nbytes} bytes were sent, {taken} taken from the limiter",
    )
    require(max(limiter.taken) <= limiter.SLICE, "more than a slice was taken at once")
    require(limiter.readers == {"mine"}, f"slices were taken for {limiter.readers}")

    def sent() -> tuple[int, int, int]:
        return exposure.sent_bytes(), exposure.sent_to("mine"), exposure.sent_to("another")

    # The last bytes are counted a moment after the reader has them.
    bench.eventually(
        lambda: sent() == (taken, taken, 0),
        lambda: f"{taken} bytes were sent, and {sent()} counted",
    )
    if isinstance(exposure, Compressing):
        _delivers(bench, exposure, nbytes)

    view = bench.destination(nbytes)
    bench.poke(view, bytes([GUARD]) * nbytes)
    running = bench.read(session, 0, 0, view, tag="running")
    bench.wait(limiter.exhausted, "the limiter is not called")
    exposure.revoke("mine")
    bench.finish(running)
    counted = exposure.sent_to("mine")
    if isinstance(exposure, Compressing):
        counted += exposure.delivered_to("mine")
    require(counted == 0, "bytes are counted for a grant that was revoked")
    # A read of several streams is not sent in order: what counts is how much of it was.
    sent_nbytes = nbytes - bench.peek(view).count(GUARD)
    left = limiter.allowed - taken
    require(sent_nbytes <= left, "more was sent than the limiter let through")
    exposure.close()
    require(exposure.join(bench.harness.deadline_s), "join waits for a limiter's pause")
    if compresses:
        _sends_what_it_counts(bench)


def _delivers(bench: Bench, exposure: Compressing, nbytes: int) -> None:
    """Check how many bytes are counted as delivered on the grant "mine"."""

    def delivered() -> tuple[int, int]:
        return exposure.delivered_to("mine"), exposure.delivered_to("another")

    bench.eventually(
        lambda: delivered() == (nbytes, 0),
        lambda: f"a reader got {nbytes} bytes, and {delivered()} were counted as delivered",
    )


def _sends_what_it_counts(bench: Bench) -> None:
    """Read bytes that are all alike: fewer are sent, and no more than are counted."""
    limiter = Allowance(1 << 40)
    source = bench.source(MIB, limiter=limiter, alike=True)
    exposure = source.exposure
    assert isinstance(exposure, Sending) and isinstance(exposure, Compressing)
    grant_id, ticket = source.grant("mine")
    view, seen = bench.destination(MIB), 0
    with contextlib.ExitStack() as stack:
        if network_path(bench) is not None:
            ticket, wire = stack.enter_context(bench.harness.tapped(ticket))
        session = bench.open_ticket(grant_id, ticket, source.sizes, tls=bench.harness.tls)
        bench.succeed(bench.read(session, 0, 0, view))
        seen = len(wire) if network_path(bench) is not None else 0
    require(bench.peek(view) == source.memories[0].expected, "wrong bytes came")
    _delivers(bench, exposure, MIB)
    taken = sum(limiter.taken)
    bench.eventually(
        lambda: exposure.sent_to("mine") == taken,
        lambda: f"{taken} bytes were taken from the limiter, and {exposure.sent_to('mine')} sent",
    )
    require(taken < MIB // 2, f"of {MIB} bytes that are all alike {taken} are sent")
    # Beside the bytes go requests' answers, and TLS.
    require(seen <= 2 * taken + 64 * KIB, f"{taken} bytes are counted, and {seen} sent")
