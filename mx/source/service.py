"""The Peer service: describes the held models and keeps the leases of their readers."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mx import codec
from mx.core.policy import Right
from mx.core.types import SourceRecord, SourceState
from mx.errors import MxError, PeerProtocolError, PeerRefusedError
from mx.log import event
from mx.source.doubts import Doubts
from mx.source.grants import Grants
from mx.source.requests import answer, check_open, first_message, principal_of
from mx.source.served import ExposedModel
from mx.swarm.stream import PeerStream
from mx.wire.pages import page_messages
from mx.wire.v1 import peer_pb2

if TYPE_CHECKING:
    from mx.wire.principals import Access

log = logging.getLogger(__name__)

_PULL = (Right.PULL,)
#: The most replaced sources that are remembered.
_MAX_GONE = 64


class PeerServicer:
    """The Peer service of one process, on the loop. `models` maps source ids to served models."""

    def __init__(
        self,
        record_of: Callable[[ExposedModel], SourceRecord],
        doubts: Doubts,
        grants: Grants,
    ) -> None:
        """
        Args:
            record_of: Returns the record of a served model.
            doubts: Hashes again what readers found wrong.
            grants: The grants of the process.
        """
        self.models: dict[str, ExposedModel] = {}
        self.grants = grants
        self.streams = 0  # the number of open swarm streams
        #: Who may pull what, where clients show certificates.
        self.access: Access | None = None
        self.state = SourceState.SERVING
        self._record_of = record_of
        self._doubts = doubts
        #: The source ids of some sources that are gone -> what their readers are told.
        self._gone: dict[str, peer_pb2.Stale] = {}

    def on_call(self, context: Any) -> None:
        """Refuse a caller that may pull no model. Raises PeerUntrustedError."""
        if self.access is not None:
            caller = self.access.require(context, _PULL, granted=False)
            self.access.granted(caller, "call")

    def on_refused(self, context: Any, error: MxError) -> None:
        """Write the audit line of a call that a budget refuses."""
        if self.access is not None:
            self.access.refused_call(context, error)

    def _may_pull(self, context: Any, name: str) -> bool:
        return self.access is None or self.access.allows(self.access.caller(context), _PULL, name)

    @contextmanager
    def _pulling(self, context: Any, served: ExposedModel | None) -> Iterator[str]:
        """Yield the principal that may pull a model; "" without certificates. The block is
        cancelled when a new policy ends its right. Raises PeerUntrustedError."""
        if self.access is None or served is None:
            yield ""
            return
        held = served.held
        about = {"revision": held.key.revision, "pin": held.manifest.ref.pin.hex()}
        about["source"] = held.source_id
        with self.access.standing(context, _PULL, held.key.name, **about) as caller:
            yield caller.name

    # -- rpcs ---------------------------------------------------------------------------------

    async def Describe(
        self, request: peer_pb2.DescribeRequest, context: Any
    ) -> peer_pb2.DescribeResponse:
        return peer_pb2.DescribeResponse(
            sources=[
                codec.source_to_wire(self._record_of(served))
                for served in self.models.values()
                if request.name in ("", served.held.key.name)
                and served.listed
                and self._may_pull(context, served.held.key.name)
            ]
        )

    async def Pages(
        self, request: peer_pb2.PagesRequest, context: Any
    ) -> AsyncIterator[peer_pb2.LayerPage]:
        held = next(
            (
                served.held
                for served in self.models.values()
                if (served.held.manifest.ref.identity, served.held.manifest.ref.layout)
                == (request.identity, request.layout)
                and self._may_pull(context, served.held.key.name)
            ),
            None,
        )
        if held is None:
            raise PeerRefusedError("this process serves no such model")
        count = len(held.manifest.layout.layers)
        pages = (
            (layer, page)
            for begin, end in codec.ranges_from_wire(request.layers)
            for layer in range(begin, min(end, count))
            if (page := held.pages.get(layer))  # a pull may not know it yet
        )
        for message in page_messages(pages, batches=request.batches):
            yield message

    async def Open(
        self,
        request_iterator: AsyncIterator[peer_pb2.OpenRequest],
        context: Any,
    ) -> None:
        """Grant a read, and keep its lease until the reader ends the stream."""
        request = await first_message(request_iterator)
        if request is None:
            return
        with self._pulling(context, self.models.get(request.source_id)) as name:
            await self._open(request, request_iterator, context, name)

    async def _open(
        self,
        request: peer_pb2.OpenRequest,
        renewals: AsyncIterator[peer_pb2.OpenRequest],
        context: Any,
        name: str,
    ) -> None:
        reader = check_open(request).hostname
        grant = moved = self.grants.movable(request, name)
        if grant is None:
            stale = await self._looked_after(request) or self._stale(request)
            if stale is not None:
                await answer(context, peer_pb2.OpenEvent(stale=stale))
                return
            principal = principal_of(context, request.reader_id, name)
            grant = self.grants.admit(self._find(request), principal, reader)
        if grant is None:
            # At debug level: a refused reader retries several times a second.
            event(log, "reader.busy", level=logging.DEBUG, reader=reader)
            await answer(context, self.grants.busy())
            return
        access, began_s = self.access, time.monotonic()
        try:
            if moved is not None:
                await grant.go_on(context)
            else:
                await grant.begin(request.transports, context)
            await grant.keep(
                context,
                renewals,
                self._doubts,
                lambda: access is not None and access.ends_soon(context, began_s),
            )
        except TimeoutError:
            event(log, "reader.expired", grant=grant.id, reader=reader)
        finally:
            await grant.end(context)

    async def Trade(
        self, request_iterator: AsyncIterator[peer_pb2.SwarmMessage], context: Any
    ) -> None:
        """Trade chunks with a peer until the stream ends."""
        first = await first_message(request_iterator)
        if first is None or first.WhichOneof("message") != "hello":
            raise PeerProtocolError("the first message of a swarm stream must be a hello")
        served = self.models.get(first.hello.source_id)
        if served is None or served.newer or self.state is not SourceState.SERVING:
            raise PeerRefusedError("this process serves no such source")
        record = codec.source_from_wire(first.hello.own)

        async def hear() -> peer_pb2.SwarmMessage | None:
            return await anext(request_iterator, None)

        with self._pulling(context, served) as name:
            if not record.ref.same_weights(served.held.manifest.ref):
                raise PeerRefusedError(
                    f"{served.held.key} here is another model, or has another layout"
                )
            principal = principal_of(context, record.source_id, name)
            stream = PeerStream(record.endpoint, hear, context.write, address=principal.address)
            self.streams += 1
            self.grants.limits.trades(principal, +1)
            try:
                # It could not read the chunks that it requests.
                if self.grants.limits.full_for(principal):
                    await stream.refuse()
                    return
                await served.participant.trade(record, first.hello.have, stream)
            finally:
                self.streams -= 1
                self.grants.limits.trades(principal, -1)

    # -- the source's side ----------------------------------------------------------------------

    def drain(self, grace_s: float) -> None:
        """Refuse new grants, and send every reader the time that it has left."""
        self.state = SourceState.DRAINING
        event = peer_pb2.OpenEvent(draining=peer_pb2.Draining(grace_s=grace_s))
        self.grants.tell(event)

    def supersede(self, source_id: str, generation: int, grace_s: float) -> None:
        """Record that another source of this process replaces this one.

        Args:
            source_id: The source that is replaced. It grants no more reads.
            generation: The generation of the one that replaces it.
            grace_s: How long its readers have to finish; each gets an event.
        """
        self.models[source_id].newer = generation
        event = peer_pb2.OpenEvent(draining=peer_pb2.Draining(grace_s=grace_s))
        self.grants.tell(event, source_id)

    def cut(self, source_id: str) -> None:
        """Cut off the readers of a superseded source: what they read from now on is not valid."""
        served = self.models.get(source_id)
        if served is None:  # removed meanwhile
            return
        served.cut = True
        event = peer_pb2.OpenEvent(stale=_stale_of(served))
        self.grants.tell(event, source_id)
        for exposure in served.all_exposures():
            try:
                exposure.set_generation(served.newer)
            except MxError as error:  # such as a lost GPU's
                log.warning("%s: %s", served.held.key, error)
                exposure.close()
        served.participant.withdrawn()

    def remove(self, source_id: str) -> ExposedModel | None:
        """Remove a source, and return it. Later requests for it get the generation that has
        replaced it, if there is one."""
        served = self.models.pop(source_id, None)
        self.grants.limits.forget(source_id)
        if served is not None and served.newer:
            self._gone[source_id] = _stale_of(served)
            while len(self._gone) > _MAX_GONE:
                del self._gone[next(iter(self._gone))]
        return served

    def documents(self, context: Any, digests: Sequence[bytes]) -> Callable[[bytes], bytes | None]:
        """Return what returns a document, by its digest, of any model that a caller may pull."""
        del digests
        held = [each.held for each in self.models.values()]
        found = [each for each in held if self._may_pull(context, each.key.name)]
        return lambda digest: next(
            (each.documents[digest] for each in found if digest in each.documents), None
        )

    async def _looked_after(self, request: peer_pb2.OpenRequest) -> peer_pb2.Stale | None:
        """Return what to tell a reader of lent memory that is about to be superseded, since its
        owner wants to write, or does not use it any more; None: it is not."""
        served = self.models.get(request.source_id)
        if served is None or served.watchman is None or await served.watchman.check():
            return None
        if self.state is SourceState.DRAINING:  # nothing supersedes it
            return None
        soon = peer_pb2.Stale(generation=served.held.generation + 1, changed=served.changed)
        return self._stale(request) or soon

    def _stale(self, request: peer_pb2.OpenRequest) -> peer_pb2.Stale | None:
        """Return what to tell a reader whose generation is not served any more; None: it is."""
        served = self.models.get(request.source_id)
        if served is None:
            return self._gone.get(request.source_id)
        if request.generation != served.held.generation and not served.newer:
            return peer_pb2.Stale(generation=served.held.generation)
        return _stale_of(served) if served.newer else None

    def _find(self, request: peer_pb2.OpenRequest) -> ExposedModel:
        served = self.models.get(request.source_id)
        if served is None or served.held.manifest.ref.identity != request.identity:
            raise PeerRefusedError("this process does not hold that model")
        if self.state is SourceState.DRAINING:
            raise PeerRefusedError("draining: no new grants are given")
        return served


def _stale_of(served: ExposedModel) -> peer_pb2.Stale:
    return peer_pb2.Stale(generation=served.newer, changed=served.changed)
