"""A GPU in use, and what is had of it: each object owns one thing and gives it back in `close`.

Closing is idempotent and may come in any order: a device's context stays until the device and
everything made of it are closed. What is dropped without being closed is given back when it is
collected; what is left at the interpreter's end goes with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from mx.cuda.driver import DeviceAttribute, Driver
from mx.cuda.errors import GONE_CODES, CudaError
from mx.errors import ClosedError, ConfigError

_PREFIX = "cuda:"


def device_key(uuid: str) -> str:
    """What `Place.device`, `Region.device` and `DeviceView.device` call a GPU."""
    return _PREFIX + uuid


def find_ordinal(driver: Driver, name: str) -> int:
    """The ordinal of "cuda:N", "cuda", "cuda:GPU-..." or "GPU-...".

    Raises ConfigError where there is no such GPU; it names those that there are.
    """
    wanted = name.removeprefix(_PREFIX)
    uuids = [driver.device_uuid(ordinal) for ordinal in range(driver.device_count())]
    if wanted in uuids:
        return uuids.index(wanted)
    if wanted == "cuda":
        wanted = "0"
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(uuids):
        return int(wanted)
    known = ", ".join(f"cuda:{i} ({uuid})" for i, uuid in enumerate(uuids)) or "none"
    raise ConfigError(f"there is no device {name!r}", hint=f"GPUs of this process: {known}")


class Device:
    """A GPU whose primary context this process holds on to.

    `ordinal` is this process's number of it, `key` "cuda:GPU-...", `context` the driver's handle.
    Thread-safe. Raises CudaError where the context can't be had.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.uuid = driver.device_uuid(ordinal)
        self.key = device_key(self.uuid)
        self.context = driver.context_retain(ordinal)
        self._hold = _ContextHold(driver, ordinal)
        self._finalizer = weakref.finalize(self, self._hold.drop)
        self._finalizer.atexit = False

    @classmethod
    def open(cls, driver: Driver, name: str) -> Device:
        """By "cuda:N" or "cuda:GPU-...". Raises ConfigError as `find_ordinal`, CudaError."""
        return cls(driver, find_ordinal(driver, name))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is this thread's current one inside."""
        self.driver.context_push(self.context)
        try:
            yield
        finally:
            self.driver.context_pop()

    @property
    def has_vmm(self) -> bool:
        """Can its memory be mapped piecewise and exported as descriptors?"""
        return all(
            self.driver.device_attribute(self.ordinal, attribute)
            for attribute in (DeviceAttribute.VMM, DeviceAttribute.POSIX_FD)
        )

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        with self.current():
            return self.driver.mem_info()

    def synchronize(self) -> None:
        """Wait for all work on the device that this process queued in its primary context."""
        with self.current():
            self.driver.context_synchronize()

    def own(self, owner: object, free: Callable[[], None]) -> weakref.finalize[..., object]:
        """Arrange for `free` to be called once, with this context current: by calling what this
        returns, or when `owner` is collected. The context stays until then."""
        if not self._finalizer.alive:
            raise ClosedError(f"{self.key} was closed")
        finalizer = weakref.finalize(owner, self._hold.free, self.context, free)
        finalizer.atexit = False
        self._hold.add()
        return finalizer

    def close(self) -> None:
        """Make nothing more of it; the context goes when the last thing made of it does."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _ContextHold:
    """Counts who needs a primary context, and releases it after the last of them."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._ordinal = driver, ordinal
        # Reentrant: a collection, and so a finalizer, can run inside any of these lines.
        self._lock = threading.RLock()
        self._holders = 1

    def add(self) -> None:
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            with _gone_is_freed():
                self._driver.context_release(self._ordinal)

    def free(self, context: int, free: Callable[[], None]) -> None:
        try:
            with _gone_is_freed():
                self._driver.context_push(context)
                try:
                    free()
                finally:
                    self._driver.context_pop()
        finally:
            self.drop()


