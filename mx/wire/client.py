"""The coordinator's client: a deadline on every call, errors of mx, and the next coordinator where
one of several does not answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mx import codec
from mx.contexts import OwnAsyncContext
from mx.core.answers import BundleStatus, ModelStatus
from mx.core.rates import Rate
from mx.core.revisions import MAIN
from mx.core.types import ManifestRef, ModelKey, SourceRecord, cover
from mx.core.variant import companion_path
from mx.errors import CoordinatorError
from mx.transport import TlsFiles
from mx.wire import documents as wire_documents
from mx.wire.channel import Remote, Role
from mx.wire.coordinators import Coordinators, Link
from mx.wire.listing import (
    Lists,
    Overview,
    SourceStatus,
    WatchUpdate,
    bundle_status,
    update_from_wire,
)
from mx.wire.progress import Report, pull_from_wire, rate_of_hosts, reporting
from mx.wire.registering import RegisterAnswer, SourceCalls
from mx.wire.status import planned_here
from mx.wire.v1 import coordinator_pb2 as pb

_T = TypeVar("_T")

__all__ = ["CoordinatorClient", "LocatedModel", "RegisterAnswer"]


class LocatedModel(NamedTuple):
    """A model that was found, and its sources, origins first; a known model may have none now.

    All `sources` hold the weights of `ref`, or parts of them; their files may differ. `documents`
    are the verified documents that came with the answer, by digest: all of a small manifest, none
    of a large one. Of many sources an answer names some: `source_count` is how many there are.
    `newest` is what the name means to the coordinator, and `older` are older revisions that can be
    obtained where that can't; None and () for a pin, a revision, a peer that the user named, and
    from an older coordinator. `seen` is to be sent with later questions for the name. `vouch` is
    what its owner is said to say of the weights, which was not verified; b"" for nothing.
    """

    model: ModelKey
    ref: ManifestRef
    sources: Sequence[SourceRecord]
    documents: Mapping[bytes, bytes] = MappingProxyType({})
    source_count: int = 0
    newest: ModelKey | None = None
    older: tuple[ModelKey, ...] = ()
    seen: bytes = b""
    vouch: bytes = b""

    @property
    def is_away(self) -> bool:
        """True if this is what the name means, and no sources hold all of it together."""
        return self.newest == self.model and not cover(self.sources)

    @property
    def says_away(self) -> bool:
        """True if that is worth saying: there is, or was, more than one revision, or a part."""
        more = bool(self.older or self.sources) or self.model.revision != MAIN
        return self.is_away and more


class CoordinatorClient(SourceCalls, OwnAsyncContext):
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
            address: HOST:PORT or unix:PATH of the coordinator, or HOST:PORT,HOST:PORT of several
                that share one state (`mx.wire.coordinators`).
            tls: The certificates for mutual TLS.
            insecure: Allow plain text beyond this machine.
            timeout_s: The deadline of a call; uploads of documents have at least 60 s.

        Raises:
            ConfigError: As `dial`.
            NotAllowedError: As `dial`.
        """
        coordinators = Coordinators(address, tls=tls, insecure=insecure, timeout_s=timeout_s)
        super().__init__(coordinators, timeout_s)
        self._lists = Lists(Remote(Role.COORDINATOR, address, tls))

    async def close(self) -> None:
        """Cut running calls and close the channel. Deregisters nothing."""
        await self._coordinators.close()

    # -- for everyone -----------------------------------------------------------------------------

    async def _pages(self, method: str, request: Any, *fields: str) -> list[list[Any]]:
        """Return the entries of lists that come in pages, by field."""

        async def question(link: Link) -> list[list[Any]]:
            pages = [
                page async for page in getattr(link.stub, method)(request, timeout=link.timeout_s)
            ]
            return [[each for page in pages for each in getattr(page, field)] for field in fields]

        return await self._coordinators.ask(question)

    async def _listed(
        self, method: str, request: Any, what: str, decode: Callable[[Any], _T]
    ) -> list[_T]:
        """Return the entries of a list that comes in pages; `what` is one of them."""
        (found,) = await self._pages(method, request, f"{what}s")
        return self._lists.read(what, found, decode)

    async def resolve(
        self,
        name: str,
        revision: str = "",
        variant: str = "",
        *,
        documents: bool = True,
        serves: bool = False,
        allow_older: bool = False,
        seen: bytes = b"",
    ) -> LocatedModel:
        """Return the manifest that NAME or NAME@PIN means, and the sources that serve it.

        Args:
            name: NAME or NAME@PIN.
            revision: "" for the newest one that its owner has published; for a rank the one that
                NAME means for all ranks of its bundle.
            variant: "" for "checkpoint", or the only one that is listed.
            documents: Request the documents of a small manifest, too.
            serves: The caller is going to serve it.
            allow_older: Take the newest revision that can be obtained whole.
            seen: What an earlier answer said that was seen of the name.

        Raises:
            UnknownModelError: No registered model fits.
            NotAllowedError: The policy lets the caller not pull it, or with `serves` not serve it.
            ConfigError: An argument is not a valid name or pin.
        """
        codec.check_model_key(
            ModelKey(name.partition("@")[0], revision or "main", variant or "checkpoint")
        )
        request = pb.ResolveRequest(
            name=name,
            revision=revision,
            variant=variant,
            inline_documents=documents,
            serves=serves,
            allow_older=allow_older,
            seen=seen,
        )

        async def question(link: Link) -> LocatedModel:
            answer = await link.stub.Resolve(request, timeout=link.timeout_s)
            ref = codec.ref_from_wire(answer.manifest)
            inlined = wire_documents.Assembler(ref.documents, who=link.remote.address)
            for page in answer.documents:
                inlined.add(page)
            return LocatedModel(
                codec.key_from_wire(answer.model),
                ref,
                self._lists.read("source", answer.sources, codec.source_from_wire),
                inlined.documents,
                # Coordinators before this field name no more than they list.
                max(answer.source_count, len(answer.sources)),
                codec.key_from_wire(answer.newest) if answer.HasField("newest") else None,
                tuple(self._lists.read("revision", answer.older, codec.key_from_wire)),
                codec.receipt_from_wire(answer.seen),
                answer.vouch[: codec.MAX_VOUCH_BYTES],
            )

        return await self._coordinators.ask(question)

    async def watch(
        self, name: str = "", revision: str = "", *, pulls: bool = False
    ) -> AsyncGenerator[WatchUpdate, None]:
        """Yield the listed sources (an UP each, then SNAPSHOT_END), then every change.

        Close the iterator when done. It raises as the other calls do if the coordinator fails.

        Args:
            name: The model; "" for all.
            revision: The revision; "" for all.
            pulls: Yield a PULL for each pull that reports, too, and their changes. Only who may
                observe them may ask for that.
        """
        request = pb.WatchRequest(name=name, revision=revision, pulls=pulls, batches=True)

        def decode(event: pb.WatchEvent) -> list[WatchUpdate]:
            return self._lists.read("change", event.batch or (event,), update_from_wire)

        stream = self._coordinators.follow(lambda link: link.stub.Watch(request), decode)
        async with aclosing(stream):
            async for updates in stream:
                for update in updates:
                    yield update

    async def layout_version(self, key: ModelKey) -> int:
        """Return the layout version by which a source has to plan a model.

        Args:
            key: What the source is about to hold.

        Raises:
            CoordinatorVersionError: The model is listed in a layout that this process does not
                plan.
            CoordinatorError: The coordinator does not answer.
        """
        request = pb.LayoutRequest(model=codec.key_to_wire(key))

        async def question(link: Link) -> int:
            answer = await link.stub.Layout(request, timeout=link.timeout_s)
            return int(answer.version)

        version = await self._coordinators.ask(question)
        planned_here(version, f"{key} is listed by the coordinator", self.remote)
        return version

    async def list_models(self) -> list[ModelStatus]:
        """Return every known model; companions are parts of one. Skips a malformed entry, with a
        warning, as the other lists."""
        found = await self._listed("ListModels", pb.ListModelsRequest(), "model", _model_status)
        return [each for each in found if not companion_path(each.model.variant)]

    async def list_sources(self, name: str = "") -> list[SourceStatus]:
        """Return all sources, or those of one model name."""
        request = pb.ListSourcesRequest(name=name)
        return await self._listed("ListSources", request, "source", _source_status)

    async def list_bundles(self, name: str = "") -> list[BundleStatus]:
        """Return all bundles, or those of one model name, with the ranks that are missing."""
        request = pb.ListBundlesRequest(name=name)
        return await self._listed("ListBundles", request, "bundle", bundle_status)

    async def overview(self, name: str = "") -> Overview:
        """Return the sources and the pulls that report their progress: all, or those of one model
        name.

        Raises:
            NotAllowedError: The caller may not observe pulls.
        """
        request = pb.ListSourcesRequest(name=name, pulls=True)
        sources, pulls = await self._pages("ListSources", request, "sources", "pulls")
        return Overview(
            tuple(self._lists.read("pull", pulls, pull_from_wire)),
            tuple(self._lists.read("source", sources, _source_status)),
        )

    async def list_rates(self, source_hosts: Sequence[str] = ()) -> list[Rate]:
        """Return the bandwidths that pulls have measured lately, from these hosts or from all."""
        request = pb.ListRatesRequest(source_hosts=source_hosts)
        return await self._listed("ListRates", request, "rate", rate_of_hosts)

    def reporting(self) -> AbstractAsyncContextManager[Report]:
        """Report a pull's progress; see `mx.wire.progress.reporting`."""
        return reporting(self._coordinators)

    async def fetch(
        self, refs: Sequence[tuple[bytes, int]], *, timeout_s: float = 30.0
    ) -> dict[bytes, bytes]:
        """Fetch documents, given as (digest, nbytes); see `mx.wire.documents.fetch`."""
        others = len(self._coordinators.addresses) - 1
        while True:
            try:
                async with self._coordinators.using() as link:
                    return await wire_documents.fetch(
                        link.channel, refs, who=link.remote, timeout_s=timeout_s
                    )
            except CoordinatorError as error:
                if type(error) is not CoordinatorError or not others:
                    raise
                others -= 1


def _model_status(model: pb.Model) -> ModelStatus:
    key, ref = codec.key_from_wire(model.model), codec.ref_from_wire(model.manifest)
    return codec.by_name(ModelStatus, model, model=key, ref=ref)


def _source_status(status: pb.SourceStatus) -> SourceStatus:
    return SourceStatus(
        codec.source_from_wire(status.source),
        codec.rate_from_wire(status.lease_left_s, "lease_left_s"),
        status.readers,
        codec.rate_from_wire(status.gb_per_s, "gb_per_s"),
    )
