"""Where this process is, and what reaches what: `topology`."""

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
from mx.hardware import Topology
from mx.target.paths import path_between, path_or_reason
from mx.transport import Path, Transport, Unavailable


@dataclass(frozen=True, slots=True)
class Reach:
    """How one device of this host reads what another process of this user has on `source`; both
    as `Place.device` says them. `paths` are best first; none if nothing reaches."""

    target: str
    source: str
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class SourceReach:
    """What a pull from this source alone would use, by the target's device."""

    record: SourceRecord
    plans: Mapping[str, Plan]


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """`matrix` has a row of entries for each device of the host, "cpu" first; `sources` those of
    the coordinator, if they were asked for."""

    topology: Topology
    devices: tuple[str, ...]
    matrix: tuple[Reach, ...]
    sources: tuple[SourceReach, ...] = ()


def topology(
    *,
    sources: bool = False,
    model: str = "",
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> TopologyReport:
    """This machine as mx sees it: interfaces, NUMA nodes, GPUs, transports, and the paths between
    its devices; with `sources` also those from the registered sources (of `model`, if given).

    What the machine lacks is said in the answer. Raises ConfigError; with `sources`
    CoordinatorError.
    """
    settings = settings or config.load()
    known = transports()
    found = discovery.topology(known, nics=settings.nics)
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
    """Every transport's path from `there` to `here`, in the order in which a pull prefers them."""
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
