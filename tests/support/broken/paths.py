"""Fakes that mistake routes, trust and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mx.testing.fake import FakeExposure
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Session,
)
from mx.units import KIB
from tests.support.broken.base import BrokenFake, exposure, transport

SLICE_BYTES = 256 * KIB


@transport("uses_rails")
class GoesByAnyRoute(BrokenFake):
    def open(self, grant: Grant) -> Session:
        return super().open(replace(grant, rail=None))


@transport("asks_for_trust")
class OffersItselfToAll(BrokenFake):
    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return super().expose(regions, replace(options, trusted_fabric=True))


@transport("asks_for_trust")
class BelievesAnySource(BrokenFake):
    def open(self, grant: Grant) -> Session:
        return super().open(replace(grant, trusted_fabric=True))


@exposure("keeps_to_limits")
class KnowsNoLimits(FakeExposure):
    def copy(
        self, grant_id: str, region: int, offset: int, view: memoryview, ended: Callable[[], bool]
    ) -> None:
        self.copy_slice(grant_id, region, offset, view)


@exposure("keeps_to_limits")
class WaitsForNoLimiter(FakeExposure):
    """Calls the limiter, and sends at once whatever delay it returns."""

    def copy(
        self, grant_id: str, region: int, offset: int, view: memoryview, ended: Callable[[], bool]
    ) -> None:
        del ended
        for start in range(0, len(view), SLICE_BYTES):
            part = view[start : start + SLICE_BYTES]
            if self.limiter is not None:
                self.limiter.slice_nbytes(grant_id)
                self.limiter.delay_s(len(part))
            self.copy_slice(grant_id, region, offset + start, part)


@exposure("keeps_to_limits")
class CountsForEveryReader(FakeExposure):
    """Counts what was sent to one reader for all of them."""

    def sent_to(self, grant_id: str) -> int:
        return self.sent_nbytes
