"""Another process's GPU memory at addresses of this one, opened allocation by allocation."""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mx.cuda.device import Device, IpcMemory, LastWork
from mx.cuda.vmm import HOST, VmmMemory
from mx.errors import PeerLostError, PeerProtocolError
from mx.threads import Threads
from mx_transports.toolkit.cuda.wire import Allocation, Export
from mx_transports.toolkit.local import BATCH

#: How many threads open allocations that are needed at once, the one that needs them among them.
THREADS = 4


@dataclass(slots=True, eq=False)
class MappedRun:
    """Source addresses [base, base + nbytes) are at `address` here, where they are open. `device`
    may reach them. `memory` is what is open of it, or the range in which it is."""

    base: int
    nbytes: int
    uuid: str
    device: Device
    address: int = 0
    memory: IpcMemory | VmmMemory | None = None


@dataclass(slots=True, eq=False)
class _Mapped:
    """An allocation, with its number at the source, and whether it is open here."""

    number: int
    allocation: Allocation
    run: MappedRun
    is_open: bool = False
    is_opening: bool = False  # one thread opens it


#: The device that is to map and copy memory of the GPU with this UUID.
DeviceFor = Callable[[str], Device]
#: Returns new descriptors of the allocations with these numbers, BATCH at most, which the caller
#: closes. Raises SourceError.
Descriptors = Callable[[Sequence[int]], list[int]]


