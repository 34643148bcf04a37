"""Fakes that each break one rule of the suite and no other: the suite's own test.

Each mistake is one that a real transport could make.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mx.buffers import address_of, memory_at
from mx.core.topology import Place
from mx.errors import (
    ClosedError,
    LocalError,
    MxError,
    PeerLostError,
    PeerRefusedError,
    SourceError,
    StaleGenerationError,
)
from mx.testing.fake import STEP_BYTES, FakeExposure, FakeSession, FakeTransport
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Read,
    ScatteredView,
    Session,
    Span,
    Unavailable,
    Viable,
    View,
    host_view,
    spans_of,
)
from mx.units import KIB

SLICE_BYTES = 256 * KIB


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


BROKEN: dict[str, type[BrokenFake]] = {}


def _session(rule: str) -> Callable[[type[FakeSession]], type[FakeSession]]:
    def register(part: type[FakeSession]) -> type[FakeSession]:
        BROKEN[part.__name__] = type(part.__name__, (BrokenFake,), {})
        BROKEN[part.__name__].rule, BROKEN[part.__name__].session_type = rule, part
        return part

    return register


def _exposure(rule: str) -> Callable[[type[FakeExposure]], type[FakeExposure]]:
    def register(part: type[FakeExposure]) -> type[FakeExposure]:
        BROKEN[part.__name__] = type(part.__name__, (BrokenFake,), {})
        BROKEN[part.__name__].rule, BROKEN[part.__name__].exposure_type = rule, part
        return part

    return register


def _transport(rule: str) -> Callable[[type[BrokenFake]], type[BrokenFake]]:
    def register(whole: type[BrokenFake]) -> type[BrokenFake]:
        whole.rule = rule
        BROKEN[whole.__name__] = whole
        return whole

    return register


@_session("right_bytes")
class TakesAllFromTheFirstRegion(FakeSession):
    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        super().move(read, read.pieces[0].region, offset, part)


@_session("nothing_outside")
class WritesWholeLines(FakeSession):
    """Rounds up to 64 bytes, as a DMA engine might, where another piece follows at a distance."""

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        super().move(read, region, offset, part)
        after = _address(part) + len(part)
        plain = [piece.view for piece in read.pieces if isinstance(piece.view, memoryview)]
        starts = [_address(view) for view in plain if len(view)]
        if any(after + 64 <= start < after + (1 << 20) for start in starts):
            ctypes.memset(after, 0, -after % 64)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@_session("completes_once")
class FinishesEmptyReadsTwice(FakeSession):
    def run(self, read: Read) -> None:
        super().run(read)
        if not read.pieces:
            read.sink.done()


@_session("completes_once")
class TellsAfterTheEnd(FakeSession):
    def run(self, read: Read) -> None:
        super().run(read)
        if read.nbytes:
            read.sink.landed(read.nbytes)


@_session("reports_progress")
class TellsAheadOfTheBytes(FakeSession):
    def copy(self, read: Read) -> None:
        landed = 0
        for region, offset, part in self.steps(read):
            landed += len(part)
            read.sink.landed(landed)
            self.check()
            self.move(read, region, offset, part)
        self.check()


@_session("reports_progress")
class ForgetsTheLastStep(FakeSession):
    """Does not report the last step by `landed`, only by `done`."""

    def copy(self, read: Read) -> None:
        landed = 0
        for region, offset, part in self.steps(read):
            self.move(read, region, offset, part)
            landed += len(part)
            self.check()
            if landed < read.nbytes or read.nbytes <= STEP_BYTES:
                read.sink.landed(landed)
        self.check()


@_session("starts_in_order")
class LastInFirstOut(FakeSession):
    def take(self) -> Read | None:
        with self.wake:
            while not self.queue and not self.closed:
                self.wake.wait()
            return self.queue.pop() if self.queue else None


@_session("refuses_out_of_range")
class GivesWhatThereIs(FakeSession):
    def check_bounds(self, read: Read) -> None:
        pass


@_session("checks_generation")
class TakesAnyGeneration(FakeSession):
    def check(self) -> None:
        try:
            super().check()
        except StaleGenerationError:
            return


class _CursorSession(FakeSession):
    """Knows a read's place only from the transport's cursors, by thread."""

    def copy(self, read: Read) -> None:
        if len(read.pieces) == 1:
            self.cursors[threading.current_thread().name] = read.pieces[0].region_offset
        super().copy(read)

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        if len(read.pieces) == 1:
            thread = threading.current_thread().name
            offset = self.cursors[thread]
            self.cursors[thread] += len(part)
        super().move(read, region, offset, part)

    @property
    def cursors(self) -> dict[str, int]:
        transport = self.exposure.transport
        assert isinstance(transport, SharesItsCursors)
        return transport.cursors


@_transport("several_sessions")
class SharesItsCursors(BrokenFake):
    """Keeps the places of running reads in the transport, where sessions meet."""

    session_type = _CursorSession

    def __init__(self) -> None:
        super().__init__()
        self.cursors: dict[str, int] = {}


@_exposure("two_exposures")
class OneEndsAll(FakeExposure):
    def close(self) -> None:
        for exposure in self.transport.exposures.values():
            FakeExposure.close(exposure)


@_session("adopts")
class LandsAtTheArenasStart(FakeSession):
    """Takes the arena, not each piece, for what the bytes belong to."""

    arena: memoryview | None = None

    def adopt(self, arena: Span) -> None:
        self.arena = host_view(arena)

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        super().move(read, region, offset, part if self.arena is None else self.arena[: len(part)])


@_session("adopts")
class KeepsItsArena(FakeSession):
    def adopt(self, arena: Span) -> None:
        assert isinstance(self.exposure.transport, BrokenFake)
        self.exposure.transport.leaked.append(host_view(arena)[:].release)


@_session("completes_empty_reads")
class RefusesEmptyReads(FakeSession):
    def check_bounds(self, read: Read) -> None:
        super().check_bounds(read)
        if not read.pieces:
            raise LocalError("there is nothing to read")


#: What a system call takes of places at a time.
_MAX_PLACES = 1024


@_exposure("gathers")
class GathersUpToALimit(FakeExposure):
    """Passes the kernel as many places as it takes, once."""

    def gather(self, view: View) -> list[memoryview]:
        return super().gather(view)[:_MAX_PLACES]


@_exposure("gathers")
class GathersByAddress(FakeExposure):
    def gather(self, view: View) -> list[memoryview]:
        return sorted(super().gather(view), key=address_of)


@_transport("gathers")
class RefusesWithoutAReason(BrokenFake):
    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        if any(isinstance(region.view, ScatteredView) for region in regions):
            raise LocalError("")
        return super().expose(regions, options)


@_exposure("refuses_holes")
class ClosesUpHoles(FakeExposure):
    def gather(self, view: View) -> list[memoryview]:
        if isinstance(view, ScatteredView):
            return [host_view(span) for span in view.located()[1]]
        return super().gather(view)


@_exposure("refuses_holes")
class FillsHoles(FakeExposure):
    """Sends zeros for what lies between tensors, as an arena has there."""

    def gather(self, view: View) -> list[memoryview]:
        if not isinstance(view, ScatteredView):
            return super().gather(view)
        found, (begins, spans) = bytearray(len(view)), view.located()
        for begin, span in zip(begins, spans, strict=True):
            found[begin : begin + len(span)] = host_view(span)
        return [memoryview(found)]


@_session("scatters")
class ScattersUpToALimit(FakeSession):
    def steps(self, read: Read) -> Iterator[tuple[int, int, memoryview]]:
        yield from itertools.islice(super().steps(read), _MAX_PLACES)


@_session("scatters")
class ScattersInOneStretch(FakeSession):
    """Takes a destination's bytes to lie one after another, from where the first do."""

    def steps(self, read: Read) -> Iterator[tuple[int, int, memoryview]]:
        for piece in read.pieces:
            spans = spans_of(piece.view)
            if not spans:
                continue
            first = host_view(spans[0])
            end = max(address_of(host_view(span)) + len(span) for span in spans)
            here = min(len(piece.view), end - address_of(first))
            whole = memory_at(address_of(first), here, first)
            for start in range(0, here, STEP_BYTES):
                part = whole[start : start + STEP_BYTES]
                yield piece.region, piece.region_offset + start, part


