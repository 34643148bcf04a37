"""The values of a state as text: JSON in which only the classes named here appear, and a copy of
values that may be changed.

A field that has its default is left out, and one that only a later release knows is not read. What
is read is built by the classes' constructors; text that has anything else in it is refused, never
executed.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from mx.core import answers, binding, bound_name, changes, name_state, store, topology, types
from mx.errors import ConfigError

#: Grows when what is written can no longer be read by the version before.
VERSION = 1

#: The classes by the names that are written, which stay when a class is called otherwise.
_WRITTEN: Mapping[str, type[Any]] = {
    "Answered": changes.AnswerChange,
    "Gone": store.FormerSource,
    "Kept": name_state.ReservedName,
    "Listed": answers.ListedSource,
    "Meant": changes.NameMeaning,
}
_VALUES: tuple[type[Any], ...] = (
    *_WRITTEN.values(), binding.Binding, binding._Files, bound_name.BoundName, bound_name.Revision,
    changes.Change, name_state.NameState, topology.Fact, topology.Gpu, topology.GpuPeer,
    topology.Nic, topology.NumaNode, topology.Place, types.AddressTable, types.ManifestRef,
    types.ModelKey, types.Region, types.SourceRecord,
)  # fmt: skip
_ENUMS: tuple[type[enum.Enum], ...] = (changes.ChangeKind, types.SourceRole, types.SourceState)
_SCALARS = (str, int, float, bool, type(None))
_CLASSES: Mapping[str, type[Any]] = {
    **{each.__name__: each for each in (*_VALUES, *_ENUMS) if each not in _WRITTEN.values()},
    **_WRITTEN,
}
_NAMES: Mapping[type[Any], str] = {each: name for name, each in _CLASSES.items()}
_NO_DEFAULT = object()


def _defaults(kind: type[Any]) -> dict[str, object]:
    """Return the names of a class's fields, and their defaults that are the same in every
    release."""
    if not is_dataclass(kind):
        return {name: kind._field_defaults.get(name, _NO_DEFAULT) for name in kind._fields}
    return {field.name: _default(field) for field in fields(kind) if field.init}


def _default(field: Field[Any]) -> object:
    if field.default_factory in (dict, list, set):
        return field.default_factory()
    return _NO_DEFAULT if field.default is MISSING else field.default


#: The fields of each class, and their defaults.
_FIELDS: Mapping[type[Any], Mapping[str, object]] = {each: _defaults(each) for each in _VALUES}
#: Those whose objects change.
_CHANGING = {
    each
    for each in _VALUES
    if is_dataclass(each) and not each.__dataclass_params__.frozen  # type: ignore[attr-defined]
}


def encode(value: object) -> str:
    """Return a value as text."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)


def decode(text: str | bytes) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        ConfigError: It is not such a text.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"what is kept is not what mx writes: {type(error).__name__}: {str(error)[:200]}",
            hint="it is damaged, or of a later version",
        ) from None


def copied(value: Any) -> Any:
    """Return a copy of a value, in which all that may be changed is new."""
    kind = type(value)
    if kind is dict:
        first = next(iter(value.values()), None)
        if isinstance(first, str | bytes | int):
            return value.copy()
        return {key: copied(each) for key, each in value.items()}
    if kind is list:
        return [copied(each) for each in value]
    if kind is set:
        return value.copy()
    if kind in _CHANGING:
        return kind(*[copied(getattr(value, name)) for name in _FIELDS[kind]])
    return value


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        return {"b": value.hex()}
    if kind is tuple:
        return [_plain(each) for each in value]
    if kind is list:
        return {"l": [_plain(each) for each in value]}
    if kind is set:
        return {"s": sorted(value)}
    if kind is dict:
        return {"d": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if kind in _ENUMS:
        return {"e": value.value, "c": _NAMES[kind]}
    if kind in _FIELDS:
        said = {}
        for name, default in _FIELDS[kind].items():
            each = getattr(value, name)
            if each != default:
                said[name] = _plain(each)
        return {"c": _NAMES[kind], "f": said}
    raise TypeError(f"a {kind.__name__} is not kept")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple([_value(each) for each in plain])
    if not isinstance(plain, dict):
        return plain
    if "f" in plain:
        found = _CLASSES[plain["c"]]
        known = _FIELDS[found]
        return found(**{n: _value(each) for n, each in plain["f"].items() if n in known})
    if "e" in plain:
        return _CLASSES[plain["c"]](plain["e"])
    ((kind, content),) = plain.items()
    if kind == "b":
        return bytes.fromhex(content)
    if kind == "d":
        return {_value(key): _value(each) for key, each in content}
    return {"l": list, "s": set}[kind](map(_value, content))
