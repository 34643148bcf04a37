"""The host's memory of a GPU session, which copy engines reach in place: the source's sealed memory
files, mapped here, or the destination."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from typing import NamedTuple

from mx.buffers import address_of, map_shared
from mx.cuda.device import Device
from mx.cuda.driver import DeviceAttribute
from mx.cuda.errors import CudaError
from mx.transport import Read, Span
from mx.units import GIB, MIB
from mx.views import View, located_spans
from mx_transports.toolkit import kernel
from mx_transports.toolkit.cuda.windows import WINDOW_BYTES, PinnedWindows
from mx_transports.toolkit.cuda.wire import RegionKind, RemoteRegion
from mx_transports.toolkit.slicing import Slice

#: How long a source's memory stays mapped and registered for this process's next pulls, and how
#: much of it: a source that is gone leaves its memory to those that have it mapped.
KEPT_S = 30.0
KEPT_BYTES = 32 * GIB
#: Of copies between a GPU and memory that is reached in place: some 1.2 ms of a PCIe 5 x16 link.
STEP_BYTES = 64 * MIB


class HostOptions(NamedTuple):
    """How host memory is reached in place: by steps and in windows of which sizes, and how long a
    source's stays mapped after its last session."""

    step_nbytes: int = STEP_BYTES
    window_nbytes: int = WINDOW_BYTES
    kept_s: float = KEPT_S


DEFAULT_OPTIONS = HostOptions()
_log = logging.getLogger(__name__)


class SourceMap:
    """A source's sealed memory file, mapped to be read only, and registered in windows."""

    def __init__(
        self, device: Device, key: tuple[int, int], descriptor: int, nbytes: int, window_nbytes: int
    ) -> None:
        """Raises OSError where it can't be mapped, CudaError."""
        self.key, self.holders = key, 0
        #: Ends the map when nothing has held it for a while.
        self.timer: threading.Timer | None = None
        # Before Linux 6.7 what is sealed against writing is mapped privately only; then the pages
        # that are pinned need not be those of the file.
        self.view = map_shared(descriptor, nbytes)
        self.address = address_of(self.view)
        # Of its own: it may outlast the session's.
        self._device = Device(device.driver, device.ordinal)
        # Without the attribute the flag is refused, but a GPU that uses the host's page tables
        # needs none.
        attribute = DeviceAttribute.READ_ONLY_REGISTER
        flag = bool(device.driver.device_attribute(device.ordinal, attribute))
        self.windows = PinnedWindows(
            self._device, "a source's memory", window_nbytes, read_only=flag
        )
        self.windows.adopt([(self.address, nbytes)], self.view)

    def close(self) -> None:
        self.windows.close()
        self._device.close()
        self.view = memoryview(b"")


class SourceMaps:
    """The maps of this process, one for each file, whatever sessions use it. Those that none uses
    stay for a while."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child does: what it has inherited it can't use."""
        self._lock = threading.Lock()
        self._maps: dict[tuple[int, int], SourceMap] = {}
        self._keeps = True

    def open(self, device: Device, descriptor: int, nbytes: int, window_nbytes: int) -> SourceMap:
        """Return the map of a sealed file, which the caller gives back by `drop`.

        Args:
            device: A GPU that copies from it.
            descriptor: The file. It may be closed afterwards.
            nbytes: How long it is at least.
            window_nbytes: The size of a window in bytes, of a new map.

        Raises:
            OSError: It can't be mapped, or is not as long.
            CudaError: CUDA fails.
        """
        status = os.fstat(descriptor)
        if not kernel.fully_sealed(descriptor) or status.st_size < nbytes:
            raise OSError("it is not sealed, or shorter than the source says")
        key = (status.st_dev, status.st_ino)
        with self._lock:
            found = self._maps.get(key)
            if found is None:
                found = SourceMap(device, key, descriptor, status.st_size, window_nbytes)
                self._maps[key] = found
            found.holders += 1
            if found.timer is not None:
                found.timer.cancel()
        return found

    def drop(self, found: SourceMap, kept_s: float) -> None:
        """Give a map back, when no work that uses it is queued any more; keep it for `kept_s`."""
        with self._lock:
            found.holders -= 1
            if found.holders:
                return
            kept = [len(each.view) for each in self._maps.values() if not each.holders]
            keeps = kept_s > 0 and self._keeps and not found.windows.reason
            if keeps and sum(kept) <= KEPT_BYTES:
                # Now, so that it comes before the end of all finalizers, which give memory back.
                atexit.unregister(self.keep_none)
                atexit.register(self.keep_none)
                found.timer = threading.Timer(kept_s, self._end, [found.key])
                found.timer.daemon = True
                found.timer.start()
                return
            del self._maps[found.key]
        found.close()

    def keep_none(self) -> None:
        """Keep nothing from now on: the process ends."""
        self._keeps = False
        self.clear()

    def clear(self) -> None:
        """End all maps that no session uses."""
        for key in list(self._maps):
            self._end(key)

    def _end(self, key: tuple[int, int]) -> None:
        with self._lock:
            found = self._maps.get(key)
            if found is None or found.holders:
                return
            del self._maps[key]
        if found.timer is not None:
            found.timer.cancel()
        found.close()