@contextlib.contextmanager
def _gone_is_freed() -> Iterator[None]:
    """With the context, or the driver, everything in it has gone."""
    try:
        yield
    except CudaError as error:
        if error.code not in GONE_CODES:
            raise


class Owned:
    """Base of what owns something of a device. `close` gives it back; idempotent, thread-safe."""

    device: Device
    _finalizer: weakref.finalize[..., object]

    def _owns(self, device: Device, free: Callable[[], None]) -> None:
        """Called by the constructor with the device's context current. Frees if that fails."""
        self.device = device
        try:
            self._finalizer = device.own(self, free)
        except BaseException:
            free()
            raise

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Raises CudaError where the driver refuses, unless it has freed everything itself."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Stream(Owned):
    """A stream of its own, independent of the default one. Close waits for what is queued, so
    that memory it uses may be freed afterwards."""

    def __init__(self, device: Device) -> None:
        driver = device.driver
        with device.current():
            self.handle = handle = driver.stream_create()

            def free() -> None:
                try:
                    driver.stream_synchronize(handle)
                finally:
                    driver.stream_destroy(handle)

            self._owns(device, free)

    def synchronize(self) -> None:
        """Wait for what is queued. Raises CudaError, which any earlier call may have caused."""
        with self.device.current():
            self.device.driver.stream_synchronize(self.handle)

    def done(self) -> bool:
        with self.device.current():
            return self.device.driver.stream_query(self.handle)

    def wait(self, event: Event) -> None:
        """What is queued from now on waits for the event's last record, of any device."""
        with self.device.current():
            self.device.driver.stream_wait_event(self.handle, event.handle)


class Event(Owned):
    """Happens when what a stream held at `record` is done; without timing."""

    def __init__(self, device: Device) -> None:
        driver = device.driver
        with device.current():
            self.handle = handle = driver.event_create()
            self._owns(device, lambda: driver.event_destroy(handle))

    def record(self, stream: Stream) -> None:
        with self.device.current():
            self.device.driver.event_record(self.handle, stream.handle)

    def done(self) -> bool:
        """Has it happened? True if it was never recorded."""
        with self.device.current():
            return self.device.driver.event_query(self.handle)

    def synchronize(self) -> None:
        """Sleep until it has. Raises CudaError, which any earlier call may have caused."""
        with self.device.current():
            self.device.driver.event_synchronize(self.handle)


class DeviceMemory(Owned):
    """`nbytes` (> 0) at `address`, of cuMemAlloc: exported by a legacy IPC handle."""

    def __init__(self, device: Device, nbytes: int) -> None:
        driver = device.driver
        self.nbytes = nbytes
        with device.current():
            self.address = address = driver.mem_alloc(nbytes)
            self._owns(device, lambda: driver.mem_free(address))


class IpcMemory(Owned):
    """Another process's allocation, opened by its 64-byte handle; `address` is its base here."""

    def __init__(self, device: Device, handle: bytes) -> None:
        driver = device.driver
        with device.current():
            self.address = address = driver.ipc_open(handle)
            self._owns(device, lambda: driver.ipc_close(address))


class PinnedMemory(Owned):
    """`nbytes` (> 0) of pinned host memory, at `address` for the host and at `device_address`
    for the device. `view()` must not be used after `close`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        driver = device.driver
        self.nbytes = nbytes
        with device.current():
            self.address = address = driver.host_alloc(nbytes)
            self._owns(device, lambda: driver.host_free(address))
            self.device_address = driver.host_device_pointer(address)

    def view(self) -> memoryview:
        """Writable bytes, which keep this object (but not the memory of a closed one) alive."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


class PinnedRegion(Owned):
    """Host memory that exists, pinned for DMA until `close`; the caller keeps it until then."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        driver = device.driver
        self.address, self.nbytes = address, nbytes
        with device.current():
            driver.host_register(address, nbytes)
            self._owns(device, lambda: driver.host_unregister(address))
