"""What is particular to the GPU transports: exports, lies, lost peers, and drivers that refuse."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mx.core.paths import Medium
from mx.core.topology import Gpu, GpuPeer, Place
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory
from mx.errors import LocalError, NotAllowedError, PathError, PeerProtocolError, SourceError
from mx.testing import spans
from mx.testing.bench import Bench, Source
from mx.testing.child import GRANT_ID, ChildSource
from mx.testing.harness import PEER
from mx.testing.holdings import Holdings
from mx.testing.memory import Kind, pattern
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, Grant, Piece, Read
from mx.units import MIB
from mx_transports import pcie_p2p
from mx_transports.cuda_ipc import CudaIpcTransport
from mx_transports.pcie_p2p import PciePeerTransport
from mx_transports.toolkit.cuda import copier, wire
from tests.support import gpu_rig
from tests.support.fake_cuda import FakeDriver, fake_uuid


@contextmanager
def rig(
    name: str = "cuda_ipc",
    kind: Kind = Kind.GPU,
    there: str = "0",
    here: str = "0",
    *,
    peers: bool = True,
    nvlinks: int = 0,
) -> Iterator[tuple[Bench, FakeDriver]]:
    """A bench over fake GPUs, which get everything back."""
    fake = FakeDriver(gpus=2, peers=peers)
    with cuda.installed(fake):
        with Bench(gpu_rig.harness(name, kind, fake, there, here, nvlinks=nvlinks)) as bench:
            yield bench, fake
        del bench
        gc.collect()
        assert fake.live() == []


def altered(ticket: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(ticket), **changes}).encode()


def open_altered(bench: Bench, source: Source, **changes: object) -> None:
    grant_id, ticket = source.grant()
    bench.open_ticket(grant_id, altered(ticket, **changes), source.sizes, tls=None)


# --- reach


def gpu_place(device: str, *gpus: Gpu, uid: int = 0, ipc: int = 1) -> Place:
    return Place("boot", "a", uid, device=device, gpus=gpus, ipc_namespace=ipc)


def pair(nvlinks: int, p2p: bool = True, lane: float = 25.0) -> tuple[Gpu, Gpu]:
    return tuple(  # type: ignore[return-value]
        Gpu(
            uuid,
            pcie_generation=generation,
            pcie_width=16,
            nvlink_gb_per_s=lane,
            peers=(GpuPeer(other, nvlinks, p2p, p2p),),
        )
        for uuid, other, generation in (("A", "B", 5), ("B", "A", 4))
    )


def test_reach_within_a_gpu_attaches() -> None:
    gpus = pair(0)
    path = CudaIpcTransport().reach(gpu_place("cuda:A", *gpus), gpu_place("cuda:A", *gpus))
    assert path is not None and path.attach and path.medium is Medium.DEVICE
    assert PciePeerTransport().reach(gpu_place("cuda:A"), gpu_place("cuda:A")) is None


def test_reach_over_nvlink_is_by_lanes() -> None:
    gpus = pair(18)
    here, there = gpu_place("cuda:A", *gpus), gpu_place("cuda:B", *gpus)
    path = CudaIpcTransport().reach(here, there)
    assert path is not None and path.medium is Medium.NVLINK and not path.attach
    assert path.gb_per_s == 382.5  # 18 x 25 x 0.85
    # One end may know nothing of the other, as in a container with one GPU; none may deny it.
    for one, other in ((here, gpu_place("cuda:B")), (gpu_place("cuda:A"), there)):
        assert CudaIpcTransport().reach(one, other) == path
    assert CudaIpcTransport().reach(gpu_place("cuda:A"), gpu_place("cuda:B")) is None
    assert CudaIpcTransport().reach(here, gpu_place("cuda:B", *pair(18, p2p=False))) is None
    beside = PciePeerTransport().reach(here, there)
    assert beside is not None and beside.medium is Medium.PCIE
    assert beside.detail.startswith("staged through host memory") and beside.not_beside


def test_reach_over_pcie_is_by_the_narrower_slot() -> None:
    gpus = pair(0)
    transport = PciePeerTransport()
    here, there = gpu_place("cuda:A", *gpus), gpu_place("cuda:B", *gpus)
    assert CudaIpcTransport().reach(here, there) is None
    path = transport.reach(here, there)
    assert path is not None and path.detail == "peer to peer"
    assert path.gb_per_s == round(1.969 * 16 * 0.8, 1)
    to_host = transport.reach(gpu_place("cpu"), here)
    assert to_host is not None and to_host.gb_per_s == round(3.938 * 16 * 0.8, 1)
    refused = pair(0, p2p=False)
    staged = transport.reach(gpu_place("cuda:A", *refused), gpu_place("cuda:B", *refused))
    assert staged is not None and staged.detail.startswith("staged through host memory")
    unknown = transport.reach(gpu_place("cpu"), gpu_place("cuda:C"))
    assert unknown is not None and unknown.gb_per_s == pcie_p2p.UNKNOWN_GB_PER_S


def test_reach_is_for_one_user_of_one_host_and_for_gpus() -> None:
    gpus = pair(18)
    here = gpu_place("cuda:A", *gpus)
    for other in (
        gpu_place("cuda:A", *gpus, uid=1),
        gpu_place("cuda:A", *gpus, ipc=2),
        replace(here, boot_id="elsewhere"),
    ):
        for transport in (CudaIpcTransport(), PciePeerTransport()):
            assert transport.reach(here, other) is None
            assert transport.reach(replace(here, device="cpu"), other) is None
    assert PciePeerTransport().reach(gpu_place("cpu"), gpu_place("cpu")) is None
    assert CudaIpcTransport().reach(gpu_place("cpu"), here) is None


# --- between two processes

IMPORTER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import xxhash
from mx.cuda import driver as cuda
from mx.testing import spans
from mx.transport import Grant
from tests.support import gpu_rig
transport = gpu_rig.cuda_ipc()
ticket, size = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
grant = Grant("g", ticket, 1, (size,), "peer", place=gpu_rig.place(cuda.load(), "0"))
session = transport.open(grant)
view = session.attach(0)
session.close()
session.join()
print(xxhash.xxh3_128_hexdigest(spans.peek(view)), flush=True)
sys.stdin.read()
print(xxhash.xxh3_128_hexdigest(spans.peek(view)), flush=True)
"""


