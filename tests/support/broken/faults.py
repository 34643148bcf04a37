"""Fakes that do the wrong thing when a peer dies, stops or lies."""

from __future__ import annotations

import time

from mx.errors import (
    ClosedError,
    MxError,
    PeerLostError,
    PeerRefusedError,
    SourceError,
)
from mx.testing.fake import FakeExposure, FakeSession
from mx.transport import (
    Read,
    host_view,
)
from tests.support.broken.base import BrokenFake, exposure, session, transport


@session("peer_dies")
class OmitsThePeersName(FakeSession):
    def name(self, read: Read, error: MxError) -> MxError:
        named = super().name(read, error)
        return PeerLostError(named.message) if self.exposure.killed else named


@session("peer_stops")
class WaitsForEver(FakeSession):
    def check(self) -> None:
        while not self.exposure.running.wait(0.01) and not self.closed:
            pass
        super().check()


@session("peer_resumes")
class SkipsAfterAPause(FakeSession):
    """Loses the bytes that should have come while the source paused."""

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        if not self.exposure.stops:
            super().move(read, region, offset, part)


@session("short_read")
class TakesTheEndForSuccess(FakeSession):
    def check(self) -> None:
        try:
            super().check()
        except PeerLostError:
            if self.exposure.killed:
                raise


@session("fences")
class WritesWhenCutOff(FakeSession):
    """A copy that was under way when the source was lost still lands."""

    def run(self, read: Read) -> None:
        super().run(read)
        if self.closed or self.exposure.limiter is not None:
            return
        try:
            self.check()
        except ClosedError:
            return
        except SourceError:
            for piece in read.pieces:
                view = host_view(piece.view)
                self.exposure.copy_slice("", piece.region, piece.region_offset, view)


@exposure("clogged_reader")
class WaitsForReaders(FakeExposure):
    def join(self, timeout_s: float | None = None) -> bool:
        deadline = time.monotonic() + (timeout_s or 0.0)
        while self.active_readers() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.active_readers()


@session("revoked")
class KeepsWhatItHad(FakeSession):
    """A grant that was looked up once is good for ever."""

    def check(self) -> None:
        try:
            super().check()
        except PeerRefusedError:
            return


@transport("wrong_tickets")
class AsksForNoSecret(BrokenFake):
    def admits(self, expected: str, secret: str) -> bool:
        return bool(expected)
