"""The digests that a source of shm states of its blocks: how they arrive, what is refused, and that
nothing of them is left."""

from __future__ import annotations

import array
import gc
import json
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mx.errors import LocalError, PeerLostError, PeerProtocolError, PeerTimeoutError, SourceError
from mx.testing.bench import Bench, BenchSource
from mx.testing.child import GRANT_ID, ChildSource
from mx.testing.harness import PEER, Harness
from mx.testing.holdings import HeldResources
from mx.testing.memory import Kind, Memory
from mx.transport import ExposedRegion, ExposeOptions, Session, Vouching
from mx.units import MIB
from mx_transports.shm import ShmTransport
from mx_transports.shm import exposure as shm
from mx_transports.toolkit import framing, kernel
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.stream import SocketStream

TARGET = "mx_transports.shm:ShmTransport"
WEIGHTS = b"weights"
#: Of a model of 3 GB, and not a whole number of pages.
DIGESTS = random.Random(3).randbytes(3001 * 16)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(Harness(TARGET, stall_timeout_s=1.5)) as made:
        yield made


def vouched(session: Session) -> memoryview:
    assert isinstance(session, Vouching)
    found = session.vouched_digests()
    assert found is not None
    return found


def vouches(session: Session) -> bool:
    """Return True if a session has digests of its source's blocks."""
    return isinstance(session, Vouching) and session.vouched_digests() is not None


def of_digests(held: HeldResources) -> list[str]:
    """Return the descriptors and maps of digests, of sources and readers alike."""
    lines = [*(link for _, link in held.descriptors), *held.mappings]
    return [line for line in lines if "/memfd:mx-digests" in line]


@contextmanager
def nothing_left(bench: Bench) -> Iterator[None]:
    before = HeldResources.now()
    yield
    gc.collect()
    bench.eventually(
        lambda: not HeldResources.now().beyond(before),
        lambda: "left behind: " + "; ".join(HeldResources.now().beyond(before)),
    )


# --- as they should arrive


def test_digests_of_another_process_arrive_as_they_are(bench: Bench) -> None:
    child = ChildSource(TARGET, [MIB], seed=1, content=WEIGHTS, block_digests=DIGESTS)
    try:
        session = bench.open_ticket(GRANT_ID, child.ticket, [MIB], tls=None, content=WEIGHTS)
        view = vouched(session)
        child.kill()
        assert view == DIGESTS
        with pytest.raises(TypeError):
            view[0] = 0
    finally:
        child.close()


@pytest.mark.parametrize("nbytes", [16, mmap.PAGESIZE, 5 * MIB + 16])
def test_digests_of_any_number(bench: Bench, nbytes: int) -> None:
    digests = random.Random(nbytes).randbytes(nbytes)
    source = bench.source(4096, content=WEIGHTS, block_digests=digests)
    assert vouched(bench.open(source, content=WEIGHTS)) == digests


def test_digests_come_after_many_regions(bench: Bench) -> None:
    source = bench.source(*[4096] * 150, content=WEIGHTS, block_digests=DIGESTS)
    session = bench.open(source, content=WEIGHTS)
    assert vouched(session) == DIGESTS
    view = bench.destination(4096)
    bench.succeed(bench.read(session, 149, 0, view))
    assert bench.peek(view) == source.memories[149].expected


def test_digests_in_other_items_than_bytes() -> None:
    items = memoryview(array.array("Q", range(64)))
    exposure = expose([], ExposeOptions(content=WEIGHTS, block_digests=items))
    with Bench(Harness(TARGET)) as bench:
        assert vouched(opened(bench, exposure)) == items.tobytes()
    end(exposure)


@pytest.mark.parametrize("none", [None, b"", memoryview(b"")])
def test_without_digests_there_is_nothing(bench: Bench, none: bytes | None) -> None:
    before = HeldResources.now()
    source = bench.source(4096, content=WEIGHTS, block_digests=none)
    session = bench.open(source, content=WEIGHTS)
    assert not vouches(session)
    assert of_digests(HeldResources.now()) == of_digests(before) == []


