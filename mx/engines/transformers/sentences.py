"""Lets sentence-transformers take a model's small files (modules, pooling) from where its weights
come from.

It asks the hub for them by itself, and without them makes another model of the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mx.engines.transformers.lookup import WEIGHTS
from mx.engines.transformers.pipelines import when_imported

if TYPE_CHECKING:
    from mx.engines.transformers.patched import Patches

_MODULE = "sentence_transformers.util.file_io"
#: The module of the class whose constructor loads a model.
_MODELS = "sentence_transformers.base.model"
#: Suffixes of weights, of which a source has only safetensors.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".xml", ".h5", ".msgpack")


def install(made: Patches) -> None:
    """Patch sentence-transformers, now or when it is imported."""
    for name in (_MODULE, _MODELS):
        when_imported(made, name, functools.partial(_replace, made))


def _replace(made: Patches, module: ModuleType) -> None:
    owner: Any = module if module.__name__ == _MODULE else vars(module).get("BaseModel")
    for name, make in (_MAKERS if owner is module else {"__init__": _model}).items():
        original = vars(owner).get(name) if owner is not None else None
        if original is not None:
            setattr(owner, name, make(made, original))
            made.when_undone(functools.partial(setattr, owner, name, original))


def _model(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the original that takes modules, configuration and weights from one
    source."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        name = args[0] if args else named.get("model_name_or_path")
        call = functools.partial(original, self, *args, **named)
        made.whole(name, call, code=named.get("trust_remote_code"))

    return __init__


def _file(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hf_hub_download(repo_id: str, filename: str, **named: Any) -> Any:
        found = made.find(repo_id, named.get("revision"))
        if found is None:
            return original(repo_id, filename, **named)
        path = Path(named.get("subfolder") or "", filename)
        made.lookup.fetch(found, path.as_posix())
        there = found.folder / path
        if there.is_file() and path != Path(WEIGHTS):
            return str(there)
        if path.suffix in _WEIGHTS:
            raise _lacks(repo_id, path)
        from huggingface_hub.errors import EntryNotFoundError

        raise EntryNotFoundError(f"{repo_id} has no {path}")

    return hf_hub_download


def _folder(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def snapshot_download(repo_id: str, **named: Any) -> Any:
        found = made.find(repo_id, named.get("revision"))
        if found is None:
            return original(repo_id, **named)
        wanted = str(named.get("allow_patterns") or "").removesuffix("/**")
        made.lookup.fetch(found, wanted)
        if not (found.folder / wanted).is_dir():
            raise _lacks(repo_id, Path(wanted))
        return str(found.folder)

    return snapshot_download


def _revision(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve_revision(repo_id: str, revision: str | None = None, **named: Any) -> Any:
        found = made.resolved(repo_id, revision)
        return original(repo_id, revision=revision, **named) if found is None else found

    return resolve_revision


def _lacks(name: str, path: Path) -> OSError:
    return OSError(
        f"{name} can't be loaded from peers: its sources have no {path}, since of weights only "
        "safetensors travel; load it from its folder, or call "
        "mx.engines.transformers.unpatch() first"
    )


_MAKERS: dict[str, Callable[[Patches, Callable[..., Any]], Callable[..., Any]]] = {
    "hf_hub_download": _file,
    "snapshot_download": _folder,
    "_hub_resolve_revision": _revision,
}
