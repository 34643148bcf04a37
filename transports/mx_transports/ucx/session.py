"""The target side of ucx: one thread keeps several one-sided reads going at once, and one calls
sinks, which hash."""

from __future__ import annotations

import contextlib
import gc
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from mx.errors import MxError, PeerLostError, PeerProtocolError, PeerTimeoutError, SourceError
from mx.transport import Grant, Piece, Read, ReportedErrors, Span, host_view
from mx.units import MIB
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.pieces import MAX_SPANS, encode_request
from mx_transports.toolkit.session import StreamSession
from mx_transports.toolkit.slicing import Slice, steps
from mx_transports.toolkit.stream import SocketStream
from mx_transports.ucx.nixl import AddressRange, Pin, TargetAgent
from mx_transports.ucx.wire import BEGIN, END, REQUEST, RESPONSE, AgentInfo


class ReportedRead:
    """A read whose sink is called by `SinkReports`; `raised`: it has raised from `landed`."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.raised = False


class SinkReports:
    """Calls sinks, in order, on one thread. That ends once `end` was called and all calls are made.

    A sink that raises from `landed` gets no more but its read's end, which is a failure.

    Args:
        name: The thread's name.
        fail: Calls a sink's `failed`.
        abandoned: The error of a read whose sink has raised.
    """

    def __init__(
        self, name: str, fail: Callable[[Read, MxError], None], abandoned: MxError
    ) -> None:
        self._fail = fail
        self._abandoned = abandoned
        self._due: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        #: `landed` calls that are due, or being made.
        self.landings = 0
        self._ended = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def wait(self, most: int, timeout_s: float | None = None) -> None:
        """Wait until `most` or fewer `landings` are left, for `timeout_s` at most if given."""
        with self._changed:
            self._changed.wait_for(lambda: self.landings <= most, timeout_s)

    def landed(self, reported: ReportedRead, nbytes: int) -> None:
        """Have the sink told that the first `nbytes` bytes are in place."""
        with self._changed:
            self.landings += 1
            self._put(partial(self._landed, reported, nbytes))

    def done(self, reported: ReportedRead) -> None:
        """Have the sink told that all are."""
        with self._changed:
            self._put(partial(self._done, reported))

    def failed(self, read: Read, error: MxError) -> None:
        """Have the sink told that they will not come; nothing writes there any more."""
        with self._changed:
            self._put(partial(self._fail, read, error))

    def end(self) -> None:
        """End the thread after all calls."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _put(self, call: Callable[[], None]) -> None:
        self._due.append(call)
        self._changed.notify_all()

    # --- the thread

    def _main(self) -> None:
        while (call := self._next()) is not None:
            with ReportedErrors():
                call()
            del call  # it refers to destinations

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._due and not self._ended:
                self._changed.wait()
            return self._due.popleft() if self._due else None

    def _landed(self, reported: ReportedRead, nbytes: int) -> None:
        try:
            if not reported.raised:
                reported.raised = True
                reported.read.sink.landed(nbytes)
                reported.raised = False
        finally:
            with self._changed:
                self.landings -= 1
                self._changed.notify_all()

    def _done(self, reported: ReportedRead) -> None:
        if reported.raised:
            self._fail(reported.read, self._abandoned)
        else:
            reported.read.sink.done()


#: One transfer of NIXL's, reported to the sink when it has ended. Over loopback 1, 2, 4 and 16 MiB
#: were equally fast with enough of them under way; smaller ones cost more of Python's time.
STEP_BYTES = 4 * MIB
#: Transfers under way or not yet reported to their sinks: one that blocks holds up its connection.
#: UCX serves them side by side, so that the first of 16 lands when all of them nearly have, for a
#: few percent more bandwidth.
STEPS = 8
#: Reads under way, those whose END is not answered yet included.
READS = 6
#: How often a source may say of a step that it is still being copied.
MAX_WAITING = MAX_SPANS // 1024
_ANSWER_TICK_S = 0.05
#: Between two looks at whether an agent that something keeps alive is gone, the first and the
#: longest.
#: How long transfers may go on after a session's end.
_LAST_TRANSFERS_S = 0.2
_FENCE_TICK_S, _MAX_FENCE_TICK_S = 0.01, 1.0
log = logging.getLogger("mx.transports.ucx")


