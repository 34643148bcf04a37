"""Reads files into a GPU's memory by cuFile (GPUDirect Storage), past the host's.

Windows of whole pages come into registered memory of the GPU, from which they are copied to their
places there: files and tensors begin anywhere, and cuFile moves whole pages. Where it can't be used
or fails, and where what came is wrong, the bytes come through pinned slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.errors import CudaMemoryError
from mx.cuda.ring import PinnedRing, RingSlot
from mx.errors import LocalError, MxError, install_hint
from mx.fetching.stored import StoredModel
from mx.snapshots.device import DiskSession, Windows
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import StoredBytes
from mx.transport import DeviceHashing, DeviceView, Read, View
from mx.units import align_up

_log = logging.getLogger(__name__)
_OPAQUE_FD = 1
_ALREADY_OPEN = 5026  # CU_FILE_DRIVER_ALREADY_OPEN


class CufileError(LocalError):
    """cuFile can't be used, or has failed."""


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t."""

    _fields_ = (("type", ctypes.c_int), ("fd", ctypes.c_void_p), ("operations", ctypes.c_void_p))


class _Properties(ctypes.Structure):
    """CUfileDrvProps_t, as far as it is looked at; later releases may write more."""

    _fields_ = (
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("sizes", ctypes.c_size_t * 2),
        ("status", ctypes.c_uint),
        ("more", ctypes.c_uint * 63),
    )


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of the bindings. Raises CufileError."""
    try:
        found = function(*arguments)
    except Exception as error:  # noqa: BLE001 - theirs have no base in common
        # The bindings have no name for an errno.
        why = "the file system does" if isinstance(error, ValueError) else error
        raise CufileError(f"cuFile's {function.__name__} fails: {why}") from None
    if isinstance(found, int) and found < 0:  # `read` returns codes of errors so
        raise CufileError(f"cuFile's {function.__name__} fails with error {-found}")
    return found


def _give_back(function: Callable[..., Any], what: int) -> None:
    """Give something back that cuFile has: what fails goes with the process."""
    try:
        _call(function, what)
    except CufileError as error:
        _log.warning("cuFile keeps what was given back: %s", error)


@functools.cache
def _opened() -> tuple[Any, str]:
    """Return the bindings and "", or None and why cuFile can't be used. What was opened stays so to
    the process's end: to close it would take it from others in this process."""
    try:
        bindings = importlib.import_module("cuda.bindings.cufile")
        bindings.driver_open()
    except ImportError as error:
        return None, f"cuda-bindings has no cuFile: {error}"
    except Exception as error:  # noqa: BLE001 - theirs have no base in common
        if getattr(error, "status", None) == _ALREADY_OPEN:
            return bindings, ""
        if isinstance(error, RuntimeError):  # of what looks for the library
            return None, f"there is no libcufile ({install_hint('gds13', 'gds12')})"
        return None, f"cuFile can't be opened: {error}"
    return bindings, ""


def _usable(gpudirect: str) -> tuple[Any, str]:
    """Return the bindings, and how cuFile moves bytes. Raises CufileError: it is not to be used."""
    if gpudirect == "off":
        raise CufileError("`gpudirect` is off")
    bindings, why = _opened()
    if bindings is None:
        raise CufileError(why)
    found = _Properties()
    _call(bindings.driver_get_properties, ctypes.addressof(found))
    if found.major_version or found.minor_version or found.status:
        return bindings, "by cufile"
    compatible = "in compatibility mode, which copies through the host's memory"
    if gpudirect != "always":
        raise CufileError(f"cuFile is {compatible}")
    return bindings, f"by cufile {compatible}"


class _RegisteredMemory:
    """Memory of a GPU for cuFile to write to, whole pages, in place of a ring's pinned memory."""

    def __init__(self, bindings: Any, device: Device, nbytes: int) -> None:
        with contextlib.ExitStack() as undo:
            memory = undo.enter_context(DeviceMemory(device, nbytes + DIRECT_ALIGNMENT_BYTES))
            self.address = align_up(memory.address, DIRECT_ALIGNMENT_BYTES)
            with device.current():
                _call(bindings.buf_register, self.address, nbytes, 0)
            undo.callback(_give_back, bindings.buf_deregister, self.address)
            self._ends = undo.pop_all()
        self._device, self._nbytes = device, nbytes

    def view(self) -> DeviceView:
        """Return the memory, which stays this object's."""
        return DeviceView(self._device.key, self.address, self._nbytes)

    def __enter__(self) -> _RegisteredMemory:
        return self

    def __exit__(self, *_: object) -> None:
        with self._device.current():
            self._ends.close()


