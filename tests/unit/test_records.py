"""A record is what the standard dataclass makes of the same class."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

import mx.core.types
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


def test_each_record_of_the_package_has_its_fields_in_slots() -> None:
    kinds = {
        each
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("mx", "mx_transports")
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__.startswith("mx") and _is_record(each)
    }
    assert mx.core.types.ModelKey in kinds
    for kind in kinds:
        names = [each.name for each in fields(kind)]
        assert tuple(names) == kind.__slots__  # type: ignore[attr-defined]


def _is_record(kind: type) -> bool:
    return getattr(vars(kind).get("__hash__"), "__module__", "") == "mx.records"
