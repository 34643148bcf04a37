"""What is particular to the GPU transports: exports, lies, lost peers, and drivers that refuse."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory
from mx.errors import LocalError, NotAllowedError, PathError, PeerProtocolError, SourceError
from mx.testing import spans
from mx.testing.bench import Bench, BenchSource
from mx.testing.child import GRANT_ID, ChildSource
from mx.testing.harness import PEER
from mx.testing.memory import Kind, pattern
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, Grant, Piece, Read, Session
from mx.units import MIB
from mx_transports.toolkit.cuda import copier, wire
from mx_transports.toolkit.cuda.exposure import GpuExposure
from mx_transports.toolkit.local import BATCH
from tests.gpu.rig import Spy
from tests.support import gpu_rig


@contextmanager
def rig(
    name: str = "cuda_ipc",
    kind: Kind = Kind.GPU,
    there: str = "0",
    here: str = "0",
    *,
    nvlinks: int = 0,
) -> Iterator[Bench]:
    """A bench over GPUs."""
    with Bench(gpu_rig.harness(name, kind, cuda.load(), there, here, nvlinks=nvlinks)) as bench:
        yield bench


def altered(ticket: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(ticket), **changes}).encode()


def open_altered(bench: Bench, source: BenchSource, **changes: object) -> None:
    grant_id, ticket = source.grant()
    bench.open_ticket(grant_id, altered(ticket, **changes), source.sizes, tls=None)


# --- what can be attached


@pytest.mark.parametrize("count", [3, BATCH + 2])
def test_allocations_in_a_row_are_one_piece_here_too(count: int) -> None:
    """As torch's expandable segments are: many handles, one range of addresses."""
    with rig(kind=Kind.GPU_VMM) as bench:
        driver = cuda.load()
        granularity = driver.vmm_granularity(0)
        with Device(driver, 0) as device:
            base = driver.vmm_reserve((count + 1) * granularity)
            for number in range(count):
                handle = driver.vmm_create(0, granularity)
                driver.vmm_map(base + number * granularity, granularity, handle)
                driver.vmm_release(handle)
            driver.vmm_set_access(base, count * granularity, 0)
            region = DeviceView(device.key, base + 100, count * granularity - 200)
            data = pattern(region.nbytes, 5)
            spans.poke(region, data)
            exposure = bench.transport.expose(
                [ExposedRegion(0, region, region.address, device.key)], ExposeOptions()
            )
            session = open_exposure(bench, exposure.grant("g"), region.nbytes)
            view = session.attach(0)
            assert isinstance(view, DeviceView) and view.address != region.address
            assert bench.peek(view) == data
            # The source may even take its addresses down: the allocations are held by handles.
            for number in range(count):
                driver.vmm_unmap(base + number * granularity, granularity)
            driver.vmm_unreserve(base, (count + 1) * granularity)
            destination = bench.destination(region.nbytes)
            bench.succeed(bench.read(session, 0, 0, destination))
            assert bench.peek(destination) == data
            session.close()
            exposure.close()
            del view, destination, region
            gc.collect()
            assert session.join(10) and exposure.join(10)


def open_exposure(bench: Bench, ticket: bytes, nbytes: int) -> Session:
    return bench.transport.open(
        Grant("g", ticket, 0, (nbytes,), PEER, place=bench.harness.here, stall_timeout_s=1.0)
    )


def test_memory_of_another_gpu_is_copied_not_attached(gpus: int) -> None:
    with rig(here="1", nvlinks=4) as bench:
        session = bench.open(bench.source(4096))
        with pytest.raises(NotAllowedError, match="copied"):
            session.attach(0)


def test_memory_that_cannot_be_exported_is_refused(gpu: Device) -> None:
    with rig() as bench:
        # So large that what follows it is not of the same block.
        with DeviceMemory(gpu, 2 * MIB) as memory:
            for nbytes, start in ((4 * MIB, 0), (4096, 1 << 46)):
                view = DeviceView(gpu.key, memory.address + start, nbytes)
                with pytest.raises(LocalError):
                    region = ExposedRegion(0, view, view.address, gpu.key)
                    bench.transport.expose([region], ExposeOptions())
        host = ExposedRegion(0, memoryview(b"x"), 0)
        with pytest.raises(LocalError, match="host"):
            bench.transport.expose([host], ExposeOptions())


# --- descriptors that are wanted


def _detached(session: Session) -> bool:
    return session._detached is not None  # type: ignore[attr-defined]


def test_who_wants_descriptors_of_what_there_is_not_loses_the_connection() -> None:
    for kind in (Kind.GPU, Kind.GPU_VMM):  # by legacy handles there are no descriptors at all
        with rig(kind=kind) as bench:
            source = bench.source(4096)
            session, other = bench.open(source), bench.open(source)
            session._remote.send(wire.wanted([99]))  # type: ignore[attr-defined]
            # A small read could end before the source has looked at what it was sent.
            bench.eventually(partial(_detached, session), lambda: "the connection was not lost")
            destination = bench.destination(4096)
            bench.failure(bench.read(session, 0, 0, destination, tag="lost"), SourceError, "lost")
            bench.succeed(bench.read(other, 0, 0, destination))


