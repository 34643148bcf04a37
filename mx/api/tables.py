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
from mx.transport import TlsFiles
from mx.wire.channel import Remote, Role, dial
from mx.wire.locate import Locator
from mx.wire.rows import fetch_table


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, or a part of one where it lies in several: `nbytes` bytes from `address` in the
    source's process. `device` is "cpu" or "cuda:UUID"."""

    name: str
    layer: str
    device: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class SourceTable:
    """One source's table, in execution order. `error` says why it could not be had.

    `live` is True if the source lends memory where it is, or serves it in a layout that is not its
    own.
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

    Rows come from the sources themselves, the rest from the coordinator.

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
        finally:
            await locator.close()
        return [
            await _table(source, manifest.layout, options.tls, options.insecure)
            for source in located.sources
            if source.ref.layout == manifest.ref.layout
        ]

    return runtime.run(ask)


async def _table(
    source: SourceRecord, layout: Layout, tls: TlsFiles | None, insecure: bool
) -> SourceTable:
    channel = dial(source.endpoint, tls=tls, insecure=insecure)
    try:
        table = await fetch_table(
            channel,
            source,
            most_rows=sum(len(layer.extents) for layer in layout.layers),
            who=Remote(Role.SOURCE, source.endpoint, tls),
        )
        extents = await in_thread(ExtentMap.of_table, layout, table)
    except MxError as error:
        return SourceTable(source, error=str(error))
    finally:
        await channel.close(None)
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
                    region.device,
                    region.base + place.region_offset,
                    place.nbytes,
                )
            )
    return SourceTable(source, tuple(found))
