"""`mx serve PIPELINE`: serve each component of a diffusers pipeline until it is stopped."""

from __future__ import annotations

from mx.cli import live, notify, options, outcome
from mx.cli.stop import Stop
from mx.config import Settings
from mx.errors import ConfigError
from mx.units import format_bytes


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

    with options.tracing(settings), options.measuring(settings):
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
                outcome.emit({"pipeline": str(pipeline.model), "models": sizes})
            outcome.say(
                f"serving the pipeline {pipeline.model}\n"
                + "".join(f"  {name}: {format_bytes(size)}\n" for name, size in sizes.items())
                + "  stop with Ctrl-C"
            )
            notify.ready(f"serving the pipeline {pipeline.model}")
            stop.wait()
            if not pipeline.drain(settings.drain_grace_s):
                outcome.say("some reads did not finish in time; they are cut")
