"""A GPU and its resources: each object owns one of them and frees it in `close`.

Closing is idempotent and may happen in any order: a device's context stays until the device and
everything made from it are closed. An object that is dropped without being closed frees its
resource when it is collected; what is left at the interpreter's end goes with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from mx.contexts import OwnContext, Undo
from mx.cuda.driver import RELAXED_CAPTURE, DeviceAttribute
from mx.cuda.errors import GONE_CODES, CudaError
from mx.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from mx.cuda.bindings import Driver

_PREFIX = "cuda:"
#: The UUIDs of each driver's GPUs by ordinal, which stay as they are: they are asked for by the
#: tensor.
_uuids: weakref.WeakKeyDictionary[Driver, list[str]] = weakref.WeakKeyDictionary()
_log = logging.getLogger(__name__)


def device_key(uuid: str) -> str:
    """Return a GPU's name in `Place.device`, `Region.device` and `DeviceView.device`."""
    return _PREFIX + uuid


def find_ordinal(driver: Driver, name: str) -> int:
    """Return the ordinal of "cuda:N", "cuda", "cuda:GPU-..." or "GPU-...".

    Raises:
        ConfigError: There is no such GPU; the hint names those that exist.
    """
    wanted = name.removeprefix(_PREFIX)
    uuids = _uuids.get(driver)
    if uuids is None:
        uuids = [driver.device_uuid(ordinal) for ordinal in range(driver.device_count())]
        _uuids[driver] = uuids
    if wanted in uuids:
        return uuids.index(wanted)
    if wanted == "cuda":
        wanted = "0"
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(uuids):
        return int(wanted)
    known = ", ".join(f"cuda:{i} ({uuid})" for i, uuid in enumerate(uuids)) or "none"
    raise ConfigError(f"there is no device {name!r}", hint=f"GPUs of this process: {known}")


@contextlib.contextmanager
def relaxed(driver: Driver) -> Iterator[None]:
    """Let an engine capture CUDA graphs on other threads while this one calls the driver inside.

    Without this, most calls would fail during a capture and invalidate it (CUDA runtime API,
    cudaThreadExchangeStreamCaptureMode). `Device.current` includes it.
    """
    before = driver.exchange_capture_mode(RELAXED_CAPTURE)
    try:
        yield
    finally:
        driver.exchange_capture_mode(before)


class _ThreadContext(threading.local):
    """The context that mx has made this thread's current one, 0 for none."""

    context = 0


_here = _ThreadContext()


@contextlib.contextmanager
def _in_context(driver: Driver, context: int) -> Iterator[None]:
    if _here.context == context:  # inside of another such block
        yield
        return
    with relaxed(driver):
        driver.context_push(context)
        before, _here.context = _here.context, context
        try:
            yield
        finally:
            _here.context = before
            driver.context_pop()


class Device(OwnContext):
    """A GPU whose primary context this object keeps alive.

    `ordinal` is its number in this process, `key` "cuda:GPU-...", `context` the driver's handle.
    Thread-safe. Raises CudaError if there is no context.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.uuid = driver.device_uuid(ordinal)
        self.key = device_key(self.uuid)
        with relaxed(driver):
            self.context = driver.context_retain(ordinal)
        self._hold = _ContextHold(driver, ordinal)
        self._finalizer = weakref.finalize(self, self._hold.drop)
        self._finalizer.atexit = False

    @classmethod
    def open(cls, driver: Driver, name: str) -> Device:
        """Open a device by "cuda:N" or "cuda:GPU-...".

        Raises:
            ConfigError: There is no such GPU.
            CudaError: The driver fails.
        """
        return cls(driver, find_ordinal(driver, name))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the device's context the thread's current one for the length of the block, in which
        the thread's calls and captures of other threads don't disturb each other."""
        return _in_context(self.driver, self.context)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """`current`, for a block that closes many of the device's resources, maybe the last."""
        self._hold.add()
        try:
            with self.current():
                yield
        finally:
            self._hold.drop()

    @property
    def has_vmm(self) -> bool:
        """True if its memory can be mapped piecewise and exported as descriptors."""
        return all(
            self.driver.device_attribute(self.ordinal, attribute)
            for attribute in (DeviceAttribute.VMM, DeviceAttribute.POSIX_FD)
        )

    def memory_info(self) -> tuple[int, int]:
        """Return the device's free and total memory in bytes."""
        with self.current():
            return self.driver.mem_info()

    def own(self, owner: object, free: Callable[[], None]) -> weakref.finalize[..., object]:
        """Arrange for a resource to be freed once; the context stays until then.

        Args:
            owner: The object that owns the resource.
            free: Frees it; called with this context current.

        Returns:
            A function that frees the resource now; otherwise it is freed when `owner` is collected.

        Raises:
            ClosedError: The device was closed.
        """
        if not self._finalizer.alive:
            raise ClosedError(f"{self.key} was closed")
        finalizer = weakref.finalize(owner, self._hold.free, self.context, free)
        finalizer.atexit = False
        self._hold.add()
        return finalizer

    def close(self) -> None:
        """Allow no new resources; the context ends with the last resource made from it."""
        self._finalizer()


