"""Device memory by virtual memory management, exported and imported as POSIX file descriptors.

Allocations and addresses are separate. The order of the calls follows the CUDA programming guide's
chapter on virtual memory management: create, reserve, map, set access; and back: unmap, release,
free the addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mx.cuda.device import Device, LastWork, Mapping
from mx.errors import LocalError
from mx.units import MIB, align_up, format_bytes

#: A range at a given address, and that address, are multiples of this: a driver of CUDA 13.0
#: (580.159, H200) has all others where it likes.
FIXED_BYTES = 32 * MIB


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
    ) -> None:
        """Map allocations one behind the other.

        Args:
            device: The GPU.
            handles: The allocations, which this object takes over even if it raises.
            sizes: Their sizes in bytes.
            last_work: See `Mapping`.
            base: The address to map them at, 0 for any.

        Raises:
            OccupiedError: The addresses from `base` on are not free.
            CudaError: The driver fails.
        """
        super().__init__(last_work)
        driver = device.driver
        self.nbytes = sum(sizes)
        # A call that is refused stops none of the others.
        with device.current(), contextlib.ExitStack() as undo:
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
                driver.vmm_map(at, size, handle)
                undo.callback(driver.vmm_unmap, at, size)  # only ranges as they were mapped
                at += size
            driver.vmm_set_access(self.address, self.nbytes, device.ordinal)
            undo.callback(self._last_work.wait, driver)
            self._owns(device, undo.pop_all().close)

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
