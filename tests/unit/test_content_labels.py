"""What a source's process says that it holds, against tickets that another process relays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest

from mx.cuda import driver as cuda
from mx.errors import PeerProtocolError, SourceError, StaleGenerationError
from mx.testing.bench import Bench
from mx.testing.child import GRANT_ID, ChildSource
from mx.testing.harness import PEER, Harness
from mx.testing.holdings import Holdings
from mx.testing.memory import Kind, Memory, pattern
from mx.transport import ExposedRegion, ExposeOptions, Grant, Session, Vouching
from mx.units import MIB
from mx_transports.shm import ShmTransport
from mx_transports.toolkit import local
from tests.support import gpu_rig
from tests.support.fake_cuda import FakeDriver

OURS, OTHERS = b"our weights", b"other weights"
Rig = Callable[[], AbstractContextManager[tuple[Bench, FakeDriver | None]]]


def shm(kind: Kind) -> Rig:
    @contextmanager
    def rig() -> Iterator[tuple[Bench, None]]:
        with Bench(Harness("mx_transports.shm:ShmTransport", kind=kind)) as bench:
            yield bench, None

    return rig


def cuda_ipc(kind: Kind) -> Rig:
    @contextmanager
    def rig() -> Iterator[tuple[Bench, FakeDriver]]:
        fake = FakeDriver(gpus=2)
        with cuda.installed(fake):
            with Bench(gpu_rig.harness("cuda_ipc", kind, fake, "0", "0")) as bench:
                yield bench, fake
            del bench
            gc.collect()
            assert fake.live() == []

    return rig


#: Both ways in which each transport gets at memory.
RIGS = {
    "shm, attached": shm(Kind.SEALED),
    "shm, copied": shm(Kind.ANONYMOUS),
    "cuda_ipc": cuda_ipc(Kind.GPU),
    "cuda_ipc, VMM": cuda_ipc(Kind.GPU_VMM),
}
each_rig = pytest.mark.parametrize("rig", RIGS.values(), ids=RIGS)


def refusal(bench: Bench, ticket: bytes, content: bytes, generation: int = 1) -> SourceError:
    """Return the error of opening a ticket for `content`; it names the peer."""
    with pytest.raises(SourceError) as caught:
        bench.open_ticket(GRANT_ID, ticket, [MIB], generation=generation, tls=None, content=content)
    assert caught.value.peer == PEER
    return caught.value.with_traceback(None)


def copied(bench: Bench, session: Session) -> bytes:
    view = bench.destination(MIB)
    bench.succeed(bench.read(session, 0, 0, view))
    return bench.peek(view)


@contextmanager
def process(bench: Bench, content: bytes) -> Iterator[ChildSource]:
    """A source in another process, of one MiB of seed 5."""
    harness = bench.harness
    child = ChildSource(
        harness.target,
        [MIB],
        seed=5,
        kind=harness.kind,
        device=harness.there.device,
        content=content,
    )
    try:
        yield child
    finally:
        child.close()


@each_rig
def test_a_ticket_of_the_same_process_for_another_model_is_refused(rig: Rig) -> None:
    with rig() as (bench, _):
        ours = bench.source(MIB, content=OURS)
        others = bench.source(MIB, content=OTHERS)
        error = refusal(bench, others.grant()[1], OURS)
        assert isinstance(error, PeerProtocolError)
        assert "offers other weights" in str(error)
        session = bench.open(ours, content=OURS)
        assert copied(bench, session) == ours.memories[0].expected


@each_rig
def test_a_ticket_of_another_process_for_another_model_is_refused(rig: Rig) -> None:
    with rig() as (bench, _), process(bench, OTHERS) as child:
        assert "offers other weights" in str(refusal(bench, child.ticket, OURS))
        session = bench.open_ticket(GRANT_ID, child.ticket, [MIB], tls=None, content=OTHERS)
        assert copied(bench, session) == pattern(MIB, 5)


@each_rig
def test_a_source_that_says_nothing_is_for_readers_that_want_anything(rig: Rig) -> None:
    with rig() as (bench, _):
        silent = bench.source(MIB)
        assert "does not say which weights" in str(refusal(bench, silent.grant()[1], OURS))
        assert copied(bench, bench.open(silent)) == silent.memories[0].expected
        named = bench.source(MIB, content=OURS)
        assert copied(bench, bench.open(named)) == named.memories[0].expected


@each_rig
def test_a_label_is_of_one_generation(rig: Rig) -> None:
    """Else a reader that is told of the next generation ahead of it would take the present label
    for the bytes that come then."""
    with rig() as (bench, _):
        source = bench.source(MIB, content=OURS)
        early = refusal(bench, source.grant()[1], OURS, generation=2)
        assert isinstance(early, StaleGenerationError)
        source.exposure.set_generation(2)
        late = refusal(bench, source.grant()[1], OURS, generation=2)
        assert "does not say which weights" in str(late)
        assert isinstance(refusal(bench, source.grant()[1], OURS), StaleGenerationError)


@each_rig
def test_nothing_is_mapped_of_a_source_that_is_refused_and_nothing_is_left(rig: Rig) -> None:
    with rig() as (bench, fake), process(bench, OTHERS) as child:
        before, live = Holdings.now(), fake.live() if fake else []
        for _ in range(20):
            refusal(bench, child.ticket, OURS)
        bench.eventually(
            lambda: not Holdings.now().beyond(before),
            lambda: "left behind: " + "; ".join(Holdings.now().beyond(before)),
        )
        if fake is not None:
            assert fake.live() == live
            assert maps(fake) == 0
            bench.open_ticket(GRANT_ID, child.ticket, [MIB], tls=None, content=OTHERS)
            assert maps(fake) == 1


def maps(fake: FakeDriver) -> int:
    """Return how much of other processes' memory this one has ever opened."""
    return fake.calls["ipc_open"] + fake.calls["vmm_import_fd"]


