"""Device memory by virtual memory management, exported and imported as POSIX file descriptors.

Allocations and addresses are separate. The order of the calls follows the CUDA programming guide's
chapter on virtual memory management: create, reserve, map, set access; and back: unmap, release,
free the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.cuda.device import Device, Mapping
from mx.cuda.driver import Driver
from mx.cuda.errors import CudaError
from mx.units import align_up


class VmmMemory(Mapping):
    """Device memory in one range of addresses, backed by one or more allocations in order.

    `address` and `nbytes` are the range; `device` may read and write all of it. Exported
    descriptors, and maps that other processes made of them, outlive it.
    """

    def __init__(self, device: Device, handles: Sequence[int], sizes: Sequence[int]) -> None:
        """Map allocations one behind the other.

        Args:
            device: The GPU.
            handles: The allocations, which this object takes over even if it raises.
            sizes: Their sizes in bytes.

        Raises:
            CudaError: The driver fails.
        """
        super().__init__()
        driver, last_work = device.driver, self._last_work
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
                last_work.wait(driver)
                _unmap(driver, address, sizes)
                for handle in handles:
                    driver.vmm_release(handle)
                driver.vmm_unreserve(address, nbytes)

            self._owns(device, free)

    @classmethod
    def allocate(cls, device: Device, nbytes: int) -> VmmMemory:
        """Return new memory of at least `nbytes` (> 0), rounded up to the device's granularity.

        It is lent to the engine.

        Raises:
            CudaMemoryError: There is too little memory.
        """
        driver = device.driver
        with device.current():
            size = align_up(nbytes, driver.vmm_granularity(device.ordinal))
            handle = driver.vmm_create(device.ordinal, size)
        memory = cls(device, [handle], [size])
        memory.lend()
        return memory

    @classmethod
    def from_fds(
        cls, device: Device, descriptors: Sequence[int], sizes: Sequence[int]
    ) -> VmmMemory:
        """Import allocations of another process, mapped one behind the other.

        Args:
            device: The GPU that they are on.
            descriptors: Their descriptors, which the caller keeps and may close at once.
            sizes: Their sizes in bytes.

        Raises:
            CudaError: The driver fails.
        """
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
    # The driver unmaps only ranges as they were mapped.
    for size in sizes:
        driver.vmm_unmap(address, size)
        address += size
