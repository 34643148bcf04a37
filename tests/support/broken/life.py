"""Fakes whose lives go wrong: sessions, threads, sinks, what is left behind."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mx.core.topology import Place
from mx.errors import (
    ClosedError,
    LocalError,
    MxError,
    PeerLostError,
)
from mx.testing.fake import FakeExposure, FakeSession
from mx.transport import (
    Grant,
    Path,
    Read,
    Unavailable,
    Viable,
    host_view,
)
from tests.support.broken.base import BrokenFake, exposure, session, transport


@transport("probes")
class RaisesWhenProbed(BrokenFake):
    def probe(self) -> Viable | Unavailable:
        raise ImportError("libfake.so.1: cannot open shared object file")


@transport("reaches_both_ways")
class ReachesUpwardsOnly(BrokenFake):
    def reach(self, here: Place, there: Place) -> Path | None:
        return super().reach(here, there) if here.pid <= there.pid else None


@transport("reaches_both_ways")
class BelievesFacts(BrokenFake):
    """Takes what the other side says of itself for a number that it can compare."""

    def reach(self, here: Place, there: Place) -> Path | None:
        path = super().reach(here, there)
        rate = 1.0 + sum(there.fact(self.name)[:1])
        return path and replace(path, gb_per_s=rate)


@session("close_cancels")
class BlamesThePeer(FakeSession):
    """Reports a read that `close` ends as if the peer had been lost."""

    def name(self, read: Read, error: MxError) -> MxError:
        if isinstance(error, ClosedError):
            error = PeerLostError(error.message)
        return super().name(read, error)


@session("hands_off")
class WritesAfterTheEnd(FakeSession):
    """A copy that was under way when the read was cancelled still lands."""

    def run(self, read: Read) -> None:
        super().run(read)
        if self.closed:
            for piece in read.pieces:
                self.move(read, piece.region, piece.region_offset, host_view(piece.view))


@session("closed_is_closed")
class SwallowsLateReads(FakeSession):
    def read(self, reads: Sequence[Read]) -> None:
        if not self.closed:
            super().read(reads)


@session("refills")
class IsNotReentrant(FakeSession):
    def read(self, reads: Sequence[Read]) -> None:
        if threading.current_thread() in self.threads:
            raise RuntimeError("read was called from a sink")
        super().read(reads)


@session("refills")
class NestsItsReads(FakeSession):
    """Reads at once what a sink requests, as deep as calls can be nested here."""

    nested = 0

    def read(self, reads: Sequence[Read]) -> None:
        if threading.current_thread() not in self.threads:
            super().read(reads)
        elif self.nested < 50:
            self.nested += 1
            for read in reads:
                self.run(read)
            self.nested -= 1


@session("grows")
class OpensNoMore(FakeSession):
    def grow(self, streams: int) -> None:
        if not self.threads:  # the ones that it begins with
            super().grow(streams)


@session("grows")
class CountsWhatWasAsked(FakeSession):
    def grow(self, streams: int) -> None:
        super().grow(streams)
        self.asked = streams

    @property
    def open_streams(self) -> int:
        return self.asked


@session("outlives_raising_sinks")
class DiesOfItsSinks(FakeSession):
    """Leaves the read without an end, and what is queued with a thread less."""

    def report(self, error: Exception) -> None:
        raise error


@session("outlives_raising_sinks")
class HidesWhatSinksRaise(FakeSession):
    def report(self, error: Exception) -> None:
        pass


@session("outlives_raising_sinks")
class FailsWhatIsDone(FakeSession):
    """Reports a failed read to a sink that raised from `done`."""

    def end(self, read: Read, error: MxError | None) -> None:
        try:
            if error is None:
                read.sink.done()
                return
        except Exception as caught:  # noqa: BLE001 - the sink's, which is reported
            self.report(caught)
            error = LocalError("its sink raised")
        super().end(read, error)


class _Lingering:
    """Ends a thread and its socket without waiting for them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.ending = threading.Event()
        threading.Thread(target=self.linger, daemon=True).start()

    def linger(self) -> None:
        with socket.socket():
            self.ending.wait()
            time.sleep(0.15)

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self.ending.set()


@session("session_joins_truly")
class SessionEndsAfterItsJoin(_Lingering, FakeSession):
    pass


@exposure("exposure_joins_truly")
class ExposureEndsAfterItsJoin(_Lingering, FakeExposure):
    pass


@exposure("counts_readers")
class CountsNoReader(FakeExposure):
    def active_readers(self) -> int:
        return 0


@session("attaches")
class AttachesOneCopyForAll(FakeSession):
    def attach(self, region: int) -> memoryview:
        if not hasattr(self, "attached"):
            self.attached = super().attach(region)
        return self.attached


class _LeakySession(FakeSession):
    """Leaves behind what `leak` makes."""

    def __init__(self, grant: Grant, exposure: FakeExposure, grant_id: str, secret: str) -> None:
        super().__init__(grant, exposure, grant_id, secret)
        assert isinstance(exposure.transport, BrokenFake)
        exposure.transport.leaked.append(self.leak())

    def leak(self) -> Callable[[], object]:
        raise NotImplementedError


@session("leaves_nothing")
class LeavesAThread(_LeakySession):
    def leak(self) -> Callable[[], object]:
        stop = threading.Event()
        threading.Thread(target=stop.wait, daemon=True).start()
        return stop.set


@session("leaves_nothing")
class LeavesADescriptor(_LeakySession):
    def leak(self) -> Callable[[], object]:
        descriptor = os.eventfd(0)
        return lambda: os.close(descriptor)


@session("leaves_nothing")
class LeavesAMapping(_LeakySession):
    def leak(self) -> Callable[[], object]:
        memfd = os.memfd_create("leaked")
        os.ftruncate(memfd, mmap.PAGESIZE)
        mapped = mmap.mmap(memfd, mmap.PAGESIZE)
        os.close(memfd)
        return mapped.close


@exposure("leaves_nothing")
class KeepsViews(FakeExposure):
    def close(self) -> None:
        regions = dict(self.regions)
        super().close()
        self.regions.update(regions)
