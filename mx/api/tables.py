"""The layer-address tables of a model's sources: where each tensor is in their memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mx import config, runtime
from mx.api.options import pull_options
from mx.core.extents import ExtentMap
from mx.core.types import ROW_BYTES, Layout, SourceRecord
from mx.errors import MxError, PeerProtocolError
from mx.fetching.resolver import describe
from mx.runtime import in_thread
from mx.units import MIB, count
from mx.wire.locate import Locator

#: The most bytes of rows that a plan reads, of all sources together, and the time that it waits.
_MOST_BYTES = 64 * MIB
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, or a part of one where it lies in several: `nbytes` bytes from `address` in the
    source's process, in its region of this number. `device` is "cpu" or "cuda:UUID"."""

    name: str
    layer: str
    region: int
    device: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class SourceTable:
    """One source's table, in execution order. `error` says why it could not be obtained.

    `live` is True if the source lends memory where it is.
    """

    record: SourceRecord
    tensors: tuple[PlacedTensor, ...] = ()
    error: str = ""

    @property
    def live(self) -> bool:
        return self.record.table.scattered


@dataclass(frozen=True, slots=True)
class RegionUse:
    """What a source has of a model in one region of its memory: `nbytes` bytes, in `rows` places
    that its table names one by one; 0 rows where the region is laid out as an arena."""

    region: int
    device: str
    nbytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer that a source holds: its bytes, padding left out, and the regions they are in."""

    layer: str
    nbytes: int
    regions: tuple[int, ...]


@dataclass(frozen=True)
class SourceMemory:
    """Where a source has a model's bytes, as its table says. `regions` has those with bytes of the
    model. `error` says why the rows of its table could not be obtained; then there are no
    regions."""

    record: SourceRecord
    regions: tuple[RegionUse, ...] = ()
    layers: tuple[LayerUse, ...] = ()
    error: str = ""

    @property
    def scattered(self) -> bool:
        """True if each tensor is where the source's owner has it."""
        return self.record.table.scattered

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its memory: "cpu" or "cuda:UUID", sorted."""
        regions = self.regions or self.record.table.regions
        return tuple(sorted({region.device for region in regions}))


def list_tables(
    model: str, *, coordinator: str | None = None, settings: config.Settings | None = None
) -> list[SourceTable]:
    """Return where each source of a model has each tensor.

    The coordinator keeps the table of each source that is listed.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: An argument is wrong.
        UnknownModelError: The coordinator knows no such model.
        CoordinatorError: The coordinator does not answer.
        SourceError: No source sends the model's layout.
    """
    settings = settings or config.load()
    options = pull_options(model, settings, {"coordinator": coordinator or settings.coordinator})

    async def ask() -> list[SourceTable]:
        async with Locator(options) as locator:
            located, manifest = await describe(locator)
            return [await _table(locator, source, manifest.layout) for source in located.sources]

    return runtime.run(ask)


async def memories(
    locator: Locator, sources: Sequence[SourceRecord], layout: Layout
) -> tuple[SourceMemory, ...]:
    """Return where each source has a model's bytes. Raises nothing: see `SourceMemory.error`.

    Args:
        locator: Reads the rows of tables, at the coordinator or else at the source.
        sources: The sources. The rows of the first ones are read, up to a bound.
        layout: The model's.
    """
    sizes = [sum(nbytes for _, nbytes in layer.extents) for layer in layout.layers]
    nbytes, reading = 0, []
    for source in sources:
        nbytes += source.table.row_count * ROW_BYTES
        reading.append(_memory(locator, source, layout, sizes, is_read=nbytes <= _MOST_BYTES))
    return tuple(await asyncio.gather(*reading))


async def _memory(
    locator: Locator, source: SourceRecord, layout: Layout, sizes: Sequence[int], *, is_read: bool
) -> SourceMemory:
    rows = count(source.table.row_count, "row")
    if source.table.row_count and not is_read:
        return SourceMemory(source, error=f"its {rows} would be more than are read here")
    try:
        if not source.table.scattered:
            return _arenas(source, layout, sizes)
        async with asyncio.timeout(_WAIT_S):
            extents = await _extents(locator, source, layout)
        return await in_thread(_scattered, source, layout, extents)
    except MxError as error:
        return SourceMemory(source, error=error.message)
    except TimeoutError:
        return SourceMemory(source, error=f"its {rows} did not arrive in {_WAIT_S:g} s")


def _arenas(source: SourceRecord, layout: Layout, sizes: Sequence[int]) -> SourceMemory:
    """Return where a source has its layers, whose bytes are `sizes`. It looks at no tensor: a plan
    has many sources."""
    region_of = {
        layer.index: region.index
        for region in source.table.regions
        if region.layers is not None
        for layer in layout.layers[slice(*region.layers)]
    }
    found: dict[int, Counter[int]] = {}
    for held in source.table.held:
        for index in range(*held):
            if index not in region_of:
                raise PeerProtocolError(f"no region has layer {index}, which it says it holds")
            found[index] = Counter({region_of[index]: sizes[index]})
    return _memory_of(source, layout, found, Counter())


def _scattered(source: SourceRecord, layout: Layout, extents: ExtentMap) -> SourceMemory:
    named = {region.index for region in source.table.regions if region.layers is None}
    found: dict[int, Counter[int]] = {}
    rows = Counter[int]()
    for begin, end in source.table.held:
        for layer in layout.layers[begin:end]:
            own = found[layer.index] = Counter[int]()
            for offset, nbytes in layer.extents:
                for place in extents.places(layer.index, offset, offset + nbytes):
                    own[place.region] += place.nbytes
                    rows[place.region] += place.region in named
    return _memory_of(source, layout, found, rows)


def _memory_of(
    source: SourceRecord, layout: Layout, found: Mapping[int, Counter[int]], rows: Counter[int]
) -> SourceMemory:
    """Return the summary of a source's table.

    Args:
        source: The source.
        layout: The model's.
        found: By layer that it holds, the bytes in each region.
        rows: By region, how many rows name them.
    """
    nbytes = sum(found.values(), Counter[int]())
    regions = [
        RegionUse(region.index, region.device, nbytes[region.index], rows[region.index])
        for region in source.table.regions
        if nbytes[region.index]
    ]
    layers = [
        LayerUse(layout.layers[index].name, own.total(), tuple(sorted(own)))
        for index, own in found.items()
    ]
    return SourceMemory(source, tuple(regions), tuple(layers))


async def _extents(locator: Locator, source: SourceRecord, layout: Layout) -> ExtentMap:
    """Return the map of a source. Raises MxError: its rows can't be obtained, or are wrong."""
    if source.table.row_count > sum(len(layer.extents) for layer in layout.layers):
        raise PeerProtocolError(f"{source.endpoint} has more rows than the model has tensors")
    return await in_thread(ExtentMap.of_table, layout, await locator.table(source))


async def _table(locator: Locator, source: SourceRecord, layout: Layout) -> SourceTable:
    try:
        extents = await _extents(locator, source, layout)
    except MxError as error:
        return SourceTable(source, error=str(error))
    regions = {region.index: region for region in source.table.regions}
    found = []
    for tensor in layout.tensors:
        try:
            places = extents.places(tensor.layer, tensor.offset, tensor.offset + tensor.nbytes)
        except PeerProtocolError:  # a layer that it has not received yet
            continue
        for place in places:
            region = regions[place.region]
            found.append(
                PlacedTensor(
                    tensor.name,
                    layout.layers[tensor.layer].name,
                    region.index,
                    region.device,
                    region.base + place.region_offset,
                    place.nbytes,
                )
            )
    return SourceTable(source, tuple(found))
