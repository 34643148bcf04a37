"""Fakes that misjudge what memory holds."""

from __future__ import annotations

from mx.testing.fake import FakeExposure, FakeSession
from mx.transport import (
    Grant,
)
from tests.support.broken.base import BrokenFake, exposure, session, transport


@transport("refuses_other_weights")
class BelievesAnyWeights(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return True


@transport("refuses_other_weights")
class TakesSilenceForConsent(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return not exposure.content or super().holds(exposure, grant)


@transport("refuses_other_weights")
class PadsItsLabels(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        wanted = grant.content.rstrip(b"\0")
        same = exposure.content.rstrip(b"\0") == wanted
        return same and exposure.generation == grant.generation


@transport("refuses_other_weights")
class TakesAnyGenerationsLabel(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return exposure.content == grant.content


@exposure("refuses_other_weights")
class KeepsItsLabel(FakeExposure):
    def withdraw_content(self) -> None:
        pass


@session("vouches")
class VouchesForAnyWeights(FakeSession):
    def __init__(self, grant: Grant, exposure: FakeExposure, grant_id: str, secret: str) -> None:
        super().__init__(grant, exposure, grant_id, secret)
        self.block_digests = exposure.block_digests


@session("vouches")
class EndsItsDigests(FakeSession):
    """Views of the digests end with the session."""

    def vouched_digests(self) -> memoryview | None:
        view = super().vouched_digests()
        if view is not None:
            self.views = [*getattr(self, "views", []), view]
        return view

    def join(self, timeout_s: float | None = None) -> bool:
        for view in getattr(self, "views", []):
            view.release()
        return super().join(timeout_s)


@session("vouches")
class HandsOutWritableDigests(FakeSession):
    """Lets its caller write to them."""

    def vouched_digests(self) -> memoryview | None:
        found = super().vouched_digests()
        return None if found is None else memoryview(bytearray(found))
