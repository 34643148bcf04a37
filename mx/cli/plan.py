"""`mx plan`: what a pull would do, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mx.cli import options, outcome
from mx.cli.printing import Column, show_rows
from mx.cli.words import in_flags
from mx.config import Settings
from mx.errors import EXIT_NO_SOURCE
from mx.units import count, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api.planning import PlannedPull
    from mx.api.tables import SourceMemory
    from mx.core.planner import SourcePath
    from mx.core.selection import Subset
    from mx.core.types import SourceRecord


class _Way(NamedTuple):
    """A path that was considered, or a transport over which there is none."""

    source: SourceRecord
    transport: str
    path: SourcePath | None
    use: str
    nbytes: int
    reason: str
    why: str = ""

    @property
    def carries(self) -> str:
        moves = self.use == "chosen" and self.path is not None and not self.path.attach
        return format_bytes(self.nbytes) if moves else "-"


_WAYS: Sequence[Column[_Way]] = (
    Column("", "source", lambda way: way.source.endpoint),
    Column("", "path", lambda way: way.path.label if way.path else way.transport, folds=8),
    Column("", "use", lambda way: way.use),
    Column("", "GB/s", lambda way: f"{way.path.gb_per_s:.3g}" if way.path else "-", right=True),
    Column("", "carries", lambda way: way.carries, right=True),
    Column("", "why", lambda way: way.reason, folds=20),
)

#: The columns of the table of memories, and the order in which a narrow terminal leaves them out.
_MEMORY_COLUMNS = (
    ("source", 0), ("memory", 0), ("device", 0), ("regions", 1), ("rows", 2),
    ("bytes", 0), ("layers", 0), ("bytes per layer", 3),
)  # fmt: skip
_DEVICE = 2


@options.takes_settings
def plan(
    settings: Settings,
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
    estimate_s = planned.estimate_s
    return {
        "model": str(planned.model),
        "identity": planned.ref.identity.hex(),
        "pin": planned.ref.pin.hex(),
        "bytes": planned.nbytes,
        "layers": planned.layers,
        "estimate_s": None if estimate_s is None else round(estimate_s, 6),
        "coordinated": planned.coordinated,
        "paths": [
            _way_json(each) | {"devices": planned.devices_of(each.source)}
            for each in _ways(planned)
        ],
        "sources": [_memory_json(each) for each in planned.memories],
    } | ({} if planned.subset is None else {"subset": _subset_json(planned.subset)})


def _ways(planned: PlannedPull) -> list[_Way]:
    plan = planned.plan
    ways = [
        _Way(path.source, path.transport, path, "chosen", nbytes, _chosen(path))
        for path, nbytes in zip(plan.chosen, plan.shares(planned.nbytes), strict=True)
    ]
    for path, reason in ((each.path, each.reason) for each in plan.spare):
        why = in_flags(reason), reason.code
        ways.append(_Way(path.source, path.transport, path, "spare", 0, *why))
    for each in plan.rejected:
        use = "skipped" if each.unasked else "impossible"
        why = in_flags(each.reason), each.reason.code
        ways.append(_Way(each.source, each.transport, None, use, 0, *why))
    return ways


def _way_json(way: _Way) -> dict[str, object]:
    path = way.path
    found: dict[str, object] = {"source": way.source.endpoint, "transport": way.transport}
    if path is not None:
        rail = "" if path.rail is None else str(path.rail)
        found |= {"rail": rail, "gb_per_s": round(path.gb_per_s, 3), "attach": path.attach}
    found |= {"use": way.use, "bytes": way.nbytes}
    found |= {"why": way.why} if way.why else {}
    return found | {"reason": way.reason}


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
    show_rows(_WAYS, _ways(planned))
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
        columns: list[Column[tuple[str, ...]]] = [
            Column("", title, itemgetter(at), right=at > _DEVICE, spare=spare)
            for at, (title, spare) in enumerate(_MEMORY_COLUMNS)
        ]
        show_rows(columns, rows)
    for memory in planned.memories:
        if memory.error:
            devices = ", ".join(memory.devices)
            outcome.write(f"{memory.record.endpoint} on {devices}: table not read: {memory.error}")
