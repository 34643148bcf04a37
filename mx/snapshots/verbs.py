"""`mx freeze`, `mx thaw`, and `mx serve` of a snapshot."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mx import packs
from mx.cli import additions, live, options, outcome
from mx.config import Settings
from mx.core.reference import with_pin
from mx.errors import ConfigError
from mx.snapshots.container import SNAPSHOT, folder_of, is_begun
from mx.units import count, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api import Pull, PullReport, Source
    from mx.core.types import ModelKey

_DIR = typer.Argument(help="The folder of the snapshot.", metavar="DIR")


def _follow(pull: Pull, key: ModelKey) -> PullReport:
    return live.follow(pull, str(key))


@options.takes_settings
def freeze(
    context: typer.Context,
    model: Annotated[
        str,
        options.model_argument(
            "NAME, NAME:REVISION, or NAME@PIN to insist on those weights (mx models)."
        ),
    ],
    folder: Annotated[str, typer.Argument(help="The folder to make.", metavar="DIR")],
    revision: options.Revision = "",
    variant: options.Variant = "",
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="peer: what the coordinator lists, the checkpoint if there is one. engine: what "
            "the engine of a replica holds, as it computes with it.",
            metavar="peer|engine",
            autocompletion=lambda: ["peer", "engine"],
        ),
    ] = "peer",
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            help="How much of KV blocks is written, too, for each rank: those of the prompts that "
            "were of use last, of replicas that give theirs. An engine that starts from the "
            "snapshot reads them.",
            metavar="SIZE",
        ),
    ] = "0",
    transport: options.OneTransport = None,
    *,
    as_json: bool,
) -> None:
    """Write what processes hold of a model to a folder to start from: a snapshot.

    All ranks are taken at the same time, each block verified; an engine's state as it is, without
    what the engine did to get there. A run that was ended goes on when it is run again. It is
    signed with this user's key if the name is his; else it has to be frozen, and thawed, under its
    pin.

    **Examples**

    - `mx freeze llama-8b /snapshots/llama-8b`

    - `mx freeze llama-8b@466847afadc6e1be /snapshots/llama-8b`

    - `mx freeze llama-8b /snapshots/llama-8b-engine --from engine --kv 2GiB`
    """
    from mx.snapshots.freezing import freeze as write

    settings = options.settings_of(context)
    with options.tracing(settings), _interruptible(folder):
        report = write(
            model,
            folder,
            revision=revision,
            variant=variant,
            source=source,
            coordinator=options.coordinator_of(settings),
            transport=transport,
            kv_bytes=kv,
            settings=settings,
            wait=_follow,
        )
    if as_json:
        outcome.emit(report.__dict__ | {"pins": list(report.pins)})
        return
    kept = f", {count(report.kept, 'rank')} of {report.ranks} there already" if report.kept else ""
    rate = f" ({format_rate(report.bytes / report.seconds)})" if report.bytes else ""
    lines = [
        f"{report.model}: {format_bytes(report.bytes)} in {format_seconds(report.seconds)}{rate}, "
        f"{count(report.ranks, 'rank')}{kept}, frozen to {folder}",
        *([f"  with {count(report.kv_blocks, 'KV block')}"] if report.kv_blocks else []),
        "  signed with this user's key"
        if report.signed
        else "  not signed: only its pin says what it is",
        *(f"  pin {with_pin(report.model.partition('[')[0], each)}" for each in report.pins),
    ]
    outcome.summarise("\n".join(lines))


@contextmanager
def _interruptible(folder: str) -> Iterator[None]:
    """Say how to go on from what a freeze has left that a signal ends. After Ctrl-C the next one
    ends the process at once. Raises CommandInterrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        again = f"run the same command again to go on from what is in {folder}"
        kept = again if is_begun(Path(folder)) else ""
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise outcome.CommandInterrupted(kept) from error
        if kept:
            outcome.say(kept)
        raise