def importer(source: Source) -> subprocess.Popen[str]:
    _, ticket = source.grant()
    arguments = [json.dumps(sys.path), ticket.hex(), str(source.sizes[0])]
    return subprocess.Popen(
        [sys.executable, "-c", IMPORTER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
def test_importer_that_dies_gives_the_memory_back(kind: Kind) -> None:
    xxhash = pytest.importorskip("xxhash")
    with rig(kind=kind) as (bench, _):
        source = bench.source(3 * MIB)
        with importer(source) as child:
            assert child.stdout is not None
            digest = xxhash.xxh3_128_hexdigest(source.memories[0].expected)
            assert child.stdout.readline().strip() == digest
            bench.eventually(lambda: source.exposure.active_readers() == 1, lambda: "not counted")
            source.exposure.close()
            assert not source.exposure.join(0.1), "it is attached still"
            child.kill()
            assert source.exposure.join(10)


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
def test_importer_outlives_the_exporter(kind: Kind) -> None:
    with rig(kind=kind) as (bench, _):
        remote, session = bench.remote(2 * MIB)
        view = session.attach(0)
        remote.kill()
        late = bench.read(session, 0, 0, bench.destination(64), tag="late")
        bench.failure(late, SourceError, "late")
        session.close()
        assert session.join(10)
        assert bench.peek(view) == pattern(2 * MIB, bench.last_seed)
        del view


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
def test_a_source_of_another_process_is_read_right(kind: Kind) -> None:
    with rig(kind=kind) as (bench, _):
        _, session = bench.remote(5 * MIB + 3, 1)
        destination = bench.destination(5 * MIB)
        bench.succeed(bench.read(session, 0, 3, destination))
        assert bench.peek(destination) == pattern(5 * MIB + 3, bench.last_seed)[3:]
        del destination


def test_a_thousand_attachments_leave_nothing() -> None:
    with rig(kind=Kind.GPU_VMM) as (bench, fake):
        remote, first = bench.remote(2 * MIB)
        first.close()
        assert first.join(10)
        gc.collect()
        before, live = Holdings.now(), fake.live()
        for _ in range(1000):
            session = bench.transport.open(
                Grant(GRANT_ID, remote.ticket, 1, (2 * MIB,), PEER, place=bench.harness.here)
            )
            view = session.attach(0)
            session.close()
            assert session.join(10)
            del view, session
        assert fake.live() == live
        bench.eventually(lambda: not Holdings.now().beyond(before), lambda: "something is left")


# --- what can be attached


def test_allocations_in_a_row_are_one_piece_here_too() -> None:
    """As torch's expandable segments are: many handles, one range of addresses."""
    with rig(kind=Kind.GPU_VMM) as (bench, fake):
        granularity = fake.vmm_granularity(0)
        with Device(fake, 0) as device:
            base = fake.vmm_reserve(4 * granularity)
            for number in range(3):
                handle = fake.vmm_create(0, granularity)
                fake.vmm_map(base + number * granularity, granularity, handle)
                fake.vmm_release(handle)
            fake.vmm_set_access(base, 3 * granularity, 0)
            region = DeviceView(device.key, base + 100, 3 * granularity - 200)
            data = pattern(region.nbytes, 5)
            spans.poke(region, data)
            exposure = bench.transport.expose(
                [ExposedRegion(0, region, region.address, device.key)], ExposeOptions()
            )
            session = open_exposure(bench, exposure.grant("g"), region.nbytes)
            view = session.attach(0)
            assert view.address != region.address and bench.peek(view) == data
            # The source may even take its addresses down: the allocations are held by handles.
            for number in range(3):
                fake.vmm_unmap(base + number * granularity, granularity)
            fake.vmm_unreserve(base, 4 * granularity)
            destination = bench.destination(region.nbytes)
            bench.succeed(bench.read(session, 0, 0, destination))
            assert bench.peek(destination) == data
            session.close()
            exposure.close()
            del view, destination, region
            gc.collect()
            assert session.join(10) and exposure.join(10)


def open_exposure(bench: Bench, ticket: bytes, nbytes: int):  # type: ignore[no-untyped-def]
    return bench.transport.open(
        Grant("g", ticket, 0, (nbytes,), PEER, place=bench.harness.here, stall_timeout_s=1.0)
    )


def test_memory_of_another_gpu_is_copied_not_attached() -> None:
    with rig(here="1", nvlinks=4) as (bench, _):
        session = bench.open(bench.source(4096))
        with pytest.raises(NotAllowedError, match="copied"):
            session.attach(0)


def test_memory_that_cannot_be_exported_is_refused() -> None:
    with rig() as (bench, fake), Device(fake, 0) as device:
        with DeviceMemory(device, 4096) as memory:
            for nbytes, start in ((8192, 0), (4096, 4096)):
                view = DeviceView(device.key, memory.address + start, nbytes)
                with pytest.raises(LocalError):
                    region = ExposedRegion(0, view, view.address, device.key)
                    bench.transport.expose([region], ExposeOptions())
        host = ExposedRegion(0, memoryview(b"x"), 0)
        with pytest.raises(LocalError, match="host"):
            bench.transport.expose([host], ExposeOptions())


# --- tickets and greetings that lie


def test_another_gpu_in_the_ticket_is_refused() -> None:
    with rig(nvlinks=4) as (bench, _):
        source = bench.source(4096)
        for uuid in ("GPU-unknown", fake_uuid(1)):
            with pytest.raises(PeerProtocolError, match="other GPUs") as caught:
                open_altered(bench, source, gpus=[uuid])
            assert caught.value.peer == PEER


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": fake_uuid(0)},
        {"nbytes": 1 << 40},
        {"nbytes": 1},
        {"base": 1 << 62},
        {"handle": b"\xff" * 64},
    ],
)
def test_a_source_that_lies_about_its_memory_is_refused(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(there="1", nvlinks=4) as (bench, fake):
        child = ChildSource(bench.harness.target, [MIB], seed=1, kind=Kind.GPU, device="cuda:1")
        try:
            live = fake.live()
            unpack = wire.Allocation.unpack

            def lying(fields: tuple[int, bytes, int, int, bytes]) -> wire.Allocation:
                return replace(unpack(fields), **change)  # type: ignore[arg-type]

            monkeypatch.setattr(wire.Allocation, "unpack", lying)
            gpus = [fake_uuid(0), fake_uuid(1)]
            with pytest.raises(SourceError) as caught:
                bench.open_ticket("g", altered(child.ticket, gpus=gpus), [MIB], tls=None)
            assert caught.value.peer == PEER
            assert fake.live() == live
        finally:
            child.close()


def test_handles_of_freed_memory_are_an_error_of_the_path() -> None:
    with rig() as (bench, fake):
        remote, session = bench.remote(MIB)
        session.close()
        assert session.join(10)
        fake.fail("ipc_open", "CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(PathError, match="cuda_ipc") as caught:
            bench.open_ticket(GRANT_ID, remote.ticket, [MIB], tls=None)
        assert caught.value.peer == PEER
        again = bench.open_ticket(GRANT_ID, remote.ticket, [MIB], tls=None)
        bench.succeed(bench.read(again, 0, 0, bench.destination(64)))


# --- drivers that refuse


def test_no_driver_is_an_error_of_the_path() -> None:
    with rig() as (bench, _):
        _, ticket = bench.source(4096).grant()
        absent = FakeDriver(gpus=1, first_gpu=1)
        place = gpu_rig.place(cuda.load(), "0")
        with cuda.installed(absent), pytest.raises(PathError, match="does not see"):
            bench.transport.open(Grant("g", ticket, 1, (4096,), PEER, place=place))
        assert absent.live() == []


def test_a_copy_that_the_driver_refuses_fails_its_read_alone() -> None:
    with rig() as (bench, fake):
        session = bench.open(bench.source(8 * MIB), streams=1)
        for call in ("copy_dtod", "event_record"):
            fake.fail(call, "CUDA_ERROR_INVALID_VALUE", after=2)
            failed = bench.read(session, 0, 0, bench.destination(8 * MIB), tag="refused")
            fine = bench.read(session, 0, 0, bench.destination(64), tag="fine")
            error = bench.failure(failed, PathError, "refused")
            assert "cuda_ipc" in str(error)
            bench.succeed(fine)


def test_a_gpu_that_breaks_fails_reads_and_ends() -> None:
    fake = FakeDriver(gpus=2)
    with cuda.installed(fake):
        with Bench(gpu_rig.harness("cuda_ipc", Kind.GPU, fake, "0", "0")) as bench:
            session = bench.open(bench.source(2 * MIB))
            destination = bench.destination(MIB)
            bench.succeed(bench.read(session, 0, 0, destination))
            with Device(fake, 0) as device, device.current():
                fake.break_device(fake.stream_create())
                with pytest.raises(LocalError):
                    fake.context_synchronize()
            broken = bench.read(session, 0, 0, destination, tag="broken")
            bench.failure(broken, PathError, "broken")
            session.close()
            assert session.join(10)
        fake.end()


def test_refused_peer_access_leaves_the_way_through_the_host() -> None:
    with rig(here="1", nvlinks=4, peers=False) as (bench, _), pytest.raises(PathError) as caught:
        bench.open(bench.source(4096))
    assert "may not read" in str(caught.value) and caught.value.peer == PEER
    with rig("pcie_p2p", Kind.GPU_VMM, "0", "1") as (bench, fake):
        source = bench.source(3 * MIB)
        # The driver reports peer access, and then a mapping for the peer fails.
        fake.fail("vmm_set_access", "CUDA_ERROR_INVALID_DEVICE")
        session = bench.open(source)
        destination = bench.destination(3 * MIB)
        bench.succeed(bench.read(session, 0, 0, destination))
        assert bench.peek(destination) == source.memories[0].expected
        assert fake.calls["copy_dtoh"] and fake.calls["copy_htod"]
        del destination


def test_beside_nvlink_pcie_goes_through_the_host() -> None:
    with rig("pcie_p2p", Kind.GPU_VMM, "0", "1", nvlinks=4) as (bench, fake):
        session = bench.open(bench.source(3 * MIB))
        bench.succeed(bench.read(session, 0, 0, bench.destination(3 * MIB)))
        assert not fake.calls["copy_dtod"]


def test_between_two_hosts_memories_it_is_refused() -> None:
    with rig("pcie_p2p", Kind.SEALED, "cpu", "cpu") as (bench, _):
        with pytest.raises(PathError, match="GPU") as caught:
            bench.open(bench.source(4096))
        assert caught.value.peer == PEER


def test_destinations_elsewhere_are_refused() -> None:
    with rig() as (bench, _):
        session = bench.open(bench.source(4096))
        there = spans.destination(16, "cuda:1")
        for destination in (memoryview(bytearray(16)), there):
            sink = bench.read(session, 0, 0, destination, tag="elsewhere")
            bench.failure(sink, LocalError, "elsewhere")
        sink = bench.sink()
        mixed = [Piece(0, 0, bench.destination(16)), Piece(0, 0, memoryview(bytearray(16)))]
        session.read([Read("mixed", mixed, sink)])
        bench.failure(sink, LocalError, "mixed")
        del there, destination, mixed


def test_a_new_generation_waits_for_what_is_written_to_the_memory() -> None:
    with rig() as (bench, fake):
        source = bench.source(4096)
        session = bench.open(source, generation=2)
        view = source.memories[0].region(0).view
        assert isinstance(view, DeviceView)
        with Device(fake, 0) as device, device.current():
            stream = fake.stream_create()
            fake.memset(view.address, 7, 4096, stream)
            source.exposure.set_generation(2)
            destination = bench.destination(4096)
            bench.succeed(bench.read(session, 0, 0, destination))
            assert bench.peek(destination) == b"\7" * 4096
            fake.stream_destroy(stream)
        del view, destination


@pytest.mark.parametrize("path", ["generation", "revoked", "closed"])
def test_what_was_on_its_way_is_not_believed_either(path: str) -> None:
    """All of the read's copies have been queued when its memory changes hands."""
    nbytes = copier.STAGES * gpu_rig.STEP_BYTES
    with rig() as (bench, _):
        source = bench.source(nbytes)
        session = bench.open(source, streams=1, grant_id="g")
        held = bench.held_read(session, bench.destination(nbytes), "held")
        if path == "generation":
            source.exposure.set_generation(2)
        elif path == "revoked":
            source.exposure.revoke("g")
        else:
            source.exposure.close()
        held.release()
        bench.failure(held, SourceError, "held")


def test_the_transports_say_why_there_is_no_cuda() -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is")
    for transport in (CudaIpcTransport(), PciePeerTransport()):
        assert "cuda" in str(transport.probe()).lower()
