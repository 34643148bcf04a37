"""The coordinator's client: one channel, a deadline on every call, errors of mx."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from blake3 import blake3

from mx import codec
from mx.core.answers import BundleStatus, ModelStatus
from mx.core.ownership import Purpose, proof, statement
from mx.core.pull_status import PullStatus
from mx.core.rates import Rate
from mx.core.registration import Registration
from mx.core.types import ManifestRef, ModelKey, SourceRecord
from mx.errors import (
    CoordinatorError,
    LocalError,
    MxError,
    PeerProtocolError,
    UnknownSourceError,
)
from mx.namekey import NameKey
from mx.transport import TlsFiles
from mx.wire import documents as wire_documents
from mx.wire.channel import Remote, Role, cut, dial, translating
from mx.wire.listing import Lists, SourceStatus, bundle_status
from mx.wire.progress import PullUpdates, Report, pull_from_wire, rate_of_hosts, reporting
from mx.wire.rpc import Stub
from mx.wire.status import planned_here
from mx.wire.tls import diagnosing
from mx.wire.v1 import coordinator_pb2 as pb
from mx.wire.watching import WatchUpdate, update_from_wire

_UPLOAD_TIMEOUT_S = 60.0  # the upload of a large manifest takes longer than other calls
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
#: How often a registration is tried whose nonce the coordinator does not know any more.
_NONCES = 3


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to `register`.

    `model` is the key that the source is listed under: for an update it has a new revision. With
    `pin_only` the name stands for other weights, and readers find the source by its pin. `receipt`
    is to be brought when the source registers `model` again.
    """

    lease_s: float
    epoch: str
    model: ModelKey
    pin_only: bool = False
    receipt: bytes = b""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The manifest to pull, and its sources, origins first; a known model may have none now.

    `documents` are the verified documents that came with the answer: all of a small manifest, none
    of a large one.
    """

    model: ModelKey
    ref: ManifestRef
    sources: list[SourceRecord]
    documents: dict[bytes, bytes]


class CoordinatorClient:
    """A client for one event loop; `close` it. Safe for concurrent calls.

    Every call raises the error that `mx.wire.status.translate` makes of a failed RPC:
    CoordinatorError if there is no answer within the timeout, else the coordinator's error. The
    client remembers the secrets of the sources that it registered.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """
        Args:
            address: HOST:PORT or unix:PATH of the coordinator.
            tls: The certificates for mutual TLS.
            insecure: Allow plain text beyond this machine.
            timeout_s: The deadline of a call; uploads of documents have at least 60 s.

        Raises:
            ConfigError: As `dial`.
            NotAllowedError: As `dial`.
        """
        self.remote = Remote(Role.COORDINATOR, address, tls)
        self._timeout_s = timeout_s
        self._channel = dial(address, tls=tls, insecure=insecure)
        service = pb.DESCRIPTOR.services_by_name["Coordinator"]
        self._stub = Stub(self._channel, service, self.remote)
        self._lists = Lists(self.remote)
        self._secrets: dict[str, bytes] = {}
        self._epochs: dict[str, str] = {}

    async def close(self) -> None:
        """Cut running calls and close the channel. Deregisters nothing."""
        await self._channel.close(None)

    # -- for sources ----------------------------------------------------------------------------

    async def register(
        self,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        *,
        name_key: NameKey | None = None,
    ) -> Registered:
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
        for _ in range(_NONCES):
            missing = await self._missing(record, documents)
            wanted = {digest: documents[digest] for digest in missing.digests}
            proved, proof = _proved(registration, name_key, missing.nonce)
            source = codec.registration_to_wire(proved, proof, missing.nonce if proof else b"")
            try:
                answer = await self._upload(source, wanted)
                break
            except UnknownSourceError as error:  # it restarted since it gave the nonce
                refused = error
        else:
            raise CoordinatorError(refused.message)
        async with self._reading():
            model = codec.key_from_wire(answer.model)
            given = codec.receipt_from_wire(answer.receipt)
        self._secrets[record.source_id] = registration.secret
        self._epochs[record.source_id] = answer.coordinator_epoch
        return Registered(answer.lease_s, answer.coordinator_epoch, model, answer.pin_only, given)

    async def _missing(
        self, record: SourceRecord, documents: Mapping[bytes, bytes]
    ) -> pb.MissingResponse:
        """Return which documents the coordinator lacks, and a nonce. Raises as `register`."""
        async with diagnosing(self.remote):
            missing: pb.MissingResponse = await self._stub.Missing(
                pb.MissingRequest(digests=[digest for digest, _ in record.documents]),
                timeout=self._timeout_s,
            )
        absent = [digest for digest in missing.digests if digest not in documents]
        if absent:
            raise LocalError(f"document {absent[0][:8].hex()} of the source is missing here")
        return missing

    async def _upload(
        self, source: pb.Source, wanted: Mapping[bytes, bytes]
    ) -> pb.RegisterResponse:
        """Register a source with these documents."""

        async def requests() -> AsyncIterator[pb.RegisterRequest]:
            yield pb.RegisterRequest(source=source)
            for digest, data in wanted.items():
                for page in wire_documents.pages(digest, data):
                    yield pb.RegisterRequest(page=page)

        timeout_s = max(self._timeout_s, _UPLOAD_TIMEOUT_S) if wanted else self._timeout_s
        with translating(self.remote):
            answer: pb.RegisterResponse = await self._stub.Register(requests(), timeout=timeout_s)
        return answer

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
    ) -> None:
        """Send heartbeats until cancelled, and register again whenever the coordinator has lost
        the source, was restarted or was away.

        Errors of the coordinator are not raised: the attempts go on with jittered backoff.

        Args:
            current: Returns the source's current record.
            register: Lists the source again, by `register` of this client.
            readers: Returns the number of the source's readers.
            gb_per_s: Returns the source's rate.
            news: Set when the record has changed, so that the next heartbeat comes at once.
            on_state: Called as on_state(registered, why) on each change of state, and of the kind
                of error that keeps the source from being registered.
            on_pin_only: Called with each answer's `pin_only`, see `Registered`.
        """
        news = news or asyncio.Event()
        known: bool | None = None
        failed_with: type[MxError] | None = None
        backoff_s = _FIRST_BACKOFF_S
        is_registered = current().source_id in self._epochs

        def beating(pin_only: bool) -> None:
            nonlocal known, backoff_s
            backoff_s = _FIRST_BACKOFF_S
            if known is not True:
                known = True
                on_state(True, f"registered with the coordinator at {self.remote.address}")
            on_pin_only(pin_only)

        while True:
            try:
                if not is_registered:
                    await register()
                    is_registered = True
                await self._beat(current, readers, gb_per_s, news, beating)
            except UnknownSourceError:
                # It restarted, or our lease ended. It answers, so register at once, but with
                # backoff if this repeats.
                is_registered = False
                if backoff_s > _FIRST_BACKOFF_S:
                    await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            except MxError as error:
                is_registered = False
                if known is not False or failed_with is not type(error):
                    known, failed_with = False, type(error)
                    on_state(False, f"not registered: {error}")
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _beat(
        self,
        current: Callable[[], SourceRecord],
        readers: Callable[[], int],
        gb_per_s: Callable[[], float],
        news: asyncio.Event,
        beating: Callable[[bool], None],
    ) -> None:
        """Send heartbeats until one fails, and raise that error."""
        ended = f"the coordinator at {self.remote.address} ended the heartbeats"
        call = self._stub.Heartbeat()
        try:
            while True:
                news.clear()
                record = current()
                request = pb.HeartbeatRequest(
                    source_id=record.source_id,
                    readers=readers(),
                    gb_per_s=gb_per_s(),
                    state=codec.state_to_wire(record.state),
                    source_secret=self._secrets[record.source_id],
                    requests_port=record.requests_port,
                )
                with translating(self.remote):
                    async with asyncio.timeout(self._timeout_s):
                        await call.write(request)
                        answer = await call.read()
                if not isinstance(answer, pb.HeartbeatResponse):
                    raise CoordinatorError(ended)
                if answer.coordinator_epoch != self._epochs[record.source_id]:
                    raise UnknownSourceError("the coordinator restarted")
                beating(answer.pin_only)
                # This way round NaN is the least that is waited.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(0.3, answer.lease_s), 3600.0) / 3):
                        await news.wait()
        except TimeoutError as error:
            raise CoordinatorError(
                f"the coordinator at {self.remote.address} did not answer in time"
            ) from error
        except asyncio.InvalidStateError as error:
            raise CoordinatorError(ended) from error
        finally:
            cut(call)

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
        with translating(self.remote):
            await self._stub.Advertise(request, timeout=self._timeout_s)

    async def deregister(self, source_id: str, *, keeps_name: bool = False) -> None:
        """Remove a source that this client registered from the list, if it is still listed.

        With `keeps_name` its name stays bound for a while, as after a crash.
        """
        request = pb.DeregisterRequest(
            source_id=source_id, source_secret=self._secret(source_id), keeps_name=keeps_name
        )
        with translating(self.remote):
            await self._stub.Deregister(request, timeout=self._timeout_s)
        self._secrets.pop(source_id, None)
        self._epochs.pop(source_id, None)

    def _secret(self, source_id: str) -> bytes:
        if source_id not in self._secrets:
            raise UnknownSourceError(f"source {source_id} was not registered by this client")
        return self._secrets[source_id]

    # -- for everyone -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """As `diagnosing`, and translate the errors of answers that parse but are not valid."""
        try:
            async with diagnosing(self.remote):
                yield
        except PeerProtocolError as error:
            raise CoordinatorError(
                f"the answer of the coordinator at {self.remote.address} is not valid: "
                f"{error.message}"
            ) from error

    async def resolve(
        self, name: str, revision: str = "", variant: str = "", *, documents: bool = True
    ) -> Resolution:
        """Return the manifest that NAME or NAME@PIN means, and the sources that serve it.

        Args:
            name: NAME or NAME@PIN.
            revision: "" for the newest one that is served; for a rank the one that NAME means for
                all ranks of its bundle.
            variant: "" for "checkpoint", or the only one that is listed.
            documents: Request the documents of a small manifest, too.

        Raises:
            UnknownModelError: No registered model fits.
            ConfigError: An argument is not a valid name or pin.
        """
        codec.check_model_key(
            ModelKey(name.partition("@")[0], revision or "main", variant or "checkpoint")
        )
        request = pb.ResolveRequest(
            name=name, revision=revision, variant=variant, inline_documents=documents
        )
        async with self._reading():
            answer = await self._stub.Resolve(request, timeout=self._timeout_s)
            ref = codec.ref_from_wire(answer.manifest)
            inlined = wire_documents.Assembler(ref.documents, who=self.remote.address)
            for page in answer.documents:
                inlined.add(page)
            return Resolution(
                codec.key_from_wire(answer.model),
                ref,
                self._lists.read("source", answer.sources, codec.source_from_wire),
                inlined.documents,
            )

    async def watch(self, name: str = "", revision: str = "") -> AsyncGenerator[WatchUpdate, None]:
        """Yield the listed sources (an UP each, then SNAPSHOT_END), then every change.

        Close the iterator when done. It raises as the other calls do if the coordinator fails.

        Args:
            name: The model; "" for all.
            revision: The revision; "" for all.
        """
        stream = self._stub.Watch(pb.WatchRequest(name=name, revision=revision, batches=True))
        try:
            async with self._reading():
                async for event in stream:
                    events = event.batch or (event,)
                    for update in self._lists.read("change", events, update_from_wire):
                        yield update
        finally:
            stream.cancel()

    async def layout_version(self, key: ModelKey) -> int:
        """Return the layout version by which a source has to plan a model.

        Args:
            key: What the source is about to hold.

        Raises:
            CoordinatorVersionError: The model is listed in a layout that this process does not
                plan.
            CoordinatorError: The coordinator does not answer.
        """
        async with diagnosing(self.remote):
            request = pb.LayoutRequest(model=codec.key_to_wire(key))
            answer = await self._stub.Layout(request, timeout=self._timeout_s)
        async with self._reading():
            version = int(answer.version)
        planned_here(version, f"{key} is listed by the coordinator", self.remote)
        return version

    async def list_models(self) -> list[ModelStatus]:
        """Return every known model. Skips a malformed entry, with a warning, as the other lists."""
        call = self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout_s)
        async with self._reading():
            messages = [model async for page in call for model in page.models]
        return self._lists.read("model", messages, _model_status)

    async def list_sources(self, name: str = "") -> list[SourceStatus]:
        """Return all sources, or those of one model name."""
        request = pb.ListSourcesRequest(name=name)
        call = self._stub.ListSources(request, timeout=self._timeout_s)
        async with self._reading():
            messages = [status async for page in call for status in page.sources]
        return self._lists.read("source", messages, _source_status)

    async def list_bundles(self, name: str = "") -> list[BundleStatus]:
        """Return all bundles, or those of one model name, with the ranks that are missing."""
        request = pb.ListBundlesRequest(name=name)
        call = self._stub.ListBundles(request, timeout=self._timeout_s)
        async with self._reading():
            messages = [bundle async for page in call for bundle in page.bundles]
        return self._lists.read("bundle", messages, bundle_status)

    async def list_pulls(self, name: str = "") -> list[PullStatus]:
        """Return all pulls that report their progress, or those of one model name."""
        call = self._stub.ListPulls(pb.ListPullsRequest(name=name), timeout=self._timeout_s)
        async with self._reading():
            messages = [pull async for page in call for pull in page.pulls]
        return self._lists.read("pull", messages, pull_from_wire)

    async def watch_pulls(self, name: str = "") -> AsyncGenerator[PullUpdates, None]:
        """Yield the pulls that report, and then every change of them.

        Close the iterator when done. It raises as the other calls do if the coordinator fails.

        Args:
            name: The model; "" for all.
        """
        stream = self._stub.WatchPulls(pb.WatchPullsRequest(name=name))
        try:
            async with self._reading():
                async for message in stream:
                    pulls = self._lists.read("pull", message.pulls, pull_from_wire)
                    gone = self._lists.read("pull", message.gone, codec.source_id_from_wire)
                    yield PullUpdates(tuple(pulls), tuple(gone), message.snapshot_end)
        finally:
            stream.cancel()

    async def list_rates(self, source_hosts: Sequence[str] = ()) -> list[Rate]:
        """Return the bandwidths that pulls have measured lately, from these hosts or from all."""
        request = pb.ListRatesRequest(source_hosts=source_hosts)
        call = self._stub.ListRates(request, timeout=self._timeout_s)
        async with self._reading():
            messages = [rate async for page in call for rate in page.rates]
        return self._lists.read("rate", messages, rate_of_hosts)

    def reporting(self) -> AbstractAsyncContextManager[Report]:
        """Report a pull's progress; see `mx.wire.progress.reporting`."""
        return reporting(self._stub, self.remote, self._timeout_s)

    async def fetch(
        self, refs: Sequence[tuple[bytes, int]], *, timeout_s: float = 30.0
    ) -> dict[bytes, bytes]:
        """Fetch documents, given as (digest, nbytes); see `mx.wire.documents.fetch`."""
        return await wire_documents.fetch(self._channel, refs, who=self.remote, timeout_s=timeout_s)