#: Contiguous parts of a read, and the payload bytes when they and all before them are in place.
_Step = tuple[list[Slice[Any]], int]


class _Reading(ReportedRead):
    """A read, and what is left of it: its `steps`, and the number of `flights` under way."""

    def __init__(self, read: Read, step_nbytes: int, as_view: Callable[[Span], Any]) -> None:
        super().__init__(read)
        self.steps: Iterator[_Step] = steps(read, step_nbytes, as_view)
        self.flights = 0
        self.begun_all = False
        self.refused = framing.OK


class Flight:
    """What was begun with the source: a read, or a step of it that comes through a slot.

    `landings` are (handle, payload bytes when it is done); `address` is where the bytes are, unless
    that follows from their regions.
    """

    def __init__(self, number: int, reading: _Reading, steps: Iterator[_Step]) -> None:
        self.number = number
        self.reading = reading
        self.steps = steps
        self.address = 0
        self.begun = False
        self.patience = MAX_WAITING
        self.posted_all = False
        self.sent_end = False
        self.landings: deque[tuple[int, int]] = deque()
        self.registered: list[Any] = []
        self.pins: list[Pin] = []


class UcxSession(StreamSession):
    """Destinations are registered once, if the session was given an arena, else read by read."""

    #: Returns the view that a read has for a destination; raises LocalError.
    as_view: Callable[[Span], Any] = staticmethod(host_view)

    def __init__(
        self, grant: Grant, stream: SocketStream, agent: TargetAgent, info: AgentInfo
    ) -> None:
        super().__init__("mx-ucx", grant, [stream])
        self.depth = 4
        self.sizes = {index: region.nbytes for index, region in info.regions.items()}
        self._stream = stream
        self._agent = agent
        self._regions = info.regions
        self._slot_bytes = info.slot_bytes
        self._reading: _Reading | None = None  # which is begun step by step
        self._arena: Pin | None = None
        self._arena_registered = False
        self._flights: deque[Flight] = deque()
        self._number = 0
        self._received = bytearray()
        self._answers = memoryview(bytearray(64 * RESPONSE.size))
        self._moved_s = 0.0
        abandoned = PeerLostError(f"{self.peer}: abandoned", peer=self.peer)
        self._reports = SinkReports("mx-ucx-sinks", self.fail, abandoned)
        self.threads.insert(0, self._reports.thread)
        self.start()

    def adopt(self, arena: Span) -> None:
        view = host_view(arena)
        if len(view):
            self._arena = Pin(view)

    def release(self) -> None:
        super().release()
        self._arena = None

    # --- the thread

    def carry(self, worker: int) -> None:
        failure: SourceError = PeerLostError(f"{self.peer}: abandoned", peer=self.peer)
        try:
            while self._take_reads():
                self.turn()
        except OSError as error:
            failure = dial.translate(error, self.peer, self.peer)
            raise failure from error
        except SourceError as error:
            failure = error
            raise
        finally:
            self._reports.wait(0)  # what blocks in a sink holds up the end, too
            self._end_transfers()
            self._fence()
            self.hang_up(worker)
            flights, self._flights = self._flights, deque()
            left = [flight.reading for flight in flights]
            if self._reading is not None:
                left.append(self._reading)
            for flight in flights:
                flight.pins.clear()
            for reading in dict.fromkeys(left):
                self._reports.failed(reading.read, failure)
            self._reports.end()

    def _end_transfers(self) -> None:
        """Let transfers that are under way end, if they do soon.

        Where a connection goes in the middle of one, UCX 1.23 aborts the source's agent ("Endpoint
        timeout"), which other readers use too.
        """
        until_s = time.monotonic() + _LAST_TRANSFERS_S
        with contextlib.suppress(SourceError):
            for flight in self._flights:
                for handle, _ in flight.landings:
                    while not self._agent.poll(handle):
                        if time.monotonic() > until_s:
                            return
                        self._agent.pause()

    def _fence(self) -> None:
        """Return once the agent is destroyed, however long that takes.

        Until then UCX, or a NIC, may write to destinations. What is failed here is read again by
        another session, into the same places: so nothing is failed before the agent is gone.
        """
        if self._agent.close():
            return
        # It may be in a cycle of references, as tracebacks are.
        tick_s = _FENCE_TICK_S
        gc.collect()
        if not self._agent.close():
            log.error(
                "%s by ucx: the connection has ended, but something in this process still refers "
                "to its agent, which may write to memory; what it was reading waits for that",
                self.peer,
            )
        while not self._agent.close():
            time.sleep(tick_s)
            tick_s = min(2 * tick_s, _MAX_FENCE_TICK_S)
            gc.collect()

    def _take_reads(self) -> bool:
        """Begin what is queued, waiting for it if nothing is under way. Return False at the end."""
        while len(self._flights) < (STEPS if self._slot_bytes else READS):
            if self._reading is None:
                idle = not self._flights
                read = self.take(wait=idle)
                if read is None:
                    return not idle
                try:
                    self.check_bounds(read)
                    self.check_generation(framing.MAX_U64)
                except MxError as error:
                    self._reports.failed(read, error)
                    continue
                if idle:
                    self._moved_s = time.monotonic()
                step_nbytes = min(STEP_BYTES, self._slot_bytes or STEP_BYTES)
                self._reading = _Reading(read, step_nbytes, self.as_view)
            self._begin(self._reading)
        return True

    def _begin(self, reading: _Reading) -> None:
        """Begin the read or, if the bytes come through slots, its next step."""
        steps, pieces = reading.steps, list[Piece]()
        reading.begun_all = not self._slot_bytes
        if self._slot_bytes:
            parts, landed = next(steps, ([], 0))
            reading.begun_all = landed == reading.read.nbytes
            pieces = [Piece(part.region, part.offset, part.view) for part in parts]
            steps = iter([(parts, landed)] if parts else [])
        if reading.begun_all:
            self._reading = None
        self._number = (self._number + 1) & framing.MAX_U32
        reading.flights += 1
        self._flights.append(Flight(self._number, reading, steps))
        self._send(BEGIN, self._number, pieces)

    def turn(self) -> None:
        """One look at everything that may have moved."""
        if self.closed:
            raise PeerLostError("closed", peer=self.peer)
        moved = self._receive()
        moved = self._post() or moved
        moved = self._land() or moved
        sinks_are_behind = self._reports.landings >= STEPS
        if moved or sinks_are_behind:
            self._moved_s = time.monotonic()
        if moved:
            return
        if time.monotonic() - self._moved_s > self.grant.stall_timeout_s:
            raise PeerTimeoutError(
                f"{self.peer} by ucx: nothing has come for {self.grant.stall_timeout_s:g} s",
                peer=self.peer,
            )
        if any(flight.landings for flight in self._flights):
            self._agent.pause()
        elif sinks_are_behind:
            self._reports.wait(STEPS - 1, _ANSWER_TICK_S)
        else:
            # Not `select`: a server's descriptors may have numbers beyond its 1,024.
            waiting = select.poll()
            waiting.register(self._stream.fileno(), select.POLLIN)
            waiting.poll(_ANSWER_TICK_S * 1000)

    def _send(self, kind: int, number: int, pieces: Sequence[Piece] = ()) -> None:
        fields = kind, number, self.grant.generation
        self._stream.send_all([encode_request(REQUEST, fields, pieces)])

    def _receive(self) -> bool:
        """Take the source's answers that have come."""
        got = self._stream.poll(self._answers)
        if not got:
            return False
        self._received += self._answers[:got]
        while len(self._received) >= RESPONSE.size:
            number, status, address = RESPONSE.unpack_from(self._received)
            del self._received[: RESPONSE.size]
            flight = next((f for f in self._flights if f.number == number), None)
            if flight is None or (flight.begun and not flight.sent_end):
                raise PeerProtocolError(
                    f"{self.peer} sent an answer that fits no request (read {number})",
                    peer=self.peer,
                )
            if status == framing.WAITING and not flight.begun and flight.patience:
                flight.patience -= 1
                continue
            self._answered(flight, status, address)
        return True

    def _answered(self, flight: Flight, status: int, address: int) -> None:
        reading = flight.reading
        reading.refused = reading.refused or status
        if not flight.begun and status == framing.OK:
            flight.begun, flight.address = True, address
            return
        if not flight.begun:
            flight.begun = flight.posted_all = flight.sent_end = True
            reading.begun_all = True
            if self._reading is reading:
                self._reading = None
            self._send(END, flight.number)
            return
        self._unregister(flight)
        self._flights.remove(flight)
        reading.flights -= 1
        if reading.flights or not reading.begun_all:
            return
        if reading.refused == framing.OK:
            self._reports.done(reading)
        else:
            refusal = framing.refusal(reading.refused, self.peer)
            self._reports.failed(reading.read, refusal)

    def _post(self) -> bool:
        """Begin transfers, in the order of the reads, as long as there are not enough."""
        under_way = sum(len(flight.landings) for flight in self._flights) + self._reports.landings
        posted = False
        for flight in self._flights:
            if not flight.begun:
                break
            while not flight.posted_all and under_way < STEPS:
                step = next(flight.steps, None)
                if step is None:
                    flight.posted_all = True
                    break
                parts, landed = step
                handle = self._agent.post(*self.ranges(flight, parts))
                flight.landings.append((handle, landed))
                under_way += 1
                posted = True
        return posted

    def ranges(
        self, flight: Flight, parts: Sequence[Slice[Any]]
    ) -> tuple[list[AddressRange], list[AddressRange]]:
        """Return where parts end here, and where they begin at the source's agent."""
        return [self._local(flight, part) for part in parts], self._remote(flight, parts)

    def _remote(self, flight: Flight, parts: Sequence[Slice[memoryview]]) -> list[AddressRange]:
        if not self._slot_bytes:
            return [
                AddressRange(self._regions[part.region].address + part.offset, len(part.view))
                for part in parts
            ]
        lengths = [len(part.view) for part in parts]
        return list(map(AddressRange, accumulate(lengths, initial=flight.address), lengths))

    def _local(self, flight: Flight, part: Slice[memoryview]) -> AddressRange:
        pin = Pin(part.view)
        flight.pins.append(pin)
        arena = self._arena
        if arena is not None:
            if not self._arena_registered:
                self._agent.register(arena.range)
                self._arena_registered = True
            if (
                arena.range.address
                <= pin.range.address
                <= pin.range.address + pin.range.nbytes
                <= arena.range.address + arena.range.nbytes
            ):
                return pin.range
        flight.registered.append(self._agent.register(pin.range))
        return pin.range

    def _unregister(self, flight: Flight) -> None:
        for descs in flight.registered:
            self._agent.deregister(descs)
        flight.registered.clear()
        flight.pins.clear()

    def _land(self) -> bool:
        """See which transfers have ended, in order, and report to sinks and source."""
        moved = False
        for flight in list(self._flights):
            while flight.landings and self._agent.poll(flight.landings[0][0]):
                _, landed = flight.landings.popleft()
                moved = True
                self._reports.landed(flight.reading, landed)
                if self.closed:
                    return moved
            if flight.landings or not flight.posted_all:
                break
            if not flight.sent_end:
                flight.sent_end = moved = True
                self._send(END, flight.number)
        return moved
