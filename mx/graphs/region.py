"""Device memory at a fixed address: where a graph's weights, inputs and work memory are.

with mx.graphs.region(nbytes) as region:
    pool = region.pool()  # torch allocates there
    ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mx.contexts import OwnContext
from mx.cuda.device import CudaStream, Device, DeviceMemory
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.cuda.vmm import FIXED_BYTES, OccupiedError, VmmMemory
from mx.errors import CapacityError, ConfigError
from mx.graphs.package import Graph, GraphPlace, RegionSpec
from mx.graphs.tensors import RegionTensor
from mx.memory.arrays import array_of
from mx.memory.device import require_device
from mx.units import GIB, MIB, align_up, format_bytes

#: Where the region of the first GPU is; each GPU has a TiB. Linux puts nothing there by itself.
BASE = 0x6000_0000_0000
_APART = 1024 * GIB
#: As cudaMalloc and torch align.
_ALIGNMENT = 512
#: Odd sizes, so that what is allocated later is elsewhere than in another process.
_DECOYS = (3 * MIB, 37 * MIB + 4096, 512, 70_000, 5 * MIB)
#: A piece of a block that the driver shares out, and blocks of their own.
_PROBES = (4096, 4 * MIB)


class Region(OwnContext):
    """`nbytes` of device memory at `base`, of zeros at first. Use `region` to open one.

    `allocate` gives pieces of it away, in order; `tensors` has views of fixed places. Closing it
    waits for the work of the GPU, and takes the addresses from everything that still refers to
    them.
    """

    def __init__(self, nbytes: int, base: int, device: Device, *, decoys: bool = False) -> None:
        """
        Args:
            nbytes: The size, rounded up to the GPU's granularity.
            base: The address.
            device: The GPU; the caller's.
            decoys: Allocate other memory before, on the GPU and pinned in the host, as long as the
                region is open.

        Raises:
            OccupiedError: The addresses are not free.
            CapacityError: There is too little memory.
            ConfigError: The GPU has no virtual memory management, or the base is not aligned.
            CudaError: The driver fails.
        """
        if not device.has_vmm:
            raise ConfigError(
                f"{device.key} has no virtual memory management, so that nothing can be at a "
                "fixed address"
            )
        if nbytes <= 0 or base <= 0 or base % FIXED_BYTES:
            raise ConfigError(
                f"a region of {nbytes} bytes at {base:#x} is not possible",
                hint=f"it has bytes, and begins at a multiple of {FIXED_BYTES >> 20} MiB",
            )
        require_device(device, nbytes, "the graph's region")
        self.device = device
        self._used = 0
        with contextlib.ExitStack() as undo:
            for size in _DECOYS if decoys else ():
                undo.enter_context(DeviceMemory(device, size))
                undo.enter_context(_pinned(device, size))
            memory = undo.enter_context(VmmMemory.allocate(device, nbytes, base))
            self.base, self.nbytes = memory.address, memory.nbytes
            stream = undo.enter_context(CudaStream(device))
            self._stream, self._ring = (
                stream,
                undo.enter_context(contextlib.closing(PinnedRing(device))),
            )
            self._memory = memory
            self.clear([(0, self.nbytes)])
            self._ends = undo.pop_all()

    @property
    def spec(self) -> RegionSpec:
        """The region as a graph names it."""
        return RegionSpec(self.base, self.nbytes)

    def allocate(self, nbytes: int) -> int:
        """Return the address of the next `nbytes`, aligned to 512; they are never freed.

        The same calls in the same order give the same offsets in every process.

        Args:
            nbytes: The size, in bytes.

        Raises:
            CapacityError: The region is full.
        """
        begin = align_up(self._used, _ALIGNMENT)
        if begin + nbytes > self.nbytes:
            raise CapacityError(
                f"the region has {format_bytes(self.nbytes - begin)} left of "
                f"{format_bytes(self.nbytes)}, and {format_bytes(nbytes)} are needed",
                hint="open a larger region",
            )
        self._used = begin + nbytes
        return self.base + begin

    def has(self, address: int, nbytes: int) -> bool:
        """Return True if `nbytes` bytes from `address` on are all in the region."""
        return 0 <= address - self.base <= self.nbytes - nbytes

    def tensor(self, place: GraphPlace) -> RegionTensor:
        """Return a view of `place`."""
        return RegionTensor(place, self.base + place.offset, self.device.ordinal, self._memory)

    def tensors(self, package: Graph, index: int = 0) -> dict[str, RegionTensor]:
        """Return a view of each weight's place, by name: what `mx.pull(into=...)` fills.

        Args:
            package: The graph.
            index: Which of its regions this one is.
        """
        places = (place for place in package.weights if place.region == index)
        return {place.name: self.tensor(place) for place in places}

    def read(self, place: GraphPlace) -> bytes:
        """Return the bytes of `place`; the caller has waited for what writes them.

        Raises:
            CudaError: They can't be read.
        """
        found = bytearray(place.nbytes)
        if found:
            self._ring.download(self.base + place.offset, memoryview(found))
        return bytes(found)

    def write(self, place: GraphPlace, value: bytes | memoryview) -> None:
        """Set the bytes of `place` to `value`; they are there when this returns.

        Raises:
            ConfigError: `value` has another size.
            CudaError: They can't be written.
        """
        if len(value) != place.nbytes:
            raise ConfigError(f"{place.name} has {place.nbytes} bytes, not {len(value)}")
        if len(value):
            self._ring.upload(self.base + place.offset, memoryview(value))

    def clear(self, spans: Iterable[tuple[int, int]], value: int = 0) -> None:
        """Set bytes of the region to a value, and wait.

        Args:
            spans: Where: (offset, nbytes) of each.
            value: The value.

        Raises:
            CudaError: They can't be written.
        """
        driver = self.device.driver
        with self.device.current():
            for offset, nbytes in spans:
                driver.memset(self.base + offset, value, nbytes, self._stream.handle)
            driver.stream_synchronize(self._stream.handle)

    def pool(self) -> Any:
        """Return a `torch.cuda.MemPool` whose memory is this region's; see `mx.graphs.pool`.

        Raises:
            LocalError: torch is missing, or is too old.
        """
        from mx.graphs.pool import make_pool

        return make_pool(self)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._used = self.nbytes  # nothing is given away any more
        self._ends.close()


@contextlib.contextmanager
def region(
    nbytes: int,
    base: int | Sequence[int] | None = None,
    device: int | str = 0,
    *,
    decoys: bool = False,
) -> Iterator[Region]:
    """Open device memory at a fixed address for the length of the block.

    Args:
        nbytes: The size, rounded up to the GPU's granularity.
        base: The address; several: the first that is free; None: one that is the same in every
            process.
        device: The GPU, "cuda:N", "cuda:GPU-..." or N.
        decoys: For the second capture of a graph: other memory is allocated before, so that all
            that the process allocates outside the region from now on is elsewhere. Open the region
            first.

    Yields:
        The region.

    Raises:
        OccupiedError: Something else of this process is at these addresses.
        CapacityError: There is too little memory.
        ConfigError: There is no such GPU, or it has no virtual memory management.
        CudaError: The driver fails.
    """
    name = f"cuda:{device}" if isinstance(device, int) else device
    with Device.open(load(), name) as opened:
        if base is None:
            base = BASE + opened.ordinal * _APART
        bases = [base] if isinstance(base, int) else base
        choices = [(RegionSpec(each, nbytes),) for each in bases]
        with contextlib.ExitStack() as ends:
            yield open_regions(choices, opened, ends, decoys=decoys)[1][0]


def open_regions(
    choices: Sequence[tuple[RegionSpec, ...]],
    device: Device,
    ends: contextlib.ExitStack,
    *,
    decoys: bool = False,
) -> tuple[tuple[RegionSpec, ...], list[Region]]:
    """Open the regions of the first choice whose addresses are free, and return both; `ends` closes
    them.

    Raises:
        OccupiedError: Something else is at the addresses of each; the message names all.
        CapacityError, ConfigError, CudaError: As for one region.
    """
    taken = []
    for specs in choices:
        try:
            with contextlib.ExitStack() as undo:
                made = [
                    undo.enter_context(Region(each.nbytes, each.base, device, decoys=decoys))
                    for each in specs
                ]
                ends.enter_context(undo.pop_all())
                return specs, made
        except OccupiedError as error:
            taken.append(error.message)
    raise OccupiedError("; ".join(taken), hint="open regions before other memory is allocated")


@contextlib.contextmanager
def _pinned(device: Device, nbytes: int) -> Iterator[int]:
    with device.current():
        address = device.driver.host_alloc(nbytes)
    try:
        yield address
    finally:
        with device.current():
            device.driver.host_free(address)


def outside(device: Device) -> tuple[int, ...]:
    """Return where memory of the GPU and of the host is now that is allocated outside all regions.

    Raises:
        CudaError: The driver fails.
    """
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(DeviceMemory(device, size)).address for size in _PROBES]
        return (*found, probes.enter_context(_pinned(device, _PROBES[0])))


def place_in(regions: Sequence[Region], name: str, tensor: object) -> GraphPlace:
    """Return a tensor's place in one of the regions.

    Raises:
        ConfigError: It is none, is not row-major, or is elsewhere.
    """
    found = array_of(name, tensor)
    nbytes = found.span_nbytes
    for index, region in enumerate(regions):
        if found.device == region.device.key and region.has(found.address, nbytes):
            if found.order != ():
                raise ConfigError(f"{name} is not row-major", hint="give a contiguous tensor")
            offset = found.address - region.base
            return GraphPlace(name, index, offset, nbytes, found.dtype, found.shape)
    raise ConfigError(
        f"{name} is at {found.address:#x} on {found.device}, outside the region",
        hint="allocate everything that the graph uses in the region",
    )


def clear_others(regions: Sequence[Region], kept: Sequence[GraphPlace]) -> None:
    """Set all memory of the regions to zero that none of these places has. Raises CudaError."""
    for index, region in enumerate(regions):
        mine = [place for place in kept if place.region == index]
        region.clear(_gaps(mine, region.nbytes))


def _gaps(places: Iterable[GraphPlace], nbytes: int) -> list[tuple[int, int]]:
    """Return the spans (offset, nbytes) of a region that no place has."""
    found, end = [], 0
    for place in sorted(places, key=lambda each: each.offset):
        if place.offset > end:
            found.append((end, place.offset - end))
        end = max(end, place.offset + place.nbytes)
    if end < nbytes:
        found.append((end, nbytes - end))
    return found
