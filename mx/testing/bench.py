"""The bench of a conformance rule: sources, sessions, destinations and sinks.

Everything made on a bench is taken down with it, whatever state the rule left it in.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from mx.errors import LocalError, MxError, SourceError
from mx.testing import spans
from mx.testing.child import GRANT_ID
from mx.testing.harness import GENERATION, PEER, Harness, RemoteSource
from mx.testing.memory import Kind, Memory, Places
from mx.transport import (
    ExposeOptions,
    Exposure,
    Grant,
    Limiter,
    Piece,
    Rail,
    Read,
    ScatteredView,
    Session,
    Span,
    TlsFiles,
    View,
)

GUARD = 0xA5


class RuleBroken(AssertionError):
    """A transport does not keep a rule of the suite."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuleBroken(message)


class SinkError(Exception):
    """What a sink raises on purpose."""


class Recorder:
    """A sink that records its calls. With `hold` the first `landed` waits for `release`, so that
    the read is certainly in its middle. The method that `raises` names raises, having noted its
    call."""

    def __init__(
        self,
        *,
        hold: bool = False,
        raises: str = "",
        on_landed: Callable[[int], None] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.landings: list[int] = []
        self.dones = 0
        #: Calls of `landed` after the end.
        self.late = 0
        self.failures: list[MxError] = []
        self.ended = threading.Event()
        self.held = threading.Event()
        self._go = threading.Event()
        self._raises = raises
        self._on_landed, self.on_end = on_landed, on_end
        if not hold:
            self._go.set()

    def landed(self, nbytes: int) -> None:
        self.late += bool(self.dones or self.failures)
        self.landings.append(nbytes)
        if self._on_landed is not None:
            self._on_landed(nbytes)
        self.held.set()
        self._go.wait()
        self._raise("landed")

    def done(self) -> None:
        self.dones += 1
        if self.on_end is not None:
            self.on_end()
        self.ended.set()
        self._raise("done")

    def failed(self, error: MxError) -> None:
        self.failures.append(error)
        if self.on_end is not None:
            self.on_end()
        self.ended.set()
        self._raise("failed")

    @property
    def ends(self) -> int:
        """Return how often the read was completed."""
        return self.dones + len(self.failures)

    def _raise(self, method: str) -> None:
        if method == self._raises:
            raise SinkError(method)

    def release(self) -> None:
        self._go.set()


class BenchSource:
    """An exposure on the bench, with its memory."""

    def __init__(self, exposure: Exposure, memories: Sequence[Memory]) -> None:
        self.exposure = exposure
        self.memories = list(memories)
        self.sizes = tuple(memory.nbytes for memory in memories)
        self._granted = 0

    def grant(self, grant_id: str | None = None) -> tuple[str, bytes]:
        self._granted += 1
        grant_id = grant_id or f"grant-{self._granted}"
        return grant_id, self.exposure.grant(grant_id)


class GrantOptions(TypedDict, total=False):
    """What a grant of the bench's may have beside what all have."""

    rail: Rail | None
    trusted_fabric: bool
    content: bytes


class OpenOptions(GrantOptions, total=False):
    """How a session is opened."""

    streams: int
    generation: int


class Bench:
    """Used in a `with` statement. Seeds are counted, so that no two memories are alike."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.transport = harness.transport()
        self.random = random.Random(7)
        self._seed = 100
        #: The seed of the last remote source's first region.
        self.last_seed = 0
        self._sources: list[BenchSource] = []
        self._sessions: list[Session] = []
        self._remotes: list[RemoteSource] = []
        self._sinks: list[Recorder] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.release()
        for session in self._sessions:
            session.close()
        for source in self._sources:
            source.exposure.close()
        for remote in self._remotes:
            remote.close()
        for session in self._sessions:
            session.join(self.harness.deadline_s)
        for source in self._sources:
            source.exposure.join(self.harness.deadline_s)
            for memory in source.memories:
                # The rule about what is left reports a transport that keeps views.
                with contextlib.suppress(BufferError):
                    memory.close()

    def source(
        self,
        *sizes: int,
        kind: Kind | None = None,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        limiter: Limiter | None = None,
        trusted_fabric: bool = False,
        content: bytes = b"",
        block_digests: bytes | None = None,
        places: Places | None = None,
        tls: TlsFiles | None = None,
        alike: bool = False,
    ) -> BenchSource:
        """Expose memory of these sizes, one region each; scattered ones in `places`. `tls`: with
        these files in place of the harness's. `alike`: all bytes are the same."""
        self._seed += 10
        kind, device = kind or self.harness.kind, self.harness.there.device
        memories = [
            Memory(nbytes, self._seed + index, kind, device, places, alike=alike)
            for index, nbytes in enumerate(sizes)
        ]
        options = ExposeOptions(
            hosts=hosts,
            tls=tls or self.harness.tls,
            stall_timeout_s=self.harness.stall_timeout_s,
            limiter=limiter,
            trusted_fabric=trusted_fabric,
            content=content,
            block_digests=block_digests,
            setting=self.harness.setting,
        )
        try:
            exposure = self.transport.expose(
                [memory.region(index) for index, memory in enumerate(memories)], options
            )
        except MxError as error:
            traceback.clear_frames(error.__traceback__)  # those of the transport, too
            for memory in memories:
                memory.close()
            raise
        exposure.set_generation(GENERATION)
        source = BenchSource(exposure, memories)
        self._sources.append(source)
        return source

    def scattered(self, nbytes: int, places: Places | None = None) -> BenchSource | str:
        """Expose memory that is in several places. Returns why not if the transport refuses it."""
        try:
            return self.source(nbytes, kind=Kind.SCATTERED, places=places)
        except LocalError as error:
            traceback.clear_frames(error.__traceback__)
            return error.message

    def remote(self, *sizes: int) -> tuple[RemoteSource, Session]:
        """Start a source that can be killed, and open a session with it."""
        self._seed += 10
        self.last_seed = self._seed
        remote = self.harness.remote(self.transport, sizes, self._seed)
        self._remotes.append(remote)
        return remote, self.open_ticket(GRANT_ID, remote.ticket, sizes, tls=None)

    def open(
        self,
        source: BenchSource,
        *,
        sizes: Sequence[int] | None = None,
        grant_id: str | None = None,
        **how: Unpack[OpenOptions],
    ) -> Session:
        """Open a session with a source on the bench, on a new grant."""
        grant_id, ticket = source.grant(grant_id)
        tls = self.harness.tls
        return self.open_ticket(grant_id, ticket, sizes or source.sizes, tls=tls, **how)

    def open_ticket(
        self,
        grant_id: str,
        ticket: bytes,
        sizes: Sequence[int],
        *,
        tls: TlsFiles | None,
        generation: int = GENERATION,
        peer: str = PEER,
        streams: int = 2,
        **how: Unpack[GrantOptions],
    ) -> Session:
        """Open a session with a ticket, of any origin."""
        session = self.transport.open(
            Grant(
                grant_id,
                ticket,
                generation,
                tuple(sizes),
                peer,
                tls=tls,
                stall_timeout_s=self.harness.stall_timeout_s,
                streams=streams,
                place=self.harness.here,
                setting=self.harness.setting,
                **how,
            )
        )
        self._sessions.append(session)
        return session

    def refuses(
        self,
        grant_id: str,
        ticket: bytes,
        sizes: Sequence[int],
        **how: Unpack[OpenOptions],
    ) -> str:
        """Return "" if opening raises a SourceError that names the peer, else what happened."""
        try:
            self.open_ticket(grant_id, ticket, sizes, tls=self.harness.tls, **how)
        except SourceError as error:
            return "" if error.peer == PEER else f"the error does not name the peer: {error!r}"
        return "it was let in"

    def destination(self, nbytes: int) -> Span:
        """Return a destination on the reader's device, of any content."""
        return spans.destination(nbytes, self.harness.here.device)

    def scattered_destination(self, sizes: Sequence[int]) -> tuple[ScatteredView, Span]:
        """Return a destination in places of these sizes, and the memory around them: guards."""
        order = list(range(len(sizes)))
        self.random.shuffle(order)
        offsets, at = {}, 64
        for number in order:
            offsets[number] = at
            at += sizes[number] + 1 + number % 64
        memory = self.destination(at + 64)
        self.poke(memory, bytes([GUARD]) * len(memory))
        begins, parts, begin = [], [], 0
        for number, size in enumerate(sizes):
            begins.append(begin)
            parts.append(memory[offsets[number] : offsets[number] + size])
            begin += size
        return ScatteredView.over(begins, parts, begin), memory

    def peek(self, view: View) -> bytes:
        """Return the bytes of a view, which is in one place."""
        return spans.peek(view)

    def poke(self, span: Span, data: bytes) -> None:
        """Fill a span."""
        spans.poke(span, data)

    def sink(self, **options: object) -> Recorder:
        sink = Recorder(**options)  # type: ignore[arg-type]
        self._sinks.append(sink)
        return sink

    def read(
        self,
        session: Session,
        region: int,
        offset: int,
        view: View,
        *,
        tag: str = "chunk 0",
        sink: Recorder | None = None,
    ) -> Recorder:
        """Enqueue a read of one piece."""
        sink = sink or self.sink()
        session.read([Read(tag, [Piece(region, offset, view)], sink)])
        return sink

    def held_read(self, session: Session, view: Span, tag: str = "held") -> Recorder:
        """Start a read of region 0 from its start, which waits at its first `landed`."""
        sink = self.read(session, 0, 0, view, tag=tag, sink=self.sink(hold=True))
        self.wait(sink.held, "a read's first bytes did not land")
        return sink

    def wait(self, event: threading.Event, message: str) -> None:
        require(event.wait(self.harness.deadline_s), message)

    def finish(self, *sinks: Recorder) -> None:
        """Wait until each read is done or has failed."""
        for sink in sinks:
            self.wait(sink.ended, "a read was neither done nor failed in time")

    def succeed(self, *sinks: Recorder) -> None:
        self.finish(*sinks)
        for sink in sinks:
            require(not sink.failures, f"a read failed: {sink.failures}")

    def failure(self, sink: Recorder, kind: type[MxError], tag: str) -> MxError:
        """Wait for a read to fail; return the error if it is a `kind` and names peer and read."""
        self.finish(sink)
        require(bool(sink.failures), f"{tag} was done where it should have failed")
        error = sink.failures[0]
        require(isinstance(error, kind), f"{error!r} should be a {kind.__name__}")
        require(tag in str(error), f"{error} does not name the read {tag}")
        named = error.peer if isinstance(error, SourceError) else PEER
        require(named == PEER, f"{error!r} does not name the peer")
        return error

    def eventually(self, condition: Callable[[], bool], message: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.harness.deadline_s
        while not condition():
            require(time.monotonic() < deadline, message())
            time.sleep(0.005)
