"""`mx plan`: what a pull would do, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mx.cli import options, outcome
from mx.cli.printing import Column, table_of
from mx.cli.words import in_flags
from mx.errors import EXIT_NO_SOURCE
from mx.units import count, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api.planning import PlannedPull
    from mx.api.tables import SourceMemory
    from mx.core.planner import Rejected, SourcePath
    from mx.core.reasons import PathReason
    from mx.core.selection import Subset

#: The columns of the table of paths, and the widths to which they may be folded.
_COLUMNS = (("source", 0), ("path", 8), ("use", 0), ("GB/s", 0), ("carries", 0), ("why", 20))

#: Those of the table of memories, and the order in which a narrow terminal leaves them out.
_MEMORY_COLUMNS = (
    ("source", 0), ("memory", 0), ("device", 0), ("regions", 1), ("rows", 2),
    ("bytes", 0), ("layers", 0), ("bytes per layer", 3),
)  # fmt: skip
_DEVICE = 2


@options.takes_settings
def plan(
    context: typer.Context,
    model: Annotated[
        str, options.model_argument("NAME, NAME:REVISION, or NAME@PIN to insist on those weights.")
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="peer: sources that the coordinator lists. peer=HOST:PORT: that one, no "
            "coordinator.",
            metavar="WHERE",
        ),
    ] = "peer",
    revision: options.Revision = "",
    variant: options.Variant = "",
    transport: options.OneTransport = None,
    no_attach: options.NoAttach = False,
    only: options.Only = None,
    slices: options.Slices = None,
    device: options.Device = "cpu",
    *,
    as_json: bool,
) -> None:
    """Show which paths a pull of MODEL to this machine would take, and why.

    Every path that was considered, the bandwidth expected of it, what it should
    carry or why it is not used; and where each source has the bytes, as its
    layer-address table says. No weights are moved. Exit code 3 if no path works.

    **Examples**

    - `mx plan llama-8b`

    - `mx plan llama-8b --transport tcp --json`

    - `mx plan llama-8b --slice '*.o_proj.weight=1:0/2' --slice '*.q_proj.weight=0:0/2'`
    """
    settings = options.settings_of(context)
    from mx import api

    planned = api.plan(
        model,
        peer=options.where_from(source).get("peer"),
        revision=revision,
        variant=variant,
        coordinator=options.coordinator_of(settings),
        transport=transport,
        attach=not no_attach,
        device=device,
        only=only or None,
        slices=options.slices_of(slices),
        settings=settings,
    )
    if as_json:
        outcome.emit(_json(planned))
    else:
        _show(planned)
    if not planned.plan.chosen:
        raise typer.Exit(EXIT_NO_SOURCE)


def _json(planned: PlannedPull) -> dict[str, object]:
    found = planned.plan
    shares = found.shares(planned.nbytes)
    paths: list[dict[str, object]] = [
        _path_json(path) | {"use": "chosen", "bytes": nbytes, "reason": _chosen(path)}
        for path, nbytes in zip(found.chosen, shares, strict=True)
    ]
    paths += [
        _path_json(spare.path) | {"use": "spare", "bytes": 0} | _reason_json(spare.reason)
        for spare in found.spare
    ]
    paths += [
        {
            "source": rejected.source.endpoint,
            "transport": rejected.transport,
            "use": _use(rejected),
            "bytes": 0,
        }
        | _reason_json(rejected.reason)
        for rejected in found.rejected
    ]
    tried = [path.source for path in found.chosen] + [spare.path.source for spare in found.spare]
    tried += [rejected.source for rejected in found.rejected]
    for path_json, source in zip(paths, tried, strict=True):
        path_json["devices"] = planned.devices_of(source)
    estimate_s = planned.estimate_s
    return {
        "model": str(planned.model),
        "identity": planned.ref.identity.hex(),
        "pin": planned.ref.pin.hex(),
        "bytes": planned.nbytes,
        "layers": planned.layers,
        "estimate_s": None if estimate_s is None else round(estimate_s, 6),
        "coordinated": planned.coordinated,
        "paths": paths,
        "sources": [_memory_json(each) for each in planned.memories],
    } | ({} if planned.subset is None else {"subset": _subset_json(planned.subset)})


def _reason_json(reason: PathReason) -> dict[str, object]:
    return {"why": reason.code, "reason": in_flags(reason)}


def _memory_json(memory: SourceMemory) -> dict[str, object]:
    return {
        "source": memory.record.endpoint,
        "source_id": memory.record.source_id,
        "scattered": memory.scattered,
        "devices": memory.devices,
        "regions": [asdict(region) for region in memory.regions],
        "layers": [asdict(layer) for layer in memory.layers],
        "error": memory.error,
    }


def _subset_json(subset: Subset) -> dict[str, object]:
    return {
        "tensors": len(subset.layout.tensors) + len(subset.layout.aliases),
        "own_bytes": subset.own_nbytes,
        "moved_bytes": subset.moved_nbytes,
        "amplification": round(subset.amplification, 3),
    }


def _use(rejected: Rejected) -> str:
    return "skipped" if rejected.unasked else "impossible"


def _path_json(path: SourcePath) -> dict[str, object]:
    return {
        "source": path.source.endpoint,
        "transport": path.transport,
        "rail": "" if path.rail is None else str(path.rail),
        "gb_per_s": round(path.gb_per_s, 3),
        "attach": path.attach,
    }


def _chosen(path: SourcePath) -> str:
    return ", ".join(
        filter(None, ["attach, nothing is copied" if path.attach else "", path.detail])
    )


def _subset(subset: Subset) -> str:
    tensors = count(len(subset.layout.tensors) + len(subset.layout.aliases), "tensor")
    return (
        f"{format_bytes(subset.own_nbytes)} in {tensors}, {format_bytes(subset.moved_nbytes)} "
        f"moved for them ({subset.amplification:.2f} times as much)"
    )


def _show(planned: PlannedPull) -> None:
    found = planned.plan
    estimate_s = planned.estimate_s
    summary = f"{planned.model}: {format_bytes(planned.nbytes)} in {count(planned.layers, 'layer')}"
    if planned.subset is not None:
        summary = f"{planned.model}: {_subset(planned.subset)}"
    if estimate_s is None:
        summary += ", and no way to get them here"
    elif found.chosen[0].attach:
        summary += ", attached without a copy"
    else:
        summary += f", about {format_seconds(estimate_s)} at {format_rate(found.gb_per_s * 1e9)}"
    outcome.write(summary)
    rows = []
    for path, nbytes in zip(found.chosen, found.shares(planned.nbytes), strict=True):
        carries = "-" if path.attach else format_bytes(nbytes)
        rate = f"{path.gb_per_s:.3g}"
        rows.append((path.source.endpoint, path.label, "chosen", rate, carries, _chosen(path)))
    for spare in found.spare:
        path, rate = spare.path, f"{spare.path.gb_per_s:.3g}"
        why = in_flags(spare.reason)
        rows.append((path.source.endpoint, path.label, "spare", rate, "-", why))
    for rejected in found.rejected:
        where, why = rejected.source.endpoint, in_flags(rejected.reason)
        rows.append((where, rejected.transport, _use(rejected), "-", "-", why))
    page = outcome.page()
    columns = [
        Column(name, [row[at] for row in rows], right=name in ("GB/s", "carries"), folds=folds)
        for at, (name, folds) in enumerate(_COLUMNS)
    ]
    outcome.show(table_of(columns, page.width), page)
    if planned.coordinated:
        outcome.write(
            "beside other pulls: they share the links, and chunks are exchanged with them"
        )
    elif found.chosen and not found.chosen[0].attach:
        where = found.chosen[0].source.endpoint
        outcome.write(f"beside other pulls: the same, since {where} is on this machine")
    _show_memories(planned)


def _show_memories(planned: PlannedPull) -> None:
    """Show where each source has the bytes: a row for each of its devices."""
    rows = []
    for memory in planned.memories:
        sizes = sorted(layer.nbytes for layer in memory.layers) or [0]
        per_layer = " to ".join(dict.fromkeys(map(format_bytes, (sizes[0], sizes[-1]))))
        what = memory.record.endpoint, "scattered" if memory.scattered else "contiguous"
        layers = f"{len(memory.layers)} of {planned.layers}", per_layer
        for device in () if memory.error else memory.devices:
            regions = [each for each in memory.regions if each.device == device]
            pieces = str(sum(each.rows for each in regions) or "-")
            nbytes = format_bytes(sum(each.nbytes for each in regions))
            rows.append((*what, device, str(len(regions)), pieces, nbytes, *layers))
    if rows:
        page = outcome.page()
        columns = [
            Column(name, [row[at] for row in rows], right=at > _DEVICE, spare=spare)
            for at, (name, spare) in enumerate(_MEMORY_COLUMNS)
        ]
        outcome.show(table_of(columns, page.width), page)
    for memory in planned.memories:
        if memory.error:
            devices = ", ".join(memory.devices)
            outcome.write(f"{memory.record.endpoint} on {devices}: table not read: {memory.error}")
