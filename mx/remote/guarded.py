"""Holds stores of other distributions to the contract of `mx.stores`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from mx.buffers import copy_bytes
from mx.errors import CheckpointError, ClosedError, ConfigError, LocalError, MxError, StoreError
from mx.storage.side_files import MAX_ENTRIES
from mx.stores import ListedFile, Opening, WeightStore
from mx.text import plain, shown
from mx.units import format_seconds
from mx.views import DeviceView

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often a thread that waits for a store looks whether the pull was closed.
LOOK_S = 0.2
#: How long closing a store may take.
_CLOSE_S = 2.0
_MOST_THREADS = 64
_MOST_BYTES = 1 << 62


def error_line(error: BaseException) -> str:
    """Return the first line of an error, which may go on with its insides."""
    lines = [line.strip() for line in str(error).splitlines()]
    return plain(next(filter(None, lines), type(error).__name__))[:300]


class GuardedStore:
    """A `WeightStore` of which mx knows nothing: its calls run on threads that can be left behind,
    and write to memory that nothing else uses."""

    def __init__(self, make: Callable[[], WeightStore], where: str, opening: Opening) -> None:
        """
        Args:
            make: Makes the store.
            where: Names it in errors until it is made.
            opening: How long a call may take, and whether the pull was closed.

        Raises:
            ConfigError, StoreError, ClosedError: It can't be made.
        """
        self.place, self._opening = where, opening
        self._closed = False

        def made() -> tuple[WeightStore, str, int, bool]:
            store = make()
            if self._closed:  # it came too late
                store.close()
            devices = getattr(store, "reads_devices", False) is True
            return store, plain(str(store.place)), int(store.threads), devices

        try:
            store, self.place, threads, self.reads_devices = self._call("", made)
        except BaseException:
            self._closed = True
            raise
        self._store: Any = store
        self.threads = max(1, min(threads, _MOST_THREADS))

    def list(self) -> Sequence[ListedFile]:
        """List as `WeightStore.list` does.

        Raises:
            StoreError: What it lists can't be right.
            MxError: As `WeightStore.list`.
        """
        found: Sequence[Any] = self._call("", lambda: list(islice(self._store.list(), MAX_ENTRIES)))
        paths = set()
        for file in found:
            sound = isinstance(file, ListedFile) and isinstance(file.path, str)
            if not sound or not isinstance(file.nbytes, int) or not 0 <= file.nbytes < _MOST_BYTES:
                what = f"{shown(str(file))}, which is not an mx.stores.ListedFile with a size"
            elif file.path in paths:
                what = f"{shown(file.path)} twice"
            else:
                paths.add(file.path)
                continue
            raise StoreError(f"{self.place} lists {what}", peer=self.place)
        return found

    def read(self, file: ListedFile, offset: int, view: memoryview | DeviceView) -> int:
        """Read as `WeightStore.read` does."""
        if isinstance(view, DeviceView):  # what writes to it is waited for
            try:
                return int(self._store.read(file, offset, view))
            except BaseException as error:
                raise self._translated(error, f"{self.place}/{file.path}") from error
        data = memoryview(bytearray(len(view)))  # not released: a read may be left behind in it
        nbytes: int = self._call(file.path, lambda: self._store.read(file, offset, data))
        if nbytes == len(view):
            copy_bytes(view, data)
        return nbytes

    def close(self) -> None:
        """Close the store, waiting two seconds at most. Idempotent."""
        if not self._closed:
            self._closed = True
            _, ended, failed = _begin(self._store.close)
            ended.wait(_CLOSE_S)
            for error in failed:
                log.warning("%s could not be closed: %s", self.place, error_line(error))

    def _call(self, path: str, work: Callable[[], T]) -> T:
        """Have a thread do it, and wait for that."""
        where = f"{self.place}/{path}" if path else self.place
        if self._closed:
            raise ClosedError(f"{self.place} was closed")
        until_s = time.monotonic() + self._opening.timeout_s
        came, ended, failed = _begin(work)
        while not ended.wait(min(LOOK_S, max(0.0, until_s - time.monotonic()))):
            if self._opening.cancelled():
                raise ClosedError("reading was cancelled")
            if time.monotonic() >= until_s:
                raise StoreError(
                    f"{where}: no answer within {format_seconds(self._opening.timeout_s)}",
                    peer=self.place,
                    hint="`store_timeout_s` is how long it may take",
                )
        if not failed:
            return came[0]
        raise self._translated(failed[0], where) from failed[0]

    def _translated(self, error: BaseException, where: str) -> MxError:
        match error:
            case ClosedError() if not (self._closed or self._opening.cancelled()):
                pass  # it would end the pull as if its caller had closed it
            case CheckpointError() | ConfigError() | LocalError() | StoreError():
                return error
            case FileNotFoundError():
                hint = "a file is missing: put the checkpoint there again"
                return CheckpointError(f"{where} is not there", hint=hint)
            case PermissionError():
                return ConfigError(
                    f"{where} may not be read: {error_line(error)}", hint="check the credentials"
                )
        said = f"{type(error).__name__}: {error_line(error)}"
        return StoreError(f"{where} could not be read: {said}", peer=self.place)


def _begin(work: Callable[[], T]) -> tuple[list[T], threading.Event, list[BaseException]]:
    """Have a thread do it; return where its result is to be, its end, and what it raises."""
    came: list[T] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            came.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            failed.append(error)
        ended.set()

    threading.Thread(target=run, name="mx-stranger", daemon=True).start()
    return came, ended, failed