def _proved(
    registration: Registration, name_key: NameKey | None, nonce: bytes
) -> tuple[Registration, bytes]:
    """Return a registration with its commitment and statement, and the proof that it holds the name
    key; without a key as it is, and b""."""
    if name_key is None:
        return registration, b""
    record, replaces = registration.record, registration.intent.replaces
    key, identity = record.model, record.ref.identity
    purpose = Purpose.UPDATE if replaces else Purpose.REGISTER
    said = proof(
        purpose,
        replace(key, revision=replaces or key.revision),
        identity,
        record.source_id,
        record.endpoint,
        blake3(registration.secret).digest(),
        nonce,
    )
    record = replace(
        record,
        commitment=name_key.commitment(key.name),
        statement=name_key.sign(key.name, statement(key, identity, replaces=replaces)),
    )
    return replace(registration, record=record), name_key.sign(key.name, said)


def _model_status(model: pb.Model) -> ModelStatus:
    return ModelStatus(
        codec.key_from_wire(model.model),
        codec.ref_from_wire(model.manifest),
        model.nbytes,
        model.layers,
        model.sources,
        model.pin_only,
        model.restored,
    )


def _source_status(status: pb.SourceStatus) -> SourceStatus:
    return SourceStatus(
        codec.source_from_wire(status.source),
        codec.rate_from_wire(status.lease_left_s, "lease_left_s"),
        status.readers,
        codec.rate_from_wire(status.gb_per_s, "gb_per_s"),
    )
