"""Two real processes on one GPU: attaching, copies in every direction, ends, leaks, lies."""

import gc
import json

import pytest
import xxhash

from mx.cuda import driver as cuda
from mx.cuda.device import Device
from mx.errors import PeerProtocolError, SourceError
from mx.testing.child import GRANT_ID
from mx.testing.harness import PEER
from mx.testing.memory import Kind, pattern
from mx.transport import DeviceView, Grant
from mx.units import MIB
from tests.gpu import rig
from tests.support.gpu_rig import place

GPU_KINDS = [Kind.GPU, Kind.GPU_VMM]
NBYTES = 96 * MIB + 4096


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_attach_and_copy_into_a_second_arena(kind: Kind) -> None:
    with rig.bench(rig.CUDA_IPC, kind) as bench:
        _, session = bench.remote(NBYTES)
        expected = pattern(NBYTES, bench.last_seed)
        view = session.attach(0)
        assert isinstance(view, DeviceView) and bench.peek(view) == expected
        destination = bench.destination(NBYTES)
        bench.succeed(bench.read(session, 0, 0, destination))
        assert bench.peek(destination) == expected


def test_host_to_device() -> None:
    for kind in (Kind.SEALED, Kind.ANONYMOUS):
        with rig.bench(rig.PCIE_P2P, kind, "cpu", "0") as bench:
            _, session = bench.remote(NBYTES)
            destination = bench.destination(NBYTES - 1)
            bench.succeed(bench.read(session, 0, 1, destination))
            assert bench.peek(destination) == pattern(NBYTES, bench.last_seed)[1:]


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_device_to_host(kind: Kind) -> None:
    with rig.bench(rig.PCIE_P2P, kind, "0", "cpu") as bench:
        _, session = bench.remote(NBYTES)
        destination = bench.destination(NBYTES - 1)
        bench.succeed(bench.read(session, 0, 1, destination))
        assert bench.peek(destination) == pattern(NBYTES, bench.last_seed)[1:]


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_importer_dies_before_the_exporter(kind: Kind) -> None:
    with rig.bench(rig.CUDA_IPC, kind) as bench:
        source = bench.source(8 * MIB)
        _, ticket = source.grant()
        with rig.Child(rig.IMPORTER, ticket.hex(), str(8 * MIB)) as child:
            digest = xxhash.xxh3_128_hexdigest(source.memories[0].expected)
            assert child.receive_line() == digest
            source.exposure.close()
            assert not source.exposure.join(0.5), "it is attached still"
            child.send_line("again")
            assert child.receive_line() == digest
            child.kill()
            assert source.exposure.join(10)
        assert source.memories[0].unchanged()


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_importer_outlives_the_exporter(kind: Kind) -> None:
    """VMM memory stays mapped after its exporter's end.

    CUDA promises nothing for legacy memory then, but this process's context must survive.
    """
    with rig.bench(rig.CUDA_IPC, kind) as bench:
        remote, session = bench.remote(8 * MIB)
        view = session.attach(0)
        remote.kill()
        late = bench.read(session, 0, 0, bench.destination(64), tag="late")
        bench.failure(late, SourceError, "late")
        session.close()
        assert session.join(10)
        if kind is Kind.GPU_VMM:
            assert bench.peek(view) == pattern(8 * MIB, bench.last_seed)
        del view
        gc.collect()
        fresh = bench.destination(4096)
        bench.poke(fresh, b"x" * 4096)
        assert bench.peek(fresh) == b"x" * 4096


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_thousand_attachments_leave_nothing(kind: Kind, gpu: Device) -> None:
    with rig.bench(rig.CUDA_IPC, kind) as bench:
        remote, first = bench.remote(64 * MIB)
        first.close()
        assert first.join(10)

        def cycle() -> None:
            session = bench.transport.open(
                Grant(GRANT_ID, remote.ticket, 1, (64 * MIB,), PEER, place=bench.harness.here)
            )
            view = session.attach(0)
            session.close()
            assert session.join(10)
            del view

        for _ in range(20):
            cycle()
        gc.collect()
        free, descriptors = gpu.memory_info()[0], rig.descriptors()
        for _ in range(1000):
            cycle()
        gc.collect()
        # Other processes may use the GPU too; a leak would be 64 MiB a cycle.
        assert free - gpu.memory_info()[0] < 64 * MIB
        assert rig.descriptors() == descriptors


def test_another_gpu_in_the_ticket_is_refused() -> None:
    with rig.bench(rig.CUDA_IPC, Kind.GPU) as bench:
        source = bench.source(4096)
        grant_id, ticket = source.grant()
        other = "GPU-00000000-0000-4000-8000-000000000000"
        for gpus in ([other], []):
            wrong = json.dumps({**json.loads(ticket), "gpus": gpus}).encode()
            with pytest.raises(PeerProtocolError) as caught:
                bench.open_ticket(grant_id, wrong, source.sizes, tls=None)
            assert caught.value.peer == PEER


@pytest.mark.parametrize("expandable", [False, True])
def test_torch_allocations(expandable: bool, gpu: Device) -> None:
    """Small tensors that share a block, and large ones; in expandable segments of many handles."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch is built for CPUs")
    sizes = [1000, 4096, 3 * MIB + 8, 100 * MIB]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with (
        rig.Child(rig.TORCH_SOURCE, *map(str, sizes), environment=environment) as child,
        rig.bench(rig.CUDA_IPC, Kind.GPU) as bench,
    ):
        ticket = bytes.fromhex(child.receive_line())
        digests = [child.receive_line() for _ in sizes]
        session = bench.open_ticket("g", ticket, sizes, tls=None)
        for index, (size, digest) in enumerate(zip(sizes, digests, strict=True)):
            view = session.attach(index)
            assert xxhash.xxh3_128_hexdigest(bench.peek(view)) == digest
            destination = bench.destination(size)
            bench.succeed(bench.read(session, index, 0, destination))
            assert xxhash.xxh3_128_hexdigest(bench.peek(destination)) == digest
            del view, destination
        kept = session.attach(3)
        session.close()
        assert session.join(10)
        child.send_line("0.2")
        assert child.receive_line() == "False", "the exporter let go of attached memory"
        assert xxhash.xxh3_128_hexdigest(bench.peek(kept)) == digests[3]
        del kept
        gc.collect()
        child.send_line("10")
        assert child.receive_line() == "True"


def test_the_place_names_the_gpu(gpu: Device) -> None:
    assert place(cuda.load(), "0").device == gpu.key
