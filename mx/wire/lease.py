"""A reader's lease on one source: a stream that stays open while the pull reads.

The first message opens the lease, each further one renews it. The reader counts the lease from when
it sent its request, the source from when it answered, so that the reader's ends first. The lease
ends with a half-close: the reader uses no bytes that it reads later. A source that receives none
has to wait until the lease runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from mx.core.reasons import Why
from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.errors import (
    ClosedError,
    MxError,
    PeerBusyError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUntrustedError,
    SourceChangedError,
    StaleGenerationError,
)
from mx.tasks import end_tasks, set_by
from mx.transport import TlsFiles
from mx.wire.channel import Remote, Role, cut, files_of, translate
from mx.wire.pacing import Pacer
from mx.wire.place import place_to_wire
from mx.wire.rpc import MalformedMessage, Stub
from mx.wire.status import in_plain_words
from mx.wire.tls import diagnose
from mx.wire.v1 import peer_pb2

#: A lease is renewed as if it were no longer than this, to notice a source that has stopped.
_MAX_LEASE_S = 60.0
#: A busy source is tried again after this at the latest.
_MAX_RETRY_S = 30.0
#: What a source says when it ends a lease: why it does.
LAST_WORDS = (PeerBusyError, PeerUntrustedError, StaleGenerationError)
#: How long to wait for the source's answer when a lease is given back.
_GIVE_BACK_S = 1.0
#: What grpc.aio says where a source refuses a call before its first message is written: the
#: source's word is lost then, and the call is made again.
_LOST_WORD = "Internal error from Core"
#: A lease moves no sooner than so long after it has, or was to.
_MOVE_AGAIN_S = 5.0


class GrantAnswer(NamedTuple):
    """What a source grants: a ticket for each transport, and the size of each region."""

    grant_id: str
    generation: int
    tickets: dict[str, bytes]
    region_nbytes: tuple[int, ...]
    pacer: Pacer | None = None  # how fast to read; None: without a bound


class Lease:
    """One reader's lease. Made, opened and closed on the loop; `check` works on any thread."""

    #: The source can be asked whether a chunk is right in its memory.
    answers = True

    def __init__(
        self,
        channel: grpc.aio.Channel,
        source: SourceRecord,
        on_change: Callable[[], None],
        read_nbytes: Callable[[], int] = lambda: 0,
        reader_id: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Args:
            channel: The channel to the source.
            source: The source.
            on_change: Called on the loop when the lease is lost, reading becomes coordinated, or
                the source is asked (`ask`).
            read_nbytes: Returns the bytes read on the lease so far; renewals report them.
            reader_id: Names the pull; "" if it can't be part of a swarm.
            tls: The channel's files.
        """
        self._opening = peer_pb2.OpenRequest()
        self._reader_id = reader_id
        self._source = source
        self.key = source.key
        self.peer = source.endpoint
        self._remote = Remote(Role.SOURCE, source.endpoint, tls)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        self._channel: Any = channel
        self._stub: Stub | None = Stub(channel, service, self._remote)
        self._on_change = on_change
        self._wrong: list[int] = []  # chunks that the source has yet to be asked about
        self._asked: dict[int, Callable[[], None]] = {}
        self._hurry = asyncio.Event()  # to renew at once
        self._loop = asyncio.get_running_loop()
        self._call: Any = None
        self._grant_id = ""
        self._files: object = None  # that the stream's connection has shown
        self._move_at_s = math.inf  # the stream ends soon: when to open another
        self._still_until_s = 0.0  # no sooner than then
        self._renewer: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._renewed: asyncio.Future[float] | None = None  # for the answer to a renewal
        self._valid_until_s = 0.0
        self._lease_s = 0.0
        self._error: MxError | None = None
        self._pacer: Pacer | None = None
        self._read_nbytes = read_nbytes
        #: True once the source has reported that other pulls read there too.
        self.coordinated = False

    async def open(self, place: Place, transports: Sequence[str], timeout_s: float) -> GrantAnswer:
        """Get a grant. Called once.

        Args:
            place: The reader's place.
            transports: The transports for which tickets are needed.
            timeout_s: How many seconds the source has to answer.

        Raises:
            SourceError: The source refuses, or does not answer.
        """
        assert self._stub is not None  # opened once
        self._files = files_of(self._channel)
        self._call = self._stub.Open()
        sent_at_s = time.monotonic()
        self._opening = request = peer_pb2.OpenRequest(
            source_id=self._source.source_id,
            identity=self._source.ref.identity,
            generation=self._source.generation,
            transports=transports,
            place=place_to_wire(place),
            reader_id=self._reader_id,
        )
        try:
            event = await self._first_event(request, timeout_s)
            if event.WhichOneof("event") == "stale":
                raise self._stale(
                    event.stale,
                    f"{self.peer} was updated: it holds generation {event.stale.generation} by now",
                    hint="start the pull again, for the new weights",
                )
            if event.WhichOneof("event") == "busy":
                raise self._busy(Why.FULL, event.busy.retry_after_s)
            if event.WhichOneof("event") != "granted":
                raise PeerProtocolError(f"{self.peer} answered without a grant", peer=self.peer)
            self._lease_s = self._believed_s(event.granted.lease_s)
            if event.granted.max_bytes_per_s:
                self._pacer = Pacer(event.granted.max_bytes_per_s, self.peer)
        except BaseException:
            await self.close()
            raise
        granted = event.granted
        self._grant_id = granted.grant_id
        self.coordinated = granted.coordinated
        self._valid_until_s = sent_at_s + self._lease_s
        self._renewer = asyncio.create_task(self._renew(), name="mx-lease")
        self._listener = asyncio.create_task(self._listen(), name="mx-lease-events")
        return GrantAnswer(
            granted.grant_id,
            granted.generation,
            {ticket.transport: ticket.ticket for ticket in granted.tickets},
            tuple(granted.region_nbytes),
            self._pacer,
        )

    @property
    def lease_s(self) -> float:
        """How long it lasts from one renewal on."""
        return self._lease_s

    def check(self) -> MxError | None:
        """Return None while the lease holds; else why it does not."""
        if self._error is not None:
            return self._error
        if time.monotonic() > self._valid_until_s:
            return PeerTimeoutError(
                f"{self.peer} has not renewed the lease for {self._lease_s:g} s", peer=self.peer
            )
        return None

    async def _first_event(self, request: peer_pb2.OpenRequest, timeout_s: float) -> Any:
        """Send the first message, and return the event that answers it. Raises SourceError."""
        async with self._translating(timeout_s):
            try:
                await self._call.write(request)
            except grpc.aio.AioRpcError as error:
                if error.details() != _LOST_WORD or self._stub is None:
                    raise
                self._call = self._stub.Open()
                await self._call.write(request)
            while True:
                event = await self._next()
                # None: what a later release says besides.
                if event.WhichOneof("event") not in ("draining", None):
                    return event

    @contextlib.asynccontextmanager
    async def _translating(self, timeout_s: float) -> AsyncIterator[None]:
        """Raise errors of gRPC in the block, and a timeout, as SourceErrors."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise PeerTimeoutError(
                f"{self.peer} stopped answering (stopped, overloaded or cut off)",
                peer=self.peer,
            ) from None
        except grpc.aio.AioRpcError as error:
            raise await diagnose(error, self._remote) from None
        except asyncio.InvalidStateError:  # the call had ended before the write
            raise await self._ending() from None

    async def _next(self) -> Any:
        event = await self._call.read()
        if isinstance(event, MalformedMessage):
            raise event.error()
        if not isinstance(event, peer_pb2.OpenEvent):
            raise await self._ending()
        return event

    async def _listen(self) -> None:
        """Act on the source's events at once, until the stream ends."""
        try:
            while True:
                event = await self._next()
                match event.WhichOneof("event"):
                    case None:
                        pass  # what a later release says besides
                    case "renewed":
                        lease_s = self._believed_s(event.renewed.lease_s)
                        if event.renewed.ends_soon:
                            self._move_at_s = self._still_until_s
                        if self._pacer is not None:
                            self._pacer.set_rate(event.renewed.max_bytes_per_s)
                        if self._renewed is not None and not self._renewed.done():
                            self._renewed.set_result(lease_s)
                    case "draining":
                        pass  # there are no new grants, and running reads may finish
                    case "coordinated":
                        self.coordinated = True
                        self._on_change()
                    case "busy":  # nothing was read for long: another reader has its place now
                        self._lose(self._busy(Why.IDLE, event.busy.retry_after_s))
                    case "checked":
                        if (right := self._asked.pop(event.checked.chunk, None)) is not None:
                            right()
                    case "stale":
                        self._lose(
                            self._stale(
                                event.stale,
                                f"{self.peer} was updated: its weights of generation "
                                f"{self._source.generation} are no longer to be read",
                            )
                        )
                        # The source waits for it, whatever the pull waits for.
                        self.end()
                    case _:
                        raise PeerProtocolError(
                            f"{self.peer} sent an event that has no place in a lease",
                            peer=self.peer,
                        )
        except grpc.aio.AioRpcError as error:
            self._lose(translate(error, who=self._remote))
        except MxError as error:
            self._lose(error)

    async def _renew(self) -> None:
        """Renew until the lease is lost. A renewal without an answer means that the source's
        process has stopped."""
        try:
            while self._error is None:
                await set_by(self._hurry, time.monotonic() + self._lease_s / 4)
                request = self._renewal()
                sent_at_s = time.monotonic()
                self._renewed = asyncio.get_running_loop().create_future()
                async with self._translating(self._lease_s * 0.4):
                    await self._call.write(request)
                    self._lease_s = await self._renewed
                self._valid_until_s = sent_at_s + self._lease_s
                if time.monotonic() >= self._move_at_s or files_of(self._channel) != self._files:
                    await self._move()
        except MxError as error:
            self._lose(error)

    async def _move(self) -> None:
        """Go on with the lease on another stream, whose connection shows the certificate of now; a
        source that refuses that goes on with this one for as long as it does."""
        assert self._stub is not None
        self._files, self._move_at_s = files_of(self._channel), math.inf
        self._still_until_s = time.monotonic() + _MOVE_AGAIN_S
        call, moved = self._stub.Open(), False
        request = peer_pb2.OpenRequest(grant_id=self._grant_id)
        request.MergeFrom(self._opening)
        try:
            async with asyncio.timeout(self._lease_s * 0.4):
                await call.write(request)
                event = await call.read()
            if isinstance(event, peer_pb2.OpenEvent):
                moved = event.HasField("renewed")
                if event.HasField("granted"):  # another lease, of a source that moves none
                    self._still_until_s = math.inf
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        finally:
            if not moved:
                cut(call)
        if not moved:
            self._move_at_s = self._still_until_s
            return
        was, self._call = self._call, call
        try:
            await end_tasks(self._listener)
        finally:
            cut(was)
        if self._error is None:
            self._listener = asyncio.create_task(self._listen(), name="mx-lease-events")

    def _renewal(self) -> peer_pb2.OpenRequest:
        wrong, self._wrong = self._wrong, []
        self._hurry.clear()
        return peer_pb2.OpenRequest(
            source_id=self._source.source_id,
            read_bytes=self._read_nbytes(),
            wrong_chunks=wrong,
        )

    def ask(self, chunk: int, right: Callable[[], None]) -> None:
        """Ask the source whether a chunk is right in its memory; from any thread.

        Args:
            chunk: The chunk.
            right: Called on the loop if the source says that it is.
        """

        def ask() -> None:
            self._wrong.append(chunk)
            self._asked[chunk] = right
            self._hurry.set()
            self._on_change()

        self._loop.call_soon_threadsafe(ask)

    def _stale(
        self, event: peer_pb2.Stale, updated: str, *, hint: str = ""
    ) -> StaleGenerationError:
        """Return the error for a source that serves these weights no more."""
        if event.changed:
            return SourceChangedError(
                f"the process at {self.peer} serves these weights no more: they have changed in "
                "its memory, or can't be read there, as on a lost GPU",
                peer=self.peer,
                hint="start another source of them",
            )
        return StaleGenerationError(updated, peer=self.peer, hint=hint)

    def _busy(self, why: Why, retry_after_s: float) -> PeerBusyError:
        if not 0 <= retry_after_s < math.inf:  # NaN is not either
            retry_after_s = _MAX_RETRY_S
        return PeerBusyError(
            why(self.peer),
            peer=self.peer,
            hint="`wait_s` waits longer for it, or for another source",
            retry_after_s=min(retry_after_s, _MAX_RETRY_S),
        )

    def _believed_s(self, lease_s: float) -> float:
        if not 0 < lease_s < math.inf:  # NaN is not either
            raise PeerProtocolError(f"{self.peer} gave a lease of {lease_s} s", peer=self.peer)
        return min(lease_s, _MAX_LEASE_S)

    async def _ending(self) -> MxError:
        """Return the error that says why the stream ended."""
        code, details = await self._call.code(), await self._call.details()
        if code == grpc.StatusCode.OK:
            return PeerLostError(f"{self.peer} ended the lease", peer=self.peer)
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE):
            said = in_plain_words(details) if details else "it is gone"
            return PeerLostError(f"{self.peer}: {said}", peer=self.peer)
        if code == grpc.StatusCode.PERMISSION_DENIED:
            initial, trailing = await self._call.initial_metadata(), self._call.trailing_metadata()
            refusal = grpc.aio.AioRpcError(code, initial, await trailing, details, None)
            return translate(refusal, who=self._remote)
        return PeerRefusedError(f"{self.peer} refused: {details}", peer=self.peer)

    def _lose(self, error: MxError) -> None:
        # What the source says is why the connections on it were lost, even if that was noticed
        # first, and the lease given back; a refusal says more than anything else.
        unsaid = not isinstance(self._error, LAST_WORDS) and isinstance(error, LAST_WORDS)
        if self._error is None or unsaid or isinstance(error, PeerUntrustedError):
            self._error = error
            self._on_change()

    def end(self, *, lost: bool = False) -> None:
        """Begin to give the lease back: `check` fails from now on. Does not block. Idempotent.

        Args:
            lost: A connection on it was lost, so that the source may be ending the stream, too.
                Then nothing is written any more: a write into a stream that has ended may cost
                gRPC the status that it ended with.
        """
        if self._giving_back is not None:
            return
        self._on_change = lambda: None
        answering = self._error is None or isinstance(self._error, StaleGenerationError)
        self._error = self._error or ClosedError(f"the lease on {self.peer} was given back")
        self._giving_back = asyncio.create_task(
            self._give_back(answering, silent=lost), name="mx-lease-end"
        )

    async def _give_back(self, answering: bool, *, silent: bool) -> None:
        await end_tasks(self._renewer)
        # A closed pull that is still referred to must not keep gRPC's threads.
        self._stub = self._channel = None
        if self._call is None:
            self._read_nbytes = lambda: 0  # it may refer to connections, which refer to this
            return
        if self._listener is not None and answering:
            # A task of its own: cancelling a coroutine that awaits a gRPC call cancels the call.
            closing = asyncio.create_task(self._last_words(silent), name="mx-lease-last")
            await asyncio.wait((closing, self._listener), timeout=_GIVE_BACK_S)
            await end_tasks(closing)
        cut(self._call)
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)
        self._call = self._listener = self._renewer = None  # the call keeps its connection alive
        self._read_nbytes = lambda: 0  # it may refer to connections, which refer to this

    async def _last_words(self, silent: bool) -> None:
        if not silent and (self._read_nbytes() or self._wrong):
            await self._call.write(self._renewal())  # so that the source counts all bytes read
        await self._call.done_writing()

    async def close(self) -> None:
        """`end`, and wait until the lease is given back. The source withdraws the grant."""
        self.end()
        assert self._giving_back is not None
        await asyncio.shield(self._giving_back)
