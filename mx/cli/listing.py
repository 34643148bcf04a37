"""`mx models` and `mx sources`: what the coordinator knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mx.cli import options, outcome
from mx.errors import ConfigError
from mx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mx.api.tables import SourceTable
    from mx.wire.listing import SourceStatus


def models(
    context: typer.Context,
    coordinator: options.Coordinator = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the models that can be pulled, and the pin of each.

    NAME@PIN gets exactly these weights, whatever the coordinator says, and exactly these files
    where the pin covers files. A model whose name stands for other weights by now is found by its
    pin only.

    **Example**

    - `mx models --coordinator 10.0.0.1:7600 --insecure`
    """
    settings = options.settings_of(context)
    from mx import api

    found = api.list_models(coordinator=settings.coordinator, settings=settings)
    if as_json:
        listed = [
            {
                "model": entry.model.name,
                "revision": entry.model.revision,
                "variant": entry.model.variant,
                "manifest": entry.ref.identity.hex(),
                "identity": entry.ref.identity.hex(),
                "pin": entry.ref.pin.hex(),
                "pin_covers_files": bool(entry.ref.packaging),
                "pin_only": entry.pin_only,
                "bytes": entry.nbytes,
                "layers": entry.layers,
                "sources": entry.sources,
            }
            for entry in found
        ]
        outcome.emit({"coordinator": settings.coordinator, "models": listed})
        return
    if not found:
        outcome.say(f"the coordinator at {settings.coordinator} knows no models")
        return
    table = Table("model", "revision", "variant", box=None, pad_edge=False)
    for name in ("size", "layers", "sources"):
        table.add_column(name, justify="right")
    table.add_column("found by")
    for entry in found:
        table.add_row(
            entry.model.name,
            entry.model.revision,
            entry.model.variant,
            # Without a source that holds all of it nothing is known of its size.
            format_bytes(entry.nbytes) if entry.layers else "-",
            str(entry.layers) if entry.layers else "-",
            str(entry.sources),
            "its pin only" if entry.pin_only else "name or pin",
        )
    outcome.show(table)
    # Not in the table, which a terminal would wrap: these are to be copied.
    outcome.write("\npins:")
    for entry in found:
        outcome.write(f"{entry.pinned}  {outcome.pin_covers(entry.ref.packaging)}")


def sources(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Only those of this one.", metavar="MODEL")] = "",
    table: Annotated[
        bool, typer.Option("--table", help="Show where each tensor of MODEL is in their memory.")
    ] = False,
    coordinator: options.Coordinator = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List who serves what, where, and how long they stay listed.

    An origin holds every layer; a relay holds those that it has received so far.

    **Examples**

    - `mx sources`

    - `mx sources llama-8b --json`

    - `mx sources llama-8b --table`
    """
    settings = options.settings_of(context)
    from mx import api

    if table:
        if not model:
            raise ConfigError("--table shows the sources of one model", hint="name the model")
        _show_tables(api.list_tables(model, settings=settings), settings.coordinator, as_json)
        return
    found = api.list_sources(model, coordinator=settings.coordinator, settings=settings)
    if as_json:
        listed = [source_object(status) for status in found]
        outcome.emit({"coordinator": settings.coordinator, "sources": listed})
        return
    if not found:
        of = f" of {model}" if model else ""
        outcome.say(f"the coordinator at {settings.coordinator} knows no sources{of}")
        return
    rows = Table("model", "endpoint", "host", "role", "state", box=None, pad_edge=False)
    for name in ("layers", "readers", "lease"):
        rows.add_column(name, justify="right")
    rows.add_column("transports")
    for status in found:
        record = status.record
        rows.add_row(
            str(record.model),
            record.endpoint,
            record.place.hostname,
            record.role.value,
            record.state.value + (", by pin only" if record.pin_only else ""),
            str(sum(end - begin for begin, end in record.table.held)),
            str(status.readers),
            format_seconds(status.lease_left_s),
            ", ".join(record.transports),
        )
    outcome.show(rows)


def _show_tables(tables: list[SourceTable], coordinator: str, as_json: bool) -> None:
    if as_json:
        listed = [
            {
                "source_id": each.record.source_id,
                "endpoint": each.record.endpoint,
                "generation": each.record.generation,
                "live": each.live,
                "error": each.error,
                "table": [asdict(tensor) for tensor in each.tensors],
            }
            for each in tables
        ]
        outcome.emit({"coordinator": coordinator, "sources": listed})
        return
    for each in tables:
        what = "each tensor where its owner has it" if each.live else "one arena"
        outcome.write(f"{each.record.model} at {each.record.endpoint}: {each.error or what}")
        rows = Table("tensor", "layer", "device", box=None, pad_edge=False)
        for name in ("address", "bytes"):
            rows.add_column(name, justify="right")
        for tensor in each.tensors:
            rows.add_row(
                tensor.name, tensor.layer, tensor.device, f"{tensor.address:#x}", str(tensor.nbytes)
            )
        outcome.show(rows)


def source_object(status: SourceStatus) -> dict[str, object]:
    """Return a source as `--json` prints it."""
    record = status.record
    return {
        "model": record.model.name,
        "revision": record.model.revision,
        "variant": record.model.variant,
        "manifest": record.ref.identity.hex(),
        "pin": record.ref.pin.hex(),
        "pin_only": record.pin_only,
        "source_id": record.source_id,
        "endpoint": record.endpoint,
        "host": record.place.hostname,
        "pid": record.place.pid,
        "role": record.role.value,
        "state": record.state.value,
        "generation": record.generation,
        "layers_held": sum(end - begin for begin, end in record.table.held),
        "transports": list(record.transports),
        "lease_left_s": round(status.lease_left_s, 3),
        "readers": status.readers,
        "gb_per_s": round(status.gb_per_s, 3),
    }