def test_a_source_that_hands_nothing_over_has_lied(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = GpuExposure._hand_over

    def refuses(self: GpuExposure, *streams: object, refuse: bool) -> None:
        hand_over(self, *streams, refuse=True)  # type: ignore[arg-type]

    with rig(kind=Kind.GPU_VMM) as bench:
        source = bench.source(4096)
        monkeypatch.setattr(GpuExposure, "_hand_over", refuses)
        with pytest.raises(PeerProtocolError, match="missing"):
            bench.open(source)


# --- tickets and greetings that lie


def test_another_gpu_in_the_ticket_is_refused(gpus: int) -> None:
    with rig(nvlinks=4) as bench:
        source = bench.source(4096)
        for uuid in ("GPU-unknown", cuda.load().device_uuid(1)):
            with pytest.raises(PeerProtocolError, match="other GPUs") as caught:
                open_altered(bench, source, gpus=[uuid])
            assert caught.value.peer == PEER


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": "the first GPU's"},
        {"nbytes": 1 << 40},
        {"nbytes": 1},
        {"base": 1 << 62},
        {"handle": b"\xff" * 64},
    ],
)
def test_a_source_that_lies_about_its_memory_is_refused(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    uuids = [cuda.load().device_uuid(ordinal) for ordinal in range(2)]
    if "uuid" in change:
        change = {"uuid": uuids[0]}
    with rig(there="1", nvlinks=4) as bench:
        child = ChildSource(bench.harness.target, [MIB], seed=1, kind=Kind.GPU, device="cuda:1")
        try:
            unpack = wire.Allocation.unpack

            def lying(fields: tuple[int, bytes, int, int, bytes]) -> wire.Allocation:
                return replace(unpack(fields), **change)  # type: ignore[arg-type]

            monkeypatch.setattr(wire.Allocation, "unpack", lying)
            with pytest.raises(SourceError) as caught:
                bench.open_ticket("g", altered(child.ticket, gpus=uuids), [MIB], tls=None)
            assert caught.value.peer == PEER
        finally:
            child.close()


def test_handles_of_freed_memory_are_an_error_of_the_path(spy: Spy) -> None:
    with rig() as bench:
        remote, session = bench.remote(MIB)
        session.close()
        assert session.join(10)
        spy.fail("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(PathError, match="cuda_ipc") as caught:
            bench.open_ticket(GRANT_ID, remote.ticket, [MIB], tls=None)
        assert caught.value.peer == PEER
        again = bench.open_ticket(GRANT_ID, remote.ticket, [MIB], tls=None)
        bench.succeed(bench.read(again, 0, 0, bench.destination(64)))


# --- drivers that refuse


def test_a_copy_that_the_driver_refuses_fails_its_read_alone(spy: Spy) -> None:
    with rig() as bench:
        session = bench.open(bench.source(8 * MIB), streams=1)
        for call in ("cuMemcpyDtoDAsync", "cuEventRecord"):
            spy.fail(call, "CUDA_ERROR_INVALID_VALUE", after=2)
            failed = bench.read(session, 0, 0, bench.destination(8 * MIB), tag="refused")
            fine = bench.read(session, 0, 0, bench.destination(64), tag="fine")
            error = bench.failure(failed, PathError, "refused")
            assert "cuda_ipc" in str(error)
            bench.succeed(fine)


def test_refused_peer_access_leaves_the_way_through_the_host(gpus: int, spy: Spy) -> None:
    cannot = cuda.load()._d.CUresult.CUDA_SUCCESS, 0
    spy.replace("cuDeviceCanAccessPeer", lambda *_: cannot)
    with rig(here="1", nvlinks=4) as bench, pytest.raises(PathError) as caught:
        bench.open(bench.source(4096))
    assert "may not read" in str(caught.value) and caught.value.peer == PEER


def test_a_map_that_is_refused_leaves_the_way_through_the_host(gpus: int, spy: Spy) -> None:
    with rig("pcie_p2p", Kind.GPU_VMM, "0", "1") as bench:
        source = bench.source(3 * MIB)
        # The driver reports peer access, and then a mapping for the peer fails.
        spy.fail("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")
        session = bench.open(source)
        destination = bench.destination(3 * MIB)
        bench.succeed(bench.read(session, 0, 0, destination))
        assert bench.peek(destination) == source.memories[0].expected
        assert not spy.calls["cuMemcpyDtoDAsync"]
        del destination


def test_beside_nvlink_pcie_goes_through_the_host(gpus: int, spy: Spy) -> None:
    with rig("pcie_p2p", Kind.GPU_VMM, "0", "1", nvlinks=4) as bench:
        session = bench.open(bench.source(3 * MIB))
        bench.succeed(bench.read(session, 0, 0, bench.destination(3 * MIB)))
        assert not spy.calls["cuMemcpyDtoDAsync"]


def test_between_two_hosts_memories_it_is_refused() -> None:
    with rig("pcie_p2p", Kind.SEALED, "cpu", "cpu") as bench:
        with pytest.raises(PathError, match="GPU") as caught:
            bench.open(bench.source(4096))
        assert caught.value.peer == PEER


def test_destinations_elsewhere_are_refused(gpus: int) -> None:
    with rig() as bench:
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


@pytest.mark.parametrize("path", ["generation", "revoked", "closed"])
def test_what_was_on_its_way_is_not_believed_either(path: str) -> None:
    """All of the read's copies have been queued when its memory changes hands."""
    nbytes = copier.STAGES * gpu_rig.STEP_BYTES
    with rig() as bench:
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
