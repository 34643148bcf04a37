"""Another process's GPU memory at addresses of this one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mx.cuda.device import Device, IpcMemory, LastWork
from mx.cuda.vmm import VmmMemory
from mx.errors import PeerProtocolError
from mx_transports.toolkit.cuda.wire import Allocation, Export


@dataclass(frozen=True, slots=True)
class MappedRun:
    """Source addresses [base, base + nbytes) are at `address` here. `device` may reach them."""

    base: int
    nbytes: int
    address: int
    uuid: str
    device: Device


#: The device that is to map and copy memory of the GPU with this UUID.
DeviceFor = Callable[[str], Device]


class Maps:
    """Runs by source address. Adjacent allocations of VMM become one run, as they are at the
    source; an allocation of cuMemAlloc is one by itself (its handle opens at its base)."""

    def __init__(self, peer: str, device_for: DeviceFor) -> None:
        self._peer = peer
        self._device_for = device_for
        self._taken: list[tuple[Allocation, int]] = []
        self._runs: list[MappedRun] = []
        self._bases: list[int] = []
        self._memories: list[IpcMemory | VmmMemory] = []
        self._last_work: dict[str, LastWork] = {}  # by the UUID of the GPU that maps

    def take(self, allocation: Allocation, descriptor: int = -1) -> None:
        """Add an allocation for `open` to open.

        Args:
            allocation: The allocation, as the source exported it.
            descriptor: Its descriptor, if it is exported by one. The caller closes it at once: a
                source may have more allocations than this process may have descriptors.

        Raises:
            CudaError: CUDA fails.
        """
        handle = 0
        if allocation.export is Export.FD:
            device = self._device_for(allocation.uuid)
            with device.current():
                handle = device.driver.vmm_import_fd(descriptor)
        self._taken.append((allocation, handle))

    def open(self, *, own: bool) -> None:
        """Open all allocations that were added.

        Args:
            own: Whether the source is this process. Then CUDA opens no legacy handles of it, and
                its addresses are used as they are.

        Raises:
            CudaError: CUDA fails. `close` undoes what was done.
            PeerProtocolError: The source's memory is not what it said.
        """
        self._taken.sort(key=lambda pair: pair[0].base)
        for before, after in itertools.pairwise(self._taken):
            if before[0].end > after[0].base:
                raise PeerProtocolError(
                    f"{self._peer}: its list of allocations is malformed", peer=self._peer
                )
        for group in list(_groups(self._taken)):
            del self._taken[: len(group)]
            self._open([a for a, _ in group], [handle for _, handle in group], own)
        self._bases = [run.base for run in self._runs]

    def _open(self, group: list[Allocation], handles: list[int], own: bool) -> None:
        first = group[0]
        device = self._device_for(first.uuid)
        nbytes = group[-1].end - first.base
        last_work = self._last_work.setdefault(device.uuid, LastWork())
        if first.export is Export.FD:
            vmm = VmmMemory(device, handles, [a.nbytes for a in group], last_work)
            self._memories.append(vmm)
            address = vmm.address
        elif own:
            address = first.base
            if device.uuid != first.uuid:
                self._reach(device, first.uuid)
        else:
            memory = IpcMemory(device, first.handle, last_work)
            self._memories.append(memory)
            address = memory.address
        self._check(first, device, address, nbytes)
        self._runs.append(MappedRun(first.base, nbytes, address, first.uuid, device))

    def _reach(self, device: Device, uuid: str) -> None:
        with Device.open(device.driver, uuid) as other, device.current():
            device.driver.enable_peer_access(other.context)

    def _check(self, first: Allocation, device: Device, address: int, nbytes: int) -> None:
        """Check that what was mapped is what the source said: an access beyond its end would break
        this process's context for good.

        More than it said may be there: small allocations share a block, of which a handle opens the
        whole. Memory of VMM is as large as it was mapped here, or its map has failed."""
        with device.current():
            info = device.driver.pointer(address)
        there_nbytes = info.base + info.nbytes - address
        if first.export is Export.IPC and not (info.base <= address and nbytes <= there_nbytes):
            raise PeerProtocolError(
                f"{self._peer}: its allocation has {there_nbytes} bytes, not {nbytes}",
                peer=self._peer,
            )
        if device.uuid == first.uuid and info.ordinal != device.ordinal:
            raise PeerProtocolError(
                f"{self._peer}: its memory is not on {first.uuid}, as it said", peer=self._peer
            )

    def check(self, address: int, nbytes: int) -> None:
        """Raise PeerProtocolError if not all of these source addresses are mapped."""
        if sum(n for _, _, n in self.pieces(address, nbytes)) != nbytes:
            raise PeerProtocolError(
                f"{self._peer}: a region lies outside of its allocations", peer=self._peer
            )

    def pieces(self, address: int, nbytes: int) -> Iterator[tuple[MappedRun, int, int]]:
        """Yield (run, address here, nbytes) of source addresses, up to the first not mapped."""
        end = address + nbytes
        while address < end:
            index = bisect_right(self._bases, address) - 1
            if index < 0:
                return
            run = self._runs[index]
            take = min(end, run.base + run.nbytes) - address
            if take <= 0:
                return
            yield run, run.address + address - run.base, take
            address += take

    def lend(self) -> None:
        """Let an engine compute with what is mapped: `close` waits for its work."""
        for last_work in self._last_work.values():
            last_work.unknown = True

    def close(self) -> None:
        """Unmap everything. Idempotent. Raises CudaError."""
        memories, self._memories = self._memories, []
        taken, self._taken = self._taken, []
        for allocation, handle in taken:
            if handle:
                device = self._device_for(allocation.uuid)
                with device.current():
                    device.driver.vmm_release(handle)
        self._runs.clear()
        self._bases.clear()
        for device in {memory.device for memory in memories}:
            with device.closing():
                for memory in memories:
                    if memory.device is device:
                        memory.close()


def _groups(pairs: Sequence[tuple[Allocation, int]]) -> Iterator[list[tuple[Allocation, int]]]:
    """Yield groups that can be mapped at once: adjacent allocations of VMM on one GPU."""
    group: list[tuple[Allocation, int]] = []
    for found, descriptor in pairs:
        if group:
            last = group[-1][0]
            joined = last.export is found.export is Export.FD and last.uuid == found.uuid
            if not joined or last.end != found.base:
                yield group
                group = []
        group.append((found, descriptor))
    if group:
        yield group
