"""Which GPU an address of device memory is on, and the owner's work on tensors in device memory."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable

from mx.cuda.device import Device, device_key
from mx.cuda.driver import load
from mx.cuda.errors import CudaError
from mx.errors import ConfigError

#: The legacy default stream (CU_STREAM_LEGACY). It waits for all streams but non-blocking ones, so
#: also for the default streams of other threads.
LEGACY_STREAM = 1
#: What the CUDA array interface calls a thread's own default stream: of which thread, it can't say.
_PER_THREAD_STREAM = 2


class Allocations(contextlib.ExitStack):
    """Finds the GPU of addresses: the driver is asked once for each allocation. A context manager,
    used by one thread, and while nothing is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: list[Device] | None = None
        self._begins: list[int] = []
        self._found: list[tuple[int, str]] = []  # where each ends, and its device

    def device_at(self, name: str, address: int) -> str:
        """Return "cuda:UUID" of the GPU whose memory this is.

        A thread needs a context to ask the driver, and this thread may have none: it is asked in
        the contexts that this process has. None is made on a GPU that it does not use.

        Args:
            name: What errors call the tensor.
            address: The address.

        Raises:
            ConfigError: It is not GPU memory, or was freed.
            CudaUnavailableError: There is no CUDA.
        """
        at = bisect_right(self._begins, address) - 1
        if at >= 0 and address < self._found[at][0]:
            return self._found[at][1]
        for device in self._used():
            try:
                with device.current():
                    info = device.driver.pointer(address)
            except CudaError:  # another context may know it
                continue
            key = next((d.key for d in self._used() if d.ordinal == info.ordinal), "")
            if key:
                at = bisect_right(self._begins, info.base)
                self._begins.insert(at, info.base)
                self._found.insert(at, (info.base + info.nbytes, key))
                return key
        raise ConfigError(
            f"{name} is at {address:#x}, which is not GPU memory of this process, or was freed"
        )

    def _used(self) -> list[Device]:
        if self._devices is None:
            driver = load()
            used = filter(driver.context_active, range(driver.device_count()))
            self._devices = [self.enter_context(Device(driver, ordinal)) for ordinal in used]
        return self._devices


def device_of_ordinal(ordinal: int) -> str:
    """Return "cuda:UUID" of a GPU by its number in this process. No context is needed.

    Raises CudaUnavailableError.
    """
    return device_key(load().device_uuid(ordinal))


def wait_for_owner(device: str, streams: Iterable[int]) -> None:
    """Wait for what tensors' owner has queued on a GPU: on its default streams, on every stream
    that is not non-blocking, and on the streams that the tensors name. Blocks.

    Args:
        device: "cuda:UUID".
        streams: The streams, as the CUDA array interface has them.

    Raises:
        CudaError: The owner's work has failed.
    """
    wanted = {LEGACY_STREAM} | {each for each in streams if each != _PER_THREAD_STREAM}
    with Device.open(load(), device) as opened, opened.current():
        for stream in sorted(wanted):
            opened.driver.stream_synchronize(stream)