source_maps = SourceMaps()
os.register_at_fork(after_in_child=source_maps.forget)


class HostSide:
    """What of a session's host memory copy engines reach in place: the source's, where the target
    is a GPU, else the destinations. Thread-safe; `close` it when nothing is queued any more."""

    def __init__(
        self,
        device: Device,
        regions: Mapping[int, RemoteRegion],
        peer: str,
        options: HostOptions,
        to_host: bool,
    ) -> None:
        """
        Args:
            device: The GPU in whose context memory is registered.
            regions: The source's regions. The log says which of the host's can't be mapped.
            peer: The source.
            options: The options.
            to_host: Whether the destinations are in the host.
        """
        self._kept_s = options.kept_s
        self._maps: dict[int, SourceMap] = {}
        self._into = PinnedWindows(device, f"what {peer} sends", options.window_nbytes)
        self._to_host = to_host
        self._said = ""
        host = [] if to_host else [each for each in regions.values() if not each.on_gpu]
        for region in host:
            if region.where is RegionKind.MEMFD and region.nbytes:
                try:
                    self._maps[region.index] = source_maps.open(
                        device, region.descriptor, region.nbytes, options.window_nbytes
                    )
                except (OSError, CudaError) as error:
                    self._said = f"copied through slots: {error}"
                    _log.warning("memory of %s is %s", peer, self._said)
        self._windows = [self._into, *(each.windows for each in self._maps.values())]
        #: Whether the source has host memory of which nothing is reached in place.
        self.through_slots = bool(host) and not self._maps

    @property
    def reason(self) -> str:
        """Why some of it is not reached in place; "" if all is that could be."""
        return next((each.reason for each in self._windows if each.reason), self._said)

    def adopt(self, arena: View) -> None:
        """Have a destination registered ahead of the reads, all of which are into it."""
        if self._to_host:
            spans = [span for span in located_spans(arena) if isinstance(span, memoryview)]
            self._into.adopt(((address_of(span), len(span)) for span in spans), arena)

    def ready(self, read: Read) -> bool:
        """Have what a read touches in the host registered, and wait for that. Return False where
        some of it can't be, or the read is none that this session can carry out."""
        waits = []
        for piece in read.pieces:
            nbytes, found = len(piece.view), self._maps.get(piece.region)
            if self._to_host:
                for span in located_spans(piece.view):
                    if not isinstance(span, memoryview):
                        return False
                    waits.append(self._into.want(address_of(span), len(span)))
            elif found is not None and 0 <= piece.region_offset <= len(found.view) - nbytes:
                waits.append(found.windows.want(found.address + piece.region_offset, nbytes))
            else:
                return False
        return all([wait() for wait in waits])

    def source(self, part: Slice[Span]) -> list[tuple[int, int]] | None:
        """Return the addresses and lengths at which a part of the source is reached in place, None
        where it is not."""
        found = self._maps.get(part.region)
        if found is None:
            return None
        return found.windows.parts(found.address + part.offset, len(part.view))

    def destination(self, view: memoryview) -> list[tuple[int, int]] | None:
        """Return the addresses and lengths at which a destination is reached in place, None where
        it is not."""
        return self._into.parts(address_of(view), len(view))

    def close(self) -> None:
        """Let go of it all. Idempotent."""
        maps, self._maps = self._maps, {}
        self._said, self._windows = self.reason, []
        for found in maps.values():
            source_maps.drop(found, self._kept_s)
        self._into.close()
