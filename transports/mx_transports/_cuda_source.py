"""The source side of the GPU transports: each allocation is exported once, to one's own uid.

A CUDA IPC handle or a descriptor is good for ever once it was handed out; so what a reader gets is
withdrawn by asking: it is told on its connection that the grant has ended, lets go, and closes.
The exposure's `join` waits for that, and its memory stays until then: freeing what another process
has opened by a legacy handle is undefined (CUDA driver API, cuIpcOpenMemHandle).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence

from mx.cuda import driver as cuda
from mx.cuda.device import Device
from mx.cuda.errors import CudaError
from mx.errors import LocalError
from mx.transport import DeviceView, ExposedRegion, ExposeOptions
from mx_transports import _cuda_wire as wire
from mx_transports import _vm as vm
from mx_transports._control import Controls, peer_credentials
from mx_transports._cuda_wire import Allocation, Export, Region, Where
from mx_transports._door import DoorExposure, Granted
from mx_transports._listeners import Listener
from mx_transports._stream import Stream


class Exports:
    """The allocations that some spans of GPU memory lie in, ready to be handed out.

    VMM allocations are held by handles of their own: their memory stays, whatever becomes of its
    addresses. That of cuMemAlloc lives as long as the spans' owners, which the caller keeps.
    """

    def __init__(self, spans: Sequence[DeviceView]) -> None:
        """Raises LocalError, CudaError or ConfigError where memory can't be exported."""
        self.driver = cuda.load() if spans else None
        self._devices: dict[str, Device] = {}
        self._handles: dict[int, int] = {}  # by base
        self._found: dict[int, Allocation] = {}
        try:
            for span in spans:
                self._cover(span)
        except BaseException:
            self.close()
            raise
        self.allocations = sorted(self._found.values(), key=lambda found: found.base)

    def _cover(self, span: DeviceView) -> None:
        driver = self.driver
        assert driver is not None
        device = self._devices.get(span.device)
        if device is None:
            device = self._devices[span.device] = Device.open(driver, span.device)
        at, end = span.address, span.address + span.nbytes
        with device.current():
            while at < end:
                info = driver.pointer(at)
                if info.ordinal != device.ordinal:
                    raise LocalError(f"memory at {at:#x} is not on {span.device}")
                if info.base not in self._found:
                    self._found[info.base] = self._export(device, info)
                at = info.base + info.nbytes

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
            hint="memory of a stream-ordered pool (cudaMallocAsync) can't; torch's own can",
        )

    @property
    def uuids(self) -> list[str]:
        return sorted({device.uuid for device in self._devices.values()})

    def descriptor(self, allocation: Allocation) -> int:
        """A new descriptor of an allocation exported so; the caller's to close."""
        assert self.driver is not None
        return self.driver.vmm_export_fd(self._handles[allocation.base])

    def synchronize(self) -> None:
        """Wait for whatever writes to the memory now."""
        for device in self._devices.values():
            device.synchronize()

    def close(self) -> None:
        for handle in self._handles.values():
            assert self.driver is not None
            # A context that has broken took it along.
            with contextlib.suppress(CudaError):
                self.driver.vmm_release(handle)
        self._handles.clear()
        for device in self._devices.values():
            device.close()
        self._devices.clear()


