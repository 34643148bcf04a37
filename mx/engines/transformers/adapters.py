"""Lets PEFT take an adapter's configuration and weights from peers: an adapter is a model of its
own, served from a folder with an `adapter_config.json`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mx.engines.transformers.pipelines import when_imported

if TYPE_CHECKING:
    from mx.engines.transformers.patched import Patches


def install(made: Patches) -> None:
    """Patch PEFT, now or when it is imported."""
    for name in ("peft.config", "peft.peft_model"):
        when_imported(made, name, functools.partial(_replace, made))


def _replace(made: Patches, module: ModuleType) -> None:
    owner = vars(module).get("PeftConfigMixin")
    for name in ("from_pretrained", "_get_peft_type"):
        if owner is not None and module.__name__ == "peft.config" and name in vars(owner):
            made.replace_method(owner, name, functools.partial(_method, made))
    original = vars(module).get("load_peft_weights")
    if original is not None:
        vars(module)["load_peft_weights"] = _from_folder(made, original)
        made.when_undone(functools.partial(setattr, module, "load_peft_weights", original))


def _method(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _from_folder(made, functools.partial(original, cls))(*args, **kwargs)

    return method


def _from_folder(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives the original, in place of a served adapter's name, the folder
    with its files, where a placeholder stands for its weights."""

    def function(name: Any, *args: Any, **kwargs: Any) -> Any:
        found = made.find(name, kwargs.get("revision"))
        return original(name if found is None else str(found.folder), *args, **kwargs)

    return function
