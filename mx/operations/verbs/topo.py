"""`mx topo`: this machine, and what reaches what."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mx.cli import options, outcome
from mx.config import Settings
from mx.operations import topo_tables

if TYPE_CHECKING:
    from mx.api.survey import SourceReach, TopologyReport
    from mx.transport import Path, Unavailable, Viable


@options.takes_settings
def topo(
    settings: Settings,
    model: Annotated[
        str, options.model_argument("Also the paths from the sources of this one.")
    ] = "",
    sources: Annotated[
        bool,
        typer.Option("--sources", help="Also the paths from what the coordinator lists."),
    ] = False,
    *,
    as_json: bool,
) -> None:
    """Show this machine as mx sees it, and what reaches what.

    Host and namespaces, NUMA nodes, network interfaces, GPUs, and every transport with the
    reason if it can't work here. Then a matrix: a row for each device that could receive
    weights, a column for each that could hold them in another process of yours, and between
    them the best path with its estimated GB/s. *attach* means that nothing is copied.

    With --sources also the paths from each registered source to the devices of this machine;
    over a network one for each pair of interfaces that share a subnet. Figures are estimates
    until a pull measures them. What a machine lacks is not an error: the exit code is 0.

    **Examples**

    - `mx topo`

    - `mx topo --sources llama-8b --coordinator 10.0.0.1:7600 --insecure`

    - `mx topo --json | jq '.place.nics[].addresses'`
    """
    from mx import api

    report = api.topology(
        sources=sources or bool(model),
        model=model,
        coordinator=options.coordinator_of(settings),
        settings=settings,
    )
    if as_json:
        outcome.emit(_json(report))
    else:
        topo_tables.show(report, asked_for_sources=sources or bool(model), model=model)


def _json(report: TopologyReport) -> dict[str, object]:
    found = report.topology
    return {
        "place": asdict(found.place),
        "missing": dict(found.missing),
        "transports": {name: _probe(each) for name, each in found.transports.items()},
        "devices": list(report.devices),
        "matrix": [
            {
                "target": entry.target,
                "source": entry.source,
                "paths": [_path(path) for path in entry.paths],
            }
            for entry in report.matrix
        ],
        "sources": [_source(source) for source in report.sources],
    }


def _probe(answer: Viable | Unavailable) -> dict[str, object]:
    reason = getattr(answer, "reason", "")
    return {"works": not reason, "detail": getattr(answer, "detail", ""), "reason": reason}


def _path(path: Path) -> dict[str, object]:
    return {
        "transport": path.transport,
        "gb_per_s": round(path.gb_per_s, 3),
        "attach": path.attach,
        "medium": path.medium.value,
        "staged": path.staged,
        "detail": path.detail,
    }


def _source(source: SourceReach) -> dict[str, object]:
    record = source.record
    paths = [
        {
            "target": device,
            "transport": path.transport,
            "rail": "" if path.rail is None else str(path.rail),
            "gb_per_s": round(path.gb_per_s, 3),
            "attach": path.attach,
            "chosen": path in plan.chosen,
            "detail": path.detail,
        }
        for device, plan in source.plans.items()
        for path in plan.paths
    ]
    return {
        "model": str(record.model),
        "source_id": record.source_id,
        "endpoint": record.endpoint,
        "host": record.place.hostname,
        "device": record.place.device,
        "paths": paths,
    }
