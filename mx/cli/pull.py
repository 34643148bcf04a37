"""`mx pull`: get a model, watch it come, keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mx import packs
from mx.cli import additions, live, options, outcome
from mx.cli.words import in_flags
from mx.errors import ConfigError, MxError
from mx.text import listed
from mx.units import count, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api import Pull, PullReport
    from mx.config import Settings
    from mx.fetching.report import FilesReport, StepReport


@options.takes_settings
def pull(
    context: typer.Context,
    model: Annotated[
        str,
        options.model_argument(
            "NAME, NAME:REVISION, or NAME@PIN to insist on those weights (mx models)."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="Write a checkpoint here that safetensors and transformers load. "
            "The folder must not exist, or be empty.",
            metavar="DIR",
        ),
    ] = None,
    hold: Annotated[
        bool,
        typer.Option(
            "--hold", help="Stay after the pull, and serve the main weights and their files."
        ),
    ] = False,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="peer: sources that the coordinator lists. peer=HOST:PORT: that one, no "
            "coordinator. disk=PATH. snapshot=DIR, of mx freeze. auto: peers, then what the "
            "settings name: snapshot, disk, Hugging Face, object store; auto=PATH: that disk.",
            metavar="WHERE",
        ),
    ] = "peer",
    revision: options.Revision = "",
    variant: options.Variant = "",
    device: options.Device = "cpu",
    files_only: Annotated[
        bool,
        typer.Option(
            "--files-only",
            help="Get only the side files (configuration, tokenizer), no weights.",
        ),
    ] = False,
    main: Annotated[
        bool,
        typer.Option(
            "--main",
            help="Write the main weights alone to --out, without the folder's further tensor "
            "files (companions).",
        ),
    ] = False,
    transport: options.OneTransport = None,
    verify: Annotated[
        str,
        typer.Option(
            help="chunks: blake3 against the model's identity; what processes of your own user "
            "hold in memory is taken at their word. strong: blake3 for everything.",
            metavar="chunks|strong",
            autocompletion=lambda: ["chunks", "strong"],
        ),
    ] = "chunks",
    no_attach: options.NoAttach = False,
    allow_older: Annotated[
        bool,
        typer.Option(
            "--allow-older",
            help="Take an older revision where the one that NAME means can't be obtained whole.",
        ),
    ] = False,
    only: options.Only = None,
    slices: options.Slices = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show all steps, and where the time of stores went."),
    ] = False,
    no_resume: Annotated[
        bool,
        typer.Option("--no-resume", help="Discard what an earlier pull to --out has left."),
    ] = False,
    *,
    as_json: bool,
) -> None:
    """Get a model from the processes that hold it, layer by layer, each verified.

    Without `--out` or `--hold` nothing is kept: then it only shows how fast it
    comes.

    **Examples**

    - `mx pull llama-8b --out /models/llama-8b`

    - `mx pull llama-8b --from peer=10.0.0.2:41001 --verify strong --hold`

    - `mx pull llama-8b --files-only --out /models/llama-8b-files`

    - `mx pull llama-8b --from auto --checkpoint-root /mnt/models --object-url s3://models/llama-8b`
    """
    _check_stores(source, context.params)
    settings = options.settings_of(context, runs_long=True, level="info" if hold else "")
    of_packs = additions.of("pull", additions.PullAddition)
    for each in of_packs:
        each.check(context, settings)
    if not hold:
        options.refuse_of_contexts(context)
    if main and out is None:
        raise ConfigError("--main says what is written", hint="give --out DIR, or leave it out")
    if hold:
        from mx.wire.descriptors import raise_limit

        raise_limit()
    from mx.api.pulling import pull as begin

    with (
        options.tracing(settings),
        options.accompanied(settings) if hold else nullcontext(),
        _closing(
            begin(
                model,
                **options.where_from(source),
                revision=revision,
                variant=variant,
                coordinator=options.coordinator_of(settings),
                device=device,
                out=out,
                hold=hold,
                transport=transport,
                verify=verify,
                attach=not no_attach,
                allow_older=allow_older,
                only=only or None,
                slices=options.slices_of(slices),
                resume=not no_resume,
                files_only=files_only,
                companions=not main,
                settings=settings,
            )
        ) as running,
    ):
        found = [got for each in of_packs if (got := each.get(context, model, settings))]
        where = source if source.startswith("peer=") else f"coordinator {settings.coordinator}"
        nearest = partial(_nearest, model, settings) if where != source else str
        report = live.follow(running, f"{model} ({where})", settings.wait_s, nearest)
        held = running.hold() if hold else None
        if as_json:
            outcome.emit(report.to_json() | {got.key: got.object for got in found})
        else:
            told = verbose or settings.log_level in ("debug", "info")  # all steps
            kept = hold or out is not None
            outcome.summarise(_summary(report, out=out, kept=kept, main=main, all_steps=told))
            show = packs.optional("mx.operations.stages:show") if told and report.stages else None
            if show is not None:
                show(report.stages)
            for got in found:
                got.show()
        if held is not None:
            from mx.cli.stop import Stop

            stop = Stop()
            with held, stop.on_signals():
                alone = ", without its companions" if report.folder.companions else ""
                outcome.say(f"serving {report.model}{alone} at {held.endpoint}; stop with Ctrl-C")
                packs.tell("ready", f"serving {report.model}")
                stop.wait()
                held.drain(settings.drain_grace_s)


def _nearest(model: str, settings: Settings) -> str:
    """Return the listed name that is most like a model's; "" if none is, or without an answer."""
    from mx.cli.listing import nearest_name

    try:
        return nearest_name(model, settings)
    except MxError:
        return ""


