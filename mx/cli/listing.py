"""`mx models` and `mx sources`: what the coordinator knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer

from mx.cli import additions, options, outcome
from mx.cli.printing import NAMES, Column, spaced, table_of
from mx.core.artifact_names import model_and_set
from mx.core.notes import decode
from mx.core.reference import parse_reference
from mx.errors import EXIT_NO_SOURCE, ConfigError, UnknownModelError
from mx.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from mx.config import Settings
    from mx.core.types import SourceRecord
    from mx.wire.listing import SourceStatus


@options.takes_settings
def models(
    context: typer.Context,
    model: Annotated[str, options.model_argument("Only this one.")] = "",
    table: Annotated[
        bool, typer.Option("--table", help="Show where each tensor of MODEL is, at each source.")
    ] = False,
    *,
    as_json: bool,
) -> None:
    """List the models that can be pulled, and the pin of each.

    NAME@PIN gets exactly these weights, whatever the coordinator says, and exactly these files
    where the pin covers files. A model whose name stands for other weights by now is found by its
    pin only.

    **Examples**

    - `mx models --coordinator 10.0.0.1:7600 --insecure`

    - `mx models llama-8b --table --json`
    """
    settings = options.settings_of(context)
    from mx import api

    if table:
        _show_tables(model, settings, as_json)
        return
    wanted = parse_reference(model)
    found = [
        each
        for each in api.list_models(coordinator=settings.coordinator, settings=settings)
        if wanted.fits(each.model, each.ref)
    ]
    # Artefacts are listed as models are, and have a verb of their own.
    sets = [each for each in found if model_and_set(each.model.name) and not model]
    found = [each for each in found if each not in sets]
    of_packs = additions.of("models", additions.ModelsAddition)
    beside = [each.find(wanted.name, settings, lists_all=not model) for each in of_packs]
    said = _notes(wanted.name, settings) if found and model else {}
    if as_json:
        listed = [
            {
                "model": entry.model.name,
                "revision": entry.model.revision,
                "variant": entry.model.variant,
                "identity": entry.ref.identity.hex(),
                "pin": entry.ref.pin.hex(),
                "pin_covers_files": bool(entry.ref.packaging),
                "pin_only": entry.pin_only,
                "layout_version": entry.ref.layout_version,
                # Known only of a model that a source holds whole.
                "bytes": entry.nbytes if entry.layers else None,
                "layers": entry.layers or None,
                "sources": entry.sources,
                "state": "served" if entry.sources else "no source",
                **(decode(said.get(entry.ref.pin, b"")).to_json() if model else {}),
            }
            for entry in found
        ]
        more = {each.key: each.object for each in beside}
        outcome.emit({"coordinator": settings.coordinator, "models": listed, **more})
        _end_unknown(model, listed)
        return
    if not found:
        say_unknown(f"model {model}" if model else "models", model, settings)
        _say_sets(len(sets))
        return
    page = outcome.page()
    # Without a source that holds all of it nothing is known of its size.
    sizes = [format_bytes(entry.nbytes) if entry.layers else "-" for entry in found]
    ways = ["its pin only" if entry.pin_only else "name or pin" for entry in found]
    columns = [
        Column("model", [entry.model.name for entry in found], folds=NAMES),
        Column("revision", [entry.model.revision for entry in found], folds=8),
        Column("variant", [spaced(entry.model.variant) for entry in found], folds=12),
        Column("size", sizes, right=True),
        Column("layers", [str(entry.layers or "-") for entry in found], right=True),
        Column("sources", [str(entry.sources or "none") for entry in found], right=True),
        Column("found by", ways, folds=5),
    ]
    outcome.show(table_of(columns, page.width), page)
    if gone := sum(not entry.sources for entry in found):
        outcome.write(
            f"{count(gone, 'row')} without a source: none can be pulled until one is back"
        )
    _say_sets(len(sets))
    for each in beside:
        each.show()
    # Not in the table, which a terminal would wrap: these are to be copied.
    outcome.write("\npins:")
    for entry in found:
        outcome.write(f"{entry.pinned}  {outcome.pin_covers(entry.ref.packaging)}")
        for line in decode(said.get(entry.ref.pin, b"")).lines():
            outcome.write(f"  {line}")


def _notes(name: str, settings: Settings) -> dict[bytes, bytes]:
    """Return what sources of a model say of their folders, by the pin of what is in these."""
    from mx import api

    found = api.list_sources(name, coordinator=settings.coordinator, settings=settings)
    return {each.record.ref.pin: each.record.notes for each in found if each.record.notes}


def _say_sets(sets: int) -> None:
    if sets:
        outcome.write(f"and {count(sets, 'set')} of artefacts: mx artifacts list")


@options.takes_settings
def sources(
    context: typer.Context,
    model: Annotated[str, options.model_argument("Only those of this one.")] = "",
    table: Annotated[
        bool, typer.Option("--table", help="Show where each tensor of MODEL is in their memory.")
    ] = False,
    *,
    as_json: bool,
) -> None:
    """List who serves what, where, and how long they stay listed.

    An origin holds every layer; a relay holds those that it has received so far. A narrow
    terminal gets no hosts, transports and roles; `--json` has them. Of a model that has no sources
    the exit code is 3.

    **Examples**

    - `mx sources`

    - `mx sources llama-8b --json`

    - `mx sources llama-8b --table`
    """
    settings = options.settings_of(context)
    from mx import api

    if table:
        _show_tables(model, settings, as_json)
        return
    found = api.list_sources(model, coordinator=settings.coordinator, settings=settings)
    if as_json:
        listed = [source_object(status) for status in found]
        outcome.emit({"coordinator": settings.coordinator, "sources": listed})
        _end_unknown(model, found)
        return
    if not found:
        say_unknown(f"sources of {model}" if model else "sources", model, settings)
        return
    records, page = [status.record for status in found], outcome.page()
    columns = [
        Column("model", [spaced(str(each.model)) for each in records], folds=NAMES),
        Column("endpoint", [each.endpoint for each in records]),
        Column("host", [each.place.hostname for each in records], spare=3),
        Column("role", [each.role.value for each in records], spare=1),
        Column("state", [_state(each) for each in records], folds=8),
        Column("layers", [str(layers_held(each)) for each in records], right=True),
        Column("readers", [str(each.readers) for each in found], right=True),
        Column("lease", [format_seconds(each.lease_left_s) for each in found], right=True),
        Column("transports", [", ".join(each.transports) for each in records], spare=2),
    ]
    outcome.show(table_of(columns, page.width), page)


def _end_unknown(model: str, found: Sequence[object]) -> None:
    """End with the exit code for it if a model that was named is not known."""
    if model and not found:
        raise typer.Exit(EXIT_NO_SOURCE)


def _state(record: SourceRecord) -> str:
    return record.state.value + (", by pin only" if record.pin_only else "")


def layers_held(record: SourceRecord) -> int:
    """Return how many layers a source holds."""
    return sum(end - begin for begin, end in record.table.held)


def say_unknown(what: str, model: str, settings: Settings) -> None:
    """Say that the coordinator knows none.

    Raises:
        UnknownModelError: One was asked for by its name.
    """
    text = f"the coordinator at {settings.coordinator} knows no {what}"
    if model:
        hint = "mx models lists what it knows"
        if alike := nearest_name(model, settings):
            hint = f"the nearest name that is listed is {alike}"
        raise UnknownModelError(text, hint=hint)
    outcome.say(text)


def nearest_name(model: str, settings: Settings) -> str:
    """Return the name that is listed and most like that of a model, which is not; "" if none is
    like it.

    Raises:
        CoordinatorError: The coordinator does not answer.
    """
    from mx import api

    listed = api.list_models(coordinator=settings.coordinator, settings=settings)
    names, name = {each.model.name for each in listed}, parse_reference(model).name
    return "" if name in names else next(iter(get_close_matches(name, names, 1)), "")


def _show_tables(model: str, settings: Settings, as_json: bool) -> None:
    from mx import api

    if not model:
        raise ConfigError("--table shows the sources of one model", hint="name the model")
    tables = api.list_tables(model, settings=settings)
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
        outcome.emit({"coordinator": settings.coordinator, "sources": listed})
        return
    for each in tables:
        what = "each tensor where its owner has it" if each.live else "one arena"
        outcome.write(f"{each.record.model} at {each.record.endpoint}: {each.error or what}")
        tensors, page = each.tensors, outcome.page()
        columns = [
            Column("tensor", [tensor.name for tensor in tensors], folds=NAMES),
            Column("layer", [tensor.layer for tensor in tensors], folds=NAMES, spare=1),
            Column("device", [tensor.device for tensor in tensors]),
            Column("region", [str(tensor.region) for tensor in tensors], right=True),
            Column("address", [f"{tensor.address:#x}" for tensor in tensors], right=True),
            Column("bytes", [str(tensor.nbytes) for tensor in tensors], right=True),
        ]
        outcome.show(table_of(columns, page.width), page)


def source_object(status: SourceStatus) -> dict[str, object]:
    """Return a source as `--json` prints it."""
    record = status.record
    return {
        "model": record.model.name,
        "revision": record.model.revision,
        "variant": record.model.variant,
        "identity": record.ref.identity.hex(),
        "pin": record.ref.pin.hex(),
        "pin_only": record.pin_only,
        "source_id": record.source_id,
        "endpoint": record.endpoint,
        "host": record.place.hostname,
        "pid": record.place.pid,
        "role": record.role.value,
        "state": record.state.value,
        "generation": record.generation,
        "layers_held": layers_held(record),
        "transports": list(record.transports),
        "lease_left_s": round(status.lease_left_s, 3),
        "readers": status.readers,
        "gb_per_s": round(status.gb_per_s, 3),
        "requests": record.requests,
    }
