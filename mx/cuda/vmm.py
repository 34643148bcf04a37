"""Device memory by virtual memory management: allocations apart from addresses, exported and
imported as POSIX file descriptors.

The order of the calls follows the CUDA programming guide's chapter on virtual memory management:
create, reserve, map, set access; and back: unmap, release, free the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.cuda.device import Device, Owned
from mx.cuda.driver import Driver
from mx.cuda.errors import CudaError
from mx.units import align_up


class VmmMemory(Owned):
    """Device memory in one range of addresses, backed by one or more allocations in order.

    `address` and `nbytes` are the range, of which `device` may read and write all. `close` waits
    for the device's work first, since a kernel that meets an unmapped page breaks the context.
    Exported descriptors, and what others have mapped of them, outlive it.
    """

    def __init__(self, device: Device, handles: Sequence[int], sizes: Sequence[int]) -> None:
        """Takes over `handles`, allocations of `sizes` bytes, also where it raises CudaError."""
        driver = device.driver
        self.nbytes = nbytes = sum(sizes)
        self._handles = tuple(handles)
        with device.current():
            try:
                self.address = address = _map(driver, device.ordinal, handles, sizes)
            except BaseException:
                for handle in handles:
                    driver.vmm_release(handle)
                raise

            def free() -> None:
                driver.context_synchronize()
                _unmap(driver, address, sizes)
                for handle in handles:
                    driver.vmm_release(handle)
                driver.vmm_unreserve(address, nbytes)

            self._owns(device, free)

    @classmethod
    def allocate(cls, device: Device, nbytes: int) -> VmmMemory:
        """New memory of at least `nbytes` (> 0), rounded up to the device's granularity. Raises
        CudaMemoryError."""
        driver = device.driver
        with device.current():
            size = align_up(nbytes, driver.vmm_granularity(device.ordinal))
            handle = driver.vmm_create(device.ordinal, size)
        return cls(device, [handle], [size])

    @classmethod
    def from_fds(
        cls, device: Device, descriptors: Sequence[int], sizes: Sequence[int]
    ) -> VmmMemory:
        """Another process's allocations, mapped one behind the other. The descriptors stay the
        caller's, and may be closed at once. Raises CudaError."""
        driver = device.driver
        handles: list[int] = []
        with device.current():
            try:
                for descriptor in descriptors:
                    handles.append(driver.vmm_import_fd(descriptor))
            except BaseException:
                for handle in handles:
                    driver.vmm_release(handle)
                raise
        return cls(device, handles, sizes)


def _map(driver: Driver, ordinal: int, handles: Sequence[int], sizes: Sequence[int]) -> int:
    nbytes = sum(sizes)
    base = driver.vmm_reserve(nbytes)
    mapped = 0
    try:
        for handle, size in zip(handles, sizes, strict=True):
            driver.vmm_map(base + sum(sizes[:mapped]), size, handle)
            mapped += 1
        driver.vmm_set_access(base, nbytes, ordinal)
    except CudaError:
        _unmap(driver, base, sizes[:mapped])
        driver.vmm_unreserve(base, nbytes)
        raise
    return base


def _unmap(driver: Driver, address: int, sizes: Sequence[int]) -> None:
    # Range by range, as they were mapped: the driver takes no other.
    for size in sizes:
        driver.vmm_unmap(address, size)
        address += size
