"""Serves a diffusers pipeline: a folder whose subfolders are models of their own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mx import config
from mx.api.common import DEFAULT_REVISION, DEFAULT_VARIANT
from mx.api.serving import serve, serve_held
from mx.api.source import Source
from mx.codec import check_model_key
from mx.contexts import OwnContext, Undo
from mx.core import manifest as manifests
from mx.core.digest import document_digest
from mx.core.notes import Notes
from mx.core.pages import Pages
from mx.core.reference import parse_reference
from mx.core.types import ModelKey, Packaging, SideFile
from mx.errors import ConfigError
from mx.memory.arena import MemfdArena
from mx.source.model import SourceModel
from mx.storage.names import model_name_of
from mx.storage.reader import fill_from_tensors
from mx.storage.side_files import read_side_files

#: The file that names a pipeline's components; also a tensor of the pipeline's own model.
INDEX = "model_index.json"
#: The file, and the tensor, that says of each component by which pin it is served.
COMPONENTS = "mx_components.json"
_TENSORS = ".safetensors"


def is_pipeline(path: str | Path) -> bool:
    """Return True for the folder of a diffusers pipeline."""
    return os.path.isfile(os.path.join(path, INDEX))  # False, too, where it may not be read


class Pipeline(OwnContext):
    """A pipeline that this process serves: a source for each component, and one for its files.

    Close it, or use it as a context manager.
    """

    def __init__(self, sources: list[Source], closing: contextlib.ExitStack) -> None:
        self.sources = sources
        self._closing = closing

    @property
    def model(self) -> ModelKey:
        """What the pipeline's own files are served as."""
        return self.sources[-1].model

    @property
    def notes(self) -> Notes:
        """Which files of the pipeline's folder are left out. Those of its components say which of
        theirs are."""
        return self.sources[-1].notes

    def drain(self, grace_s: float = 10.0) -> bool:
        """Stop granting reads, and wait for the current readers; see `Source.drain`.

        Args:
            grace_s: Seconds to wait at most.

        Returns:
            True if all readers finished in time.
        """
        return all([source.drain(grace_s) for source in self.sources])

    def close(self) -> None:
        """Deregister all. Idempotent."""
        self._closing.close()


def serve_pipeline(
    path: str | Path,
    *,
    model: str = "",
    revision: str = "",
    settings: config.Settings | None = None,
    coordinator: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **more: Any,
) -> Pipeline:
    """Serve each component of a pipeline as NAME/COMPONENT, and its small files as NAME.

    NAME has the configuration of all components, schedulers and tokenizers, and two tensors: the
    bytes of model_index.json, and of a file with the pin of each component. So the pin of NAME
    covers the weights of all of them, and an update of one is an update of NAME.

    Args:
        path: The pipeline's folder.
        model: NAME or NAME:REVISION; by default the folder's name.
        revision: The revision, where `model` names none.
        settings: As for `serve`, and so are the others.
        coordinator: As for `serve`.
        on_progress: As for `serve`.
        more: Further arguments of `serve`.

    Returns:
        The pipeline, once all of it is registered.

    Raises:
        ConfigError: There is no component with weights.
        MxError: As `serve`.
    """
    settings = settings or config.load()
    root = Path(path)
    reference = parse_reference(model or model_name_of(root), revision=revision)
    revision = reference.revision or DEFAULT_REVISION
    components = sorted(entry.name for entry in os.scandir(root) if _has_weights(entry))
    if not components:
        raise ConfigError(f"{root} is a diffusers pipeline without weights")
    with contextlib.ExitStack() as failing:
        sources = []
        for component in components:
            source = serve(
                root / component,
                model=f"{reference.name}/{component}",
                revision=revision,
                settings=settings,
                coordinator=coordinator,
                on_progress=on_progress,
                **more,
            )
            # The first may be the coordinator of the others: it is closed last.
            failing.callback(source.close)
            sources.append(source)
        pins = {
            component: source.pinned.rpartition("@")[2]
            for component, source in zip(components, sources, strict=True)
        }
        # The coordinator has named the version for the components, which are listed with it.
        version = sources[0].manifest.layout.version
        key = ModelKey(reference.name, revision, DEFAULT_VARIANT)
        held = _held_files(root, key, pins, version)
        where, update = sources[0].coordinator_address, bool(more.get("update"))
        source = _serve_held(held, where, settings, update=update)
        failing.callback(source.close)
        return Pipeline([*sources, source], failing.pop_all())


def _has_weights(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir() or entry.name.startswith("."):
        return False
    return any(name.endswith(_TENSORS) for name in os.listdir(entry.path))


def _held_files(
    root: Path, key: ModelKey, pins: Mapping[str, str], layout_version: int
) -> SourceModel:
    """Return a model of a pipeline's small files, and of the pins of its components."""
    check_model_key(key)
    files, documents, left_out = read_side_files(root)
    # What a component's source leaves out, or serves, it names itself.
    left_out = {path: why for path, why in left_out.items() if path.split("/")[0] not in pins}
    said = json.dumps(pins, sort_keys=True).encode()
    side = SideFile(COMPONENTS, len(said), document_digest(said))
    documents = documents | {side.digest: said}
    files = (*(each for each in files if each.path != COMPONENTS), side)
    tensors = {INDEX: (root / INDEX).read_bytes(), COMPONENTS: said}
    specs = [manifests.TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()]
    layout = manifests.plan_layout(specs, (), layout_version)
    arena = MemfdArena(layout.arena_nbytes, name=str(key))
    with Undo(arena.release):
        view = arena.view
        assert isinstance(view, memoryview)
        views = {name: memoryview(data) for name, data in tensors.items()}
        filled = fill_from_tensors(views, layout, view, memfd=arena.memfd)
        del view
        arena.seal()
        packaging = Packaging((), files)
        manifest = manifests.encode(layout, packaging, filled.roots, documents)
        manifest = replace(manifest, notes=Notes(left_out).encode())
    return SourceModel(key, manifest, arena, Pages.whole(manifest, filled.pages))


def _serve_held(
    held: SourceModel, coordinator: str, settings: config.Settings, *, update: bool
) -> Source:
    with Undo(held.release):
        return serve_held(held, coordinator, settings, may_update=True, update=update)