@options.takes_settings
def thaw(
    context: typer.Context,
    folder: Annotated[str, _DIR],
    model: Annotated[
        str,
        typer.Argument(help="What it has to be: NAME@PIN, of one rank.", metavar="NAME@PIN"),
    ] = "",
    variant: options.Variant = "",
    hold: Annotated[
        bool, typer.Option("--hold", help="Serve what it held, until this is stopped.")
    ] = False,
    *,
    as_json: bool,
) -> None:
    """Read a snapshot back, all ranks at the same time, each byte verified.

    Without `--hold` nothing is kept: then it only shows that all of it is right, and how fast it
    comes. `mx pull NAME --from snapshot=DIR` has the options of a pull.

    **Examples**

    - `mx thaw /snapshots/llama-8b`

    - `mx thaw /snapshots/llama-8b llama-8b@466847afadc6e1be --hold`
    """
    from mx.snapshots.thawing import checked
    from mx.snapshots.thawing import thaw as read

    settings = options.settings_of(context, runs_long=hold, level="info" if hold else "")
    if hold:
        checked(Path(folder), model, variant=variant, settings=settings)
        _serve(context, settings, folder, as_json=as_json, variant=variant)
        return
    with (
        options.tracing(settings),
        _interruptible(folder),
        read(folder, model, variant=variant, settings=settings, wait=_follow) as thawed,
    ):
        snapshot, pulls = thawed.snapshot, thawed.pulls
        reports = [each.wait() for each in pulls.values()]
    nbytes = sum(each.bytes for each in reports)
    if as_json:
        outcome.emit(
            {
                "folder": folder,
                "model": snapshot.name,
                "revision": snapshot.revision,
                "vouched_by": thawed.vouched_by,
                "bytes": nbytes,
                "seconds": round(thawed.seconds, 6),
                "ranks": [each.to_json() for each in reports],
            }
        )
        return
    vouched = {
        "pin": "it is what the pin says",
        "signature": "its owner's key has signed it",
        "": "nothing but the snapshot says which weights these are (no pin, no signature)",
    }
    lines = [
        f"{snapshot.name}: {format_bytes(nbytes)} in {format_seconds(thawed.seconds)} "
        f"({format_rate(nbytes / thawed.seconds)}), {count(len(pulls), 'rank')}, all of it right",
        f"  {vouched[thawed.vouched_by]}",
        *(f"  pin {with_pin(each.model.partition('[')[0], each.pin)}" for each in reports),
        "  nothing was kept: --hold serves it",
    ]
    outcome.summarise("\n".join(lines))


def is_snapshot(path: str) -> bool:
    """Return True if a path is that of a snapshot's folder."""
    folder = Path(path)
    return bool(path) and (folder / SNAPSHOT).is_file() and folder_of(folder, 0).is_dir()


def _serve(
    context: typer.Context, settings: Settings, folder: str, *, as_json: bool, **how: Any
) -> None:
    """Serve a snapshot until SIGTERM or Ctrl-C. Raises MxError as `served`."""
    from mx.cli.stop import Stop
    from mx.snapshots.thawing import served
    from mx.wire.descriptors import raise_limit

    outcome.ignore_hangup()
    raise_limit()
    with options.tracing(settings), options.accompanied(settings), ExitStack() as serving:
        stop = Stop()
        with live.reading(folder) as on_progress:
            sources: Sequence[Source] = served(
                Path(folder),
                coordinator=options.coordinator_of(settings),
                settings=settings,
                on_progress=on_progress,
                **how,
            )
        for each in sources:
            serving.enter_context(each)
        with stop.on_signals():
            if as_json:
                found = [{"model": each.pinned, "endpoint": each.endpoint} for each in sources]
                outcome.emit({"folder": folder, "sources": found})
            lines = [
                f"serving {each.model}: {format_bytes(each.manifest.layout.payload_nbytes)}\n"
                f"  at {each.endpoint}, coordinator {each.coordinator_address}\n"
                f"  pin {each.pinned}"
                for each in sources
            ]
            outcome.say("\n".join([*lines, "  stop with Ctrl-C"]))
            packs.tell("ready", f"serving {', '.join(str(each.model) for each in sources)}")
            stop.wait()
            for each in sources:
                each.drain(settings.drain_grace_s)


class _ServeSnapshot(additions.ServeAddition):
    help = (
        "A folder of `mx freeze` is served as what it was frozen from: the same name, revision and "
        "variant, all ranks.\n\n- `mx serve /snapshots/llama-8b`"
    )

    def run(self, context: Any, checkpoint: str, *, as_json: bool) -> bool:
        """Serve a snapshot, if the folder is one. Raises MxError as `served`."""
        if not is_snapshot(checkpoint):
            return False
        given = context.params
        for name in ("follow", "weights"):
            if given[name]:
                raise ConfigError(f"--{name} is for a checkpoint's folder", hint="leave it out")
        settings = options.settings_of(context, runs_long=True, level="info")
        names = ("model", "revision", "variant", "device", "pinned", "update")
        how = {name: given[name] for name in names}
        _serve(context, settings, checkpoint, as_json=as_json, **how)
        return True


SNAPSHOTS = _ServeSnapshot()