class GpuExposure(DoorExposure):
    """Regions of this process's memory, on GPUs or in the host, for processes of its uid."""

    def __init__(
        self, name: str, magic: bytes, regions: Sequence[ExposedRegion], options: ExposeOptions
    ) -> None:
        """Raises LocalError, CudaError where something can't be exported."""
        if len(regions) > wire.MAX_ENTRIES:
            raise LocalError(f"{name} exposes at most {wire.MAX_ENTRIES} regions")
        # Kept for the memory's sake: their owners free it.
        self._offered = list(regions)
        self._exports = Exports(
            [region.view for region in regions if isinstance(region.view, DeviceView)]
        )
        self._regions = [_described(region) for region in regions]
        self._exports.synchronize()
        self._socket_name = f"mx-{name}-{secrets.token_hex(16)}"
        self._controls = Controls()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(b"\0" + self._socket_name.encode())
            listener.listen(256)
            super().__init__(
                name=f"mx-{name}-source",
                magic=magic,
                listeners=[Listener(listener)],
                stall_timeout_s=options.stall_timeout_s,
            )
        except OSError as error:
            listener.close()
            self._exports.close()
            raise LocalError(f"{name}: no socket for readers: {error.strerror}") from error
        self._start()

    def set_generation(self, generation: int) -> None:
        # What the new generation stands for may still be on its way into the memory.
        self._exports.synchronize()
        super().set_generation(generation)

    def _allowed(self, sock: socket.socket) -> bool:
        return peer_credentials(sock)[1] == os.geteuid()

    def _ticket_fields(self) -> dict[str, object]:
        pid = os.getpid()
        return {
            "socket": self._socket_name,
            "pid": pid,
            "start_ticks": vm.start_ticks(pid),
            "gpus": self._exports.uuids,
        }

    def _changed(self, granted: Granted) -> None:
        self._controls.write(granted.key, self._generation, granted.revoked)

    def _end(self, granted: Granted) -> None:
        """The reader is asked to let go, not cut off: it may be copying."""
        granted.revoked = True
        self._changed(granted)
        for stream in granted.streams:
            stream.notify(wire.ENDED)

    def _released(self) -> None:
        self._exports.close()
        self._offered.clear()

    # --- one reader's connection

    def _serve(self, stream: Stream, granted: Granted) -> None:
        self._greet(stream, granted)
        busy, held, said = False, False, memoryview(bytearray(1))
        let_go_by = 0.0
        try:
            while True:
                try:
                    stream.fill(said)
                except TimeoutError:
                    if not granted.revoked or held:
                        continue
                    # A reader that does not listen has until now to end what it had begun.
                    let_go_by = let_go_by or time.monotonic() + self._stall_timeout_s
                    if time.monotonic() >= let_go_by:
                        return
                    continue
                # Who holds the memory beyond its session may be reading it at any time.
                held = held or said == wire.HELD
                if busy != (held or said == wire.BUSY):
                    busy = not busy
                    with self._lock:
                        granted.busy += 1 if busy else -1
        finally:
            if busy:
                with self._lock:
                    granted.busy -= 1

    def _greet(self, stream: Stream, granted: Granted) -> None:
        with self._lock:
            if granted.revoked:
                return
            control = self._controls.descriptor(granted.key, self._generation)
        allocations = self._exports.allocations
        sizes = wire.GREETING.pack(len(allocations), len(self._regions))
        try:
            stream.send_descriptors(sizes, [control])
        finally:
            os.close(control)
        for first in range(0, len(allocations), wire.BATCH):
            batch = allocations[first : first + wire.BATCH]
            descriptors: list[int] = []
            try:
                for found in batch:
                    if found.export is Export.FD:
                        descriptors.append(self._exports.descriptor(found))
                stream.send_descriptors(b"".join(found.pack() for found in batch), descriptors)
            except CudaError as error:
                raise ConnectionAbortedError(str(error)) from error
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        for first in range(0, len(self._regions), wire.BATCH):
            part = self._regions[first : first + wire.BATCH]
            stream.send_descriptors(
                b"".join(region.pack() for region in part),
                [region.descriptor for region in part if region.where is Where.MEMFD],
            )


def _described(region: ExposedRegion) -> Region:
    if isinstance(region.view, DeviceView):
        return Region(region.index, region.view.address, region.view.nbytes, Where.DEVICE)
    sealed = region.memfd is not None and vm.seals(region.memfd) & vm.FULL_SEALS == vm.FULL_SEALS
    # A descriptor of memory that can still be written is not handed out.
    if sealed and region.memfd is not None:
        nbytes = len(region.view)
        return Region(region.index, region.address, nbytes, Where.MEMFD, region.memfd)
    return Region(region.index, region.address, len(region.view), Where.PROCESS)
