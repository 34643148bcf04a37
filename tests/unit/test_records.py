"""A record is what the standard dataclass makes of the same class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

import mx.core.types
import mx.records
from mx.records import record


def _of(made_by: Callable[..., Any]) -> Any:
    @made_by(frozen=True, slots=True)
    class Item:
        """An item."""

        name: str
        sizes: list[int] = field(default_factory=list)
        count: int = 3
        missing: dict[str, int] = field(default_factory=dict)
        secret: str = field(default="s", repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.count < 0:
                raise ValueError("a negative count")

        @property
        def twice(self) -> int:
            return 2 * self.count

    return Item


RECORD, STANDARD = _of(record), _of(dataclass)


def test_a_record_is_made_as_a_dataclass_is() -> None:
    for arguments, options in (
        (("a",), {}),
        (("a", [1], 4, {"put": 1}, "t"), {}),
        ((), {"name": "a", "count": 5}),
    ):
        made, standard = RECORD(*arguments, **options), STANDARD(*arguments, **options)
        assert repr(made) == repr(standard)
        assert asdict(made) == asdict(standard)
        assert made.twice == standard.twice
    assert [each.name for each in fields(RECORD)] == [each.name for each in fields(STANDARD)]
    assert all(map(dataclasses.is_dataclass, (RECORD, RECORD("a"))))
    assert RECORD.__dataclass_params__.frozen == STANDARD.__dataclass_params__.frozen
    with pytest.raises(TypeError):
        RECORD()
    with pytest.raises(TypeError):
        RECORD("a", [], 1, {}, "s", 2)
    with pytest.raises(ValueError, match="negative"):
        RECORD("a", count=-1)
    assert RECORD("a").sizes is not RECORD("a").sizes


@pytest.mark.parametrize("item", [RECORD, STANDARD])
def test_what_a_record_does_a_dataclass_does(item: Any) -> None:
    made = item("a", count=4)
    assert made == item("a", count=4, secret="other")
    assert made != item("b", count=4)
    assert made != ("a", [], 4)
    assert not hasattr(made, "__dict__")
    with pytest.raises(FrozenInstanceError):
        made.count = 5
    with pytest.raises(FrozenInstanceError):
        del made.count
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)  # its list is
    changed = replace(made, count=5, sizes=(), missing=())
    assert (changed.count, changed.secret) == (5, "s")
    assert hash(changed) == hash(replace(changed, secret="other"))
    with pytest.raises(TypeError):
        replace(made, other=1)
    for again in (copy.copy(made), copy.deepcopy(made)):
        assert (again, again.secret) == (made, made.secret)
    match made:
        case item("a", _, count, _):
            assert count == 4
        case _:
            pytest.fail("no match")


def test_a_class_may_be_made_of_a_record() -> None:
    class Item(_of(record)):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(name, count=9)

    assert [(each.name, each.count) for each in (Item("a"), Item("b"))] == [("a", 9), ("b", 9)]


def test_threads_may_make_the_first_one_at_once() -> None:
    item, together = _of(record), threading.Barrier(8)
    found: list[Any] = []

    def make() -> None:
        together.wait()
        found.append(item("a"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [item("a")] * 8


OPTIONS = [
    {"frozen": frozen, "slots": slots, "repr": shown, "eq": compared}
    for frozen, slots, shown, compared in itertools.product((False, True), repeat=4)
]


def _family(made_by: Callable[..., Any], options: dict[str, bool]) -> tuple[Any, Any]:
    @made_by(**options)
    class Base:
        """A base."""

        name: str
        sizes: list[int] = field(default_factory=list)

    @made_by(**options)
    class Item(Base):
        """An item."""

        count: int = 3
        told: list[str] = field(init=False, repr=False, default_factory=list)
        twice: int = field(init=False, compare=False)
        state: str = field(init=False, default="new")

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.count)

    return Base, Item


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_record_with_options_is_what_the_standard_one_makes(options: dict[str, bool]) -> None:
    recorded, standard = _family(record, options), _family(dataclass, options)
    for mine, theirs, values in (
        (recorded[0], standard[0], [(("a",), {}), (("a", [1]), {}), ((), {"name": "b"})]),
        (recorded[1], standard[1], [(("a",), {}), (("a", [1], 4), {}), (("a",), {"count": 9})]),
    ):
        assert [each.name for each in fields(mine)] == [each.name for each in fields(theirs)]
        assert mine.__match_args__ == theirs.__match_args__
        assert vars(mine).get("__slots__") == vars(theirs).get("__slots__")
        assert (mine.__hash__ is None) == (theirs.__hash__ is None)
        assert [*inspect.signature(mine).parameters] == [*inspect.signature(theirs).parameters]
        for arguments, named in values:
            one, other = mine(*arguments, **named), theirs(*arguments, **named)
            assert asdict(one) == asdict(other)
            assert (repr(one) == repr(other)) == options["repr"]
            assert hasattr(one, "__dict__") == hasattr(other, "__dict__")
            assert (one == mine(*arguments, **named)) == options["eq"]
            assert (one == replace(one, name="z")) == (other == replace(other, name="z"))
            for again in (copy.copy(one), copy.deepcopy(one), pickled(one)):
                assert asdict(again) == asdict(one)
            assert _changed(one) == _changed(other)
    assert recorded[0]("a") != recorded[1]("a")
    assert recorded[1].state == standard[1].state or options["slots"]


def pickled(item: Any) -> Any:
    """Return what comes back of a pickle of an object whose class has no name in a module."""
    kept = item.__reduce_ex__(4)
    made = kept[0](*kept[1])
    if hasattr(made, "__setstate__"):
        made.__setstate__(kept[2])
    elif isinstance(kept[2], tuple):
        for name, value in kept[2][1].items():
            setattr(made, name, value)
    else:
        vars(made).update(kept[2])
    return made


def _changed(item: Any) -> tuple[str, Any]:
    try:
        item.name = "c"
    except FrozenInstanceError:
        return ("refused", item.name)
    try:
        item.other = 1
    except AttributeError:
        return ("set, no others", item.name)
    return ("set, and others", item.name)


def test_a_default_is_not_shared() -> None:
    with pytest.raises(ValueError, match=r"Item\.sizes"):

        @record
        class Item:
            """An item."""

            sizes: list[int] = []  # noqa: RUF012


def test_what_a_class_says_itself_is_left() -> None:
    @record(frozen=True)
    class Item:  # noqa: PLW1641
        """An item."""

        name: str
        size: int = field(default=2)

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Item)

    assert repr(Item("a")) == "mine"
    assert Item("a") == Item("b")
    assert hash(Item("a")) == hash(Item("a"))
    assert Item.size == 2
    assert Item.__doc__ == "An item."


def test_records_of_the_package_use_only_what_a_record_has() -> None:
    kinds = {
        each
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("mx", "mx_transports")
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__.startswith("mx") and _is_record(each)
    }
    assert mx.core.types.ModelKey in kinds
    for kind in kinds:
        assert {*fields(kind)} == {*kind.__dataclass_fields__.values()}  # type: ignore[attr-defined]
        if vars(kind)["__init__"].__module__ == "mx.records":
            assert mx.records._constructor(kind)  # its fields are in an order that Python takes
        for each in vars(kind).get("__annotations__", {}).values():
            assert not re.match(r"(typing\.|dataclasses\.)?(ClassVar|InitVar|KW_ONLY)\b", each)


def _is_record(kind: type) -> bool:
    return isinstance(vars(kind).get("__dataclass_params__"), SimpleNamespace)
