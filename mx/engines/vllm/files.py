"""Configuration and tokenizer files, which vLLM reads before its loader runs."""

from __future__ import annotations

import atexit
import functools
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mx
from mx.core.digest import document_digest
from mx.core.reference import ModelReference, parse_reference
from mx.core.types import ManifestRef
from mx.engines.replica.choice import CHECKPOINT
from mx.engines.replica.frozen import reader
from mx.engines.replica.names import newest_if_main
from mx.engines.replica.options import LoaderOptions
from mx.engines.side_files import check_code, check_covered
from mx.errors import MxError, OutputError, UnknownModelError

log = logging.getLogger("vllm.mx_peer")


@dataclass(frozen=True)
class FetchedFiles:
    """Where a model's files came from: the manifest of the weights that they belong to."""

    variant: str
    ref: ManifestRef


def fetch_files(
    model: str,
    out: str | Path,
    *,
    revision: str = "",
    coordinator: str | None = None,
    settings: mx.config.Settings | None = None,
) -> Path:
    """Pull a model's configuration and tokenizer into a folder, and no weights.

    They are those of one source: of the checkpoint, if one is listed with files, or else of a
    replica that lends what it loaded. With a pin they are what the pin says.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        out: The folder, which must not exist or be empty.
        revision: The revision, where `model` names none.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The folder.

    Raises:
        UnknownModelError: No source has files of this model.
        ConfigError: The pin is one of the weights alone, or the files name code to run.
        MxError: As `mx.pull`.
    """
    fetch(model, Path(out), revision=revision, coordinator=coordinator, settings=settings)
    return Path(out)


def fetch(
    model: str,
    out: Path,
    *,
    revision: str = "",
    coordinator: str | None = None,
    settings: mx.config.Settings | None = None,
) -> FetchedFiles:
    """Fetch files as `fetch_files` does, and return where they came from."""
    reference = parse_reference(model, revision=newest_if_main(revision))
    if reference.pin:
        revision, variant = reference.revision, CHECKPOINT
    else:
        revision, variant = _with_files(model, reference, coordinator, settings)
    with mx.pull(
        reference.pinned_name,
        revision=revision,
        variant=variant,
        files_only=True,
        coordinator=coordinator,
        settings=settings,
    ) as pull:
        files, ref = pull.files(), pull.wait_manifest().ref
        check_covered(
            model,
            reference.pin,
            ref,
            "give vLLM a folder of yours with config.json as the model, and "
            f'\'{{"model": "{model}"}}\' in `model_loader_extra_config`',
        )
        _write(reference.name, files, out)
    return FetchedFiles(variant, ref)


def _write(name: str, files: Mapping[str, bytes], out: Path) -> None:
    check_code(name, files)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise OutputError(f"{out} is not empty", hint="name a new folder")
    for path, data in files.items():
        there = out / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data)


def _of_snapshot(name: str, snapshot: str, out: Path) -> FetchedFiles:
    """Write the files of a snapshot, and return what they belong to. Raises MxError."""
    rank, files = reader("files_of")(Path(snapshot))
    if not files:
        raise UnknownModelError(f"{snapshot} has no configuration", hint="name a folder as model")
    _write(name, files, out)
    digests = (rank.identity, b"", document_digest(rank.packaging))
    return FetchedFiles(rank.variant, ManifestRef(*digests, (0, 0, len(rank.packaging))))


def _with_files(
    model: str,
    reference: ModelReference,
    coordinator: str | None,
    settings: mx.config.Settings | None,
) -> tuple[str, str]:
    """Return the revision and variant whose files to take."""
    current = [
        each.revision
        for each in mx.list_bundles(reference.name, coordinator=coordinator, settings=settings)
        if (each.revision == reference.revision if reference.revision else each.named)
    ]
    found = [
        each
        for each in mx.list_models(coordinator=coordinator, settings=settings)
        if each.sources and each.ref.packaging and not each.pin_only
        if each.model.name == reference.name and each.model.revision in current
    ]
    found.sort(key=lambda each: each.model.variant != CHECKPOINT)
    if not found:
        raise UnknownModelError(
            f"no source has the configuration of {model}",
            hint="serve its checkpoint, or start a replica from a folder with its files",
        )
    return found[0].model.revision, found[0].model.variant


def fetch_before_configuration() -> None:
    """Have vLLM get the configuration from a peer where `model` is not a folder. Idempotent."""
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
    revision = newest_if_main(arguments.revision)
    wanted = parse_reference(options.model or named, revision=revision)
    folder = Path(tempfile.mkdtemp(prefix="mx-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        if options.snapshot:
            found = _of_snapshot(named, options.snapshot, folder / "files")
        else:
            found = fetch(
                options.model or named,
                folder / "files",
                revision=revision,
                settings=options.settings,
            )
    except MxError as error:
        if wanted.pin and not options.fallback:
            raise
        log.warning("%s; vLLM looks for the configuration of %s itself", error, named)
        return
    more = {"files": found.ref.packaging.hex()}
    if found.variant == CHECKPOINT and not options.checkpoint:
        more["checkpoint"] = found.ref.identity.hex()
    arguments.model_loader_extra_config = {"model": named, **extra, **more}
    arguments.served_model_name = arguments.served_model_name or named
    if arguments.tokenizer in (None, named):
        arguments.tokenizer = None
    arguments.model = str(folder / "files")
