"""What the shell completes: names of models, as a coordinator lists them."""

from __future__ import annotations

import re

import typer

#: How long a shell waits for the coordinator, unless `connect_timeout_s` is set.
TIMEOUT_S = 0.5
#: The shell's script may evaluate what it gets, and a coordinator lists what any process registers.
_HARMLESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*", re.ASCII)


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models that begin so; none if the coordinator does not answer at once.

    Args:
        context: The verb's, with the flags that were typed so far.
        incomplete: What was typed of the name.
    """
    try:
        found = _listed(context)
    except Exception:  # noqa: BLE001 - whatever it is, a shell's line is not a place for it
        return []
    harmless = [name for name in found if _HARMLESS.fullmatch(name)]
    return sorted(name for name in harmless if name.startswith(incomplete))


def _listed(context: typer.Context) -> set[str]:
    from mx import api, config
    from mx.core.artifact_names import model_and_set

    given = {name: context.params.get(name) for name in config.descriptions()}
    file = context.params.get("config")
    settings = config.load(given, file=file, typed=True)
    if not settings.is_set("connect_timeout_s"):
        given["connect_timeout_s"] = str(TIMEOUT_S)
        settings = config.load(given, file=file, typed=True)
    names = {each.model.name for each in api.list_models(settings=settings)}
    return {name for name in names if model_and_set(name) is None}
