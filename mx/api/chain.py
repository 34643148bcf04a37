"""Which stores a pull reads what its sources do not serve, and which steps it does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict
from urllib.parse import quote

from mx import config, packs
from mx.core.packaging import bad_path
from mx.core.reference import ModelReference
from mx.core.revisions import MAIN
from mx.errors import ConfigError
from mx.fetching.report import SKIPPED, StepReport
from mx.storage.stores import DISK, HUB, OBJECTS, SNAPSHOT, CheckpointStore, DiskStore, UrlStore

#: What `source` may be.
PEERS, AUTO = "peers", "auto"


class ChainOptions(TypedDict):
    """The fields of `PullOptions` that describe the chain."""

    stores: tuple[CheckpointStore, ...]
    bound: bool
    skipped: tuple[StepReport, ...]
    store_timeout_s: float


def chain_of(
    source: str,
    settings: config.Settings,
    model: ModelReference,
    path: str | Path | None,
    fallback: str | Path | None,
) -> ChainOptions:
    """Return the stores that the arguments of `pull` and the settings name.

    Args:
        source: "auto" or "peers".
        settings: They say where checkpoints are kept.
        model: What is pulled.
        path, fallback: A checkpoint on disk, from the arguments.

    Raises:
        ConfigError: `source` has another value, contradicts `path`, or a setting names no place.
    """
    if source not in (PEERS, AUTO, SNAPSHOT):
        hint = "it is peers, auto or snapshot"
        raise ConfigError(f"`source={source}` is not understood", hint=hint)
    if source == SNAPSHOT and path is None:
        raise ConfigError("`source=snapshot` reads a folder", hint="name it with `path`")
    named = path if path is not None else fallback
    stores: list[CheckpointStore] = [] if named is None else [DiskStore(Path(named))]
    skipped: list[StepReport] = []
    if source == AUTO:
        if path is not None:
            raise ConfigError(
                "`source=auto` reads sources first, and `path` none",
                hint="give `fallback` in place of `path`, or leave out `source`",
            )
        of_packs = packs.optional("mx.snapshots.reading:step")
        for step, found in (
            (SNAPSHOT, of_packs(settings, model) if of_packs else SNAPSHOT),
            (DISK, DISK if stores else _disk(settings, model)),
            (HUB, _hub(settings, model)),
            (OBJECTS, _objects(settings, model)),
        ):
            if not isinstance(found, str):
                stores.append(found)
            elif found != step:
                skipped.append(StepReport(step, SKIPPED, found))
    return ChainOptions(
        stores=tuple(stores),
        bound=source == AUTO,
        skipped=tuple(skipped),
        store_timeout_s=settings.store_timeout_s,
    )


def _disk(settings: config.Settings, model: ModelReference) -> CheckpointStore | str:
    """Return the step, or why there is none."""
    if not settings.checkpoint_root:
        return "no `checkpoint_root` is set"
    if reason := bad_path(model.name):
        return f"the name of the model {reason}, so it names no folder"
    if _is_of_a_revision(model):
        return _of_any_revision("checkpoint_root", "name its folder with `fallback=PATH`", model)
    return DiskStore(Path(settings.checkpoint_root) / model.name)


def _is_of_a_revision(model: ModelReference) -> bool:
    """Return True if a revision is asked for, and no pin says whether a store has it."""
    return model.revision not in ("", MAIN) and not model.pin


def _of_any_revision(setting: str, instead: str, model: ModelReference) -> str:
    return (
        f"`{setting}` says nothing of revisions, and {model.revision} is asked for: {instead}, or "
        "name the pin"
    )


def _hub(settings: config.Settings, model: ModelReference) -> CheckpointStore | str:
    named = settings.hub_id or (model.name if "/" in model.name else "")
    if not named:
        return f"no `hub_id` is set, and {model.name} is not of the form ORGANISATION/MODEL"
    repository, _, revision = named.replace("{name}", model.name).partition("@")
    from mx.storage.hub_cache import is_hub_id

    if not is_hub_id(repository):
        return f"{repository} is not the id of a model on the hub"
    if revision not in ("", model.revision) and _is_of_a_revision(model):
        return f"`hub_id` names revision {revision}, and {model.revision} is asked for"
    hub_store = packs.optional("mx.remote.hub:HubStore")
    if hub_store is None:
        return "the hub needs the pack mx.remote, which is not there"
    store: CheckpointStore = hub_store(repository, revision or model.revision or MAIN)
    return store


def _objects(settings: config.Settings, model: ModelReference) -> CheckpointStore | str:
    if not settings.object_url:
        return "no `object_url` is set"
    if "{name}" in settings.object_url and (reason := bad_path(model.name)):
        return f"the name of the model {reason}, so it names no object"
    if "{revision}" not in settings.object_url and _is_of_a_revision(model):
        return _of_any_revision("object_url", "put {revision} into it", model)
    url = settings.object_url.replace("{name}", quote(model.name))
    url = url.replace("{revision}", quote(model.revision or MAIN, safe=""))
    from mx.stores import check_url

    check_url(url)
    return UrlStore(url)
