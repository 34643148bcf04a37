"""Undoes what building a model leaves behind in its engine, so that another can be built."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch

_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)


@contextlib.contextmanager
def undone_unless_kept(package: str, *owners: object) -> Iterator[Callable[[], None]]:
    """Yield a function that keeps the model that is built inside the block.

    If it is not called, the engine is restored at the end of the block: its registries without
    parts of the model, and torch's random state and default dtype as they were before.

    Args:
        package: The engine's package. Modules and tensors that were added to the variables of its
            Python modules, or to dicts, lists and sets in them, are removed, as are entries under
            the `id` of one. The rest, such as imported classes, does not belong to the model, and
            stays.
        owners: Objects whose attributes are restored, with the content of those that are dicts,
            lists or sets.
    """
    before = {id(found): (found, _copy(found)) for found in _of_modules(package)}
    variables = [(found, dict(found)) for found in _variables_of(package)]
    owned = [(vars(owner), dict(vars(owner))) for owner in owners]
    owned += [(found, _copy(found)) for owner in owners for found in _of(owner)]
    random, dtype = _random(), torch.get_default_dtype()
    kept = []
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            _set_random(*random)
            torch.set_default_dtype(dtype)
            for registry, content in owned:
                _restore(registry, content)
            for registry in _of_modules(package):
                _forget_parts(registry, before.get(id(registry), (registry, ()))[1])
            for found, content in variables:
                _forget_parts(found, content)
            clear_frames(sys.exception())
            gc.collect()  # the model's memory is needed


def clear_frames(error: BaseException | None) -> None:
    """Clear what the frames of an error and its causes refer to, so that the memory of a model is
    freed. The tracebacks still show where each was raised.

    Args:
        error: The error; None changes nothing.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _random() -> tuple[torch.Tensor, list[torch.Tensor]]:
    cuda: Any = torch.cuda  # its functions have no types
    return torch.get_rng_state(), cuda.get_rng_state_all() if cuda.is_initialized() else []


def _set_random(on_host: torch.Tensor, on_devices: list[torch.Tensor]) -> None:
    torch.set_rng_state(on_host)
    if on_devices:
        torch.cuda.set_rng_state_all(on_devices)


def _of(owner: object) -> list[Any]:
    return [each for each in vars(owner).values() if isinstance(each, _CONTAINERS)]


def _variables_of(package: str) -> list[dict[str, Any]]:
    """Return the variables of each module of a package that is imported."""
    return [
        vars(module)
        for name, module in list(sys.modules.items())
        if (name == package or name.startswith(f"{package}.")) and hasattr(module, "__dict__")
    ]


def _of_modules(package: str) -> list[Any]:
    found = {}
    for variables in _variables_of(package):
        for each in list(variables.values()):
            if type(each) in (dict, list, set) or type(each).__name__ == "defaultdict":
                found[id(each)] = each
    return list(found.values())


def _copy(registry: Any) -> Any:
    """Return a registry's content as a plain dict, set or list."""
    if isinstance(registry, MutableMapping):
        return dict(registry)
    return set(registry) if isinstance(registry, MutableSet) else list(registry)


def _restore(registry: Any, content: Any) -> None:
    registry.clear()
    registry.extend(content) if isinstance(registry, MutableSequence) else registry.update(content)


def _forget_parts(registry: Any, before: Any) -> None:
    """Remove parts of a model that were added to a registry, and restore those that they
    replaced."""
    if isinstance(registry, dict):
        old = before or {}
        for name in [n for n, each in registry.items() if _is_part(each) or _is_address(n)]:
            if name not in old:
                del registry[name]
            elif registry[name] is not old[name]:
                registry[name] = old[name]
    elif any(_is_part(each) for each in registry):
        known = {id(each) for each in before or ()}
        kept = [each for each in registry if not _is_part(each) or id(each) in known]
        _restore(registry, kept)


def _is_part(value: object, depth: int = 2) -> bool:
    if isinstance(value, torch.nn.Module | torch.Tensor):
        return True
    if isinstance(value, tuple | list | dict) and depth and len(value) <= 16:
        inside = value.values() if isinstance(value, dict) else value
        return any(_is_part(each, depth - 1) for each in inside)
    return False


def _is_address(key: object) -> bool:
    """Return True if a key may be the `id` of a module, which the next model's may have, too."""
    return type(key) is int and key >= 1 << 32
