"""What sources ask of the coordinator: to be listed, and to stay listed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from blake3 import blake3

from mx import codec
from mx.core.marks import MAX_MARK_BYTES
from mx.core.ownership import Purpose, proof, statement
from mx.core.types import ModelKey, Registration, SourceRecord
from mx.errors import (
    CoordinatorError,
    LocalError,
    MxError,
    NotAllowedError,
    UnknownSourceError,
)
from mx.namekey import NameKey
from mx.tasks import end_tasks
from mx.wire import documents as wire_documents
from mx.wire.channel import Remote, cut, files_of, translating
from mx.wire.coordinators import Coordinators, Link
from mx.wire.v1 import coordinator_pb2 as pb

_UPLOAD_TIMEOUT_S = 60.0  # the upload of a large manifest takes longer than other calls
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
#: Only a person mends a refusal.
_REFUSED_BACKOFF_S = 10.0
#: How often a registration is tried whose nonce the coordinator does not know any more.
_NONCES = 3


class RegisterAnswer(NamedTuple):
    """The answer to `register`.

    `model` is the key that the source is listed under: for an update it has a new revision. With
    `pin_only` the name stands for other weights, and readers find the source by its pin. `receipt`
    is to be brought when the source registers `model` again. `owner` is the commitment that the
    name belongs to, b"" if there is none, or an older coordinator does not say. `published_s` is to
    be brought then, too (`mx.core.types.Intent`). `vouch` is what was said of the weights,
    which stands.
    """

    lease_s: float
    epoch: str
    model: ModelKey
    pin_only: bool = False
    receipt: bytes = b""
    owner: bytes = b""
    published_s: float = 0.0
    vouch: bytes = b""


class SourceCalls:
    """The calls of sources, in one client; see `mx.wire.client.CoordinatorClient`."""

    def __init__(self, coordinators: Coordinators, timeout_s: float) -> None:
        """
        Args:
            coordinators: Where to ask; the client closes them.
            timeout_s: The deadline of a registration.
        """
        self._coordinators = coordinators
        self._timeout_s = timeout_s
        self._secrets: dict[str, bytes] = {}
        self._epochs: dict[str, str] = {}
        self._mark = b""  # the last one that a coordinator has answered

    @property
    def link(self) -> Link:
        """The coordinator that is asked now."""
        return self._coordinators.current

    @property
    def remote(self) -> Remote:
        """Its address, for messages."""
        return self.link.remote

    async def register(
        self,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        *,
        name_key: NameKey | None = None,
    ) -> RegisterAnswer:
        """List a source, or list it again.

        Uploads those of the source's documents, in pages, that the coordinator lacks.

        Args:
            registration: The source, and what it asks for.
            documents: The documents of its manifest, and that of its table's rows, by digest.
            name_key: The key of the name's owner, to prove that the source holds it.

        Raises:
            BindingError: The name is bound to other weights or belongs to another owner, or another
                source has updated it.
            NotAllowedError: The source id belongs to another secret.
            StaleGenerationError: The generation is past.
            CoordinatorError: The coordinator does not answer.
            LocalError: `documents` lacks a document that the coordinator lacks too.
        """
        record = registration.record
        codec.check_model_key(record.model)
        answer, model, receipt, vouch = await self._coordinators.ask(
            lambda link: self._register_at(link, registration, documents, name_key)
        )
        self._secrets[record.source_id] = registration.secret
        self._epochs[record.source_id] = answer.coordinator_epoch
        self._marked(answer.mark)
        return RegisterAnswer(
            answer.lease_s,
            answer.coordinator_epoch,
            model,
            answer.pin_only,
            receipt,
            codec.commitment_from_wire(answer.owner),
            codec.published_from_wire(answer.published_s),
            vouch,
        )

    async def _register_at(
        self,
        link: Link,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        name_key: NameKey | None,
    ) -> tuple[pb.RegisterResponse, ModelKey, bytes, bytes]:
        """Register at one coordinator, whose nonces are its own."""
        for _ in range(_NONCES):
            owned = registration.record.model if name_key else None
            missing = await self._missing(link, registration.record, documents, owned)
            wanted = {digest: documents[digest] for digest in missing.digests}
            proved, proof = _proved(registration, name_key, missing.nonce, missing.vouches)
            source = codec.registration_to_wire(proved, proof, missing.nonce if proof else b"")
            try:
                answer = await self._upload(link, source, wanted)
                model = codec.key_from_wire(answer.model)
                receipt = codec.receipt_from_wire(answer.receipt)
                return answer, model, receipt, proved.record.vouch
            except UnknownSourceError as error:  # it restarted since it gave the nonce
                refused = error
        raise CoordinatorError(refused.message)

    async def _missing(
        self,
        link: Link,
        record: SourceRecord,
        documents: Mapping[bytes, bytes],
        owned: ModelKey | None,
    ) -> pb.MissingResponse:
        """Return which documents the coordinator lacks, a nonce, and what was said of a model that
        the source may own. Raises as `register`."""
        model = None if owned is None else codec.key_to_wire(owned)
        missing: pb.MissingResponse = await link.stub.Missing(
            pb.MissingRequest(digests=[digest for digest, _ in record.documents], model=model),
            timeout=link.timeout_s,
        )
        absent = [digest for digest in missing.digests if digest not in documents]
        if absent:
            raise LocalError(f"document {absent[0][:8].hex()} of the source is missing here")
        return missing

    async def _upload(
        self, link: Link, source: pb.Source, wanted: Mapping[bytes, bytes]
    ) -> pb.RegisterResponse:
        """Register a source with these documents."""

        async def requests() -> AsyncIterator[pb.RegisterRequest]:
            yield pb.RegisterRequest(source=source, mark=self._mark)
            for digest, data in wanted.items():
                for page in wire_documents.pages(digest, data, wire_documents.PIECE_BYTES):
                    yield pb.RegisterRequest(page=page)

        # Longer than other attempts, since a thousand may register at once: gRPC itself notices
        # that the coordinator has stopped.
        timeout_s = max(self._timeout_s, _UPLOAD_TIMEOUT_S) if wanted else self._timeout_s
        answer: pb.RegisterResponse = await link.stub.Register(requests(), timeout=timeout_s)
        return answer

    def _marked(self, mark: bytes) -> None:
        if mark and len(mark) <= MAX_MARK_BYTES:
            self._mark = mark

    async def keep_alive(
        self,
        current: Callable[[], SourceRecord],
        register: Callable[[], Awaitable[object]],
        *,
        readers: Callable[[], int] = lambda: 0,
        gb_per_s: Callable[[], float] = lambda: 0.0,
        news: asyncio.Event | None = None,
        on_state: Callable[[bool, str], None] = lambda registered, why: None,
        on_pin_only: Callable[[bool], None] = lambda pin_only: None,
        on_receipt: Callable[[bytes], None] = lambda receipt: None,
        on_outdated: Callable[[str], None] = lambda replaces: None,
    ) -> None:
        """Send heartbeats until cancelled, and register again whenever the coordinator has lost
        the source, was restarted or was away.

        If it does not answer, the next one is asked at once, which may know the source. Errors of
        the coordinators are not raised: the attempts go on with jittered backoff.

        Args:
            current: Returns the source's current record.
            register: Lists the source again, by `register` of this client.
            readers: Returns the number of the source's readers.
            gb_per_s: Returns the source's rate.
            news: Set when the record has changed, so that the next heartbeat comes at once.
            on_state: Called as on_state(registered, why) on each change of state, and of the kind
                of error that keeps the source from being registered.
            on_pin_only: Called with each answer's `pin_only`, see `RegisterAnswer`.
            on_receipt: Called with each receipt that takes the place of the one before.
            on_outdated: Called with the revision that the source has to update, so that its name
                means it.
        """
        news = news or asyncio.Event()
        known: bool | None = None
        failed_with: type[MxError] | None = None
        backoff_s = _FIRST_BACKOFF_S
        is_registered = current().source_id in self._epochs
        lost: set[Link] = set()  # since the last answer

        def beating(answer: pb.HeartbeatResponse) -> None:
            nonlocal known, backoff_s
            backoff_s = _FIRST_BACKOFF_S
            lost.clear()
            if known is not True:
                known = True
                on_state(True, f"registered with the coordinator at {self.remote.address}")
            on_pin_only(answer.pin_only)
            if answer.receipt:
                on_receipt(codec.receipt_from_wire(answer.receipt))
            if answer.replaces:
                on_outdated(answer.replaces)

        while True:
            try:
                if not is_registered:
                    await register()
                    is_registered = True
                await self._beat(current, readers, gb_per_s, news, beating, lost)
            except UnknownSourceError:
                # It restarted, or our lease ended. It answers, so register at once, but with
                # backoff if this repeats.
                is_registered = False
                if backoff_s > _FIRST_BACKOFF_S:
                    await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            except MxError as error:
                if is_registered and self._coordinators.current not in lost:
                    continue  # another one, which may list the source
                is_registered = False
                refused = isinstance(error, NotAllowedError)
                if known is not False or failed_with is not type(error):
                    known, failed_with = False, type(error)
                    # It is tried again by itself, unless it is refused.
                    on_state(False, f"not registered: {error if refused else error.message}")
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _REFUSED_BACKOFF_S if refused else _MAX_BACKOFF_S)

    async def _beat(
        self,
        current: Callable[[], SourceRecord],
        readers: Callable[[], int],
        gb_per_s: Callable[[], float],
        news: asyncio.Event,
        beating: Callable[[pb.HeartbeatResponse], None],
        lost: set[Link],
    ) -> None:
        """Send heartbeats until one fails, and raise that error; return where another certificate
        is to be shown from now on. Adds the coordinator to `lost`."""
        async with self._coordinators.using() as link:
            lost.add(link)
            shown = files_of(link.channel)
            ended = f"the coordinator at {link.remote.address} ended the heartbeats"
            call = link.stub.Heartbeat()
            # The next answer is awaited all the time, so that the end of the stream is noticed at
            # once. (A callback of the call's would keep the call, and its connection.)
            reading = asyncio.create_task(call.read(), name="mx-heartbeat-answer")

            def ends(_: object) -> None:
                news.set()

            try:
                while True:
                    news.clear()
                    reading.remove_done_callback(ends)
                    record = current()
                    request = pb.HeartbeatRequest(
                        source_id=record.source_id,
                        readers=readers(),
                        gb_per_s=gb_per_s(),
                        state=codec.state_to_wire(record.state),
                        source_secret=self._secrets[record.source_id],
                        requests_port=record.requests_port,
                        mark=self._mark,
                    )
                    with translating(link.remote):
                        async with asyncio.timeout(link.timeout_s):
                            await call.write(request)
                            answer = await reading
                    if not isinstance(answer, pb.HeartbeatResponse):
                        raise CoordinatorError(ended)
                    reading = asyncio.create_task(call.read(), name="mx-heartbeat-answer")
                    reading.add_done_callback(ends)
                    self._marked(answer.mark)
                    if answer.coordinator_epoch != self._epochs[record.source_id]:
                        raise UnknownSourceError("the coordinator restarted")
                    beating(answer)
                    if files_of(link.channel) != shown:
                        return
                    # This way round NaN is the least that is waited.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(max(0.3, answer.lease_s), 3600.0) / 3):
                            await news.wait()
            except TimeoutError as error:
                raise CoordinatorError(
                    f"the coordinator at {link.remote.address} did not answer in time"
                ) from error
            except asyncio.InvalidStateError as error:
                raise CoordinatorError(ended) from error
            finally:
                cut(call)
                await end_tasks(reading)

    async def advertise(
        self, source_id: str, generation: int, held: Sequence[tuple[int, int]]
    ) -> None:
        """Report which layers a source that this client registered holds now.

        Args:
            source_id: The source.
            generation: The generation of its memory.
            held: The half-open ranges of its complete layers.

        Raises:
            UnknownSourceError: The source is not listed.
            StaleGenerationError: The source has a newer generation by now.
        """
        request = pb.AdvertiseRequest(
            source_id=source_id,
            generation=generation,
            held=codec.ranges_to_wire(held),
            source_secret=self._secret(source_id),
        )
        await self._coordinators.ask(
            lambda link: link.stub.Advertise(request, timeout=link.timeout_s)
        )

    async def deregister(self, source_id: str, *, keeps_name: bool = False) -> None:
        """Remove a source that this client registered from the list, if it is still listed.

        With `keeps_name` its name stays bound for a while, as after a crash.
        """
        request = pb.DeregisterRequest(
            source_id=source_id, source_secret=self._secret(source_id), keeps_name=keeps_name
        )
        await self._coordinators.ask(
            lambda link: link.stub.Deregister(request, timeout=link.timeout_s)
        )
        self._secrets.pop(source_id, None)
        self._epochs.pop(source_id, None)

    def _secret(self, source_id: str) -> bytes:
        if source_id not in self._secrets:
            raise UnknownSourceError(f"source {source_id} was not registered by this client")
        return self._secrets[source_id]


def _proved(
    registration: Registration,
    name_key: NameKey | None,
    nonce: bytes,
    vouches: Iterable[bytes] = (),
) -> tuple[Registration, bytes]:
    """Return a registration with its commitment, statement and vouch, and the proof that it holds
    the name key; without a key as it is, and b""."""
    record, replaces = registration.record, registration.intent.replaces
    key, identity = record.model, record.ref.identity
    if name_key is None or not name_key.signs_for(key):
        return registration, b""
    purpose = Purpose.UPDATE if replaces else Purpose.REGISTER
    asked = key._replace(revision=replaces or key.revision)
    known = [record.vouch, *vouches]
    # What was published before, and is now to have another number, is no newer for that.
    intent = registration.intent
    newer = not intent.published_s and (bool(replaces) or intent.publishes)
    vouch = name_key.vouch(asked, record.ref, known, time.time_ns() // 1000, updates=newer)
    said = proof(
        purpose,
        asked,
        identity,
        record.source_id,
        record.endpoint,
        blake3(registration.secret).digest(),
        nonce,
    )
    record = replace(
        record,
        vouch=vouch,
        commitment=name_key.commitment(key.name),
        statement=name_key.sign(key.name, statement(key, identity, replaces=replaces)),
        certificate=name_key.certificate(key.name),
    )
    return replace(registration, record=record), name_key.sign(key.name, said)
