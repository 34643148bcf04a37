"""Fakes that move the wrong bytes, or to the wrong places."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence

from mx.buffers import address_of, memory_at
from mx.errors import LocalError, StaleGenerationError
from mx.testing.fake import STEP_BYTES, FakeExposure, FakeSession
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Read,
    ScatteredView,
    Span,
    View,
    host_view,
    spans_of,
)
from tests.support.broken.base import BrokenFake, exposure, session, transport


@session("right_bytes")
class TakesAllFromTheFirstRegion(FakeSession):
    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        super().move(read, read.pieces[0].region, offset, part)


@session("nothing_outside")
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


@session("completes_once")
class FinishesEmptyReadsTwice(FakeSession):
    def run(self, read: Read) -> None:
        super().run(read)
        if not read.pieces:
            read.sink.done()


@session("completes_once")
class TellsAfterTheEnd(FakeSession):
    def run(self, read: Read) -> None:
        super().run(read)
        if read.nbytes:
            read.sink.landed(read.nbytes)


@session("reports_progress")
class TellsAheadOfTheBytes(FakeSession):
    def copy(self, read: Read) -> None:
        landed = 0
        for region, offset, part in self.steps(read):
            landed += len(part)
            read.sink.landed(landed)
            self.check()
            self.move(read, region, offset, part)
        self.check()


@session("reports_progress")
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


@session("starts_in_order")
class LastInFirstOut(FakeSession):
    def take(self) -> Read | None:
        with self.wake:
            while not self.queue and not self.closed:
                self.wake.wait()
            return self.queue.pop() if self.queue else None


@session("refuses_out_of_range")
class GivesWhatThereIs(FakeSession):
    def check_bounds(self, read: Read) -> None:
        pass


@session("checks_generation")
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


@transport("several_sessions")
class SharesItsCursors(BrokenFake):
    """Keeps the places of running reads in the transport, where sessions meet."""

    session_type = _CursorSession

    def __init__(self) -> None:
        super().__init__()
        self.cursors: dict[str, int] = {}


@exposure("two_exposures")
class OneEndsAll(FakeExposure):
    def close(self) -> None:
        for each in self.transport.exposures.values():
            FakeExposure.close(each)


@session("adopts")
class LandsAtTheArenasStart(FakeSession):
    """Takes the arena, not each piece, for what the bytes belong to."""

    arena: memoryview | None = None

    def adopt(self, arena: Span) -> None:
        self.arena = host_view(arena)

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        super().move(read, region, offset, part if self.arena is None else self.arena[: len(part)])


@session("adopts")
class KeepsItsArena(FakeSession):
    def adopt(self, arena: Span) -> None:
        assert isinstance(self.exposure.transport, BrokenFake)
        self.exposure.transport.leaked.append(host_view(arena)[:].release)


@session("completes_empty_reads")
class RefusesEmptyReads(FakeSession):
    def check_bounds(self, read: Read) -> None:
        super().check_bounds(read)
        if not read.pieces:
            raise LocalError("there is nothing to read")


#: What a system call takes of places at a time.
_MAX_PLACES = 1024


@exposure("gathers")
class GathersUpToALimit(FakeExposure):
    """Passes the kernel as many places as it takes, once."""

    def gather(self, view: View) -> list[memoryview]:
        return super().gather(view)[:_MAX_PLACES]


@exposure("gathers")
class GathersByAddress(FakeExposure):
    def gather(self, view: View) -> list[memoryview]:
        return sorted(super().gather(view), key=address_of)


@transport("gathers")
class RefusesWithoutAReason(BrokenFake):
    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        if any(isinstance(region.view, ScatteredView) for region in regions):
            raise LocalError("")
        return super().expose(regions, options)


@exposure("refuses_holes")
class ClosesUpHoles(FakeExposure):
    def gather(self, view: View) -> list[memoryview]:
        if isinstance(view, ScatteredView):
            return [host_view(span) for span in view.located()[1]]
        return super().gather(view)


@exposure("refuses_holes")
class FillsHoles(FakeExposure):
    """Sends zeros for what lies between tensors, as an arena has there."""

    def gather(self, view: View) -> list[memoryview]:
        if not isinstance(view, ScatteredView):
            return super().gather(view)
        found, (begins, spans) = bytearray(len(view)), view.located()
        for begin, span in zip(begins, spans, strict=True):
            found[begin : begin + len(span)] = host_view(span)
        return [memoryview(found)]


@session("scatters")
class ScattersUpToALimit(FakeSession):
    def steps(self, read: Read) -> Iterator[tuple[int, int, memoryview]]:
        yield from itertools.islice(super().steps(read), _MAX_PLACES)


@session("scatters")
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
