"""Memory that an engine holds and computes with: lent where it is, or filled where it is.

mx allocates nothing here and copies nothing. It keeps the tensors' storages, so that the memory
stays while others read it or it is filled, and looks whether the engine still uses that memory:
an engine may replace a tensor, or resize or free its storage, without a word.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import compress, islice, repeat, starmap
from operator import add, attrgetter, itemgetter, le, lt, sub
from typing import TYPE_CHECKING, TypeAlias, cast

from mx.buffers import memory_at
from mx.core.digest import BlockHasher
from mx.core.extents import ExtentMap
from mx.core.types import Alias, Layout
from mx.cuda.blake3 import UNIT_BYTES
from mx.cuda.device import Device
from mx.cuda.digest import DigestKernel, RingDigester, digester, kernel_of
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.errors import ClosedError, ConfigError, MxError
from mx.memory.allocations import Allocations
from mx.memory.arena import MakeHasher
from mx.memory.arrays import Array, all_are_now, arrays_of, wait_for_owners
from mx.memory.collector import paused
from mx.text import listed
from mx.transport import DeviceView
from mx.views import ScatteredView, Span, View, Window

if TYPE_CHECKING:
    from mx.core.grid import ChunkGrid
    from mx.core.pages import Pages
    from mx.core.types import Manifest
    from mx.cuda.digest_table import DigestTable
    from mx.memory.arena import Arena
    from mx.memory.device import LayerWindow


class SpanHashing:
    """Hashes blocks on the host or on a GPU. Thread-safe.

    What a GPU needs for that is made at its first block, and kept until `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus: dict[str, _GpuDigests] = {}
        self._closed = False

    def hasher(self, blocks: Sequence[Span]) -> BlockHasher | _ReadHasher:
        """Return a hasher for blocks that land in these views, all of the host or of one GPU.

        Does not block, unlike the hasher's own methods.
        """
        there = [block for block in blocks if isinstance(block, DeviceView)]
        if there:
            return _ReadHasher(self, there)
        return BlockHasher(cast("Sequence[memoryview]", blocks))

    def digests(self, blocks: Sequence[DeviceView]) -> list[bytes]:
        """Return the blake3 digest of each of some blocks of one GPU. Blocks.

        Raises:
            ClosedError: This was closed.
            CudaError: The GPU has no memory left for it, or fails.
        """
        device = blocks[0].device
        with self._lock:
            if self._closed:
                raise ClosedError("the memory was given back")
            gpu = self._gpus.get(device)
            if gpu is None:
                gpu = self._gpus[device] = _GpuDigests(device)
        return gpu.digests(blocks)

    def kernel(self, device: str) -> DigestKernel | None:
        """Return a GPU's kernel, None until a block of it was hashed, or if it has none."""
        with self._lock:
            gpu = self._gpus.get(device)
        return None if gpu is None else gpu.kernel

    def close(self, *, for_good: bool = True) -> None:
        """Free what GPUs needed, once no block is being hashed. Idempotent.

        Args:
            for_good: False lets the next block make it anew.
        """
        with self._lock:
            self._closed = self._closed or for_good
            gpus = list(self._gpus.values())
            self._gpus.clear()
        for gpu in gpus:
            gpu.close()


class _GpuDigests:
    """What hashing needs of one GPU."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._ring: PinnedRing | None = None
        with contextlib.ExitStack() as undo:
            self._device = undo.enter_context(Device.open(load(), name))
            self._digester = undo.enter_context(
                contextlib.closing(digester(self._device, self._through))
            )
            self._ends = undo.pop_all()

    @property
    def kernel(self) -> DigestKernel | None:
        return kernel_of(self._digester)

    def digests(self, blocks: Sequence[DeviceView]) -> list[bytes]:
        """Return the blake3 digest of each block."""
        # Kernels read whole units: beyond a tensor's end there may be no memory.
        whole = [not (block.address | len(block)) % UNIT_BYTES for block in blocks]
        places = [(block.address, len(block)) for block in blocks]
        there = iter(self._digester.digests(list(compress(places, whole))))
        odd = list(compress(places, map(operator.not_, whole)))
        here = iter(RingDigester(self._through()).digests(odd) if odd else ())
        return [next(there if each else here) for each in whole]

    def _through(self) -> PinnedRing:
        with self._lock:
            if self._ring is None:
                self._ring = PinnedRing(self._device)
            return self._ring

    def close(self) -> None:
        self._ends.close()
        if self._ring is not None:
            self._ring.close()


class _ReadHasher:
    """The blocks of one read; see `mx.memory.arena.Hasher`."""

    __slots__ = ("_blocks", "_hashing")

    def __init__(self, hashing: SpanHashing, blocks: Sequence[DeviceView]) -> None:
        self._hashing, self._blocks = hashing, blocks

    def landed(self, payload_nbytes: int) -> None:
        """Do nothing: the blocks of a read are one batch."""

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, concatenated. Raises as `SpanHashing.digests`."""
        return b"".join(self._hashing.digests(self._blocks))


#: What to do where tensors are not what they were.
_AS_BEFORE = "make them as they were and call `changing` again, or serve the tensors anew"

#: Returns the tensors of a module or mapping as they are at the moment.
Tensors = Callable[[], Mapping[str, object]]


class TensorColumns:
    """Where the tensors of a layout that have bytes are, in its order: columns of their arrays, and
    of where each begins and ends."""

    def __init__(self, layout: Layout, arrays: Iterable[Array]) -> None:
        """
        Args:
            layout: The layout.
            arrays: Its tensors, in its order.
        """
        sizes = [nbytes for layer in layout.layers for _, nbytes in layer.extents]
        self.arrays = list(compress(arrays, sizes))
        self.lengths = list(filter(None, sizes))
        self.addresses = list(map(attrgetter("address"), self.arrays))
        self.ends = list(map(add, self.addresses, self.lengths))

    @cached_property
    def ranges(self) -> Ranges:
        """The memory of all, ascending: that of each by itself unless some of them overlap."""
        return merged(zip(self.addresses, self.ends, strict=True))

    @property
    def apart(self) -> bool:
        """True if no two of them share a byte."""
        return len(self.ranges) == len(self.arrays)


class _TensorLocations:
    """Where the tensors of a layout are at one moment, and the claim on that memory."""

    @paused()
    def __init__(
        self,
        layout: Layout,
        arrays: Mapping[str, Array],
        what: str,
        *,
        fills: bool,
        held: TensorColumns | None = None,
        before: _TensorLocations | None = None,
    ) -> None:
        """Args and Raises as those of `LiveMemory`; `before` is the place that this one is to
        replace."""
        self.arrays: dict[str, Array] = dict(arrays)
        if held is None:
            held = TensorColumns(layout, map(self.arrays.__getitem__, layout.forms[0]))
        beside = None if before is None else before.claim
        begins: list[int] = []
        for layer in layout.layers:
            base = layer.arena_offset
            begins += [base + offset for offset, nbytes in layer.extents if nbytes]
        self.address = min(held.addresses, default=0)
        self.nbytes = max(held.ends, default=0) - self.address
        self._shifts = list(map(sub, held.addresses, repeat(self.address)))
        self._layout = layout
        self.base: Span | None = None
        spans: Sequence[Span] = ()
        devices: list[str] = sorted(set(map(attrgetter("device"), held.arrays))) or ["cpu"]
        if len(devices) > 1:
            raise ConfigError(
                f"the tensors are on {listed(devices)}, and not on one device",
                hint="give those of one device, or pull into it and serve a copy",
            )
        (self.device,) = devices
        if self.device == "cpu":
            owners = list(map(attrgetter("owner"), held.arrays))
            self.base = memory_at(self.address, self.nbytes, owners)
            spans = Window(self.base, self.address, self._shifts, held.lengths)
        else:
            spans = [array.view() for array in held.arrays]
        self.view: ScatteredView | memoryview = ScatteredView.over(
            begins, spans, layout.arena_nbytes
        )
        self.claim: Claim = claim(held.ranges, what, fills=fills, beside=beside)

    @cached_property
    def extents(self) -> ExtentMap:
        return ExtentMap.of_places(self._layout, self._shifts)

    def release(self) -> None:
        """Release the tensors. Idempotent."""
        self.claim.release()
        self.view = memoryview(b"")
        self.arrays.clear()
        self.base = None


class LentMemory:
    """Memory that its owner may change, and others read: tensors of this process (`LiveMemory`), or
    what a pack knows where it is."""

    memfd: int | None = None
    #: Whether this process can look at it.
    is_here = True
    hasher: MakeHasher

    @property
    def view(self) -> ScatteredView | memoryview:
        """It, as the arena of a layout."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        """Where it is: "cpu" or "cuda:UUID"."""
        raise NotImplementedError

    @property
    def address(self) -> int:
        """The lowest address of its region."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of its region."""
        raise NotImplementedError

    @property
    def extents(self) -> ExtentMap:
        """Where the layout's bytes are."""
        raise NotImplementedError

    def manifest_again(self, cancelled: Callable[[], bool]) -> tuple[Manifest, Pages]:
        """Return what it holds after a change, where `is_here` is False. Blocks; once `cancelled`
        returns True it raises ClosedError."""
        raise NotImplementedError

    def changed(self) -> str:
        """Say what of it is not where it was: "" if all is."""
        return ""

    def rest(self) -> None:
        """Free what hashing keeps, while none runs."""

    def yield_claim(self) -> None:
        """Let its owner have a pull write to it."""

    def release(self) -> None:
        """Let go of it. Idempotent."""


class LiveMemory(LentMemory):
    """The memory of some tensors as the arena of a layout, with every tensor where it is.

    `view` is writable, in layer space; it, and every view of it, keeps the storages of its tensors.
    `extents` has a row for each tensor; `address` is that of their region: the lowest
    of any tensor. `arrays` are all tensors by name, those included that share others' memory.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Mapping[str, Array],
        tensors: Tensors,
        what: str,
        *,
        fills: bool = False,
        overlapping: Set[int] = frozenset(),
        held: TensorColumns | None = None,
    ) -> None:
        """
        Args:
            layout: The layout. Every tensor of it is in `arrays`, dense, with its size.
            arrays: The tensors, as they were when they were described.
            tensors: Returns them as they are now.
            what: Who uses the memory, for the error that another one gets.
            fills: Whether it is to be filled: then no other pull or source may use it.
            overlapping: The layers with tensors that share memory with others which are not views
                of them in the layout: what is written to one is written to the other.
            held: Where `arrays` are, if that is known.

        Raises:
            ConfigError: The memory is in use, or on several devices.
        """
        self.overlapping = overlapping
        self._hashing = SpanHashing()
        self.hasher: MakeHasher = self._hashing.hasher
        self._tensors: Tensors | None = tensors
        self._place = _TensorLocations(layout, arrays, what, fills=fills, held=held)

    @property
    def view(self) -> ScatteredView | memoryview:
        return self._place.view

    @property
    def device(self) -> str:
        """Where the tensors are: "cpu" or "cuda:UUID"."""
        return self._place.device

    @property
    def address(self) -> int:
        return self._place.address

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    @property
    def extents(self) -> ExtentMap:
        """A row for each tensor, in one region."""
        return self._place.extents

    def digest_table(
        self, grid: ChunkGrid, page_of: Callable[[int], bytes | None]
    ) -> DigestTable | None:
        """Return a table of the blocks of a model, where the memory is a GPU's; as that of
        `DeviceArena`."""
        view = self.view
        if not isinstance(view, ScatteredView) or view.device == "cpu":
            return None
        from mx.cuda.digest_table import DigestTable

        return DigestTable(grid, view, page_of, partial(self._hashing.kernel, view.device))

    def renew(self, layout: Layout) -> None:
        """Take over where the same tensors are now, in place of where they were.

        Args:
            layout: The layout of this memory.

        Raises:
            ConfigError: A tensor is gone, has no memory of its own, or another form or other ties
                than before, or its memory is in use. Then nothing has changed.
        """
        if self._tensors is None:
            raise ConfigError("the memory was given back", hint="serve the tensors again")
        now, before = self._tensors(), self._place
        gone = [name for name in before.arrays if name not in now]
        if gone:
            raise ConfigError(f"{listed(gone)}: no longer there", hint=_AS_BEFORE)
        arrays = arrays_of({name: now[name] for name in before.arrays})
        other = [
            t.name
            for t in layout.tensors
            if (t.dtype, t.shape) != (arrays[t.name].dtype, arrays[t.name].shape)
            or (t.nbytes and t.stride != arrays[t.name].order)
        ]
        other += [
            a.name for a in layout.aliases if not is_tied(a, arrays[a.name], arrays[a.target])
        ]
        if other:
            raise ConfigError(
                f"{listed(other)}: another shape, dtype, order or tie than before", hint=_AS_BEFORE
            )
        claim = before.claim
        self._place = _TensorLocations(layout, arrays, claim.what, fills=claim.fills, before=before)
        before.release()

    def sharing(self, names: Iterable[str]) -> set[str]:
        """Return the names of all tensors that share memory with some of these."""
        arrays = self._place.arrays

        def place(name: str) -> tuple[int, int]:
            array = arrays[name]
            return array.address, array.address + array.span_nbytes

        ranges = merged(map(place, names))
        return {name for name in arrays if overlap([place(name)], ranges)}

    @property
    def released(self) -> bool:
        """True once the tensors are the caller's alone again."""
        return self._tensors is None

    def private_view(self) -> View:
        """Return the memory: here the tensors' own."""
        return self.view

    def rest(self) -> None:
        """Free what hashing keeps on a GPU, 16 MiB, while none runs; it is made anew."""
        self._hashing.close(for_good=False)

    def yield_claim(self) -> None:
        """Let a pull fill the tensors, until `claim_again`."""
        self._place.claim.release()

    def claim_again(self) -> None:
        """End what `yield_claim` has begun. Idempotent. Raises ConfigError if a pull fills them."""
        was = self._place.claim
        self._place.claim = claim(was.ranges, was.what, fills=was.fills, beside=was)
        was.release()

    def changed(self) -> str:
        """Say which tensors are no longer where they were: "" if all are."""
        tensors, arrays = self._tensors, self._place.arrays
        if tensors is None:
            return "the memory was given back"
        now = tensors()
        if all_are_now(arrays, now):
            return ""
        moved: list[str] = []
        with Allocations() as places:
            for name, array in arrays.items():
                try:
                    if name not in now or not array.is_now(name, now[name], places):
                        moved.append(name)
                except (MxError, RuntimeError):  # torch's, of a tensor without memory
                    moved.append(name)
        return f"{listed(moved)}: replaced, resized or freed since they were lent" if moved else ""

    def wait_for_owner(self) -> None:
        """Wait until what the tensors' owner has queued for them is done, where they are on a GPU:
        see `mx.memory.arrays.wait_for_owners`. Raises CudaError."""
        if self.device != "cpu" and self._tensors is not None:
            wait_for_owners(self._place.arrays, self._tensors())

    @contextlib.contextmanager
    def filling(self) -> Iterator[LayerWindow]:
        """Give host memory to fill, layer by layer, in place of that of a GPU."""
        view = self.view
        assert isinstance(view, ScatteredView)
        from mx.memory.device import LayerWindow

        with (
            Device.open(load(), self.device) as device,
            contextlib.closing(PinnedRing(device)) as ring,
            contextlib.closing(LayerWindow(view, ring)) as window,
        ):
            yield window

    def release(self) -> None:
        """Release the tensors. Idempotent."""
        self._tensors = None
        self._place.release()
        self._hashing.close()


def is_tied(alias: Alias, array: Array, target: Array) -> bool:
    """Return True if a tensor is the view of another one's memory that an alias describes."""
    return 0 in alias.shape or (
        array.address == target.address + alias.offset_bytes
        and array.dtype == alias.dtype
        and len(array.shape) == len(alias.shape)
        and all(
            n <= 1 or a == b
            for n, a, b in zip(alias.shape, array.stride, alias.stride, strict=True)
        )
    )


#: What a model's bytes are in.
Memory: TypeAlias = "Arena | LiveMemory"


# -- which memory of this process mx fills or lends ------------------------------------------------

#: Half-open ranges of addresses.
Ranges = list[tuple[int, int]]


class Claim:
    """Ranges of memory that one pull fills, or one source lends, until `release`."""

    def __init__(self, ranges: Ranges, what: str, *, fills: bool) -> None:
        self.ranges, self.what, self.fills = ranges, what, fills

    def release(self) -> None:
        """Give the ranges up. Idempotent."""
        with _lock:
            if self in _claims:
                _claims.remove(self)


_lock = threading.Lock()
_claims: list[Claim] = []


def claim(ranges: Ranges, what: str, *, fills: bool, beside: Claim | None = None) -> Claim:
    """Claim memory, to fill it or to lend it. Any number of sources may lend the same memory.

    Args:
        ranges: Half-open ranges of addresses, as `merged` returns them.
        what: Who claims it, for the error that another one gets.
        fills: Whether it is to be filled.
        beside: A claim of the same claimant's, which may have some of it.

    Raises:
        ConfigError: Some of it is filled by another pull, or is to be filled and is lent.
    """
    new = Claim(ranges, what, fills=fills)
    with _lock:
        for other in _claims:
            if other is not beside and (fills or other.fills) and overlap(new.ranges, other.ranges):
                raise ConfigError(
                    f"some of these tensors' memory is in use: {other.what}",
                    hint="close that one first, or give other tensors",
                )
        _claims.append(new)
    return new


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges ascending, without empty ones and without overlaps."""
    found: Ranges = []
    ascending = sorted(ranges)
    if all(starmap(lt, ascending)) and are_apart(ascending):  # as those of many tensors are
        return ascending
    for begin, end in ascending:
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def are_apart(ascending: Ranges) -> bool:
    """Return True if no range overlaps the next one. They ascend by where they begin."""
    begins = islice(map(itemgetter(0), ascending), 1, None)
    return all(map(le, map(itemgetter(1), ascending), begins))


def overlap(some: Ranges, others: Ranges) -> bool:
    """Return True if any two ranges share a byte. Both are ascending, without overlaps."""
    if len(some) > len(others):
        some, others = others, some
    for begin, end in some:
        at = bisect_right(others, begin, key=lambda each: each[0])
        if (at and others[at - 1][1] > begin) or (at < len(others) and others[at][0] < end):
            return True
    return False
