"""What the fleet pack adds to `mx serve` (a cache), `mx models` (bundles) and `mx web` (`/v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from mx.cli import additions
from mx.core.artifact_names import model_and_set
from mx.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from mx.config import Settings


class _CacheAddition(additions.ServeAddition):
    flags: ClassVar = {
        "as_cache": Annotated[
            bool,
            typer.Option(
                "--cache",
                help="Serve no checkpoint: hold what this host pulls, for all its processes to "
                "share.",
            ),
        ]
    }
    help = (
        "With `--cache` it holds what this host pulls, least recently used first out: each pull of "
        "this user on this host asks it first, and attaches to its memory.\n\n"
        "- `mx serve --cache --memory 64GB`  one copy of each model for all processes of this host"
    )

    def run(self, context: Any, checkpoint: str, *, as_json: bool) -> bool:
        """Run a cache until SIGTERM or Ctrl-C, if it is asked for. Raises MxError as `mx.cache`."""
        if not context.params["as_cache"]:
            if context.params["cache_memory"] is not None:
                raise ConfigError("--memory is the memory of a cache", hint="give --cache, too")
            return False
        if checkpoint or context.params.get("artifacts"):
            raise ConfigError(
                "a cache serves no CHECKPOINT and no sets of its own: it holds what is pulled",
                hint="leave out --cache, or serve that by another command",
            )
        from mx.fleet.verbs import run_cache

        run_cache(context, as_json=as_json)
        return True


CACHE = _CacheAddition()


class _Bundles(additions.ModelsAddition):
    help = (
        "A variant with fields such as tp=0/2 is one of the ranks that make a whole; below the "
        "models these bundles are listed, with the ranks that no source holds completely."
    )

    def find(self, name: str, settings: Settings, *, lists_all: bool) -> additions.FoundBeside:
        from mx.cli.printing import objects
        from mx.fleet.bundles import list_bundles
        from mx.fleet.verbs import BUNDLES, show_bundles

        bundles = [
            each
            for each in list_bundles(name, coordinator=settings.coordinator, settings=settings)
            if not lists_all or model_and_set(each.name) is None
        ]
        return additions.FoundBeside(
            "bundles",
            objects(BUNDLES, bundles),
            show=lambda: show_bundles([each for each in bundles if each.ranks > 1]),
        )


BUNDLES = _Bundles()


class _Http(additions.VerbAddition):
    help = (
        "At `/v1/replicas`, `/v1/estimate`, `/v1/place` and `/v1/watch` routers in other languages "
        "ask what `mx.Router` answers, as JSON (docs/http.md)."
    )

    def answers(
        self, settings: Settings, headers: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, ASGIApp]]:
        from mx.fleet.http import applications

        return applications(settings, headers)


HTTP = _Http()