@_session("peer_dies")
class OmitsThePeersName(FakeSession):
    def name(self, read: Read, error: MxError) -> MxError:
        named = super().name(read, error)
        return PeerLostError(named.message) if self.exposure.killed else named


@_session("peer_stops")
class WaitsForEver(FakeSession):
    def check(self) -> None:
        while not self.exposure.running.wait(0.01) and not self.closed:
            pass
        super().check()


@_session("peer_resumes")
class SkipsAfterAPause(FakeSession):
    """Loses the bytes that should have come while the source paused."""

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        if not self.exposure.stops:
            super().move(read, region, offset, part)


@_session("short_read")
class TakesTheEndForSuccess(FakeSession):
    def check(self) -> None:
        try:
            super().check()
        except PeerLostError:
            if self.exposure.killed:
                raise


@_session("fences")
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


@_exposure("clogged_reader")
class WaitsForReaders(FakeExposure):
    def join(self, timeout_s: float | None = None) -> bool:
        deadline = time.monotonic() + (timeout_s or 0.0)
        while self.active_readers() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.active_readers()


@_session("revoked")
class KeepsWhatItHad(FakeSession):
    """A grant that was looked up once is good for ever."""

    def check(self) -> None:
        try:
            super().check()
        except PeerRefusedError:
            return


