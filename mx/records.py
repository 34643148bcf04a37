"""Classes of values, as `dataclass` makes them, in a tenth of its time.

The standard decorator compiles up to six functions for each class while its module is imported, a
sixth of the time of a short command. Here classes share their methods, and the constructor is
compiled when the first object is made. `fields`, `replace`, `asdict`, `copy` and patterns work as
they do there. `ClassVar`, `KW_ONLY`, `InitVar` and `order` are left to the standard one.
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

    def record(cls=None, *, frozen=False, slots=False, repr=True, eq=True):
        """Make a class of values; used as `dataclass` is, with or without options.

        Args:
            cls: The class; None returns the decorator.
            frozen: True refuses changes.
            slots: True keeps the fields in slots, in a new class.
            repr: False leaves `__repr__` as it is.
            eq: False compares and hashes objects by their identity.

        Returns:
            The class.
        """
        if cls is None:
            return lambda cls: record(cls, frozen=frozen, slots=slots, repr=repr, eq=eq)
        return _made(cls, SimpleNamespace(frozen=frozen, slots=slots, repr=repr, eq=eq))


def _made(cls: Any, options: SimpleNamespace) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        made.__init__ = _constructor(made)
        made.__init__(self, *args, **options)

    own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    if own.get("__hash__", cls) is None:  # Python's, since the class has `__eq__`
        del own["__hash__"]
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= getattr(base, "__dataclass_fields__", {})
    inherited = {*fields}
    for name, kind in own.get("__annotations__", {}).items():
        given = own.pop(name, MISSING)
        each: Any = given if isinstance(given, Field) else field(default=given)
        if type(each.default).__hash__ is None:
            raise ValueError(f"{cls.__name__}.{name}: all objects would share its default")
        fields[name] = each
        each.name, each.type, each.kw_only = name, kind, False
        each._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        if not options.slots and isinstance(given, Field):
            if each.default is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, each.default)
    shared: dict[str, Any] = {
        "__init__": init,
        "__match_args__": tuple(name for name, each in fields.items() if each.init),
        "__dataclass_fields__": fields,
        "__dataclass_params__": options,
        "__signature__": _Signature(),
    } | _methods(fields, options)
    if options.slots:
        shared["__slots__"] = tuple(name for name in fields if name not in inherited)
        made: Any = type(cls)(cls.__name__, cls.__bases__, shared | own)
        made.__qualname__ = cls.__qualname__
        return made
    made = cls
    for name, value in shared.items():
        if name not in own:
            setattr(cls, name, value)
    return cls


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
            if each.init:
                shown.append(Parameter(name, kind, default=given, annotation=each.type))
        return Signature(shown)


def _methods(fields: dict[str, Any], options: SimpleNamespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.repr:
        found["__repr__"] = _show
    if options.eq:
        found |= _comparing(fields, frozen=options.frozen)
    if options.frozen:
        found |= {"__setattr__": _refuse, "__delattr__": _refuse}
        if options.slots:  # `copy` and `pickle` would set the slots
            found |= {"__getstate__": _state, "__setstate__": _restore}
    return found


def _comparing(fields: dict[str, Any], *, frozen: bool) -> dict[str, Any]:
    names = [name for name, each in fields.items() if each.compare]
    compared: Callable[[Any], Any] = attrgetter(*names) if names else lambda _: ()

    def equals(self: Any, other: Any) -> Any:
        same = other.__class__ is self.__class__
        return compared(self) == compared(other) if same else NotImplemented

    return {
        "__eq__": equals,
        "__hash__": (lambda self: hash(compared(self))) if frozen else None,
    }


def _show(self: Any) -> str:
    shown = [name for name, each in self.__dataclass_fields__.items() if each.repr]
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({values})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _restore(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        object.__setattr__(self, name, value)


def _constructor(cls: Any) -> Any:
    # No field is called like these.
    known: dict[str, Any] = {"__put": object.__setattr__, "__none": MISSING}
    head, body = "self", ""
    frozen = cls.__dataclass_params__.frozen
    for name, each in cls.__dataclass_fields__.items():
        made = each.default_factory is not MISSING
        known[f"__of_{name}"] = each.default_factory if made else each.default
        if each.init:
            head += f", {name}"
            if made or each.default is not MISSING:
                head += "=__none" if made else f"=__of_{name}"
            value = f"__of_{name}() if {name} is __none else {name}" if made else name
        elif made or each.default is not MISSING:
            value = f"__of_{name}()" if made else f"__of_{name}"
        else:  # `__post_init__` sets it
            continue
        body += f"\n __put(self, {name!r}, {value})" if frozen else f"\n self.{name} = {value}"
    if hasattr(cls, "__post_init__"):
        body += "\n self.__post_init__()"
    exec(f"def __init__({head}):{body or ' pass'}", known)
    return known["__init__"]
