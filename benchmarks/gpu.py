"""Measures the GPU rows of the design's table against bare copies in the same process.

    PYTHONPATH=.:transports python -m benchmarks.gpu [--rounds 5] [--gib 8] [--resident-gb 100]

Sources are processes of their own; bare copies are the driver's calls on memory of this process,
in the same steps, without any messages: trips of 256 MiB, and steps of 64 MiB between the host and
a GPU, as in a pull. Rounds interleave them; a row is a ratio of medians. A measurement that does
not fit is scaled down and says so. Needs one GPU, cuda-bindings, and Triton for the digests.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mx import config
from mx.core.paths import FIRST_STREAMS
from mx.core.topology import Place
from mx.cuda import driver as cuda
from mx.cuda.device import CudaEvent, CudaStream, Device, DeviceMemory, PinnedMemory, PinnedRegion
from mx.errors import LocalError, MxError
from mx.testing import spans
from mx.transport import Grant, Piece, Read, Session, Span, Transport, Unavailable
from mx.units import GIB, MIB
from mx_transports.cuda_ipc import CudaIpcTransport
from mx_transports.pcie_p2p import PciePeerTransport
from mx_transports.toolkit.cuda.copier import DIRECT_STEP_BYTES
from mx_transports.toolkit.cuda.hosts import STEP_BYTES

from . import harness
from .processes import Child

#: Of a read, as a pull's trips have them.
READ_BYTES = 256 * MIB
#: GPU memory that the source does not serve, and that this process needs.
SPARE_BYTES = 4 * GIB

#: Serves argv[2] bytes of memory of kind argv[1] by the transport argv[3], and prints the ticket.
_SOURCE = f"""
import sys
from {__package__}.gpu import serve
serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
"""
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "cuda_ipc": CudaIpcTransport,
    "pcie_p2p": PciePeerTransport,
}


def serve(kind: str, nbytes: int, transport: str, device: str) -> None:
    """Run the source process until its standard input ends."""
    from mx.cuda.vmm import VmmMemory
    from mx.testing.memory import Kind, Memory
    from mx.transport import DeviceView, ExposedRegion, ExposeOptions

    with contextlib.ExitStack() as stack:
        if kind == "host":
            memory = Memory(nbytes, 1, Kind.SEALED)
            stack.callback(memory.close)
            region = memory.region(0)
        else:
            gpu = stack.enter_context(Device.open(cuda.load(), device))
            owner: DeviceMemory | VmmMemory
            owner = VmmMemory.allocate(gpu, nbytes) if kind == "vmm" else DeviceMemory(gpu, nbytes)
            stack.callback(owner.close)
            with CudaStream(gpu) as stream, gpu.current():
                gpu.driver.memset(owner.address, 0x5C, nbytes, stream.handle)
            view = DeviceView(gpu.key, owner.address, nbytes, owner)
            region = ExposedRegion(0, view, owner.address, gpu.key)
        exposure = TRANSPORTS[transport]().expose([region], ExposeOptions())
        exposure.set_generation(1)
        print(exposure.grant("bench").hex(), flush=True)
        sys.stdin.read()
        exposure.close()
        exposure.join()
        # Views of the memory must be dropped before the memory.
        del region


@dataclass
class Remote:
    """A source in its own process, which a session opens from `place`."""

    transport: Transport
    ticket: bytes
    nbytes: int
    place: Place

    def open(self) -> Session:
        streams = config.load().streams
        return self.transport.open(
            Grant(
                *("bench", self.ticket, 1, (self.nbytes,), "source"),
                place=self.place,
                streams=streams if isinstance(streams, int) else FIRST_STREAMS,
            )
        )


@contextlib.contextmanager
def remote(
    kind: str, nbytes: int, transport: str, device: Device, place: Place
) -> Iterator[Remote]:
    child = Child("-c", _SOURCE, kind, str(nbytes), transport, device.key)
    try:
        yield Remote(TRANSPORTS[transport](), bytes.fromhex(child.hear()), nbytes, place)
    finally:
        child.close()


class _Countdown:
    """A sink that waits for the end of many reads."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.error: MxError | None = None

    def landed(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self.ended.set()

    def failed(self, error: MxError) -> None:
        self.error = error
        self.ended.set()


def read_all(session: Session, target: Span) -> float:
    """Return the seconds to read region 0 into `target`, by trips as in a pull."""
    starts = range(0, len(target), READ_BYTES)
    sink = _Countdown(len(starts))
    begun_s = time.perf_counter()
    session.read(
        [
            Read(f"at {at}", [Piece(0, at, target[at : min(at + READ_BYTES, len(target))])], sink)
            for at in starts
        ]
    )
    sink.ended.wait()
    seconds = time.perf_counter() - begun_s
    if sink.error is not None:
        raise sink.error
    return seconds


Copy = Callable[[int, int, int, int], None]


def bare(
    device: Device, copy: Copy, target: int, source: int, nbytes: int, step_nbytes: int
) -> float:
    """Return the seconds for the driver's copies alone, in the same steps, on one stream."""
    with CudaStream(device) as stream, CudaEvent(device) as event:
        begun_s = time.perf_counter()
        with device.current():
            for at in range(0, nbytes, step_nbytes):
                copy(target + at, source + at, min(step_nbytes, nbytes - at), stream.handle)
        event.record(stream)
        event.synchronize()
        return time.perf_counter() - begun_s


def attach_row(device: Device, place: Place, resident: int, rounds: int) -> list[harness.Row]:
    """Measure opening and attaching, and read both ends of the attached memory."""
    free, _ = device.memory_info()
    nbytes = min(resident, free - SPARE_BYTES) // MIB * MIB
    rows = []
    for kind in ("vmm", "legacy"):
        with remote(kind, nbytes, "cuda_ipc", device, place) as source:

            def once(source: Remote = source) -> float:
                begun_s = time.perf_counter()
                session = source.open()
                view = session.attach(0)
                seconds = time.perf_counter() - begun_s
                ends = (view[:1], view[len(view) - 1 :])
                assert all(spans.peek(end) == b"\x5c" for end in ends)
                session.close()
                session.join()
                return seconds

            samples = harness.interleave({"attach": once}, rounds)
        value = harness.median(samples, "attach") * 1e3
        work = f"same-GPU attach, {nbytes / 1e9:.1f} GB resident, {kind}"
        rows.append(harness.at_most(work, value, "ms", 60, "", samples, digits=2))
    return rows


def device_copy_row(device: Device, place: Place, nbytes: int, rounds: int) -> harness.Row:
    driver = device.driver
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(remote("vmm", nbytes, "cuda_ipc", device, place))
        # Memory of this process for the bare copy; both have the same target.
        own = stack.enter_context(DeviceMemory(device, nbytes))
        target = spans.destination(nbytes, device.key)
        session = source.open()
        try:
            samples = harness.interleave(
                {
                    "mx": lambda: read_all(session, target),
                    "bare": lambda: bare(
                        *(device, driver.copy_dtod, _address(target), own.address),
                        *(nbytes, DIRECT_STEP_BYTES),
                    ),
                },
                rounds,
            )
        finally:
            session.close()
            session.join()
    return harness.ratio("device copy", samples, "bare", 0.9, nbytes)


def host_rows(device: Device, place: Place, nbytes: int, rounds: int) -> list[harness.Row]:
    """Measure host to device and back, against copies from and to pinned memory."""
    driver, rows = device.driver, []
    on_host = replace(place, device="cpu")
    with PinnedMemory(device, nbytes) as pinned, DeviceMemory(device, nbytes) as own:
        target = spans.destination(nbytes, device.key)
        room = spans.destination(nbytes)
        paths: list[tuple[str, str, Place, Span, Callable[[], float]]] = [
            (
                "host to device",
                "host",
                place,
                target,
                lambda: bare(
                    device, driver.copy_htod, own.address, pinned.address, nbytes, STEP_BYTES
                ),
            ),
            (
                "device to host",
                "vmm",
                on_host,
                room,
                lambda: bare(
                    device, driver.copy_dtoh, pinned.address, own.address, nbytes, STEP_BYTES
                ),
            ),
        ]
        for work, kind, here, into, reference in paths:
            with remote(kind, nbytes, "pcie_p2p", device, here) as source:
                session = source.open()

                def ours(session: Session = session, into: Span = into) -> float:
                    return read_all(session, into)

                try:
                    samples = harness.interleave({"mx": ours, "bare": reference}, rounds)
                finally:
                    session.close()
                    session.join()
            rows.append(harness.ratio(work, samples, "bare", 0.9, nbytes))
        rows.append(_registered_row(device, own.address, nbytes, rounds))
    return rows


def _registered_row(device: Device, target: int, nbytes: int, rounds: int) -> harness.Row:
    """Measure pinning a source's memfd in place, to compare it with copying through slots."""
    descriptor = os.memfd_create("mx-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        with mmap.mmap(descriptor, nbytes) as mapped:
            mapped.write(b"\x5c" * nbytes)
            anchor = ctypes.c_char.from_buffer(mapped)
            address = ctypes.addressof(anchor)

            def once() -> float:
                begun_s = time.perf_counter()
                with PinnedRegion(device, address, nbytes):
                    bare(device, device.driver.copy_htod, target, address, nbytes, STEP_BYTES)
                    return time.perf_counter() - begun_s

            samples = harness.interleave({"register and copy": once}, rounds)
            del anchor
    finally:
        os.close(descriptor)
    speed = nbytes / harness.median(samples, "register and copy") / 1e9
    work = "host to device, a memfd pinned for it and copied"
    return harness.shown(work, speed, "GB/s", "for comparison", samples)


def digest_row(device: Device, nbytes: int, rounds: int) -> harness.Row:
    """Measure digests of 1 MiB blocks, in the batches that a trip makes."""
    from mx.cuda.digest import BlockDigester

    with DeviceMemory(device, nbytes) as memory:
        digester = BlockDigester(device)
        try:

            def once() -> float:
                begun_s = time.perf_counter()
                for start in range(0, nbytes, READ_BYTES):
                    end = min(start + READ_BYTES, nbytes)
                    blocks = range(start, end, MIB)
                    digester.digests([(memory.address + at, min(MIB, end - at)) for at in blocks])
                return time.perf_counter() - begun_s

            samples = harness.interleave({"digests": once}, rounds)
        finally:
            digester.close()
    speed = nbytes / harness.median(samples, "digests") / 1e9
    return harness.shown("digests on the device", speed, "GB/s", "", samples)


def run(*, nbytes: int, resident: int, rounds: int) -> list[harness.Row]:
    """Measure and return all rows. Raises LocalError if there is no CUDA."""
    found = cuda.probe()
    if isinstance(found, Unavailable):
        raise LocalError(found.reason)
    harness.say(found.detail)
    rows: list[harness.Row] = []
    with Device(cuda.load(), 0) as device:
        # On a machine with one GPU a session uses only the device of its place.
        place = Place(device=device.key)
        steps: list[Callable[[], Sequence[harness.Row]]] = [
            lambda: attach_row(device, place, resident, rounds),
            lambda: [device_copy_row(device, place, nbytes, rounds)],
            lambda: host_rows(device, place, nbytes, rounds),
            lambda: [digest_row(device, nbytes, rounds)],
        ]
        for step in steps:
            try:
                rows += step()
            except MxError as error:
                harness.say(f"a row could not be measured: {error}")
    return rows


def _address(span: Span) -> int:
    assert not isinstance(span, memoryview)
    return span.address


def main() -> None:
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--gib", type=float, default=4.0, help="of the copies")
    parser.add_argument("--resident-gb", type=float, default=100.0, help="of what is attached")
    given = parser.parse_args()
    try:
        rows = run(
            nbytes=int(given.gib * GIB) // MIB * MIB,
            resident=int(given.resident_gb * 1e9),
            rounds=given.rounds,
        )
    except LocalError as error:
        raise SystemExit(f"no GPU rows: {error}") from None
    harness.show(rows, as_json=given.json)


if __name__ == "__main__":
    main()
