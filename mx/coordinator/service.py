"""The Coordinator service: the codec checks requests, the state answers them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from mx import codec
from mx.coordinator.callers import check_places, own_port
from mx.coordinator.decoding import ManifestDecoder
from mx.coordinator.events import warn_of_unreached
from mx.coordinator.listings import ListingServicer
from mx.coordinator.marks import Marks
from mx.coordinator.paging import ANSWER_BYTES, pages_of
from mx.coordinator.proofs import Proofs
from mx.coordinator.state import CoordinatorState
from mx.coordinator.uploads import Upload
from mx.coordinator.view import View, Views
from mx.coordinator.watchers import INTERVAL_S, MeantLog, Watcher
from mx.core import layout_rules
from mx.core.answers import ListedSource, in_order, in_turn
from mx.core.budget import Budget
from mx.core.changes import ChangeKind, Tail
from mx.core.ownership import Receipt
from mx.core.policy import Right
from mx.core.registry import RegisteredSource, Registry
from mx.core.types import Registration, SourceRole
from mx.core.versions import HINT, Versions, own
from mx.errors import (
    ClosedError,
    CoordinatorVersionError,
    MxError,
    NotAllowedError,
    PeerProtocolError,
    UnknownSourceError,
)
from mx.wire.address import host_of_peer
from mx.wire.documents import pages
from mx.wire.principals import Access, caller_of, payer_of
from mx.wire.v1 import common_pb2 as pb_common
from mx.wire.v1 import coordinator_pb2 as pb

_T = TypeVar("_T")

REGISTER_TIMEOUT_S = 60.0
#: A source that sends no heartbeat for this many leases is gone.
_SILENT_LEASES = 4
_SILENT_S = 15.0
#: The size of a batch; a watcher that does not read holds about two of them here.
_WATCH_BYTES = 32 << 10
_WATCH_SLICE = 64
_MAX_RESOLVED = 256
_MAX_MISSING = 4096
#: A manifest up to this size is part of the answer to Resolve; each document is one page.
_INLINE_BYTES = 1 << 20


class CoordinatorServicer(ListingServicer):
    """The Coordinator service, for `mx.wire.server.listen`."""

    def __init__(
        self,
        state: CoordinatorState,
        *,
        receipt_key: bytes | None = None,
        access: Access | None = None,
    ) -> None:
        """
        Args:
            state: The state.
            receipt_key: See `mx.coordinator.proofs.Proofs`.
            access: Who may do what; None: everybody everything.
        """
        access = access or Access()
        views = Views(state, access)
        super().__init__(views)
        self._state = state
        nonces = state.limits.nonces
        self._proofs = Proofs(receipt_key, state.now, lambda: state.epoch, nonces)
        self._marks = Marks(state.store, self._proofs, state.lease_s)
        self._decoded = ManifestDecoder()
        self._rng = random.Random()
        self._log = views.log
        self._names = MeantLog()
        self._layouts = layout_rules.InUse(state.now())
        limits = state.limits
        self._registering = Budget(limits.registrations, "the coordinator has {} registrations")
        self._beating = Budget(limits.heartbeats, "the coordinator has {} heartbeat streams")
        self._watching = Budget(limits.watches, "the coordinator has {} watches")
        state.follow(self._on_changes)
        access.follow(self._log.wake)  # every watch looks at it

    def stop(self) -> None:
        """End every watch and heartbeat stream, and refuse new ones."""
        self._stopped.set()
        for silence in self._silences:
            silence.reschedule(0.0)
        self._log.wake()

    def streams(self) -> dict[str, int]:
        """Return how many streams are open, by kind."""
        return {
            "registration": self._registering.total,
            "heartbeat": self._beating.total,
            "watch": self._watching.total,
            "pull": self._reporting.total,
        }

    def on_call(self, context: Any, versions: Versions) -> None:
        """Refuse a caller whose certificate names no process, or one that may do nothing, and note
        the layout version of one that does not plan the newest."""
        self._access.require_some(context)
        newest = versions.layout.high
        if newest < layout_rules.newest():
            self._layouts.began(newest)
            context.add_done_callback(lambda _: self._layouts.ended(newest, self._state.now()))

    def on_documents(self, context: Any) -> None:
        """Refuse a caller of the Documents service that may pull no model.

        Raises:
            NotAllowedError: It may not.
        """
        self._view(context).require((Right.PULL,), granted=False)

    def documents(self, context: Any, digests: Sequence[bytes]) -> Callable[[bytes], bytes | None]:
        """Return what returns one of these documents if the caller may pull a model that it is
        of."""
        return self._view(context).documents(digests)

    # -- sources --------------------------------------------------------------------------------

    async def Layout(self, request: pb.LayoutRequest, context: Any) -> pb.LayoutResponse:
        unlisted = self._layouts.named(self._state.now())
        key = codec.key_from_wire(request.model)
        version = await self._view(context).layout_version(key, unlisted)
        return pb.LayoutResponse(version=version)

    async def Register(self, requests: AsyncIterator[Any], context: Any) -> pb.RegisterResponse:
        with self._registering.held(payer_of(context)):
            try:
                async with asyncio.timeout(REGISTER_TIMEOUT_S):
                    return await self._register(requests, context)
            except TimeoutError:
                raise PeerProtocolError(
                    f"the registration took more than {REGISTER_TIMEOUT_S:g} s"
                ) from None

    async def _register(self, requests: AsyncIterator[Any], context: Any) -> pb.RegisterResponse:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "source":
            raise PeerProtocolError("Register: the first message carries the source")
        registration = codec.registration_from_wire(first.source)
        record = registration.record
        if record.ref.layout_version not in layout_rules.RULES:
            raise CoordinatorVersionError(
                f"{record.model} is in layout {record.ref.layout_version}; this coordinator plans "
                f"layout {own().layout}",
                hint=HINT,
            )
        model, pin = record.model, record.ref.pin.hex()
        view = self._view(context)
        caller = view.require((Right.SERVE,), model.name, granted=False, pin=pin)
        port = own_port(context, self._access, model.name, record.endpoint, record.requests_port)
        record = replace(record, requests_port=port)
        registration = replace(registration, record=record)
        about = {"model": model.name, "revision": model.revision, "pin": pin}
        about["source"] = record.source_id
        try:
            if caller.subject is not None:  # it may be another's, or name others' places
                check_places(context, record)
                await view.check_free(record.source_id)
            answer = await self._registered(registration, first, requests, view)
        except MxError as error:
            self._access.refused(caller, error, Right.SERVE.value, **about)
            raise
        listed = answer.record
        about |= {"model": listed.model.name, "revision": listed.model.revision}
        done = "updated" if registration.intent.replaces else "bound"
        if listed.pin_only or record.role is SourceRole.RELAY:
            done = "listed"
        about["endpoint"] = listed.endpoint
        self._access.granted(caller, Right.SERVE.value, result=done, **about)
        await warn_of_unreached(listed.endpoint, host_of_peer(context.peer()))
        return pb.RegisterResponse(
            source_id=listed.source_id,
            lease_s=self._state.lease_s,
            coordinator_epoch=self._state.epoch,
            model=codec.key_to_wire(listed.model),
            pin_only=listed.pin_only,
            receipt=self._proofs.receipt(answer.receipt),
            mark=self._marks.current(),
            owner=answer.owner,
            published_s=answer.published_s,
        )

    async def _registered(
        self,
        registration: Registration,
        first: pb.RegisterRequest,
        requests: AsyncIterator[Any],
        view: View,
    ) -> RegisteredSource:
        record, address = registration.record, view.caller.name
        async with Upload(self._state, record, address, view.known()) as upload:
            async for request in requests:
                part = request.WhichOneof("part")
                if part is None:  # what a later release sends besides
                    continue
                if part != "page":
                    raise PeerProtocolError("Register: pages follow the source")
                await upload.add(request.page)
            await upload.finish(self._decoded)
        await self._marks.heed(first.mark, address)
        subject = view.caller.subject
        self._proofs.check(
            registration, first.source, address, None if subject is None else subject.name
        )
        registration = self._proofs.vouched(registration)
        receipt = self._proofs.read(registration.intent.receipt)
        return await self._state.register(
            registration, upload.documents, receipt=receipt, address=address
        )

    async def Missing(self, request: pb.MissingRequest, context: Any) -> pb.MissingResponse:
        if len(request.digests) > _MAX_MISSING:
            raise PeerProtocolError(f"more than {_MAX_MISSING} digests")
        digests = [codec.digest_from_wire(digest, "digests") for digest in request.digests]
        view = self._view(context)
        response = pb.MissingResponse(nonce=self._proofs.nonce())
        response.digests.extend(await view.missing(digests))
        if request.HasField("model"):
            response.vouches.extend(await view.vouches(codec.key_from_wire(request.model)))
        return response

    async def Heartbeat(
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: Any
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        caller, checked, view = caller_of(context), None, self._view(context)
        told: Receipt | None = None
        with self._beating.held(caller.name):
            silent_s = max(_SILENT_S, _SILENT_LEASES * self._state.lease_s)
            async for request in self._until_stopped(requests, silent_s):
                source_id = codec.source_id_from_wire(request.source_id)
                await self._marks.heed(request.mark)
                self._access.check_connection(context)
                port = codec.port_from_wire(request.requests_port)
                if caller.subject is not None and checked != (self._access.version, source_id):
                    await self._still_allowed(view, source_id, request.source_secret)
                    checked = self._access.version, source_id
                if port:
                    listed = (await view.owned(source_id)).record
                    name, endpoint = listed.model.name, listed.endpoint
                    port = own_port(context, self._access, name, endpoint, port)
                beat = partial(
                    Registry.heartbeat,
                    source_id=source_id,
                    secret=codec.secret_from_wire(request.source_secret),
                    state=codec.state_from_wire(request.state),
                    readers=request.readers,
                    gb_per_s=codec.rate_from_wire(request.gb_per_s, "gb_per_s"),
                    requests_port=port,
                )
                record = await self._state.event(beat)
                response = pb.HeartbeatResponse(
                    lease_s=self._state.lease_s,
                    coordinator_epoch=self._state.epoch,
                    pin_only=record.pin_only,
                    mark=self._marks.current(),
                    replaces=view.outdated_by(source_id),
                )
                receipt = view.receipt_of(source_id)
                if receipt != told:
                    told, response.receipt = receipt, self._proofs.receipt(receipt)
                yield response

    async def _still_allowed(self, view: View, source_id: str, secret: bytes) -> None:
        """Raise NotAllowedError unless a source's registrant may still serve its model; then it is
        not listed any more."""
        listed = await view.owned(source_id)
        model, pin = listed.record.model, listed.record.ref.pin.hex()
        try:
            view.require((Right.SERVE,), model.name, granted=False, pin=pin, source=source_id)
        except NotAllowedError:
            await self._state.event(
                partial(
                    Registry.deregister, source_id=source_id, secret=codec.secret_from_wire(secret)
                )
            )
            raise

    async def Advertise(self, request: pb.AdvertiseRequest, context: Any) -> pb.AdvertiseResponse:
        source_id = codec.source_id_from_wire(request.source_id)
        secret = codec.secret_from_wire(request.source_secret)
        held = codec.ranges_from_wire(request.held)
        listed = await self._view(context).owned(source_id)
        codec.check_held(listed.record.table, held)
        await self._state.event(
            lambda registry, now: registry.advertise(
                now, source_id, secret, request.generation, held
            )
        )
        return pb.AdvertiseResponse()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        source_id = codec.source_id_from_wire(request.source_id)
        secret = codec.secret_from_wire(request.source_secret)
        with contextlib.suppress(UnknownSourceError):
            await self._view(context).owned(source_id)
        await self._state.event(
            lambda registry, now: registry.deregister(
                now, source_id, secret, keeps_name=request.keeps_name
            )
        )
        return pb.DeregisterResponse()

    # -- questions --------------------------------------------------------------------------------

    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:
        view, name = self._view(context), request.name.partition("@")[0]
        view.require((Right.PULL,), name, granted=False)
        found = await view.resolve(
            request.name,
            request.revision,
            request.variant,
            serves=request.serves,
            allow_older=request.allow_older,
            seen=await self._marks.read_seen(request.seen, name),
        )
        response = pb.ResolveResponse(
            model=codec.key_to_wire(found.model),
            manifest=codec.ref_to_wire(found.ref),
            source_count=len(found.sources),
            newest=None if found.newest is None else codec.key_to_wire(found.newest),
            older=map(codec.key_to_wire, found.older),
            seen=self._proofs.seen(found.seen, self._state.store.latest),
            vouch=found.vouch,
        )
        response.sources.extend(self._sources_that_fit(found.sources))
        if request.inline_documents and sum(found.ref.sizes) <= _INLINE_BYTES:
            for digest, data in view.inlined(found).items():
                response.documents.extend(pages(digest, data))
        return response

    def _sources_that_fit(self, sources: Sequence[ListedSource]) -> list[pb.Source]:
        """Return the messages of sources; of too many for one answer, a fair choice, which is
        another one for each who asks."""
        sized = [self._messages.sized(listed.record) for listed in sources]
        if len(sized) <= _MAX_RESOLVED and sum(size for _, size in sized) <= ANSWER_BYTES:
            return [message for message, _ in sized]
        size_of = {id(listed): size for listed, (_, size) in zip(sources, sized, strict=True)}
        nbytes, taken = 0, list[ListedSource]()
        for listed in islice(in_turn(sources, self._rng), _MAX_RESOLVED):
            nbytes += size_of[id(listed)]
            if nbytes > ANSWER_BYTES and taken:
                break
            taken.append(listed)
        return [self._messages.source(each.record) for each in in_order(taken)]

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        with self._watching.held(payer_of(context)):
            await self._state.tick()
            policy, view = self._access.version, self._view(context)
            watcher = view.watcher(request.name, request.revision, pulls=request.pulls)
            snapshot = True
            with self._log.watching(watcher):
                while not self._stopped.is_set():
                    watcher.woken.clear()
                    if policy != self._access.version:  # who sees nothing any more is refused
                        policy = self._access.version
                        view.sees_rows(request.name, pulls=request.pulls)
                        watcher.look_again()
                    while watcher.behind:
                        latest = self._log.latest
                        while watcher.is_before(latest):
                            events = map(self._messages.event, watcher.take(_WATCH_SLICE))
                            for message in _watch_messages(events, in_batches=request.batches):
                                yield message
                        if not watcher.is_before(self._log.latest_source):
                            break
                        await asyncio.sleep(INTERVAL_S)  # what changed meanwhile is another batch
                    # No source may come between its changes and what names mean through them.
                    for named in self._named(watcher):
                        yield named
                    if snapshot:
                        yield pb.WatchEvent(kind=pb.WatchEvent.KIND_SNAPSHOT_END)
                        snapshot = False
                    sent_s = time.monotonic()
                    await watcher.woken.wait()
                    await asyncio.sleep(sent_s + INTERVAL_S - time.monotonic())
        raise ClosedError("the coordinator is shutting down")

    def _named(self, watcher: Watcher) -> list[pb.WatchEvent]:
        """Return the events of names that have changed their meaning since the last call."""
        return [
            pb.WatchEvent(
                kind=pb.WatchEvent.KIND_NAMED,
                named=pb_common.ModelKey(
                    name=meant.name, revision=meant.revision, variant=meant.bundle
                ),
            )
            for meant in watcher.take_meant(self._names)
        ]

    def _on_changes(self, tail: Tail) -> None:
        self._log.push(tail.changes, begins_again=tail.begins_again)
        self._names.push(tail.meant, begins_again=tail.begins_again)
        if tail.begins_again:
            self._messages.forget_all()
        for change in tail.changes:
            if change.kind is ChangeKind.GONE:
                self._messages.forget(change.record.source_id)
        self._log.wake(each.name for each in tail.meant)


def _watch_messages(
    events: Iterable[pb.WatchEvent], *, in_batches: bool
) -> Iterator[pb.WatchEvent]:
    if not in_batches:
        yield from events
        return
    for page in pages_of(events, _WATCH_BYTES):
        if page:
            yield pb.WatchEvent(batch=page)
