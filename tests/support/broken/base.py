"""What the fakes that break a rule are made of."""

from __future__ import annotations

from collections.abc import Callable

from mx.testing.fake import FakeExposure, FakeSession, FakeTransport


class BrokenFake(FakeTransport):
    """`rule` is the one it breaks. `leaked` are calls that undo what it leaves behind."""

    rule = ""

    def __init__(self) -> None:
        super().__init__()
        self.leaked: list[Callable[[], object]] = []

    def clean_up(self) -> None:
        for undo in self.leaked:
            undo()
        for exposure in self.exposures.values():
            exposure.regions.clear()


#: All of them by name.
BROKEN: dict[str, type[BrokenFake]] = {}


def session(rule: str) -> Callable[[type[FakeSession]], type[FakeSession]]:
    def register(part: type[FakeSession]) -> type[FakeSession]:
        BROKEN[part.__name__] = type(part.__name__, (BrokenFake,), {})
        BROKEN[part.__name__].rule, BROKEN[part.__name__].session_type = rule, part
        return part

    return register


def exposure(rule: str) -> Callable[[type[FakeExposure]], type[FakeExposure]]:
    def register(part: type[FakeExposure]) -> type[FakeExposure]:
        BROKEN[part.__name__] = type(part.__name__, (BrokenFake,), {})
        BROKEN[part.__name__].rule, BROKEN[part.__name__].exposure_type = rule, part
        return part

    return register


def transport(rule: str) -> Callable[[type[BrokenFake]], type[BrokenFake]]:
    def register(whole: type[BrokenFake]) -> type[BrokenFake]:
        whole.rule = rule
        BROKEN[whole.__name__] = whole
        return whole

    return register
