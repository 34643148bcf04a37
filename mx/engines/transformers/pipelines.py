"""Makes diffusers take pipelines and their components from peers and from this host's cache.

diffusers takes seconds to import, so that it is patched when the program imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mx.engines.transformers.counters import served
from mx.engines.transformers.loads import LeftToDiskError
from mx.engines.transformers.lookup import ServedModel, say_why_not

if TYPE_CHECKING:
    from mx.engines.transformers.patched import Patches

log = logging.getLogger(__name__)

#: What is replaced: module, class, class method.
_METHODS = (
    ("diffusers.configuration_utils", "ConfigMixin", "load_config"),
    ("diffusers.models.modeling_utils", "ModelMixin", "from_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "download"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "from_pretrained"),
)
#: Arguments that ask for other files than those that peers serve.
_OTHER_FILES = (
    "variant",
    "custom_pipeline",
    "force_download",
    "from_flax",
    "use_onnx",
    "use_flashpack",
    "disable_mmap",
    "trust_remote_code",
)


def install(made: Patches) -> None:
    """Patch the modules of diffusers that are imported now, and the others once they are."""
    for name in sorted({module for module, _, _ in _METHODS}):
        when_imported(made, name, functools.partial(_replace, made))


def when_imported(made: Patches, name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module: now, if it is imported, or when it is.

    Args:
        made: The patch, whose end also ends the waiting.
        name: The module's.
        then: Called with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    made.when_undone(functools.partial(_remove, finder))


def _remove(finder: _Finder) -> None:
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def _replace(made: Patches, module: ModuleType) -> None:
    for name, owner, method in _METHODS:
        if name == module.__name__:
            make = _MAKERS[owner, method]
            made.replace_method(vars(module)[owner], method, functools.partial(make, made))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `imported` with a module once it is imported."""

    def __init__(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, imported: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._inner.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._imported(module)


def _found(made: Patches, name: object, kwargs: dict[str, Any]) -> ServedModel | None:
    if any(kwargs.get(argument) for argument in _OTHER_FILES):
        return None
    return made.find(name, kwargs.get("revision"))


def _why_not(made: Patches, name: object, kwargs: dict[str, Any]) -> str:
    given = [argument for argument in _OTHER_FILES if kwargs.get(argument)]
    return f"`{given[0]}` was given" if given else made.why_not(name, kwargs.get("revision"))


def _config(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `ConfigMixin.load_config`, which schedulers use, too."""

    @functools.wraps(original)
    def load_config(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        found = _found(made, name, kwargs)
        return original(cls, name if found is None else str(found.folder), *args, **kwargs)

    return load_config


def _download(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def download(cls: Any, pretrained_model_name: Any, **kwargs: Any) -> Any:
        found = _found(made, pretrained_model_name, kwargs)
        if found is None:
            return original(cls, pretrained_model_name, **kwargs)
        return str(found.folder)

    return download


def _from_pretrained(
    made: Patches, original: Callable[..., Any], *, by_name: bool
) -> Callable[..., Any]:
    """Return a replacement of `from_pretrained` of a pipeline or model, which loads again from disk
    if a source was lost. With `by_name` the original finds the folder itself."""

    @functools.wraps(original)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        if made.here.loads is not None:
            return original(cls, name, *args, **kwargs)  # a part of a pipeline
        loads = made.here.loads = []
        failures: list[BaseException] = []
        try:
            with made.lookup.one_call():
                found = _found(made, name, kwargs)
                reason = _why_not(made, name, kwargs) if found is None else ""
                if found is not None:
                    where = name if by_name else str(found.folder)
                    try:
                        return original(cls, where, *args, **kwargs)
                    except LeftToDiskError as left:  # of a model of transformers' in it
                        failures, reason = [left.__cause__ or left], left.reason
                    except Exception:
                        failures = [load.failure for load in loads if load.failure is not None]
                        if not failures:
                            raise
                        reason = str(failures[0])
                    log.warning("%s: not from peers: %s", name, reason)
            try:
                with made.from_disk(reason):
                    model = original(cls, name, *args, **kwargs)
            except OSError as missing:
                say_why_not(missing, name, reason)
                if not failures:
                    raise
                raise missing from failures[0]
            served(str(name), "disk", reason=reason)
            return model
        finally:
            made.here.loads = None

    return from_pretrained


_MAKERS: dict[tuple[str, str], Callable[..., Callable[..., Any]]] = {
    ("ConfigMixin", "load_config"): _config,
    ("ModelMixin", "from_pretrained"): functools.partial(_from_pretrained, by_name=False),
    ("DiffusionPipeline", "download"): _download,
    ("DiffusionPipeline", "from_pretrained"): functools.partial(_from_pretrained, by_name=True),
}
