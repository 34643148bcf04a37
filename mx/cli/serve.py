"""`mx serve`: serve a checkpoint until it is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from mx import config, packs
from mx.cli import additions, live, options, outcome
from mx.cli.stop import Stop
from mx.config import Settings
from mx.errors import ConfigError
from mx.storage.companions import COPY
from mx.text import listed
from mx.units import count, format_bytes
from mx.wire.descriptors import raise_limit

if TYPE_CHECKING:
    from mx.api import Source

#: The flags that say how a checkpoint is served.
_OF_CHECKPOINTS = (
    "model",
    "revision",
    "variant",
    "update",
    "device",
    "pinned",
    "follow",
    "weights",
)


def _is_given(context: typer.Context, name: str) -> bool:
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


@options.takes_settings
def serve(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A safetensors file, a folder of them, or ORG/NAME[@REVISION] in Hugging Face's "
            "cache on this machine.",
            metavar="CHECKPOINT",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="The name to serve it under, or NAME:REVISION. (default: the folder's name, or "
            "ORG/NAME)",
            metavar="NAME",
        ),
    ] = "",
    revision: Annotated[
        str, typer.Option(help="The revision's label. (default: main)", metavar="R")
    ] = "",
    variant: Annotated[
        str,
        typer.Option(
            help="Which of the model's variants this is: a word, or the fields of a rank, like "
            "tp=0/2,dtype=bf16. (default: checkpoint)",
            metavar="V",
        ),
    ] = "",
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="If the name stands for other weights, serve these as its next revision. The name "
            "has to belong to this user's name key.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where to hold it: the host, or a GPU.", metavar="cpu|cuda:N")
    ] = "cpu",
    pinned: Annotated[
        bool,
        typer.Option(
            "--pinned",
            help="Hold it in host memory that CUDA's driver makes: GPUs of this host copy from it "
            "without pinning it first. Processes without a GPU can't attach to it.",
        ),
    ] = False,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder that the checkpoint's files may be links into; may be repeated.",
            metavar="DIR",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Copies of the main weights to serve beside them: a path or pattern, such as "
            "model.fp16.safetensors; may be repeated.",
            metavar="GLOB",
        ),
    ] = None,
    *,
    as_json: bool,
) -> None:
    """Serve a checkpoint from memory, for others to pull.

    Reads CHECKPOINT once, seals its memory, registers with the coordinator and serves until it
    is stopped. Without `--coordinator` it joins the one at 127.0.0.1:7600, and where none
    answers it is one itself. SIGTERM and Ctrl-C drain: running reads finish, no new ones start.
    Closing the terminal (SIGHUP) does not end it.

    Of a diffusers pipeline each component is served as NAME/COMPONENT, and its files as NAME.

    **Examples**

    - `mx serve /models/llama-8b --model llama-8b`

    - `mx serve Qwen/Qwen2.5-0.5B`  from Hugging Face's cache

    - `mx serve model.safetensors --model small --coordinator 10.0.0.1:7600 --listen 10.0.0.2:0
      --tls-cert me.pem --tls-key me.key --tls-ca ours.pem`

    - `mx serve /model --model small --coordinator 10.0.0.1:7600 --wait 60 --listen 0.0.0.0:7601
      --advertise 10.0.0.9:7601 --data-ports 7602-7605 --insecure`  in a container
    """
    of_packs = additions.of("serve", additions.ServeAddition)
    if any(each.run(context, checkpoint, as_json=as_json) for each in of_packs):
        return
    beside = [each for each in of_packs if each.is_given(context)]
    if not checkpoint and not beside:
        raise ConfigError(
            "Missing argument 'CHECKPOINT'",
            hint="name a folder, or see --help for what else is served",
        )
    if not checkpoint and (given := [n for n in _OF_CHECKPOINTS if _is_given(context, n)]):
        raise ConfigError(
            f"--{given[0]} is for a checkpoint, and there is none",
            hint=f"name a checkpoint, or leave out --{given[0]}",
        )
    settings = options.settings_of(context, runs_long=True, level="info")
    outcome.ignore_hangup()
    raise_limit()
    from mx import api
    from mx.api.pipelines import is_pipeline
    from mx.storage.hub_cache import cached_snapshot, hub_name

    if name := hub_name(checkpoint):
        checkpoint = str(cached_snapshot(config.hub_cache(), checkpoint))
        model = model or name
    if checkpoint and is_pipeline(checkpoint):
        if beside:
            flag = next(f"--{name}" for each in beside for name in each.flags)
            raise ConfigError(
                f"{flag} is not for pipelines", hint="serve that by a command of its own"
            )
        if follow or weights or pinned:
            flag = "--follow" if follow else "--weights" if weights else "--pinned"
            raise ConfigError(f"{flag} is for one model", hint="serve one component")
        run_pipeline(
            settings, checkpoint, model, revision, variant, device, update=update, as_json=as_json
        )
        return
    with options.tracing(settings), options.accompanied(settings), ExitStack() as serving:
        stop = Stop()
        source = None
        if checkpoint:
            with live.reading(checkpoint) as on_progress:
                source = api.serve(
                    checkpoint,
                    model=model,
                    revision=revision,
                    variant=variant,
                    update=update,
                    coordinator=options.coordinator_of(settings),
                    device=device,
                    pinned=pinned,
                    follow=follow or (),
                    weights=weights or (),
                    settings=settings,
                    on_progress=on_progress,
                )
            serving.enter_context(source)
        sets = [each for a in beside for each in a.serve(context, source, settings, serving)]
        sources = [source, *sets] if source is not None else sets
        with stop.on_signals():
            _announce(source, sets, as_json=as_json)
            packs.tell("ready", f"serving {', '.join(str(each.model) for each in sources)}")
            stop.wait()
            readers = sum(source.stats().readers for source in sources)
            if readers:
                outcome.say(f"draining: {readers} running, at most {settings.drain_grace_s:g} s")
            if not all([source.drain(settings.drain_grace_s) for source in sources]):
                outcome.say("some reads did not finish in time; they are cut")


def _announce(checkpoint: Source | None, sets: Sequence[Source], *, as_json: bool) -> None:
    if as_json:
        told = {} if checkpoint is None else _object(checkpoint)
        outcome.emit(told | ({"artifacts": [_object(each) for each in sets]} if sets else {}))
    first = checkpoint or sets[0]
    where = "itself, at" if first.embedded else "the one at"
    text = ""
    if checkpoint is not None:
        layout = checkpoint.manifest.layout
        text += (
            f"serving {checkpoint.model}: {format_bytes(layout.payload_nbytes)} in "
            f"{count(len(layout.layers), 'layer')}\n"
            f"  at {checkpoint.endpoint}, coordinator: {where} {checkpoint.coordinator_address}\n"
            f"  pin {checkpoint.pinned} {outcome.pin_covers(checkpoint.manifest.ref.packaging)}\n"
        )
        notes = checkpoint.notes
        if notes.companions or COPY in notes.left_out.values():
            main = listed([file.path for file in checkpoint.manifest.packaging.files])
            text += f"  main weights: {main}\n"
        text += "".join(f"  {line}\n" for line in notes.lines())
    for each in sets:
        text += (
            f"serving {each.model.name}: {format_bytes(each.manifest.layout.payload_nbytes)}\n"
            f"  at {each.endpoint}, coordinator: {where} {each.coordinator_address}\n"
        )
    outcome.say(text + "  stop with Ctrl-C")


def _object(source: Source) -> dict[str, object]:
    layout, ref = source.manifest.layout, source.manifest.ref
    return {
        "model": source.model.name,
        "revision": source.model.revision,
        "variant": source.model.variant,
        "identity": source.identity_hex,
        "pin": ref.pin.hex(),
        "pin_covers_files": bool(ref.packaging),
        "pin_only": source.stats().pin_only,
        "bytes": layout.payload_nbytes,
        "layers": len(layout.layers),
        "endpoint": source.endpoint,
        "coordinator": source.coordinator_address,
        "embedded": source.embedded,
        "main": [file.path for file in source.manifest.packaging.files],
        **source.notes.to_json(),
    }


# -- `mx serve PIPELINE` ---------------------------------------------------------------------------


def run_pipeline(
    settings: Settings,
    folder: str,
    model: str,
    revision: str,
    variant: str,
    device: str,
    *,
    update: bool,
    as_json: bool,
) -> None:
    """Serve a pipeline until SIGTERM or Ctrl-C; the arguments are those of `mx serve`.

    Raises:
        MxError: As `mx.api.pipelines.serve_pipeline`.
    """
    if variant:
        raise ConfigError(
            "a pipeline has no variants", hint="leave out `variant`, or serve one component"
        )
    from mx.api.pipelines import serve_pipeline

    with options.tracing(settings), options.accompanied(settings):
        stop = Stop()
        with live.reading(folder) as on_progress:
            pipeline = serve_pipeline(
                folder,
                model=model,
                revision=revision,
                coordinator=options.coordinator_of(settings),
                device=device,
                update=update,
                settings=settings,
                on_progress=on_progress,
            )
        with pipeline, stop.on_signals():
            sizes = {str(s.model): s.manifest.layout.payload_nbytes for s in pipeline.sources}
            if as_json:
                said = pipeline.notes.to_json()
                outcome.emit({"pipeline": str(pipeline.model), "models": sizes, **said})
            outcome.say(
                f"serving the pipeline {pipeline.model}\n"
                + "".join(f"  {name}: {format_bytes(size)}\n" for name, size in sizes.items())
                + "".join(f"  {line}\n" for line in pipeline.notes.lines())
                + "  stop with Ctrl-C"
            )
            packs.tell("ready", f"serving the pipeline {pipeline.model}")
            stop.wait()
            if not pipeline.drain(settings.drain_grace_s):
                outcome.say("some reads did not finish in time; they are cut")
