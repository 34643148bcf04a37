"""Where KV blocks are in a process's memory: for each layer a region, a stride, and runs of bytes.

An engine allocates one tensor for each layer, of which one dimension counts blocks, and mostly one
counts heads. The bytes of a block's part in one layer are those of its runs, in order. Between a
rank with all heads and one with some of them a run has the bytes of these heads.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from mx.buffers import address_of
from mx.core.digest import DIGEST_BYTES
from mx.errors import ConfigError, PeerProtocolError
from mx.memory.arrays import Array, array_of
from mx.transport import ExposedRegion
from mx.views import DeviceView, Span

if TYPE_CHECKING:
    from mx.kv.gpu import KvGpu

#: The most layers of a pool, and the most runs of one layer's part.
MOST_LAYERS, MOST_RUNS = 4096, 4096


@dataclass(frozen=True)
class Rows:
    """Where one layer's parts are: those of slot s in `run_nbytes` bytes at each of
    `begin + s * stride + offset`, in a region."""

    region: int
    begin: int
    stride: int
    offsets: tuple[int, ...]
    run_nbytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of one part."""
        return len(self.offsets) * self.run_nbytes

    def runs(self, slot: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the region, bytes) of a slot's part."""
        base = self.begin + slot * self.stride
        for offset in self.offsets:
            yield base + offset, self.run_nbytes

    def heads(self, first: int, count: int, of: int) -> Rows:
        """Return where some heads of these rows are, which have `of` heads in each run."""
        head_nbytes, left = divmod(self.run_nbytes, of)
        if left or not 0 <= first < first + count <= of:
            raise ConfigError(f"a part of {of} heads has no heads {first} to {first + count}")
        shift = first * head_nbytes
        offsets = tuple(offset + shift for offset in self.offsets)
        return Rows(self.region, self.begin, self.stride, offsets, count * head_nbytes)

    def joined(self) -> Rows:
        """Return the same rows with runs that follow each other as one, where all do."""
        step, count = self.run_nbytes, len(self.offsets)
        for size in range(count, 1, -1):
            if count % size:
                continue
            groups = [self.offsets[at : at + size] for at in range(0, count, size)]
            if all(b - a == step for group in groups for a, b in itertools.pairwise(group)):
                firsts = tuple(group[0] for group in groups)
                return Rows(self.region, self.begin, self.stride, firsts, size * step)
        return self

    def check(self, region_nbytes: Sequence[int], slots: int) -> None:
        """Raise PeerProtocolError if a slot is not in the region."""
        if self.region >= len(region_nbytes) or not 0 < len(self.offsets) <= MOST_RUNS:
            raise PeerProtocolError("a layer of its KV pool has no place")
        last = self.begin + (slots - 1) * self.stride + max(self.offsets) + self.run_nbytes
        if min(slots, self.run_nbytes) < 1 or last > region_nbytes[self.region]:
            raise PeerProtocolError("a layer of its KV pool is larger than its memory")


def rows_of(array: Array, region: int, blocks: int, heads: int | None) -> tuple[Rows, int]:
    """Return where the blocks of one layer are in a tensor, and how many there are.

    A part's bytes are in the order of the tensor's dimensions as they lie in memory.

    Args:
        array: The tensor.
        region: The region that begins with its first element.
        blocks: The dimension that counts blocks.
        heads: The one that counts heads, None for none.

    Raises:
        ConfigError: What is within a head is not contiguous, or there are more than `MOST_RUNS`.
    """
    size, dims = array.item_nbytes, []
    for at in range(len(array.shape)):
        if at != blocks and array.shape[at] > 1:
            dims.append((array.stride[at] * size, array.shape[at], at == heads))
    dims.sort(key=lambda each: -each[0])
    run_nbytes, inner = size, True
    outer: list[tuple[int, int]] = []
    for stride, count, is_heads in reversed(dims):
        if inner and stride == run_nbytes:
            run_nbytes *= count
            inner = not (is_heads and heads is not None)
        else:
            inner = False
            if is_heads:
                raise ConfigError("the elements of one KV head are not contiguous")
            outer.append((stride, count))
    if math.prod(count for _, count in outer) > MOST_RUNS:
        raise ConfigError(f"a layer of a KV block is in more than {MOST_RUNS} runs of bytes")
    outer.reverse()
    steps = (range(0, stride * count, stride) for stride, count in outer)
    offsets = tuple(sum(each) for each in itertools.product(*steps))
    return Rows(region, 0, array.stride[blocks] * size, offsets, run_nbytes), array.shape[blocks]


def copies(theirs: Rows, own: Rows) -> tuple[tuple[int, int, int], ...]:
    """Return (offset there, offset here, bytes) of a part's pieces, relative to its slots.

    Args:
        theirs: Where the part is read from.
        own: Where it is read into; of the same size.
    """
    found = []
    sources, targets = iter(theirs.joined().runs(0)), iter(own.joined().runs(0))
    source = target = (0, 0)
    left = theirs.nbytes
    while left:
        source = source if source[1] else next(sources)
        target = target if target[1] else next(targets)
        nbytes = min(source[1], target[1])
        found.append((source[0], target[0], nbytes))
        source = source[0] + nbytes, source[1] - nbytes
        target = target[0] + nbytes, target[1] - nbytes
        left -= nbytes
    return tuple(found)