def test_what_are_no_digests_is_not_taken() -> None:
    for wrong in (bytes(15), bytes(17), memoryview(bytes(64))[::2]):
        with pytest.raises(ValueError, match="16 contiguous bytes"):
            ExposeOptions(block_digests=wrong)


def test_one_memfd_for_all_readers_which_ends_with_the_exposure(bench: Bench) -> None:
    with nothing_left(bench):
        memory = Memory(4096, 1)
        exposure = expose([memory.region(0)], ExposeOptions(content=WEIGHTS, block_digests=DIGESTS))
        (made,) = of_digests(HeldResources.now())
        sessions = [opened(bench, exposure) for _ in range(3)]
        bench.succeed(*(bench.read(s, 0, 0, bench.destination(64)) for s in sessions))
        # The source's, and of each reader a map and the descriptor that keeps it. The source closes
        # the duplicate that it has sent a moment after the reader has it.
        bench.eventually(
            lambda: len(of_digests(HeldResources.now())) == 1 + 2 * len(sessions),
            lambda: f"{of_digests(HeldResources.now())}",
        )
        for session in sessions:
            session.close()
            assert session.join(10)
        bench.eventually(lambda: of_digests(HeldResources.now()) == [made], lambda: "maps are left")
        end(exposure)
        assert of_digests(HeldResources.now()) == []
        memory.close()


# --- for how long


def test_a_session_vouches_until_it_is_closed(bench: Bench) -> None:
    source = bench.source(MIB, content=WEIGHTS, block_digests=DIGESTS)
    session = bench.open(source, content=WEIGHTS)
    held = bench.held_read(session, bench.destination(MIB))
    assert vouched(session) == DIGESTS
    session.close()
    assert not vouches(session)
    held.release()


def test_a_view_lives_longer_than_both_sides_and_takes_all_with_it(bench: Bench) -> None:
    with nothing_left(bench):
        exposure = expose([], ExposeOptions(content=WEIGHTS, block_digests=DIGESTS))
        session = opened(bench, exposure)
        views = [vouched(session), vouched(session)]
        session.close()
        assert session.join(10)
        end(exposure)
        assert not vouches(session)
        assert views == [DIGESTS, DIGESTS]
        part = views.pop()
        part = part[16:32]
        views.clear()
        assert part == DIGESTS[16:32]
        assert of_digests(HeldResources.now())
        del part


def test_memory_that_changes_has_no_digests_any_more(bench: Bench) -> None:
    source = bench.source(4096, content=WEIGHTS, block_digests=DIGESTS)
    before = vouched(bench.open(source, content=WEIGHTS))
    assert announced(source) == len(DIGESTS)
    source.exposure.set_generation(1)
    assert announced(source) == len(DIGESTS)
    for generation in (2, 1):
        source.exposure.set_generation(generation)
        # Whatever a reader says that it wants.
        assert announced(source) == 0
    assert before == DIGESTS


