"""`--artifacts` of `mx serve` and `mx pull`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from mx.cli import additions, options, outcome
from mx.config import Settings
from mx.errors import ConfigError
from mx.wire.address import split_address

if TYPE_CHECKING:
    from mx.api import Source


class _ServedSets(additions.ServeAddition):
    flags: ClassVar = {
        "artifacts": Annotated[
            list[str] | None,
            typer.Option(
                help="A set that `mx artifacts publish` made, to serve, too, or alone; may be "
                "repeated.",
                metavar="SET",
            ),
        ]
    }

    def serve(
        self, context: Any, checkpoint: Source | None, settings: Settings, serving: ExitStack
    ) -> list[Source]:
        """Serve sets, all with one coordinator: that of the checkpoint, if there is one."""
        from mx.artifacts.carry import serve

        sets = context.params["artifacts"]
        if split_address(settings.listen)[1] and len(sets) + (checkpoint is not None) > 1:
            raise ConfigError(
                f"each set listens on a port of its own, not all on {settings.listen}",
                hint="give `listen` with port 0, or serve each by a command of its own",
            )
        found: list[Source] = []
        for each in sets:
            # The first may be the coordinator of the others: it is closed last.
            first = checkpoint or (found[0] if found else None)
            where = first.coordinator_address if first else options.coordinator_of(settings)
            found.append(serving.enter_context(serve(each, coordinator=where, settings=settings)))
        return found


class _PulledSet(additions.PullAddition):
    flags: ClassVar = {
        "artifacts": Annotated[
            str | None,
            typer.Option(
                help="Get the set of compile caches that fits this machine, too (`--trust` says "
                "whose may run here), and lay it out in this folder.",
                metavar="DIR",
            ),
        ]
    }

    def check(self, context: Any, settings: Settings) -> None:
        if context.params["artifacts"] is not None:
            from mx.artifacts.verbs import required_trust

            required_trust(settings)

    def get(self, context: Any, model: str, settings: Settings) -> additions.FoundBeside | None:
        folder = context.params["artifacts"]
        if folder is None:
            return None
        from mx.artifacts.verbs import obtain, obtained_line, obtained_object

        found = obtain(model, settings, folder)
        return additions.FoundBeside(
            "artifacts",
            obtained_object(found),
            show=lambda: outcome.summarise(obtained_line(found)),
        )


SERVED, PULLED = _ServedSets(), _PulledSet()