@dataclass(frozen=True)
class KvMemory:
    """The memory of a process's KV blocks.

    Attributes:
        views: The memory of each layer's tensor, all in the host, or all on one GPU.
        rows: Where each layer's parts are.
        slots: How many blocks there are.
        first_head: Which of the model's KV heads come first in it.
        heads: How many of them it holds.
        gpu: What hashes there; None in the host.
    """

    views: tuple[Span, ...]
    rows: tuple[Rows, ...]
    slots: int
    first_head: int
    heads: int
    gpu: KvGpu | None = None

    @classmethod
    def of(
        cls,
        tensors: Sequence[Any],
        blocks: int,
        heads: int | None,
        first_head: int = 0,
    ) -> KvMemory:
        """Return the memory of an engine's KV tensors, which it keeps alive. Of a GPU's memory
        `close` it after what uses it.

        Args:
            tensors: One for each layer, in order; of torch, or as `mx.serve` takes them.
            blocks: The dimension that counts blocks.
            heads: The dimension that counts KV heads; None where all ranks have all of them.
            first_head: The first of the model's KV heads in it.

        Raises:
            ConfigError: A tensor is not understood, or they do not have the same number of blocks,
                or are not in the memory of one device.
            CudaError: The driver fails.
        """
        found, rows, slots = [], [], set()
        for at, tensor in enumerate(tensors):
            array = _array(f"the KV cache of layer {at}", tensor)
            own, count = rows_of(array, at, blocks, heads)
            found.append(array)
            rows.append(own)
            slots.add(count)
        if not found or len(found) > MOST_LAYERS or len(slots) != 1 or 0 in slots:
            raise ConfigError("the layers of a KV cache do not have the same number of blocks")
        own_heads = 1 if heads is None else found[0].shape[heads]
        views = tuple(array.view() for array in found)
        return cls(views, tuple(rows), slots.pop(), first_head, own_heads, _gpu_of(views, rows))

    @classmethod
    def whole(
        cls, memory: Any, part_nbytes: Sequence[int], first_head: int, heads: int
    ) -> KvMemory:
        """Return memory that is a pool of its own: in each slot the parts of all layers follow each
        other.

        Args:
            memory: An array of bytes, the first dimension of which counts slots.
            part_nbytes: The size of each layer's part.
            first_head: The first of the model's KV heads in it.
            heads: How many of them.
        """
        view, begin, rows = _array("the KV pool", memory).view(), 0, list[Rows]()
        stride = sum(part_nbytes)
        for nbytes in part_nbytes:
            rows.append(Rows(0, begin, stride, (0,), nbytes))
            begin += nbytes
        slots, gpu = len(view) // stride, _gpu_of((view,), rows)
        return cls((view,), tuple(rows), slots, first_head, heads, gpu)

    @property
    def device(self) -> str:
        """Where it is: "cpu" or "cuda:UUID"."""
        return "cpu" if self.gpu is None else self.gpu.device.key

    def close(self) -> None:
        """Free what hashes on the GPU. Idempotent."""
        if self.gpu is not None:
            self.gpu.close()

    def regions(self) -> list[ExposedRegion]:
        """Return what transports expose."""
        return [
            ExposedRegion(at, view, view.address, view.device)
            if isinstance(view, DeviceView)
            else ExposedRegion(at, view.toreadonly(), address_of(view))
            for at, view in enumerate(self.views)
        ]

    @functools.cached_property
    def _joined(self) -> tuple[Rows, ...]:
        return tuple(each.joined() for each in self.rows)

    def parts(self, slot: int, rows: Sequence[Rows] | None = None) -> Iterator[list[Any]]:
        """Yield the memory of each layer's part of a block, or of these rows, by its runs."""
        for each in self._joined if rows is None else rows:
            view = self.views[each.region]
            yield [view[begin : begin + nbytes] for begin, nbytes in each.runs(slot)]

    def digest(self, slot: int, layer: int) -> bytes:
        """Return the blake3 digest of a block's part in one layer."""
        return b"".join(self.digests_of(list(self.parts(slot, [self._joined[layer]]))))

    def digests(self, slot: int) -> bytes:
        """Return the blake3 digests of a block's parts, one after the other."""
        return b"".join(self.digests_of(list(self.parts(slot))))

    def digests_of(self, parts: Sequence[Sequence[Any]]) -> list[bytes]:
        """Return the blake3 digest of each part, whose runs these are. Raises CudaError."""
        return list(map(digest_of, parts)) if self.gpu is None else self.gpu.digests(parts)


def _gpu_of(views: Sequence[Span], rows: Sequence[Rows]) -> KvGpu | None:
    """Return what hashes these views; None in the host. Raises ConfigError, CudaError."""
    devices = {view.device if isinstance(view, DeviceView) else "cpu" for view in views}
    if len(devices) > 1:
        raise ConfigError(f"the layers of a KV cache are in {' and '.join(sorted(devices))}")
    (device,) = devices
    if device == "cpu":
        return None
    from mx.kv.gpu import MOST_PART_BYTES, KvGpu

    if max(each.nbytes for each in rows) > MOST_PART_BYTES:
        raise ConfigError(
            f"a layer of a KV block on a GPU has at most {MOST_PART_BYTES} bytes",
            hint="use smaller blocks",
        )
    return KvGpu(device)


def _array(name: str, tensor: Any) -> Array:
    if "torch" in sys.modules:
        import mx.memory.torch_source  # noqa: F401 - it adds torch's tensors to `array_of`

    return array_of(name, tensor)


def digest_of(runs: Sequence[memoryview]) -> bytes:
    """Return the blake3 digest of bytes, run after run."""
    if len(runs) == 1:
        return blake3(runs[0]).digest(DIGEST_BYTES)
    hasher = blake3()
    for run in runs:
        hasher.update(run)
    return hasher.digest(DIGEST_BYTES)
