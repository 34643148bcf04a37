"""How a source answers a coordinator that asks it to adopt a layout."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from mx.codec import MAX_DISPUTES
from mx.core.types import ManifestRef, ModelKey
from mx.errors import CoordinatorError, LocalError, ManifestError, MxError, UnknownModelError
from mx.source.adoption import register_adopting
from mx.units import MIB
from mx.wire.client import Registered


def ref(number: int) -> ManifestRef:
    return ManifestRef(b"i" * 32, number.to_bytes(32, "big"), MIB, b"", (1, 1, 0))


@dataclass
class Stage:
    """A coordinator that asks for one layout after the other, and why each can't be adopted."""

    asks: list[tuple[ManifestRef, MxError | None]]
    believes: bool = True
    calls: list[tuple[bool, int]] = field(default_factory=list)
    adopted: list[ManifestRef] = field(default_factory=list)

    async def register(self, keeps_layout: bool, disputes: list[bytes]) -> Registered:
        self.calls.append((keeps_layout, len(disputes)))
        left = [each for each, _ in self.asks if each.layout not in disputes]
        if not left or left[0] in self.adopted or (keeps_layout and self.believes):
            return Registered(5.0, "epoch", ModelKey("m"))
        return Registered(5.0, "epoch", ModelKey("m"), adopt=left[0])

    async def adopt(self, bound: ManifestRef) -> None:
        error = dict(self.asks)[bound]
        if error is not None:
            raise error
        self.adopted.append(bound)

    def play(self, *, keeps_layout: bool = False) -> Registered:
        work = register_adopting(self.register, self.adopt, keeps_layout=keeps_layout)
        return asyncio.run(work)


def test_it_adopts_the_first_layout_that_describes_its_weights() -> None:
    stage = Stage(
        [
            (ref(1), ManifestError("of other weights")),
            (ref(2), UnknownModelError("not held here")),
            (ref(3), None),
            (ref(4), None),
        ]
    )
    assert stage.play().adopt is None
    assert stage.adopted == [ref(3)]
    assert stage.calls == [(False, 0), (False, 1), (False, 2), (False, 2)]


def test_it_keeps_its_own_where_none_can_be_adopted_here() -> None:
    stage = Stage([(ref(1), LocalError("no port is left"))])
    stage.play()
    assert stage.calls == [(False, 0), (True, 0)]


def test_it_keeps_its_own_after_many_disputes() -> None:
    wrong = ManifestError("of other weights")
    stage = Stage([(ref(number), wrong) for number in range(2 * MAX_DISPUTES)])
    stage.play()
    assert stage.calls[-1] == (True, MAX_DISPUTES)


def test_a_coordinator_that_asks_for_ever_is_an_error() -> None:
    stage = Stage([(ref(1), LocalError("no"))], believes=False)
    with pytest.raises(CoordinatorError, match="one layout after the other"):
        stage.play()


def test_a_coordinator_that_does_not_answer_is_no_dispute() -> None:
    stage = Stage([(ref(1), CoordinatorError("it did not answer in time"))])
    with pytest.raises(CoordinatorError, match="in time"):
        stage.play()
    assert stage.calls == [(False, 0)]
