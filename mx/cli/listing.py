"""`mx models` and `mx sources`: what the coordinator knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer

from mx.cli import additions, options, outcome
from mx.cli.printing import NAMES, Column, objects, show_rows, spaced
from mx.config import Settings
from mx.core.artifact_names import model_and_set
from mx.core.notes import decode
from mx.core.reference import parse_reference
from mx.errors import EXIT_NO_SOURCE, ConfigError, UnknownModelError
from mx.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from mx.api.tables import PlacedTensor
    from mx.core.answers import ModelStatus
    from mx.core.types import SourceRecord
    from mx.wire.listing import SourceStatus


def layers_held(record: SourceRecord) -> int:
    """Return how many layers a source holds."""
    return sum(end - begin for begin, end in record.table.held)


def _state(status: SourceStatus) -> str:
    return status.record.state.value + (", by pin only" if status.record.pin_only else "")


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


# Without a source that holds all of a model nothing is known of its size.
_MODELS: Sequence[Column[ModelStatus]] = (
    Column("model", "model", lambda m: m.model.name, folds=NAMES),
    Column("revision", "revision", lambda m: m.model.revision, folds=8),
    Column("variant", "variant", lambda m: m.model.variant, spaced, folds=12),
    Column("identity", "", lambda m: m.ref.identity.hex()),
    Column("pin", "", lambda m: m.ref.pin.hex()),
    Column("pin_covers_files", "", lambda m: bool(m.ref.packaging)),
    Column("pin_only", "", lambda m: m.pin_only),
    Column("layout_version", "", lambda m: m.ref.layout_version),
    Column("bytes", "size", lambda m: m.nbytes if m.layers else None, _size, right=True),
    Column("layers", "layers", lambda m: m.layers or None, lambda n: n or "-", right=True),
    Column("sources", "sources", lambda m: m.sources, lambda n: n or "none", right=True),
    Column("state", "", lambda m: "served" if m.sources else "no source"),
    Column("", "found by", lambda m: "its pin only" if m.pin_only else "name or pin", folds=5),
)
SOURCES: Sequence[Column[SourceStatus]] = (
    Column("", "model", lambda s: spaced(str(s.record.model)), folds=NAMES),
    Column("model", "", lambda s: s.record.model.name),
    Column("revision", "", lambda s: s.record.model.revision),
    Column("variant", "", lambda s: s.record.model.variant),
    Column("identity", "", lambda s: s.record.ref.identity.hex()),
    Column("pin", "", lambda s: s.record.ref.pin.hex()),
    Column("pin_only", "", lambda s: s.record.pin_only),
    Column("source_id", "", lambda s: s.record.source_id),
    Column("endpoint", "endpoint", lambda s: s.record.endpoint),
    Column("host", "host", lambda s: s.record.place.hostname, spare=3),
    Column("pid", "", lambda s: s.record.place.pid),
    Column("role", "role", lambda s: s.record.role.value, spare=1),
    Column("state", "", lambda s: s.record.state.value),
    Column("", "state", _state, folds=8),
    Column("generation", "", lambda s: s.record.generation),
    Column("layers_held", "layers", lambda s: layers_held(s.record), right=True),
    Column("", "readers", lambda s: s.readers, right=True),
    Column("", "lease", lambda s: s.lease_left_s, format_seconds, right=True),
    Column("transports", "transports", lambda s: s.record.transports, ", ".join, spare=2),
    Column("lease_left_s", "", lambda s: s.lease_left_s),
    Column("readers", "", lambda s: s.readers),
    Column("gb_per_s", "", lambda s: s.gb_per_s),
    Column("requests", "", lambda s: s.record.requests),
)
_TENSORS: Sequence[Column[PlacedTensor]] = (
    Column("", "tensor", lambda t: t.name, folds=NAMES),
    Column("", "layer", lambda t: t.layer, folds=NAMES, spare=1),
    Column("", "device", lambda t: t.device),
    Column("", "region", lambda t: t.region, right=True),
    Column("", "address", lambda t: t.address, hex, right=True),
    Column("", "bytes", lambda t: t.nbytes, right=True),
)


@options.takes_settings
def models(
    settings: Settings,
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
        listed = objects(_MODELS, found)
        for entry, fields in zip(found, listed, strict=True):
            fields |= decode(said.get(entry.ref.pin, b"")).to_json() if model else {}
        more = {each.key: each.object for each in beside}
        outcome.emit({"coordinator": settings.coordinator, "models": listed, **more})
        _end_unknown(model, listed)
        return
    if not found:
        say_unknown(f"model {model}" if model else "models", model, settings)
        _say_sets(len(sets))
        return
    show_rows(_MODELS, found)
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
        outcome.emit({"coordinator": settings.coordinator, "sources": objects(SOURCES, found)})
        _end_unknown(model, found)
        return
    if not found:
        say_unknown(f"sources of {model}" if model else "sources", model, settings)
        return
    show_rows(SOURCES, found)


def _end_unknown(model: str, found: Sequence[object]) -> None:
    """End with the exit code for it if a model that was named is not known."""
    if model and not found:
        raise typer.Exit(EXIT_NO_SOURCE)


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
        show_rows(_TENSORS, each.tensors)
