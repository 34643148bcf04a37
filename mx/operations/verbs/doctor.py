"""`mx doctor`: what this host and its fleet can and can't do, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from mx.cli import options, outcome
from mx.cli.words import in_flags
from mx.errors import ConfigError, MxError
from mx.units import count

if TYPE_CHECKING:
    from mx.operations.doctor import Examination

#: The version of the object that `--json` prints; docs/doctor.schema.json describes it.
SCHEMA = 1
_EXIT_FOUND = 1


@options.takes_settings
def doctor(
    context: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this check, like coordinators; may be repeated.", metavar="CHECK"),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Only measure the drive of this file or folder: by one read at a time, by many, "
            "and as mx reads a checkpoint that is there. Takes some seconds.",
            metavar="PATH",
        ),
    ] = None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what this host and its fleet can and can't do, and what to change.

    A *failure* stops what the settings ask for, and makes the exit code 1. With a *warning* mx
    works, but slower than it could, less safely, or not for long. A *note* names what this host
    lacks, and nothing that was asked for needs. Nothing is changed, and CUDA is not started.
    `--quiet` shows warnings and failures only, and nothing where there are none.

    Give it the settings that the command will have that is to run here: the coordinator, the
    certificates, `--listen`.

    **Examples**

    - `mx doctor`

    - `mx doctor --coordinator 10.0.0.1:7600 --listen 10.0.0.2:0 --tls-cert me.pem --tls-key me.key
      --tls-ca ours.pem`

    - `mx doctor --only coordinators --only sources --json`

    - `mx doctor --disk /models/llama-8b`
    """
    settings = options.settings_of(context, level="error")
    from mx.operations.doctor import examine

    if disk is not None and only:
        raise ConfigError(
            "--disk measures a drive and checks nothing else", hint="leave --only out"
        )
    found = examine(settings, only=only or (), disk=disk)
    if as_json:
        outcome.emit(_object(found))
    else:
        _show(found, quiet=quiet)
    if not found.ok:
        raise typer.Exit(_EXIT_FOUND)


def _show(found: Examination, *, quiet: bool) -> None:
    told = found.findings
    if quiet:
        told = tuple(each for each in told if each.level.value in ("warning", "failure"))
    texts = Column(overflow="fold")  # a long path is cut nowhere
    table = Table("", "", texts, box=None, pad_edge=False, show_header=False)
    for each in told:
        table.add_row(each.level.value, each.check, in_flags(each.text))
        if each.fix:
            table.add_row("", "", f"→ {in_flags(each.fix)}")
    if told:
        outcome.show(table)
    levels = [each.level.value for each in found.findings]
    counts = (count(levels.count(name), name) for name in ("failure", "warning", "note"))
    outcome.summarise(f"{found.host}: {', '.join(counts)}")


def _object(found: Examination) -> dict[str, object]:
    import mx

    findings = [
        {
            "check": each.check,
            "level": each.level.value,
            "text": in_flags(each.text),
            "fix": in_flags(each.fix),
        }
        for each in found.findings
    ]
    coordinators = [
        {
            "address": each.address,
            "answers": each.error is None,
            "seconds": round(each.seconds, 4) if each.error is None else None,
            "models": len(each.models),
            "sources": len(each.sources),
            "error": _text(each.error),
        }
        for each in found.fleet.answers
    ]
    sources = [
        {"endpoint": endpoint, "answers": error is None, "error": _text(error)}
        for endpoint, error in found.fleet.called.items()
    ]
    rates = [
        {"reads": each.reads, "bytes": each.bytes, "gb_per_s": round(each.gb_per_s, 3)}
        for each in found.disk
    ]
    return {
        "schema": SCHEMA,
        "ok": found.ok,
        "host": found.host,
        "version": mx.__version__,
        "findings": findings,
        "coordinators": coordinators,
        "sources": sources,
        "sources_not_called": found.fleet.uncalled,
    } | ({"disk": rates} if rates else {})


def _text(error: MxError | None) -> str:
    return "" if error is None else in_flags(str(error))
