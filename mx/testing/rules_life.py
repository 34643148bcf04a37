"""Conformance rules about a transport's life: what it serves, ends, and leaves behind."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from dataclasses import replace

from mx.core.topology import MAX_FACT_BYTES, Fact, Gpu, GpuPeer, Place
from mx.errors import ClosedError, MxError, NotAllowedError, SourceError
from mx.testing.bench import Bench, RuleBroken, SinkError, require
from mx.testing.holdings import HeldResources
from mx.testing.memory import Kind
from mx.transport import (
    BLOCK_DIGEST_BYTES,
    DeviceView,
    Exposure,
    Growing,
    Piece,
    Read,
    Session,
    Unavailable,
    Viable,
    Vouching,
    host_view,
)
from mx.units import MIB

#: Reads that are each begun by the one before.
DEEPER_THAN_A_STACK = 400
#: For so long what `join` did not wait for is watched.
LIE_S = 0.3

GPUS = (
    Gpu("GPU-1", pcie_generation=5, pcie_width=16, nvlinks=18, nvlink_gb_per_s=25.0),
    Gpu("GPU-2", pcie_generation=4, pcie_width=8, nvlinks=12, nvlink_gb_per_s=25.0),
)
PEERS = (GpuPeer("GPU-1", 18, True, True, "nvlink"), GpuPeer("GPU-2", 12, True, False, "nvlink"))
#: With and without NVLink between them, and as one side alone may report it.
GPU_SETS = (
    GPUS,
    (replace(GPUS[0], peers=PEERS[1:]), replace(GPUS[1], peers=PEERS[:1])),
    (replace(GPUS[0], peers=PEERS[1:]), GPUS[1]),
)


def probes(bench: Bench) -> None:
    """`probe` answers, again and again, and never raises."""
    for _ in range(3):
        try:
            answer = bench.transport.probe()
        except (MxError, OSError, ImportError, RuntimeError, ValueError, TypeError) as error:
            require(False, f"probe raised {error!r}")
        else:
            require(isinstance(answer, Viable | Unavailable), f"probe returned {answer!r}")


def reaches_both_ways(bench: Bench) -> None:
    """`reach` gives the same path in both directions, for any two places."""
    places = [
        Place(boot, boot, uid, pid, 7, pid_ns, net_ns, 1, 1, device, addresses, gpus=gpus)
        for boot, uid, pid, pid_ns, net_ns, device, addresses, gpus in itertools.product(
            ("boot-1", "boot-2", ""),
            (0, 1000),
            (100, 200),
            (1, 2),
            (1, 2),
            ("cpu", "cuda:GPU-1", "cuda:GPU-2"),
            (("127.0.0.1",), ("10.0.0.1", "::1")),
            GPU_SETS,
        )
    ]
    # Many that differ in everything, and some that differ in their devices and GPUs alone.
    near = [p for p in places if (p.boot_id, p.uid, p.pid_namespace) == ("boot-1", 0, 1)]
    sample = bench.random.sample(places, 60) + bench.random.sample(near, 60)
    # What a transport says of itself comes from other machines: it may be anything.
    name, nbytes = bench.transport.name, (0, 1, 16, MAX_FACT_BYTES)
    said = [Fact(name, bench.random.randbytes(n).hex()) for n in nbytes]
    sample += [replace(place, facts=(bench.random.choice(said),)) for place in sample[::4]]
    for here, there in itertools.combinations_with_replacement(sample, 2):
        path, back = bench.transport.reach(here, there), bench.transport.reach(there, here)
        if path != back:  # texts of places take longer than all else here
            raise RuleBroken(f"{here} -> {there}: {path}, but back: {back}")
        name = path.transport if path else bench.transport.name
        require(name == bench.transport.name, f"the path is called {name}")


def close_cancels(bench: Bench) -> None:
    """`close` fails what runs and what is queued with ClosedError; afterwards nothing starts."""
    source = bench.source(bench.harness.big_nbytes)
    session = bench.open(source, streams=1)
    running = bench.held_read(session, bench.destination(source.sizes[0]), "running")
    queued = [
        bench.read(session, 0, 0, bench.destination(MIB), tag=f"queued {n}") for n in range(5)
    ]
    session.close()
    running.release()
    bench.failure(running, ClosedError, "running")
    for n, sink in enumerate(queued):
        bench.failure(sink, ClosedError, f"queued {n}")


def hands_off(bench: Bench) -> None:
    """Once a read has failed, its destination is never written to again."""
    source = bench.source(bench.harness.big_nbytes)
    session = bench.open(source)
    view = bench.destination(source.sizes[0])
    blank = bytes(len(view))

    # At the moment the read fails its destination is wiped, as a new owner would.
    def wipe() -> None:
        bench.poke(view, blank)

    sink = bench.sink(hold=True, on_end=wipe)
    bench.read(session, 0, 0, view, sink=sink)
    bench.wait(sink.held, "a read's first bytes did not land")
    session.close()
    sink.release()
    bench.finish(sink)
    require(session.join(bench.harness.deadline_s), "join did not return")
    require(bench.peek(view) == blank, "memory was written to after its read had failed")


def closed_is_closed(bench: Bench) -> None:
    """After `close`, reads are refused; closing and joining again is harmless on both sides."""
    source = bench.source(4096)
    session = bench.open(source)
    require(not session.join(0.05), "join says that a running session has ended")
    for _ in range(2):
        session.close()
        require(session.join(bench.harness.deadline_s), "join did not return")
    sink = bench.sink()
    try:
        session.read([Read("late", [Piece(0, 0, bench.destination(1))], sink)])
    except ClosedError:
        require(not sink.ended.is_set(), "a refused read's sink was called")
    else:
        require(False, "a closed session takes reads")
    for _ in range(2):
        source.exposure.close()
        require(source.exposure.join(bench.harness.deadline_s), "join did not return")


def refills(bench: Bench) -> None:
    """A sink may call `read` of its session, from `landed`, `done` and `failed`, many times."""
    source = bench.source(MIB)
    session = bench.open(source, streams=1)
    later = [bench.sink(), bench.sink()]
    trouble: list[BaseException] = []
    views = [bench.destination(4096) for _ in range(3)]

    def more(number: int) -> None:
        try:
            session.read([Read("more", [Piece(0, 0, views[number])], later[number])])
        except (MxError, RuntimeError) as error:
            trouble.append(error)
            later[number].ended.set()

    first = bench.sink(on_landed=lambda _: more(0), on_end=lambda: more(1))
    bench.read(session, 0, 0, views[2], sink=first)
    bench.succeed(first, *later)
    require(not trouble, f"a sink could not call read: {trouble}")

    failing, after = bench.sink(on_end=lambda: more(0)), bench.sink()
    later[0] = after
    bench.read(session, 0, MIB, views[2], sink=failing)
    bench.finish(failing)
    bench.succeed(after)

    # Each from the `done` of the one before, more often than calls can be nested.
    chain = [bench.sink() for _ in range(DEEPER_THAN_A_STACK)]
    for sink, following in itertools.pairwise(chain):
        sink.on_end = functools.partial(
            bench.read, session, 0, 0, views[0], tag="chained", sink=following
        )
    bench.read(session, 0, 0, views[0], sink=chain[0])
    bench.succeed(*chain)


def grows(bench: Bench) -> None:
    """A session that grows opens more connections beside one that is held up, closes none, and ends
    those that are being opened, too."""
    source = bench.source(bench.harness.big_nbytes)
    session = bench.open(source, streams=1)
    if not isinstance(session, Growing):
        return
    depth = session.depth
    held = bench.held_read(session, bench.destination(source.sizes[0]))
    session.grow(1)
    require(session.open_streams == 1, f"{session.open_streams} connections are open, not 1")
    session.grow(3)
    # Only another connection can bring these.
    bench.succeed(*(bench.read(session, 0, 0, bench.destination(MIB)) for _ in range(6)))
    bench.eventually(
        lambda: session.open_streams == 3,
        lambda: f"{session.open_streams} connections are open, not 3",
    )
    require(session.depth > depth, "depth has not risen")
    session.grow(2)
    require(session.open_streams == 3, "a connection was closed")
    held.release()
    bench.succeed(held)
    for grown in (session, bench.open(source, streams=1)):
        assert isinstance(grown, Growing)
        grown.grow(8)
        grown.close()
        grown.grow(9)
        require(grown.join(bench.harness.deadline_s), "join did not return")


def outlives_raising_sinks(bench: Bench) -> None:
    """A sink that raises costs what its connection has begun at most: every read ends, once."""
    raised_there: list[BaseException | None] = []
    hook = threading.excepthook
    threading.excepthook = lambda thread: raised_there.append(thread.exc_value)
    try:
        for method in ("landed", "done", "failed"):
            raised_there.clear()
            source = bench.source(2 * MIB)
            session = bench.open(source)
            bad, good = bench.sink(raises=method), [bench.sink() for _ in range(6)]
            start = 2 * MIB if method == "failed" else 0
            reads = [Read("bad", [Piece(0, start, bench.destination(MIB))], bad)]
            reads += [Read("good", [Piece(0, 0, bench.destination(65_536))], sink) for sink in good]
            session.read(reads)
            bench.finish(bad, *good)
            if method == "failed":
                bench.succeed(*good)
            session.close()
            require(session.join(bench.harness.deadline_s), f"{method} raised: join hangs")
            ends = [sink.ends for sink in (bad, *good)]
            require(set(ends) == {1}, f"{method} raised: reads were completed {ends} times")
            # What was done stays done; the others fail.
            require(bool(bad.dones) or method != "done", "a read that was done has failed")
            require(
                bool(bad.failures) or method != "landed", "a read was done whose sink had raised"
            )
            raised = method != "failed" or bool(bad.failures)
            reported = any(isinstance(error, SinkError) for error in raised_there)
            require(
                reported or not raised, f"what {method} raised did not reach threading.excepthook"
            )
            again = bench.open(source)
            bench.succeed(bench.read(again, 0, 0, bench.destination(MIB)))
    finally:
        threading.excepthook = hook


def session_joins_truly(bench: Bench) -> None:
    """Once its `join` has returned True, nothing of a session has yet to go: no thread,
    descriptor or mapping."""
    # The source is in another process: what goes here is the session's.
    remote, session = bench.remote(bench.harness.big_nbytes)
    bench.succeed(bench.read(session, 0, 0, bench.destination(MIB)))
    session.close()
    _ends_truly(bench, session)
    del remote


def exposure_joins_truly(bench: Bench) -> None:
    """Once its `join` has returned True, nothing of an exposure has yet to go: no thread,
    descriptor or mapping. The reader in this process is held up in its sink, so that it does not
    end meanwhile; a session whose sink does not hold it up leaves this rule out."""
    nbytes = bench.harness.big_nbytes
    source = bench.source(nbytes)
    view = bench.destination(nbytes)
    held = bench.held_read(bench.open(source, streams=1), view)
    # Some sessions go on with what is under way; where that is cut off, something of theirs goes.
    before = b""
    while (landed := bench.peek(view)) != before:
        before = landed
        time.sleep(LIE_S)
    source.exposure.close()
    _ends_truly(bench, source.exposure)
    held.release()


def _ends_truly(bench: Bench, ending: Session | Exposure) -> None:
    if not ending.join(bench.harness.deadline_s):
        return  # other rules say that it must
    then = HeldResources.after_join()
    time.sleep(LIE_S)
    gone = then.beyond(HeldResources.now())
    require(not gone, "join did not wait for: " + "; ".join(gone))


def counts_readers(bench: Bench) -> None:
    """`active_readers` is the number of grants with a read running."""
    source = bench.source(bench.harness.big_nbytes)
    sessions = [bench.open(source) for _ in range(2)]
    active = source.exposure.active_readers
    require(active() == 0, f"{active()} readers are active before any has read")
    sinks = []
    for number, session in enumerate(sessions):
        sinks.append(bench.held_read(session, bench.destination(source.sizes[0])))
        bench.eventually(
            lambda number=number: active() == number + 1,  # type: ignore[misc]
            lambda number=number: f"{active()} active, should be {number + 1}",  # type: ignore[misc]
        )
    for sink in sinks:
        sink.release()
    bench.finish(*sinks)
    bench.eventually(lambda: active() == 0, lambda: f"{active()} readers stay active")


def attaches(bench: Bench) -> None:
    """Where paths can be attached to: the bytes, private, outliving the session, or refused."""
    path = bench.transport.reach(bench.harness.here, bench.harness.there)
    if path is None or not path.attach:
        return
    if bench.harness.kind.on_gpu:
        _attaches_gpu(bench)
    else:
        _attaches_host(bench)


def _attaches_gpu(bench: Bench) -> None:
    """Shared, not private: so the source's memory stays until the last view has gone."""
    source = bench.source(3 * MIB, MIB)
    expected = source.memories[1].expected
    session = bench.open(source)
    views = [session.attach(1), session.attach(1)]
    for view in views:
        require(isinstance(view, DeviceView), f"a GPU's memory was attached as {type(view)}")
        require(len(view) == len(expected), f"{len(view)} bytes were attached")
        require(bench.peek(view) == expected, "the attached bytes are wrong")
    views.pop()
    session.close()
    require(session.join(bench.harness.deadline_s), "join waits for attached views")
    source.exposure.close()
    require(not source.exposure.join(0.1), "the source ends while its memory is attached")
    part = views.pop()[4096:8192]
    del view
    require(bench.peek(part) == expected[4096:8192], "an attached view ended with its session")
    # Longer than it may wait for a reader that does not answer.
    longer_s = 3 * bench.harness.stall_timeout_s
    require(not source.exposure.join(longer_s), "the source ends while a part of it is attached")
    del part
    ended = source.exposure.join(bench.harness.deadline_s)
    require(ended, "the source does not notice that the last attached view has gone")


