"""Fakes that mistake routes, trust and limits."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from mx.testing.fake import FakeExposure, FakeSession, FakeTransport
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Read,
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


# --- bytes that are sent compressed


class PackingExposure(FakeExposure):
    """Keeps the rules, and sends fewer bytes than its readers get."""

    def __init__(
        self,
        transport: FakeTransport,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
    ) -> None:
        super().__init__(transport, regions, options)
        self.delivered: Counter[str] = Counter()

    def delivered_to(self, grant_id: str) -> int:
        return self.delivered[grant_id] if grant_id in self.secrets else 0

    def sent_nbytes_of(self, packed_nbytes: int, nbytes: int) -> int:
        """Return how many bytes are counted, and taken from the limiter."""
        del nbytes
        return packed_nbytes

    def on_the_wire(self, raw: memoryview) -> bytes:
        return zlib.compress(raw, 1)

    def move(
        self, grant_id: str, region: int, offset: int, view: memoryview, ended: Callable[[], bool]
    ) -> bytes:
        """Copy a step, and return what goes over the network for it."""
        with self.lock:
            held = self.regions.get(region)
            parts = self.gather(held.view[offset : offset + len(view)]) if held else []
            raw = b"".join(parts)
        packed = zlib.compress(raw, 1)
        left = counted = self.sent_nbytes_of(len(packed), len(raw))
        while left and self.limiter is not None:
            part = min(left, self.limiter.slice_nbytes(grant_id))
            if not self.waits(self.limiter.delay_s(part), ended):
                return b""
            left -= part
        view[: len(raw)] = raw
        with self.lock:
            self.sent_nbytes += counted
            if grant_id in self.secrets:
                self.sent[grant_id] += counted
                self.delivered[grant_id] += len(raw)
        return self.on_the_wire(memoryview(raw))

    def waits(self, delay_s: float, ended: Callable[[], bool]) -> bool:
        """Wait, and return True if the bytes may go then."""
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s:
            if ended():
                return False
            time.sleep(0.005)
        return True


class PackingSession(FakeSession):
    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        exposure = self.exposure
        assert isinstance(exposure, PackingExposure)
        sent = exposure.move(self.grant_id, region, offset, part, self.ended)
        exposure.transport.send(memoryview(sent), exposure.tls)


class PackingFake(BrokenFake):
    """Breaks no rule."""

    exposure_type = PackingExposure
    session_type = PackingSession


class CountsHalf(PackingExposure):
    def sent_nbytes_of(self, packed_nbytes: int, nbytes: int) -> int:
        return packed_nbytes // 2


@transport("keeps_to_limits")
class SaysThatItPacksTwice(PackingFake):
    exposure_type = CountsHalf


class SendsAsItIs(PackingExposure):
    def on_the_wire(self, raw: memoryview) -> bytes:
        return bytes(raw)


@transport("keeps_to_limits")
class SendsUnpacked(PackingFake):
    """Counts what it would send compressed, and sends the bytes as they are."""

    exposure_type = SendsAsItIs


class WaitsForNothing(PackingExposure):
    def waits(self, delay_s: float, ended: Callable[[], bool]) -> bool:
        return True


@transport("keeps_to_limits")
class PacksWithoutLimits(PackingFake):
    exposure_type = WaitsForNothing


class CountsWhatArrives(PackingExposure):
    def sent_nbytes_of(self, packed_nbytes: int, nbytes: int) -> int:
        return nbytes


@transport("keeps_to_limits")
class CountsAsIfUnpacked(PackingFake):
    """Says that it compresses, and takes from its limiter what its readers get."""

    exposure_type = CountsWhatArrives