class _ContextHold:
    """Counts the users of a primary context, and releases it after the last one."""

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
            with giving_back(), relaxed(self._driver):
                self._driver.context_release(self._ordinal)

    def free(self, context: int, free: Callable[[], None]) -> None:
        try:
            with giving_back(), _in_context(self._driver, context):
                free()
        finally:
            self.drop()


@contextlib.contextmanager
def giving_back() -> Iterator[None]:
    """Log errors of giving something back, which is of no more use and goes with the process; not
    those that say that the context or the driver ended, which frees everything."""
    try:
        yield
    except CudaError as error:
        if error.code not in GONE_CODES:
            _log.warning("a GPU's resource was not given back: %s", error)


class WaitingStreams:
    """What is freed only once no stream of its GPU waits for bytes.

    cuMemFree and cuMemFreeHost wait for all work of the context, and other threads' calls for them:
    a driver of CUDA 13.0 (580.159) lets no copy be queued meanwhile, and the bytes never come.
    """

    def __init__(self) -> None:
        # Reentrant: a collection, and so a finalizer, can run inside any of these lines.
        self._lock = threading.RLock()
        self._waits: Counter[int] = Counter()
        self._later: list[tuple[int, Callable[[], None]]] = []

    def free(self, ordinal: int, free: Callable[[], None]) -> None:
        """Free something of a GPU, now or later; its context is current."""
        with self._lock:
            if self._waits[ordinal]:
                self._later.append((ordinal, free))
                return
        free()

    def begin(self, device: Device) -> None:
        """Free nothing of a GPU from now on: streams are about to wait."""
        with self._lock:
            self._waits[device.ordinal] += 1

    def end(self, device: Device) -> None:
        """End what `begin` began; with the last one, free what has come together."""
        with self._lock:
            self._waits[device.ordinal] -= 1
            now = [] if self._waits[device.ordinal] else self._later
            mine = [free for ordinal, free in now if ordinal == device.ordinal]
            if mine:
                self._later = [each for each in now if each[0] != device.ordinal]
        for free in mine:
            with giving_back(), device.current():
                free()


waiting_streams = WaitingStreams()