@_transport("wrong_tickets")
class AsksForNoSecret(BrokenFake):
    def admits(self, expected: str, secret: str) -> bool:
        return bool(expected)


@_transport("refuses_other_weights")
class BelievesAnyWeights(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return True


@_transport("refuses_other_weights")
class TakesSilenceForConsent(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return not exposure.content or super().holds(exposure, grant)


@_transport("refuses_other_weights")
class PadsItsLabels(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        wanted = grant.content.rstrip(b"\0")
        same = exposure.content.rstrip(b"\0") == wanted
        return same and exposure.generation == grant.generation


@_transport("refuses_other_weights")
class TakesAnyGenerationsLabel(BrokenFake):
    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        return exposure.content == grant.content


@_exposure("refuses_other_weights")
class KeepsItsLabel(FakeExposure):
    def withdraw_content(self) -> None:
        pass


@_session("vouches")
class VouchesForAnyWeights(FakeSession):
    def __init__(self, grant: Grant, exposure: FakeExposure, grant_id: str, secret: str) -> None:
        super().__init__(grant, exposure, grant_id, secret)
        self.block_digests = exposure.block_digests


@_session("vouches")
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


@_session("vouches")
class HandsOutWritableDigests(FakeSession):
    """Lets its caller write to them."""

    def vouched_digests(self) -> memoryview | None:
        found = super().vouched_digests()
        return None if found is None else memoryview(bytearray(found))


@_transport("probes")
class RaisesWhenProbed(BrokenFake):
    def probe(self) -> Viable | Unavailable:
        raise ImportError("libfake.so.1: cannot open shared object file")


@_transport("reaches_both_ways")
class ReachesUpwardsOnly(BrokenFake):
    def reach(self, here: Place, there: Place) -> Path | None:
        return super().reach(here, there) if here.pid <= there.pid else None


@_session("close_cancels")
class BlamesThePeer(FakeSession):
    """Reports a read that `close` ends as if the peer had been lost."""

    def name(self, read: Read, error: MxError) -> MxError:
        if isinstance(error, ClosedError):
            error = PeerLostError(error.message)
        return super().name(read, error)


@_session("hands_off")
class WritesAfterTheEnd(FakeSession):
    """A copy that was under way when the read was cancelled still lands."""

    def run(self, read: Read) -> None:
        super().run(read)
        if self.closed:
            for piece in read.pieces:
                self.move(read, piece.region, piece.region_offset, host_view(piece.view))


@_session("closed_is_closed")
class SwallowsLateReads(FakeSession):
    def read(self, reads: Sequence[Read]) -> None:
        if not self.closed:
            super().read(reads)


@_session("refills")
class IsNotReentrant(FakeSession):
    def read(self, reads: Sequence[Read]) -> None:
        if threading.current_thread() in self.threads:
            raise RuntimeError("read was called from a sink")
        super().read(reads)


@_session("refills")
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


@_session("outlives_raising_sinks")
class DiesOfItsSinks(FakeSession):
    """Leaves the read without an end, and what is queued with a thread less."""

    def report(self, error: Exception) -> None:
        raise error


@_session("outlives_raising_sinks")
class HidesWhatSinksRaise(FakeSession):
    def report(self, error: Exception) -> None:
        pass


@_session("outlives_raising_sinks")
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


@_exposure("joins_truly")
class EndsAfterItsJoin(FakeExposure):
    """Ends a thread and its socket without waiting for them."""

    def __init__(
        self,
        transport: FakeTransport,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
    ) -> None:
        super().__init__(transport, regions, options)
        self.ending = threading.Event()
        threading.Thread(target=self.linger, daemon=True).start()

    def linger(self) -> None:
        with socket.socket():
            self.ending.wait()
            time.sleep(0.15)

    def close(self) -> None:
        super().close()
        self.ending.set()


@_transport("uses_rails")
class GoesByAnyRoute(BrokenFake):
    def open(self, grant: Grant) -> Session:
        return super().open(replace(grant, rail=None))


@_transport("asks_for_trust")
class OffersItselfToAll(BrokenFake):
    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return super().expose(regions, replace(options, trusted_fabric=True))


@_transport("asks_for_trust")
class BelievesAnySource(BrokenFake):
    def open(self, grant: Grant) -> Session:
        return super().open(replace(grant, trusted_fabric=True))


@_exposure("keeps_to_limits")
class KnowsNoLimits(FakeExposure):
    def copy(
        self, grant_id: str, region: int, offset: int, view: memoryview, ended: Callable[[], bool]
    ) -> None:
        self.copy_slice(grant_id, region, offset, view)


@_exposure("keeps_to_limits")
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


@_exposure("keeps_to_limits")
class CountsForEveryReader(FakeExposure):
    """Counts what was sent to one reader for all of them."""

    def sent_to(self, grant_id: str) -> int:
        return self.sent_nbytes


@_exposure("counts_readers")
class CountsNoReader(FakeExposure):
    def active_readers(self) -> int:
        return 0


@_session("attaches")
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


@_session("leaves_nothing")
class LeavesAThread(_LeakySession):
    def leak(self) -> Callable[[], object]:
        stop = threading.Event()
        threading.Thread(target=stop.wait, daemon=True).start()
        return stop.set


@_session("leaves_nothing")
class LeavesADescriptor(_LeakySession):
    def leak(self) -> Callable[[], object]:
        descriptor = os.eventfd(0)
        return lambda: os.close(descriptor)


@_session("leaves_nothing")
class LeavesAMapping(_LeakySession):
    def leak(self) -> Callable[[], object]:
        memfd = os.memfd_create("leaked")
        os.ftruncate(memfd, mmap.PAGESIZE)
        mapped = mmap.mmap(memfd, mmap.PAGESIZE)
        os.close(memfd)
        return mapped.close


@_exposure("leaves_nothing")
class KeepsViews(FakeExposure):
    def close(self) -> None:
        regions = dict(self.regions)
        super().close()
        self.regions.update(regions)
