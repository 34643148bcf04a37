"""The source side of the GPU transports: each allocation is exported once, to one's own uid.

A CUDA IPC handle or a descriptor stays valid once it was handed out. So when a grant ends, the
source notifies the reader, which unmaps and closes the connection. The exposure's `join` waits for
that, and its memory stays until then: freeing what another process has opened by a legacy handle is
undefined (CUDA driver API, cuIpcOpenMemHandle).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence

from mx.contexts import Undo
from mx.cuda import driver as cuda
from mx.cuda.device import Device, relaxed
from mx.cuda.errors import GONE_CODES, CudaError
from mx.cuda.vmm import HOST, DriverHostMemory, driver_host_memory
from mx.errors import LocalError
from mx.transport import DeviceView, ExposedRegion, ExposeOptions, ScatteredView
from mx.views import located_spans
from mx_transports.toolkit import kernel
from mx_transports.toolkit.cuda import wire
from mx_transports.toolkit.cuda.places import ScatterTable
from mx_transports.toolkit.cuda.wire import Allocation, Export, RegionKind, RemoteRegion
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.local import BATCH, LocalExposure
from mx_transports.toolkit.stream import SocketStream


class Exports:
    """The allocations that some spans of GPU memory lie in, ready to be handed out.

    VMM allocations are held by handles of their own: their memory stays, whatever becomes of its
    addresses. That of cuMemAlloc lives as long as the spans' owners, which the caller keeps.
    """

    def __init__(
        self, spans: Sequence[DeviceView], host: Mapping[int, DriverHostMemory] | None = None
    ) -> None:
        """`host` is memory that the driver made, by address, to be exported too. Raises LocalError,
        CudaError or ConfigError where memory can't be exported."""
        self.driver = cuda.load() if spans or host else None
        self._devices: dict[str, Device] = {}
        self._handles: dict[int, int] = {}  # by base
        self._found: dict[int, Allocation] = {}
        with Undo(self.close):
            reached: dict[str, int] = {}  # the end of the last allocation, by device
            for span in sorted(spans, key=lambda span: span.address):
                at = max(span.address, reached.get(span.device, 0))
                reached[span.device] = self._cover(span.device, at, span.address + len(span))
            for made in (host or {}).values():
                assert self.driver is not None
                with relaxed(self.driver):
                    self._handles[made.address] = self.driver.vmm_retain(made.address)
                found = Allocation(Export.FD, HOST, made.address, made.nbytes)
                self._found[made.address] = found
        self.allocations = sorted(self._found.values(), key=lambda found: found.base)

    def _cover(self, key: str, at: int, end: int) -> int:
        """Find the allocations of some addresses of a GPU; return where the last one ends."""
        driver = self.driver
        assert driver is not None
        if at >= end:
            return at
        device = self._devices.get(key)
        if device is None:
            device = self._devices[key] = Device.open(driver, key)
        with device.current():
            while at < end:
                info = driver.pointer(at)
                if info.ordinal != device.ordinal:
                    raise LocalError(f"memory at {at:#x} is not on {key}")
                if info.base not in self._found:
                    self._found[info.base] = self._export(device, info)
                at = info.base + info.nbytes
        return at

    def _export(self, device: Device, info: cuda.PointerInfo) -> Allocation:
        driver = device.driver
        if info.ipc_capable:
            handle = driver.ipc_handle(info.base)
            return Allocation(Export.IPC, device.uuid, info.base, info.nbytes, handle)
        if info.fd_capable:
            self._handles[info.base] = driver.vmm_retain(info.base)
            return Allocation(Export.FD, device.uuid, info.base, info.nbytes)
        raise LocalError(
            f"the memory at {info.base:#x} of {device.key} can't be shared with other processes",
            hint="memory of a stream-ordered pool (cudaMallocAsync), or made without an exportable "
            "handle, can't; torch's own can",
        )

    @property
    def uuids(self) -> list[str]:
        return sorted({found.uuid for found in self.allocations})

    def descriptor(self, allocation: Allocation) -> int:
        """Return a new descriptor of an allocation that is exported by one. The caller closes
        it."""
        assert self.driver is not None
        with relaxed(self.driver):
            return self.driver.vmm_export_fd(self._handles[allocation.base])

    def close(self) -> None:
        for handle in self._handles.values():
            assert self.driver is not None
            # A context that has broken took it along.
            with contextlib.suppress(CudaError), relaxed(self.driver):
                self.driver.vmm_release(handle)
        self._handles.clear()
        for device in self._devices.values():
            device.close()
        self._devices.clear()