class Maps:
    """Runs by source address. Adjacent allocations of VMM become one run, as they are at the
    source; an allocation of cuMemAlloc is one by itself (its handle opens at its base).

    Thread-safe. Only `open` opens anything.
    """

    def __init__(self, peer: str, device_for: DeviceFor, descriptors: Descriptors) -> None:
        self._peer = peer
        self._device_for = device_for
        self._descriptors = descriptors
        self._own = False
        self._mapped: list[_Mapped] = []  # by source address
        self._at: list[int] = []  # these addresses
        self._runs: list[MappedRun] = []
        self._bases: list[int] = []
        self._last_work: dict[str, LastWork] = {}  # by the UUID of the GPU that maps
        #: Guards what is open, is notified when that changes; and what follows.
        self._changed = threading.Condition()
        self._left = 0  # allocations that are not open
        self._closed = False

    # -- what there is ----------------------------------------------------------------------------

    def place(self, allocations: Sequence[Allocation], *, own: bool) -> None:
        """Take the list of the source's allocations.

        Args:
            allocations: The allocations, by their numbers.
            own: Whether the source is this process. Then CUDA opens no legacy handles of it, and
                its addresses are used as they are.

        Raises:
            PeerProtocolError: They overlap.
        """
        self._own = own
        order = sorted(enumerate(allocations), key=lambda pair: pair[1].base)
        for (_, before), (_, after) in itertools.pairwise(order):
            if before.end > after.base:
                raise PeerProtocolError(
                    f"{self._peer}: its list of allocations is malformed", peer=self._peer
                )
        for group in _groups(order):
            first, last = group[0][1], group[-1][1]
            device = self._device_for(first.uuid)
            run = MappedRun(first.base, last.end - first.base, first.uuid, device)
            self._last_work.setdefault(device.uuid, LastWork())
            self._runs.append(run)
            self._mapped += [_Mapped(number, each, run) for number, each in group]
        self._bases = [run.base for run in self._runs]
        self._at = [each.allocation.base for each in self._mapped]
        self._left = len(self._mapped)

    def check(self, address: int, nbytes: int) -> str:
        """Return the UUID of the GPU that source addresses are on. Raises PeerProtocolError if not
        all of them are in allocations."""
        found = list(self.pieces(address, nbytes))
        if sum(n for _, _, n in found) != nbytes:
            raise PeerProtocolError(
                f"{self._peer}: a region lies outside of its allocations", peer=self._peer
            )
        return found[0][0].uuid

    def pieces(self, address: int, nbytes: int) -> Iterator[tuple[MappedRun, int, int]]:
        """Yield (run, address here, nbytes) of source addresses, up to the first in no allocation.
        There is memory at an address here only once it is open."""
        end = address + nbytes
        while address < end:
            index = bisect_right(self._bases, address) - 1
            if index < 0:
                return
            run = self._runs[index]
            take = min(end, run.base + run.nbytes) - address
            if take <= 0:
                return
            yield run, run.address + address - run.base, take
            address += take

    # -- opening ----------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """True once all allocations are open."""
        return not self._left

    def open(self, places: Iterable[tuple[int, int]]) -> None:
        """Open the allocations of source addresses, or wait until other threads have.

        Args:
            places: Pairs of an address and a length.

        Raises:
            CudaError: CUDA fails. `close` undoes what was done.
            PeerProtocolError: The source's memory is not what it said.
            SourceError: The source does not hand its memory over, or `close` was called.
        """
        wanted = self._covering(places)
        while wanted := [each for each in wanted if not each.is_open]:
            with self._changed:
                if self._closed:
                    raise PeerLostError(f"{self._peer}: its memory was let go", peer=self._peer)
                mine = [each for each in wanted if not each.is_opening]
                for each in mine:
                    each.is_opening = True
                if not mine:
                    self._changed.wait()
            if mine:
                self._open(mine)

    def _covering(self, places: Iterable[tuple[int, int]]) -> list[_Mapped]:
        """Return the allocations of source addresses, each once, in the order of the places."""
        found: dict[int, _Mapped] = {}
        for address, nbytes in places:
            at = max(bisect_right(self._at, address) - 1, 0)
            while at < len(self._at) and self._at[at] < address + nbytes:
                if self._mapped[at].allocation.end > address:
                    found[at] = self._mapped[at]
                at += 1
        return list(found.values())

    def _open(self, mine: list[_Mapped]) -> None:
        """Open allocations that no other thread opens, on several threads where they are many."""
        size = min(-(-len(mine) // THREADS), BATCH)
        shares = [mine[at : at + size] for at in range(0, len(mine), size)]
        by_descriptor = [each for each in mine if each.allocation.export is Export.FD]
        try:
            with mine[0].run.device.current():  # mostly it is that of all
                for run in {each.run for each in by_descriptor}:
                    self._reserve(run)
                with Threads(THREADS - 1, "mx-open") as helpers:
                    begun = [helpers.submit(self._open_share, share) for share in shares[1:]]
                    self._open_share(shares[0])
                for share in begun:
                    share.result()
                self._allow(by_descriptor)
        finally:
            with self._changed:
                for each in mine:
                    each.is_opening = False
                    self._left -= each.is_open
                self._changed.notify_all()

    def _reserve(self, run: MappedRun) -> None:
        """Reserve the addresses of a run of virtual memory management, if that was not done."""
        with self._changed:
            if run.memory is None:
                last_work = self._last_work[run.device.uuid]
                run.memory = VmmMemory(run.device, (), (), last_work, nbytes=run.nbytes)
                run.address = run.memory.address

    def _open_share(self, share: list[_Mapped]) -> None:
        numbers = [each.number for each in share if each.allocation.export is Export.FD]
        descriptors = self._descriptors(numbers) if numbers else []
        left = iter(descriptors)
        try:
            with share[0].run.device.current():
                for each in share:
                    run, allocation = each.run, each.allocation
                    with run.device.current():
                        if allocation.export is Export.IPC:
                            self._open_legacy(each)
                        elif isinstance(run.memory, VmmMemory):
                            handle = run.device.driver.vmm_import_fd(next(left))
                            address = run.address + allocation.base - run.base
                            run.memory.map(address, allocation.nbytes, handle)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _open_legacy(self, mapped: _Mapped) -> None:
        run, allocation = mapped.run, mapped.allocation
        if not self._own:
            last_work = self._last_work[run.device.uuid]
            run.memory = IpcMemory(run.device, allocation.handle, last_work)
            run.address = run.memory.address
        else:
            run.address = allocation.base
            if run.device.uuid != run.uuid:
                with Device.open(run.device.driver, run.uuid) as other:
                    run.device.driver.enable_peer_access(other.context)
        self._check(run, run.address, allocation)
        mapped.is_open = True

    def _allow(self, mapped: list[_Mapped]) -> None:
        """Let the GPU that maps them access allocations of virtual memory management: those side by
        side at once."""
        mapped.sort(key=lambda each: each.allocation.base)
        for group in _groups(list(enumerate(each.allocation for each in mapped))):
            run, first = mapped[group[0][0]].run, group[0][1]
            address, nbytes = run.address + first.base - run.base, group[-1][1].end - first.base
            with run.device.current():
                run.device.driver.vmm_set_access(address, nbytes, run.device.ordinal)
            if run.uuid != HOST:  # of the host's memory the driver tells only that it is mapped
                self._check(run, address, first)
            for at, _ in group:
                mapped[at].is_open = True

    def _check(self, run: MappedRun, address: int, first: Allocation) -> None:
        """Check that what was mapped is what the source said: an access beyond its end would break
        this process's context for good.

        More than it said may be there: small allocations share a block, of which a handle opens the
        whole. Memory of VMM is as large as it was mapped here, or its map has failed."""
        with run.device.current():
            info = run.device.driver.pointer(address)
        there_nbytes = info.base + info.nbytes - address
        if info.base > address or first.nbytes > there_nbytes:
            raise PeerProtocolError(
                f"{self._peer}: its allocation has {there_nbytes} bytes, not {first.nbytes}",
                peer=self._peer,
            )
        if run.device.uuid == run.uuid and info.ordinal != run.device.ordinal:
            raise PeerProtocolError(
                f"{self._peer}: its memory is not on {run.uuid}, as it said", peer=self._peer
            )

    # -- the end ----------------------------------------------------------------------------------

    def lend(self) -> None:
        """Let an engine compute with what is mapped: `close` waits for its work."""
        for last_work in self._last_work.values():
            last_work.unknown = True

    def close(self) -> None:
        """Open nothing more, and unmap everything. Idempotent. Raises CudaError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while any(each.is_opening for each in self._mapped):
                self._changed.wait()
        memories = [run.memory for run in self._runs if run.memory is not None]
        for columns in (self._mapped, self._at, self._runs, self._bases):
            columns.clear()
        for device in {memory.device for memory in memories}:
            with device.closing():
                for memory in memories:
                    if memory.device is device:
                        memory.close()


def _groups(order: Sequence[tuple[int, Allocation]]) -> Iterator[list[tuple[int, Allocation]]]:
    """Yield groups that can be mapped at once: adjacent allocations of VMM on one GPU."""
    group: list[tuple[int, Allocation]] = []
    for number, found in order:
        if group:
            last = group[-1][1]
            joined = last.export is found.export is Export.FD and last.uuid == found.uuid
            if not joined or last.end != found.base:
                yield group
                group = []
        group.append((number, found))
    if group:
        yield group