def test_not_a_byte_is_read_of_a_source_that_is_refused() -> None:
    with shm(Kind.ANONYMOUS)() as (bench, _), closing(Memory(MIB, 1, Kind.ANONYMOUS)) as memory:
        region = memory.region(0)
        # Where nothing is mapped: to read there is an error of its own.
        exposure = ShmTransport().expose(
            [ExposedRegion(0, region.view, 4096)], ExposeOptions(content=OTHERS)
        )
        del region
        try:
            assert "can't be read" in str(refusal(bench, exposure.grant("g"), OTHERS, 0))
            assert "offers other weights" in str(refusal(bench, exposure.grant("g"), OURS, 0))
        finally:
            exposure.close()
            assert exposure.join(10)


def test_a_label_has_a_size() -> None:
    longest = bytes(64)
    assert (
        ExposeOptions(content=longest).content
        == Grant("g", b"", 1, (), "p", content=longest).content
    )
    with pytest.raises(ValueError, match="64 bytes"):
        ExposeOptions(content=bytes(65))
    with pytest.raises(ValueError, match="64 bytes"):
        Grant("g", b"", 1, (), "p", content=bytes(65))


def test_a_label_longer_than_itself_is_malformed() -> None:
    with shm(Kind.SEALED)() as (bench, _):
        source = bench.source(MIB, content=OURS)
        exposure = source.exposure
        assert isinstance(exposure, local.LocalExposure)
        exposure._content = bytes(200)
        assert "malformed" in str(refusal(bench, source.grant()[1], OURS))


def test_transports_whose_bytes_are_verified_ignore_labels() -> None:
    with Bench(Harness("mx_transports.tcp:TcpTransport")) as bench:
        source = bench.source(MIB, content=OTHERS, block_digests=bytes(16))
        session = bench.open(source, content=OURS)
        assert copied(bench, session) == source.memories[0].expected
        assert not isinstance(session, Vouching)
