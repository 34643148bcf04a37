"""Configuration and tokenizer files, which vLLM reads before its loader runs."""

from __future__ import annotations

import atexit
import functools
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mx
from mx.engines.replica.choice import CHECKPOINT, name_and_revision
from mx.engines.replica.options import LoaderOptions
from mx.errors import MxError, UnknownModelError

log = logging.getLogger(__name__)


def fetch_files(
    model: str,
    out: str | Path,
    *,
    coordinator: str | None = None,
    settings: mx.config.Settings | None = None,
) -> Path:
    """Pull a model's configuration and tokenizer into a folder, and no weights.

    Any source will do: one that holds the checkpoint, or else a replica that lends what it loaded.

    Args:
        model: NAME or NAME:REVISION.
        out: The folder, which must not exist or be empty.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The folder.

    Raises:
        UnknownModelError: No source has files of this model.
        MxError: As `mx.pull`.
    """
    name, revision, _ = name_and_revision(model)
    listed = mx.list_models(coordinator=coordinator, settings=settings)
    found = [
        each
        for each in listed
        if each.sources and each.ref.packaging
        if each.model.name == name and revision in ("", each.model.revision)
    ]
    found.sort(key=lambda each: each.model.variant != CHECKPOINT)
    if not found:
        raise UnknownModelError(
            f"no source has the configuration of {model}",
            hint="serve its checkpoint, or start a replica from a folder with its files",
        )
    with mx.pull(
        name,
        revision=found[0].model.revision,
        variant=found[0].model.variant,
        files_only=True,
        out=out,
        coordinator=coordinator,
        settings=settings,
    ) as pull:
        pull.wait()
    return Path(out)


def fetch_before_configuration() -> None:
    """Have vLLM get the configuration from a peer where `model` is no folder. Idempotent."""
    from vllm.engine import arg_utils

    arguments = arg_utils.EngineArgs
    if hasattr(arguments.create_engine_config, "__wrapped__"):
        return
    create, find = arguments.create_engine_config, arg_utils.get_model_path

    @functools.wraps(create)
    def create_engine_config(self: Any, *given: Any, **named: Any) -> Any:
        if self.load_format == "mx-peer":
            _point_at_files(self)
        return create(self, *given, **named)

    @functools.wraps(find)
    def get_model_path(model: Any, *given: Any, **named: Any) -> Any:
        # Called as soon as the hub is offline, before the above: a peer may have the files.
        try:
            return find(model, *given, **named)
        except OSError:
            return model

    arguments.create_engine_config = create_engine_config
    arg_utils.get_model_path = get_model_path


def _point_at_files(arguments: Any) -> None:
    extra = arguments.model_loader_extra_config
    named = str(arguments.model)
    if Path(named).exists() or not isinstance(extra, Mapping):
        return
    options = LoaderOptions.read(extra)
    folder = Path(tempfile.mkdtemp(prefix="mx-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        fetch_files(options.model or named, folder / "files", settings=options.settings)
    except MxError as error:
        log.warning("%s; vLLM looks for the configuration of %s itself", error, named)
        return
    arguments.model_loader_extra_config = {"model": named, **extra}
    arguments.served_model_name = arguments.served_model_name or named
    if arguments.tokenizer in (None, named):
        arguments.tokenizer = None
    arguments.model = str(folder / "files")