class DeviceResource(OwnContext):
    """Base class of owners of a device resource, freed by `close`; idempotent, thread-safe."""

    device: Device
    _finalizer: weakref.finalize[..., object]

    def _owns(self, device: Device, free: Callable[[], None]) -> None:
        """Take the resource over; constructors call it with the device's context current.

        If it fails the resource is freed.
        """
        self.device = device
        with Undo(free):
            self._finalizer = device.own(self, free)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Free the resource. Idempotent; if the driver refuses, that is logged."""
        self._finalizer()


class CudaStream(DeviceResource):
    """A stream that is independent of the default stream.

    `close` waits for its queued work, so that memory it uses may be freed afterwards.
    """

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
        """Wait for the queued work. Raises CudaError, which any earlier call may have caused."""
        with self.device.current():
            self.device.driver.stream_synchronize(self.handle)

    def done(self) -> bool:
        """Return True if all queued work is done. Raises CudaError."""
        with self.device.current():
            return self.device.driver.stream_query(self.handle)

    def wait(self, event: CudaEvent) -> None:
        """Make later work wait for the last record of an event of any device."""
        with self.device.current():
            self.device.driver.stream_wait_event(self.handle, event.handle)


class CudaEvent(DeviceResource):
    """An event that happens when the work in a stream at `record` is done; without timing."""

    def __init__(self, device: Device) -> None:
        driver = device.driver
        with device.current():
            self.handle = handle = driver.event_create()
            self._owns(device, lambda: driver.event_destroy(handle))

    def record(self, stream: CudaStream) -> None:
        """Record the event behind the present work of `stream`. Raises CudaError."""
        with self.device.current():
            self.device.driver.event_record(self.handle, stream.handle)

    def done(self) -> bool:
        """Return True if the event has happened, or was never recorded."""
        with self.device.current():
            return self.device.driver.event_query(self.handle)

    def synchronize(self) -> None:
        """Sleep until the event happens. Raises CudaError, perhaps of an earlier call."""
        with self.device.current():
            self.device.driver.event_synchronize(self.handle)


class DeviceMemory(DeviceResource):
    """`nbytes` (> 0) at `address`, from cuMemAlloc; a legacy IPC handle exports it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        driver = device.driver
        self.nbytes = nbytes
        with device.current():
            self.address = address = driver.mem_alloc(nbytes)
            free = partial(driver.mem_free, address)
            self._owns(device, partial(waiting_streams.free, device.ordinal, free))


class LastWork:
    """Whether work that mx did not queue may use some memory. Finalizers refer to it."""

    unknown = False

    def wait(self, driver: Driver) -> None:
        if self.unknown:
            driver.context_synchronize()
            self.unknown = False


class Mapping(DeviceResource):
    """Memory of which `close` takes the addresses away: work that still uses them would break the
    context. mx waits for its own copies, one by one."""

    def __init__(self, last_work: LastWork | None = None) -> None:
        """
        Args:
            last_work: That of other memory of this device too, all of which is closed at once.
        """
        self._last_work = last_work or LastWork()

    def lend(self) -> None:
        """Wait in `close` for all work of the context: an engine computes with this memory from now
        on. To wait so invalidates captures of graphs, so that memory which mx alone reads is not
        lent."""
        self._last_work.unknown = True


class IpcMemory(Mapping):
    """An allocation of another process, opened by its 64-byte handle.

    `address` is its base in this process.
    """

    def __init__(self, device: Device, handle: bytes, last_work: LastWork | None = None) -> None:
        super().__init__(last_work)
        driver, last_work = device.driver, self._last_work

        def free() -> None:
            last_work.wait(driver)
            driver.ipc_close(address)

        with device.current():
            self.address = address = driver.ipc_open(handle)
            self._owns(device, free)


class PinnedMemory(DeviceResource):
    """`nbytes` (> 0) of pinned host memory.

    The host has it at `address`, the device at `device_address`. Do not use `view()` after `close`.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        driver = device.driver
        self.nbytes = nbytes
        with device.current():
            self.address = address = driver.host_alloc(nbytes)
            free = partial(driver.host_free, address)
            self._owns(device, partial(waiting_streams.free, device.ordinal, free))
            self.device_address = driver.host_device_pointer(address)

    def view(self) -> memoryview:
        """Return writable bytes, which keep this object (but not closed memory) alive."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


class PinnedRegion(DeviceResource):
    """Existing host memory, pinned for DMA until `close`. The caller keeps it until then, or
    `owner` does, which is referred to for as long."""

    def __init__(
        self,
        device: Device,
        address: int,
        nbytes: int,
        *,
        read_only: bool = False,
        owner: object = None,
    ) -> None:
        driver = device.driver
        self.address, self.nbytes = address, nbytes

        def free() -> None:
            nonlocal owner
            driver.host_unregister(address)
            owner = None

        # To unregister waits for streams that wait: what keeps the memory lets it wait for them.
        later = partial(waiting_streams.free, device.ordinal, free)
        with device.current():
            driver.host_register(address, nbytes, read_only=read_only)
            self._owns(device, free if owner is None else later)