class _RegisteredRing(PinnedRing):
    """A ring of a GPU's own memory."""

    def push_all(self, slot: RingSlot, places: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies as `PinnedRing.push_all`, within the GPU."""
        copy, stream = self.device.driver.copy_dtod, self.up
        for target, offset, nbytes in places:
            copy(target, slot.address + offset, nbytes, stream)


class _RegisteredFiles(Windows):
    """Files that cuFile knows, read into registered memory."""

    def __init__(self, bindings: Any, files: Sequence[StoredBytes]) -> None:
        super().__init__(files)
        self._bindings = bindings
        self._handles: list[int] = []
        self._memory: tuple[Device, int] | None = None
        with contextlib.ExitStack() as undo:
            for file in files:
                fd = getattr(file, "direct_fd", -1)
                if fd < 0:
                    raise CufileError("the files are on no disk that is read by O_DIRECT")
                described = _Descriptor(_OPAQUE_FD, fd, None)
                handle = _call(bindings.handle_register, ctypes.addressof(described))
                undo.callback(_give_back, bindings.handle_deregister, handle)
                self._handles.append(handle)
            self._ends = undo.pop_all()

    def register(self, device: Device, nbytes: int) -> _RegisteredMemory:
        """Return the memory that slots are in, once: the ring does not grow."""
        memory = _RegisteredMemory(self._bindings, device, nbytes)
        self._memory = device, memory.address
        return memory

    def fill(self, number: int, position: int, nbytes: int, slot: View) -> None:
        """See `Windows`. Raises CufileError, also where the file ends before."""
        assert isinstance(slot, DeviceView) and self._memory is not None
        device, base = self._memory
        handle, offset = self._handles[number], slot.address - base
        with device.current():
            got = _call(self._bindings.read, handle, base, len(slot), position, offset)
        if got < nbytes:
            raise CufileError(f"cuFile has read {got} of {nbytes} bytes")

    def close(self) -> None:
        """Let go of the files, when nothing is read any more. Idempotent."""
        self._ends.close()


class CufileSession(DiskSession):
    """A `DiskSession` by cuFile, which goes on through pinned slots once that fails."""

    def __init__(
        self,
        device: str,
        model: StoredModel,
        threads: int,
        on_idle: Callable[[], None],
        gpudirect: str,
    ) -> None:
        """
        Args:
            device: As for `DiskSession`, and so are the next three.
            gpudirect: The setting.

        Raises:
            CufileError: It can't be used here, or not with these files.
            CudaError: The driver fails.
        """
        bindings, detail = _usable(gpudirect)
        self._slots: DiskSession | None = None
        self._more_slots = functools.partial(DiskSession, device, model, threads, on_idle)
        self._changing = threading.Lock()
        #: Where reads that were asked for begin, and why to read them again.
        self._asked: dict[int, str] = {}
        with contextlib.ExitStack() as undo:
            self._registered = _RegisteredFiles(bindings, model.files)
            undo.callback(self._registered.close)
            register = cast("Any", self._registered.register)  # it is as pinned memory is
            self._make_ring = functools.partial(_RegisteredRing, memory=register)
            super().__init__(
                device, model, threads, on_idle, windows=self._registered, detail=detail
            )
            undo.pop_all()

    @property
    def failure(self) -> MxError | None:
        """See `DiskSession`: what cuFile can't do ends nothing."""
        return None if self._slots is None else self._slots.failure

    @property
    def idle(self) -> bool:
        """See `DiskSession`."""
        return super().idle and (self._slots is None or self._slots.idle)

    def read(self, reads: Sequence[Read]) -> None:
        """See `mx.transport.Session`."""
        fresh, others = [], []
        for read in reads:
            if self._slots is None and _first(read) not in self._asked:
                self._asked[_first(read)] = "what it had read did not verify"
                fresh.append(Read(read.tag, read.pieces, _Retried(self, read)))
            else:
                others.append(read)
        if fresh:
            super().read(fresh)
        for read in others:
            self.go_on(read, self._asked.get(_first(read), ""))

    def not_hashed(self, read: Read, why: str) -> None:
        """Take note of a read after which the GPU has failed."""
        self._asked[_first(read)] = why

    def go_on(self, read: Read, why: str) -> None:
        """Read through slots from now on."""
        try:
            with self._changing:
                if self._slots is None:
                    self._slots = self._more_slots()
                    self.detail += f", then through pinned slots: {why}"
                    if self._closed:
                        self._slots.close()
            self._slots.read([read])
        except MxError as error:
            read.sink.failed(error.with_traceback(None))

    def close(self) -> None:
        """See `mx.transport.Session`."""
        super().close()
        with self._changing:
            if self._slots is not None:
                self._slots.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """See `mx.transport.Session`."""
        if not super().join(timeout_s):
            return False
        self._registered.close()
        return self._slots is None or self._slots.join(timeout_s)


def _first(read: Read) -> int:
    return read.pieces[0].region_offset if read.pieces else -1


class _Retried:
    """The sink of a read by cuFile, which is read through slots if that fails."""

    __slots__ = ("_queued", "_read", "_session")

    def __init__(self, session: CufileSession, read: Read) -> None:
        self._session, self._read, self._queued = session, read, False

    def queued(self, stream: int) -> None:
        """See `mx.transport.DeviceHashing`."""
        self._queued = True
        if isinstance(self._read.sink, DeviceHashing):
            self._read.sink.queued(stream)

    def landed(self, nbytes: int) -> None:
        """Do nothing before the end: what is read again may differ from what has been hashed."""

    def done(self) -> None:
        self._read.sink.landed(sum(len(piece.view) for piece in self._read.pieces))
        self._read.sink.done()

    def failed(self, error: MxError) -> None:
        if self._queued or self._session.closed:
            self._session.not_hashed(self._read, error.message)
            self._read.sink.failed(error)
        else:
            self._session.go_on(self._read, error.message)


def disk_session(
    device: str,
    gpudirect: str,
    model: StoredModel,
    threads: int,
    on_idle: Callable[[], None],
) -> DiskSession:
    """Return what reads a stored model into a GPU's memory: by cuFile where it can be used.

    Args:
        device: As for `DiskSession`, and so are the last three.
        gpudirect: The setting.

    Raises:
        CudaError: The driver fails: so much memory can't be pinned.
    """
    try:
        return CufileSession(device, model, threads, on_idle, gpudirect)
    except (CufileError, CudaMemoryError) as error:
        detail = f"through pinned slots: {error.message}"
    return DiskSession(device, model, threads, on_idle, detail=detail)
