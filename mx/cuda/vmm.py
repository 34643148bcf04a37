"""Device memory by virtual memory management, exported and imported as POSIX file descriptors.

Allocations and addresses are separate. The order of the calls follows the CUDA programming guide's
chapter on virtual memory management: create, reserve, map, set access; and back: unmap, release,
free the addresses.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mx.contexts import Undo
from mx.cuda.device import Device, LastWork, Mapping, giving_back, relaxed
from mx.cuda.driver import DeviceAttribute
from mx.errors import ConfigError, LocalError
from mx.units import MIB, align_up, format_bytes

#: A range at a given address, and that address, are multiples of this: a driver of CUDA 13.0
#: (580.159, H200) has all others where it likes.
FIXED_BYTES = 32 * MIB
#: What stands for a GPU's UUID where memory is the host's.
HOST = "host"


if TYPE_CHECKING:
    from mx.cuda.bindings import Driver


class OccupiedError(LocalError):
    """Memory can't be where it has to be: something else is at these addresses."""


class VmmMemory(Mapping):
    """Device memory in one range of addresses, backed by one or more allocations in order.

    `address` and `nbytes` are the range; `device` may read and write all of it. Exported
    descriptors, and maps that other processes made of them, outlive it.
    """

    def __init__(
        self,
        device: Device,
        handles: Sequence[int],
        sizes: Sequence[int],
        last_work: LastWork | None = None,
        *,
        base: int = 0,
        nbytes: int = 0,
    ) -> None:
        """Map allocations one behind the other.

        Args:
            device: The GPU.
            handles: The allocations, which this object takes over even if it raises. With none of
                them `map` maps some later.
            sizes: Their sizes in bytes.
            last_work: See `Mapping`.
            base: The address to map them at, 0 for any.
            nbytes: The size of the range, 0: that of the allocations.

        Raises:
            OccupiedError: The addresses from `base` on are not free.
            CudaError: The driver fails.
        """
        super().__init__(last_work)
        driver, last_work = device.driver, self._last_work
        self.nbytes = nbytes or sum(sizes)
        self._undo = undo = contextlib.ExitStack()

        def free() -> None:
            with undo:  # a call that is refused stops none of the others
                last_work.wait(driver)

        with device.current(), Undo(undo.close):
            for handle in handles:
                undo.callback(driver.vmm_release, handle)
            reserved = align_up(self.nbytes, FIXED_BYTES) if base else self.nbytes
            self.address = at = driver.vmm_reserve(reserved, base)
            undo.callback(driver.vmm_unreserve, at, reserved)
            if base and at != base:  # the address was a hint
                raise OccupiedError(
                    f"the {format_bytes(self.nbytes)} of addresses from {base:#x} on are in use "
                    "in this process",
                    hint="open the region before other memory is allocated",
                )
            for handle, size in zip(handles, sizes, strict=True):
                self._map(at, size, handle, device)
                at += size
            if handles:
                driver.vmm_set_access(self.address, self.nbytes, device.ordinal)
            self._owns(device, free)

    def _map(self, address: int, nbytes: int, handle: int, device: Device) -> None:
        device.driver.vmm_map(address, nbytes, handle)
        self._undo.callback(device.driver.vmm_unmap, address, nbytes)  # only as it was mapped

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map an allocation at an address of the range, where it can't be accessed yet.

        Args:
            address: Where.
            nbytes: Its size.
            handle: The allocation, which this object takes over even if it raises.

        Raises:
            CudaError: The driver fails.
        """
        self._undo.callback(self.device.driver.vmm_release, handle)
        self._map(address, nbytes, handle, self.device)

    @classmethod
    def allocate(cls, device: Device, nbytes: int, base: int = 0) -> VmmMemory:
        """Return new memory of at least `nbytes` (> 0), rounded up to the device's granularity.

        It is lent to the engine.

        Args:
            device: The GPU.
            nbytes: The bytes that are needed.
            base: The address to have them at, a multiple of `FIXED_BYTES`; 0 for any.

        Raises:
            CudaMemoryError: There is too little memory.
            OccupiedError: The addresses from `base` on are not free.
        """
        driver = device.driver
        with device.current():
            size = align_up(nbytes, driver.vmm_granularity(device.ordinal))
            handle = driver.vmm_create(device.ordinal, size)
        memory = cls(device, [handle], [size], base=base)
        memory.lend()
        return memory


class DriverHostMemory:
    """Host memory that the driver made, and other processes import by a descriptor: it is pinned
    from the first, so that nothing has to be registered for copies to GPUs. It needs no context.

    `address` is writable for the processors, for `nbytes`, a multiple of the driver's granularity.
    It is freed with this object; maps of other processes outlive it.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """
        Args:
            driver: The driver. The memory is of the NUMA node of its first GPU.
            nbytes: How many bytes are needed, more than 0.

        Raises:
            ConfigError: The driver makes no such memory.
            CudaError: It fails.
        """
        if not driver.device_attribute(0, DeviceAttribute.HOST_NUMA_VMM):
            raise ConfigError(
                "this driver makes no host memory that can be shared (HOST_NUMA)",
                hint="leave out `pinned`",
            )
        node = max(0, driver.device_attribute(0, DeviceAttribute.HOST_NUMA_ID))
        with relaxed(driver), contextlib.ExitStack() as undo:
            self.nbytes = size = align_up(nbytes, driver.vmm_granularity(node, host=True))
            handle = driver.vmm_create(node, size, host=True)
            undo.callback(driver.vmm_release, handle)
            self.address = address = driver.vmm_reserve(size)
            undo.callback(driver.vmm_unreserve, address, size)
            driver.vmm_map(address, size, handle)
            undo.callback(driver.vmm_unmap, address, size)
            driver.vmm_set_access(address, size, node, host=True)
            self._finalizer = weakref.finalize(self, _free, driver, undo.pop_all())
        self._finalizer.atexit = False  # the process's end frees it
        _made.add(self)


def _free(driver: Driver, ends: contextlib.ExitStack) -> None:
    with giving_back(), relaxed(driver), ends:
        pass  # it is freed as the block ends


#: All of this process.
_made: weakref.WeakSet[DriverHostMemory] = weakref.WeakSet()


def driver_host_memory(address: int) -> DriverHostMemory | None:
    """Return the memory that the driver made which an address is in; None for other memory."""
    return next((m for m in _made if m.address <= address < m.address + m.nbytes), None)
