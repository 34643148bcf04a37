"""`mx serve --cache`: hold what this host pulls until it is stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mx.cli import options, outcome
from mx.cli.stop import Stop
from mx.errors import ConfigError
from mx.units import format_bytes

if TYPE_CHECKING:
    from mx.api.caching import Cache


def run_cache(context: typer.Context, checkpoint: str, *, as_json: bool) -> None:
    """Run a cache until SIGTERM or Ctrl-C.

    Args:
        context: The verb's context, with its settings.
        checkpoint: What was given as CHECKPOINT: nothing.
        as_json: Whether to print an object.

    Raises:
        MxError: As `mx.cache`.
    """
    if checkpoint:
        raise ConfigError(
            "a cache serves no CHECKPOINT of its own",
            hint="leave out --cache, or serve the checkpoint by another command",
        )
    settings = options.settings_of(context, runs_long=True, level="info")
    outcome.ignore_hangup()
    from mx.api.caching import cache

    with options.tracing(settings):
        stop = Stop()
        running = cache(coordinator=options.coordinator_of(settings), settings=settings)
        with running, stop.on_signals():
            _announce(running, as_json=as_json)
            stop.wait()


def _announce(cache: Cache, *, as_json: bool) -> None:
    budget_bytes = cache.status().budget_bytes
    if as_json:
        outcome.emit(
            {
                "cache": str(cache.socket),
                "memory_bytes": budget_bytes,
                "coordinator": cache.coordinator_address,
                "embedded": cache.embedded,
            }
        )
    where = "itself, at" if cache.embedded else "the one at"
    outcome.say(
        f"caching up to {format_bytes(budget_bytes)} of what this host pulls\n"
        f"  at {cache.socket}, coordinator: {where} {cache.coordinator_address}\n"
        f"  stop with Ctrl-C"
    )