def _check_stores(source: str, given: Mapping[str, object]) -> None:
    """Refuse flags that `--from` makes useless. In a file they are meant for some of the pulls.

    Raises:
        ConfigError: One of them was given.
    """
    places = ("checkpoint_root", "hub_id", "object_url")
    named = [f"`{name}`" for name in places if given[name] is not None]
    if named and source.partition("=")[0] != "auto":
        raise ConfigError(
            f"{' and '.join(named)} would not be used: --from {source} reads no store",
            hint="add --from auto, or leave that out",
        )
    if given["checkpoint_root"] is not None and source.startswith("auto="):
        raise ConfigError(
            f"`checkpoint_root` would not be used: --from {source} names the disk",
            hint="give --from auto, or leave that out",
        )


_STORES = ("snapshot", "disk", "hub", "objects")


@contextmanager
def _closing(pull: Pull) -> Iterator[Pull]:
    """Close the pull at the end; of one that a signal ends, say how to go on from what it left.

    Raises:
        outcome.CommandInterrupted: Ctrl-C ended it; its hint is what the pull has kept.
    """
    try:
        with pull:
            yield pull
    except KeyboardInterrupt as error:
        raise outcome.CommandInterrupted(pull.kept) from error
    except SystemExit:
        if pull.kept:
            outcome.say(pull.kept)
        raise


def _summary(
    report: PullReport, *, out: str | None, kept: bool, main: bool, all_steps: bool
) -> str:
    from mx.core.reference import with_pin

    if report.files is not None:
        return _files_summary(report, report.files, out=out)
    # Nothing is copied to attach: a rate of it would say nothing.
    moved = sum(path.bytes for path in report.paths if path.transport != "resume")
    rate = "" if report.gb_per_s is None else f" ({format_rate(moved / report.seconds)})"
    lines = [
        f"{report.model}: {format_bytes(report.bytes)} in {format_seconds(report.seconds)}{rate}, "
        f"{count(report.layers, 'layer')}, the first after {format_seconds(report.first_layer_s)}, "
        f"{report.verdict}"
    ]
    if report.newest:
        lines.append(f"  older than {report.newest}, which the name means and no source has whole")
    if report.moved_bytes is not None:
        lines.append(f"  {format_bytes(report.moved_bytes)} moved for these tensors")
    for path in report.paths:
        if path.transport == "resume":
            lines.append(f"  {format_bytes(path.bytes)} were there already, in {path.source}")
            continue
        how = "attached, no copy" if path.attached else format_bytes(path.bytes)
        over = f" over {path.rail}" if path.rail else ""
        detail = f" ({path.detail})" if path.detail else ""
        lines.append(f"  {path.transport} from {path.source}{over}: {how}{detail}")
    if report.retries:
        again = "chunk was" if report.retries == 1 else "chunks were"
        lines.append(f"  {report.retries} {again} fetched again")
    lines += [f"  left {each.source}: {in_flags(each.reason)}" for each in report.left]
    if report.fallback and not report.steps:
        came = any(path.transport not in _STORES for path in report.paths)
        why = "no source could be used;"
        if came:
            why = "sources did not serve everything: the rest was"
        lines.append(f"  {why} taken from {report.fallback}")
    lines += _steps(report.steps, shows_all=all_steps)
    if out is not None:
        for each in report.companions:
            where = listed(each.sources) or "there already"
            lines.append(f"  companion {each.path}: {format_bytes(each.bytes)} from {where}")
        lines.append(f"  written to {out}")
        folder = report.folder
        if main and folder.companions:
            without = listed([*folder.companions])
            lines.append(f"  without its companions, as --main asks: {without}")
        lines += [f"  {line}" for line in folder.lines_of_left_out()]
    name = with_pin(report.model, report.pin)
    lines.append(f"  pin {name} {outcome.pin_covers(report.pin_covers_files)}")
    if not kept:
        lines.append("  nothing was kept: --out DIR writes it, --hold serves it")
    return "\n".join(lines)


def _steps(steps: Sequence[StepReport], *, shows_all: bool) -> list[str]:
    """Return a line for the steps of --from auto that served bytes, and one for each that failed;
    `shows_all` adds one for each other."""
    if not steps:
        return []
    used = [f"{each.step} ({format_bytes(each.bytes)})" for each in steps if each.bytes]
    lines = [f"  came by {', then '.join(used) or 'no step'}"]
    for each in steps:
        if shows_all or each.outcome in ("failed", "partly"):
            because = f": {in_flags(each.reason)}" if each.reason else ""
            lines.append(f"  step {each.step} {each.outcome}{because}")
    return lines


def _files_summary(report: PullReport, files: FilesReport, *, out: str | None) -> str:
    from mx.core.reference import with_pin

    lines = [
        f"{report.model}: {count(files.count, 'file')} without weights, "
        f"{format_bytes(files.bytes)} in {format_seconds(report.seconds)} from {files.source}, "
        f"{report.verdict}"
    ]
    lines += [f"  left {each.source}: {in_flags(each.reason)}" for each in report.left]
    if report.fallback:
        lines.append(f"  no source served them; taken from {report.fallback}")
    if report.pin:
        name = with_pin(report.model, report.pin)
        lines.append(f"  pin {name} {outcome.pin_covers(report.pin_covers_files)}")
    kept = "nothing was kept: --out DIR writes them" if out is None else f"written to {out}"
    return "\n".join([*lines, f"  {kept}"])
