"""Values, as `dataclass(frozen=True, slots=True)` makes them, in a tenth of its time.

The standard decorator compiles six functions for each class while its module is imported, a sixth
of the time of a short command. Here classes share their methods, and the constructor is compiled
when the first object is made. `fields`, `replace`, `asdict`, `copy` and patterns work as they do
there. Classes with bases, `ClassVar`, `KW_ONLY`, `InitVar` or `init=False` are left to the standard
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen, slots):
        """Return the decorator. Both are True; they are what type checkers see."""
        return _made


def _made(cls: Any) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        made.__init__ = _constructor(made)
        made.__init__(self, *args, **options)

    own = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    fields: dict[str, Any] = {}
    for name, kind in own["__annotations__"].items():
        given = own.pop(name, MISSING)
        each: Any = given if isinstance(given, Field) else field(default=given)
        fields[name] = each
        each.name, each.type, each.kw_only = name, kind, False
        each._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    names = tuple(fields)
    shared: dict[str, Any] = {
        "__init__": init,
        "__slots__": names,
        "__match_args__": names,
        "__dataclass_fields__": fields,
        "__dataclass_params__": SimpleNamespace(frozen=True),
        "__signature__": _Signature(),
    }
    compared = attrgetter(*(name for name in names if fields[name].compare))
    made: Any = type(cls)(cls.__name__, cls.__bases__, shared | _methods(compared) | own)
    made.__qualname__ = cls.__qualname__
    return made


class _Signature:
    """What `help` shows in place of the constructor that is not compiled yet."""

    def __get__(self, _: Any, cls: Any) -> Any:
        from inspect import Parameter, Signature

        shown = []
        for name, each in cls.__dataclass_fields__.items():
            made = each.default_factory is not MISSING
            default = each.default_factory() if made else each.default
            given = Parameter.empty if default is MISSING else default
            kind = Parameter.POSITIONAL_OR_KEYWORD
            shown.append(Parameter(name, kind, default=given, annotation=each.type))
        return Signature(shown)


def _methods(compared: Callable[[Any], Any]) -> dict[str, Any]:
    def equals(self: Any, other: Any) -> Any:
        same = other.__class__ is self.__class__
        return compared(self) == compared(other) if same else NotImplemented

    def show(self: Any) -> str:
        shown = [n for n, each in self.__dataclass_fields__.items() if each.repr]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({values})"

    def refuse(self: Any, name: str, *value: Any) -> None:
        raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")

    def restore(self: Any, state: list[Any]) -> None:
        for name, value in zip(self.__dataclass_fields__, state, strict=True):
            object.__setattr__(self, name, value)

    return {
        "__repr__": show,
        "__eq__": equals,
        "__hash__": lambda self: hash(compared(self)),
        "__setattr__": refuse,
        "__delattr__": refuse,
        "__getstate__": lambda self: [getattr(self, name) for name in self.__dataclass_fields__],
        "__setstate__": restore,
    }


def _constructor(cls: Any) -> Any:
    # No field is called like these.
    known: dict[str, Any] = {"__put": object.__setattr__, "__none": MISSING}
    head, body = "self", ""
    for name, each in cls.__dataclass_fields__.items():
        made = each.default_factory is not MISSING
        known[f"__of_{name}"] = each.default_factory if made else each.default
        head += f", {name}"
        if made or each.default is not MISSING:
            head += "=__none" if made else f"=__of_{name}"
        value = f"__of_{name}() if {name} is __none else {name}" if made else name
        body += f"\n __put(self, {name!r}, {value})"
    if hasattr(cls, "__post_init__"):
        body += "\n self.__post_init__()"
    exec(f"def __init__({head}):{body}", known)
    return known["__init__"]
