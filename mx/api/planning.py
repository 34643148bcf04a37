"""Shows what a pull would do: `plan`."""

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
    """Return the paths from the sources of `model` to this process, without moving weights.

    The plan says which paths a `pull` with the same arguments would use, what each should carry,
    and why it would not use the others.

    Args:
        model: NAME, NAME:REVISION or NAME@IDENTITY.
        peer: HOST:PORT of the one source to consider, without a coordinator.
        revision: The revision, where `model` names none.
        variant: The variant; "checkpoint" if empty.
        coordinator: HOST:PORT; None takes the address in the settings.
        transport: The name of the only transport to consider.
        attach: False leaves out paths that share memory.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: An argument is wrong.
        UnknownModelError: The coordinator knows no such model.
        CoordinatorError: The coordinator does not answer.
        SourceError: The source at `peer` can't be used.
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
