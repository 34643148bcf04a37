"""What a pull would do: `plan`."""

from __future__ import annotations

from mx import config, runtime
from mx.api.common import transports
from mx.api.options import pull_options
from mx.target.planning import PlannedPull, plan_pull, target_place


def plan(
    model: str,
    *,
    peer: str | None = None,
    revision: str = "",
    variant: str = "",
    coordinator: str | None = None,
    transport: str | None = None,
    attach: bool = True,
    settings: config.Settings | None = None,
) -> PlannedPull:
    """The ways from the sources of `model` to this process, which of them a `pull` with the same
    arguments would use and what each should carry, and why not the others. Moves no weights.

    Raises ConfigError, UnknownModelError, CoordinatorError, SourceError.
    """
    settings = settings or config.load()
    options = pull_options(
        model,
        settings,
        peer=peer,
        revision=revision,
        variant=variant,
        coordinator=coordinator or settings.coordinator,
        transport=transport,
        attach=attach,
    )
    loop = runtime.acquire()
    try:
        return loop.run(plan_pull(options, target_place(options), transports()))
    finally:
        runtime.release(loop)