def announced(source: BenchSource) -> int:
    """Return how many bytes of digests a source announces to a reader."""
    ticket = json.loads(source.grant()[1])
    key, secret = bytes.fromhex(ticket["key"]), bytes.fromhex(ticket["secret"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(b"\0" + ticket["socket"].encode())
        sock.sendall(framing.PREAMBLE.pack(shm.MAGIC, key, secret))
        at = framing.HELLO.size + 73  # generation, the label's bytes, the label
        greeting = b""
        while len(greeting) < at + shm.INFO.size:
            received = sock.recv(at + shm.INFO.size - len(greeting))
            assert received
            greeting += received
    nbytes: int = shm.INFO.unpack_from(greeting, at)[1]
    return nbytes


# --- sources that lie


class Lying(shm.ShmExposure):
    """Announces so many bytes of digests, and sends what `say` sends in their place."""

    def __init__(self, announced: int, say: Callable[[SocketStream], None]) -> None:
        self.announced, self.say = announced, say
        super().__init__([], ExposeOptions(content=WEIGHTS))

    def _greet(self, stream: SocketStream, grant: GrantState, digests: int) -> bool:
        greeted = self.send_control(stream, grant, shm.INFO.pack(0, self.announced))
        self.say(stream)
        return greeted


@contextmanager
def memfd(nbytes: int, seals: int) -> Iterator[int]:
    descriptor = os.memfd_create("mx-testing", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        kernel.add_seals(descriptor, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def refusal(bench: Bench, announced: int, say: Callable[[SocketStream], None]) -> SourceError:
    """Return the error of opening a lying source, of which nothing is left on either side."""
    with nothing_left(bench):
        exposure = Lying(announced, say)
        exposure.set_generation(1)
        with pytest.raises(SourceError) as caught:
            opened(bench, exposure)
        end(exposure)
    assert caught.value.peer == PEER
    return caught.value.with_traceback(None)


ALL = kernel.FULL_SEALS


@pytest.mark.parametrize(
    "seals",
    [0, *(ALL & ~each for each in (0x2, 0x4, 0x8)), ALL & ~0x8 | kernel.F_SEAL_FUTURE_WRITE],
)
def test_digests_that_can_change_are_refused(bench: Bench, seals: int) -> None:
    with memfd(64, seals) as descriptor:
        error = refusal(bench, 64, lambda s: s.send_descriptors(shm.DIGESTS, [descriptor]))
    assert isinstance(error, PeerProtocolError)
    assert "not sealed" in str(error)


@pytest.mark.parametrize("nbytes", [0, 16, 48, 63, 65, 80, 1 << 40])
def test_digests_of_another_number_are_refused(bench: Bench, nbytes: int) -> None:
    with memfd(nbytes, ALL) as descriptor:
        error = refusal(bench, 64, lambda s: s.send_descriptors(shm.DIGESTS, [descriptor]))
    assert isinstance(error, PeerProtocolError)
    assert "not as many" in str(error)


@pytest.mark.parametrize("announced", [1, 15, 17, (1 << 30) + 16, (1 << 64) - 16])
def test_announcements_of_impossible_digests_are_refused(bench: Bench, announced: int) -> None:
    with memfd(64, ALL) as descriptor:
        error = refusal(bench, announced, lambda s: s.send_descriptors(shm.DIGESTS, [descriptor]))
    assert isinstance(error, PeerProtocolError)
    assert "malformed" in str(error)


@pytest.mark.parametrize("path", ["/dev/zero", "a file"])
def test_what_is_no_memfd_is_refused(bench: Bench, path: str, tmp_path: Path) -> None:
    if path == "a file":
        path = str(tmp_path / "digests")
        Path(path).write_bytes(bytes(64))
    with open(path, "rb") as file:
        error = refusal(bench, 64, lambda s: s.send_descriptors(shm.DIGESTS, [file.fileno()]))
    assert "not sealed" in str(error)


def test_too_few_and_too_many_descriptors_are_refused(bench: Bench) -> None:
    with memfd(64, ALL) as descriptor:
        for error in (
            refusal(bench, 64, lambda s: s.send_all([shm.DIGESTS])),
            refusal(bench, 64, lambda s: s.send_descriptors(shm.DIGESTS, [descriptor] * 2)),
        ):
            assert isinstance(error, PeerProtocolError)
            assert "missing" in str(error)
        many = refusal(bench, 64, lambda s: s.send_descriptors(shm.DIGESTS, [descriptor] * 200))
        assert "lost on the way" in str(many)
        other = refusal(bench, 64, lambda s: s.send_descriptors(b"X", [descriptor]))
        assert isinstance(other, PeerProtocolError)


def test_a_source_that_ends_or_stops_before_its_digests(bench: Bench) -> None:
    assert isinstance(refusal(bench, 64, lambda s: s.abort()), PeerLostError)
    assert isinstance(refusal(bench, 64, lambda s: None), PeerTimeoutError)


# --- open fails after the digests have come


def test_nothing_is_left_where_opening_fails_half_way(bench: Bench) -> None:
    memory = Memory(MIB, 1, Kind.ANONYMOUS)
    view = memory.region(0).view
    nowhere = ExposedRegion(0, view, 4096)
    with nothing_left(bench):
        options = ExposeOptions(content=WEIGHTS, block_digests=DIGESTS)
        exposure = expose([nowhere], options)
        for _ in range(5):
            with pytest.raises(PeerProtocolError, match="can't be read"):
                opened(bench, exposure)
        end(exposure)
        exposure = expose([], options)
        stale = json.dumps(json.loads(exposure.grant("g")) | {"start_ticks": 1}).encode()
        with pytest.raises(PeerLostError):
            bench.open_ticket("g", stale, [], tls=None, content=WEIGHTS)
        end(exposure)
    del view, nowhere
    gc.collect()
    memory.close()


def test_digests_that_a_reader_cannot_map_are_done_without(bench: Bench) -> None:
    source = bench.source(MIB, content=WEIGHTS, block_digests=bytes(64 * MIB))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # There is room for the threads, and none for the digests.
    stack = threading.stack_size(MIB)
    resource.setrlimit(resource.RLIMIT_AS, (used + 32 * MIB, hard))
    try:
        session = bench.open(source, content=WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(stack)
    assert not vouches(session)
    bench.succeed(bench.read(session, 0, 0, bench.destination(MIB)))


# --- sources that can't


def test_a_source_without_a_place_for_its_digests_says_so(bench: Bench) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with nothing_left(bench):
        resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, hard))
        try:
            with pytest.raises(LocalError, match="digests"):
                expose([], ExposeOptions(block_digests=DIGESTS))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
    with (
        closing(mmap.mmap(-1, (1 << 30) + 16)) as many,
        memoryview(many) as digests,
        pytest.raises(LocalError, match="at most"),
    ):
        expose([], ExposeOptions(block_digests=digests))


# --- forks

FORKS = """
import json, os, sys, time, warnings
sys.path[:] = json.loads(sys.argv[1])
warnings.simplefilter("ignore", DeprecationWarning)
from mx import forks
from mx.testing.harness import PEER, Harness
from mx.testing.holdings import HeldResources
from mx.transport import ExposeOptions, Grant
from mx_transports.shm import ShmTransport

def links():
    return [to for _, to in HeldResources.now().descriptors if "mx-digests" in to]

def until_two():
    # The exposure's thread closes the one that it has sent a little after that has arrived.
    until_s = time.monotonic() + 30
    while len(links()) != 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(links()) == 2, links()

transport, digests = ShmTransport(), bytes(range(256))
exposure = transport.expose([], ExposeOptions(content=b"w", block_digests=digests))
session = transport.open(Grant("g", exposure.grant("g"), 0, (), "peer", content=b"w"))
view = session.vouched_digests()
until_two()
child = os.fork()
if not child:
    forks.give_up()
    # What a child still refers to stays as it is, and ends without harm.
    fine = not links() and view == digests
    del view, session, exposure
    os._exit(0 if fine else 1)
_, status = os.waitpid(child, 0)
assert view == digests and session.vouched_digests() == digests
until_two()
again = transport.open(Grant("h", exposure.grant("h"), 0, (), "peer", content=b"w"))
assert again.vouched_digests() == digests
for each in (session, again, exposure):
    each.close()
    assert each.join(10)
del view
assert not links(), links()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_keeps_no_descriptor_of_digests() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(sys.path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "0\n"


# --- what the tests are made of


def expose(regions: Sequence[ExposedRegion], options: ExposeOptions) -> shm.ShmExposure:
    exposure = ShmTransport().expose(regions, options)
    assert isinstance(exposure, shm.ShmExposure)
    exposure.set_generation(1)
    return exposure


def opened(bench: Bench, exposure: shm.ShmExposure) -> Session:
    return bench.open_ticket("g", exposure.grant("g"), [], tls=None, content=WEIGHTS)


def end(exposure: shm.ShmExposure) -> None:
    exposure.close()
    assert exposure.join(10)