def _attaches_host(bench: Bench) -> None:
    source = bench.source(MIB, kind=Kind.SEALED)
    expected = source.memories[0].expected
    session = bench.open(source)
    views = [host_view(session.attach(0)), host_view(session.attach(0))]
    require(bytes(views[0]) == expected, "the attached bytes are wrong")
    require(not views[0].readonly, "an attached view can't be written to")
    views[0][:4096] = bytes(4096)
    require(bytes(views[1]) == expected, "what one writes, another attached view sees")
    require(source.memories[0].unchanged(), "what is written to a view reaches the source")
    session.close()
    require(session.join(bench.harness.deadline_s), "join waits for attached views")
    require(bytes(views[1]) == expected, "an attached view ended with its session")
    for kind in (Kind.UNSEALED, Kind.ANONYMOUS):
        session = bench.open(bench.source(4096, kind=kind))
        try:
            session.attach(0)
        except (NotAllowedError, SourceError):
            continue
        require(False, f"{kind.value} memory was attached")


def leaves_nothing(bench: Bench) -> None:
    """After `join` no thread, descriptor or mapping is left, and no view of the memory."""
    before = HeldResources.now()
    for ending in ("idle", "running", "revoked"):
        source = bench.source(
            bench.harness.big_nbytes, content=b"weights", block_digests=bytes(BLOCK_DIGEST_BYTES)
        )
        grant_id, ticket = source.grant()
        session = bench.open_ticket(
            grant_id, ticket, source.sizes, tls=bench.harness.tls, content=b"weights"
        )
        if isinstance(session, Vouching):
            session.vouched_digests()
        bench.succeed(bench.read(session, 0, 0, bench.destination(MIB)))
        if ending != "idle":
            held = bench.held_read(session, bench.destination(source.sizes[0]))
            if ending == "revoked":
                source.exposure.revoke(grant_id)
            held.release()
        session.close()
        require(session.join(bench.harness.deadline_s), "the session's join did not return")
        source.exposure.close()
        require(source.exposure.join(bench.harness.deadline_s), "the exposure's did not")
        for memory in source.memories:
            try:
                memory.close()
            except BufferError:
                require(False, "the exposure holds on to its regions' views")
    # The kernel takes a moment to be rid of a thread that has been joined.
    bench.eventually(
        lambda: not HeldResources.now().beyond(before),
        lambda: "left behind: " + "; ".join(HeldResources.now().beyond(before)),
    )
