"""Reports this machine and the paths between its devices: `topology`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mx import config, discovery
from mx.api.common import transports
from mx.api.listing import list_sources
from mx.core.locality import with_verified_place
from mx.core.planner import Plan, plan
from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.discovery import Topology
from mx.fetching.paths import path_between, path_or_reason
from mx.plugins import transport_context
from mx.transport import Path, Transport, Unavailable
from mx.units import count


@dataclass(frozen=True, slots=True)
class Reach:
    """The paths by which `target` reads memory of another process of this user on `source`.

    Both are devices of this host, written as in `Place.device`. `paths` has the best path first,
    and is empty if no transport connects the two.
    """

    target: str
    source: str
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class SourceReach:
    """The plan of a pull from this source alone, for each target device."""

    record: SourceRecord
    plans: Mapping[str, Plan]


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """This machine, the paths within it and, if requested, those from registered sources.

    `devices` are those of the host, "cpu" first. `matrix` has an entry for each pair of them,
    target by target.
    """

    topology: Topology
    devices: tuple[str, ...]
    matrix: tuple[Reach, ...]
    sources: tuple[SourceReach, ...] = ()

    def __repr__(self) -> str:
        """Return one line: what the machine has, the transports that work, the sources."""
        place, states = self.topology.place, self.topology.transports
        working = [name for name in sorted(states) if not isinstance(states[name], Unavailable)]
        return (
            f"<TopologyReport: {count(len(place.nics), 'interface')}, "
            f"{count(len(place.gpus), 'GPU')}, {', '.join(working) or 'no transport'}, "
            f"{count(len(self.sources), 'source')}>"
        )


def topology(
    *,
    sources: bool = False,
    model: str = "",
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> TopologyReport:
    """Return what mx sees of this machine: interfaces, NUMA nodes, GPUs, transports and paths.

    The report names what the machine lacks, and why.

    Args:
        sources: True also reports the paths from sources that are registered.
        model: NAME, NAME:REVISION or NAME@PIN to report only its sources; empty reports all.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: An argument or a setting is wrong.
        CoordinatorError: With `sources`, the coordinator does not answer.
    """
    settings = settings or config.load()
    context = transport_context(settings)
    known = {**transports(), **context.broken}
    found = discovery.topology(known, nics=settings.nics)
    found = replace(found, place=replace(found.place, facts=context.facts))
    viable = {
        name: each
        for name, each in known.items()
        if not isinstance(found.transports[name], Unavailable)
    }
    devices = ("cpu", *(f"cuda:{gpu.uuid}" for gpu in found.place.gpus))
    places = [replace(found.place, device=device) for device in devices]
    matrix = [
        Reach(here.device, there.device, paths(here, there, viable))
        for here in places
        for there in places
    ]
    records = []
    if sources:
        listed = list_sources(model, coordinator=coordinator, settings=settings)
        records = [status.record for status in listed]
    return TopologyReport(
        found,
        devices,
        tuple(matrix),
        tuple(
            _source_reach(record, places, known, found, trusted_fabric=settings.trusted_fabric)
            for record in records
        ),
    )


def paths(here: Place, there: Place, transports: Mapping[str, Transport]) -> tuple[Path, ...]:
    """Return each transport's path from `there` to `here`, in the order that a pull prefers."""
    found = (path_between(each, here, there) for each in transports.values())
    known = [path for path in found if path is not None]
    return tuple(sorted(known, key=lambda path: (not path.attach, -path.gb_per_s, path.transport)))


def _source_reach(
    record: SourceRecord,
    places: list[Place],
    known: Mapping[str, Transport],
    found: Topology,
    *,
    trusted_fabric: bool,
) -> SourceReach:
    plans = {}
    for here in places:

        def reach(name: str, there: Place, here: Place = here) -> Path | str:
            viable = found.transports[name]
            if isinstance(viable, Unavailable):
                return viable.reason
            return path_or_reason(known[name], here, there, trusted_fabric=trusted_fabric)

        plans[here.device] = plan(here, [with_verified_place(record, here)], sorted(known), reach)
    return SourceReach(record, plans)