class GpuExposure(LocalExposure):
    """Regions of this process's memory, on GPUs or in the host, for processes of its uid.

    Raises:
        LocalError: There are too many regions, memory can't be exported, or there is no socket.
        CudaError: CUDA fails.
    """

    def __init__(
        self, name: str, magic: bytes, regions: Sequence[ExposedRegion], options: ExposeOptions
    ) -> None:
        if len(regions) > wire.MAX_ENTRIES:
            raise LocalError(f"{name} exposes at most {wire.MAX_ENTRIES} regions")
        self._on_lost = options.on_lost
        # Kept for the memory's sake: their owners free it.
        self._offered = list(regions)
        host = {each.index: memory for each in regions if (memory := _driver_made(each))}
        self._regions = [_described(region, region.index in host) for region in regions]
        self._exports = Exports(
            [
                span
                for region in regions
                for span in located_spans(region.view)
                if isinstance(span, DeviceView)
            ],
            {memory.address: memory for memory in host.values()},
        )
        try:
            super().__init__(name=f"mx-{name}-source", magic=magic, options=options)
        except LocalError:
            self._exports.close()
            raise
        self.start()

    def ticket_fields(self) -> dict[str, object]:
        return {**super().ticket_fields(), "gpus": self._exports.uuids}

    def end(self, grant: GrantState) -> None:
        """Ask the reader to let go. Its connection is not cut, since it may be copying."""
        grant.revoked = True
        self.changed(grant)
        for stream in grant.streams:
            stream.notify(wire.ENDED)

    def released(self) -> None:
        self._exports.close()
        self._offered.clear()

    # --- one reader's connection

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        hands = self._greet(stream, grant)
        busy, held, said = False, False, memoryview(bytearray(1))
        let_go_by = 0.0
        try:
            while True:
                try:
                    stream.fill(said)
                except TimeoutError:
                    if not grant.revoked or held:
                        continue
                    # A reader that does not listen has until now to end what it had begun.
                    let_go_by = let_go_by or time.monotonic() + self.stall_timeout_s
                    if time.monotonic() >= let_go_by:
                        return
                    continue
                if said == wire.WANTED:
                    self._hand_over(stream, hands, refuse=grant.revoked and not held)
                    continue
                # Who holds the memory beyond its session may be reading it at any time.
                held = held or said == wire.HELD
                if busy != (held or said == wire.BUSY):
                    busy = not busy
                    self.count_reads(grant, 1 if busy else -1)
        finally:
            if hands is not None:
                hands.close()
            if busy:
                self.count_reads(grant, -1)

    def _greet(self, stream: SocketStream, grant: GrantState) -> SocketStream | None:
        """Describe the memory to a reader. Return the socket for descriptors, if there are any."""
        allocations = self._exports.allocations
        if not self.send_control(
            stream, grant, wire.GREETING.pack(len(allocations), len(self._regions))
        ):
            return None
        stream.send_all([b"".join(found.pack() for found in allocations)])
        for first in range(0, len(self._regions), BATCH):
            regions = self._regions[first : first + BATCH]
            stream.send_descriptors(
                b"".join(region.pack() for region in regions),
                [region.descriptor for region in regions if region.where is RegionKind.MEMFD],
            )
        places = [region.places.pack() for region in self._regions if region.places is not None]
        stream.send_all([columns for columns in places if columns])
        if not any(found.export is Export.FD for found in allocations):
            stream.send_all([wire.HANDED])
            return None
        ours, theirs = socket.socketpair()
        hands = SocketStream(ours, self.stall_timeout_s)
        with theirs, Undo(hands.close):
            stream.send_descriptors(wire.HANDED, [theirs.fileno()])
        return hands

    def _hand_over(self, stream: SocketStream, hands: SocketStream | None, *, refuse: bool) -> None:
        """Send a reader the descriptors that it wants; `refuse`: none of them.

        Raises:
            OSError: It asks for what there is not, or the connection has ended.
        """
        count = stream.receive(1)[0]
        numbers = wire.NUMBER.iter_unpack(stream.receive(wire.NUMBER.size * count))
        descriptors: list[int] = []
        try:
            for (number,) in () if refuse else numbers:
                found = self._exports.allocations[number]
                descriptors.append(self._exports.descriptor(found))
            if hands is not None:
                hands.send_descriptors(wire.HANDED, descriptors)
        except LookupError as error:
            raise ConnectionAbortedError("a reader wants what there is not") from error
        except CudaError as error:
            if error.code in GONE_CODES:
                self._on_lost(error)
            raise ConnectionAbortedError(str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _driver_made(region: ExposedRegion) -> DriverHostMemory | None:
    """Return the memory of a region in the host that the driver made; None for other memory."""
    if not isinstance(region.view, memoryview) or not region.view:
        return None
    return driver_host_memory(region.address)


def _described(region: ExposedRegion, driver_made: bool) -> RemoteRegion:
    nbytes = len(region.view)
    if driver_made:
        return RemoteRegion(region.index, region.address, nbytes, RegionKind.DEVICE)
    if isinstance(region.view, ScatteredView):
        places = ScatterTable.of(region.view)
        return RemoteRegion(region.index, 0, nbytes, RegionKind.SCATTERED, places=places)
    if isinstance(region.view, DeviceView):
        return RemoteRegion(region.index, region.view.address, nbytes, RegionKind.DEVICE)
    # A descriptor of memory that can still be written is not handed out.
    if region.memfd is not None and kernel.fully_sealed(region.memfd):
        return RemoteRegion(region.index, region.address, nbytes, RegionKind.MEMFD, region.memfd)
    return RemoteRegion(region.index, region.address, nbytes, RegionKind.PROCESS)
