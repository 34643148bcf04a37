"""The layer-address tables of a model's sources: where each tensor is in their memory."""

from __future__ import annotations

from dataclasses import dataclass

from mx import config, runtime
from mx.api.options import pull_options
from mx.core.extents import ExtentMap
from mx.core.types import Layout, SourceRecord
from mx.errors import MxError, PeerProtocolError
from mx.runtime import in_thread
from mx.target.resolver import describe
from mx.wire.locate import Locator


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
    """One source's table, in execution order. `error` says why it could not be had.

    `live` is True if the source lends memory where it is.
    """

    record: SourceRecord
    tensors: tuple[PlacedTensor, ...] = ()
    error: str = ""

    @property
    def live(self) -> bool:
        return self.record.table.scattered


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
        SourceError: No source gives the model's layout.
    """
    settings = settings or config.load()
    options = pull_options(model, settings, {"coordinator": coordinator or settings.coordinator})

    async def ask() -> list[SourceTable]:
        locator = Locator(options)
        try:
            located, manifest = await describe(locator)
            return [await _table(locator, source, manifest.layout) for source in located.sources]
        finally:
            await locator.close()

    return runtime.run(ask)


async def _table(locator: Locator, source: SourceRecord, layout: Layout) -> SourceTable:
    try:
        if source.table.row_count > sum(len(layer.extents) for layer in layout.layers):
            raise PeerProtocolError(f"{source.endpoint} has more rows than the model has tensors")
        table = await locator.table(source)
        extents = await in_thread(ExtentMap.of_table, layout, table)
    except MxError as error:
        return SourceTable(source, error=str(error))
    regions = {region.index: region for region in table.regions}
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
