"""What one caller may know of a coordinator: each answer, hint, list, rate and watch is made here.

A handler gets the view of its caller, and asks the registry, the documents and the board of pulls
by nothing else: so what a caller may not see is in none of its answers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mx.coordinator.callers import check_owner, measured_host
from mx.coordinator.state import CoordinatorState
from mx.coordinator.watchers import Sees, Watcher, WatchLog
from mx.core.answers import BundleStatus, ListedSource, ModelStatus, ResolveAnswer
from mx.core.ownership import Receipt
from mx.core.policy import Right
from mx.core.progress_board import ProgressBoard
from mx.core.pull_status import PullStatus
from mx.core.rates import Rate, fastest_link
from mx.core.registry import Registry
from mx.core.types import ModelKey
from mx.errors import NotAllowedError, UnknownSourceError
from mx.wire.principals import SEES, Access, Caller

#: Who has one of these for a model need not prove that he has its documents.
_HAS = (Right.SERVE, Right.PULL)
#: The most (principal, model) that are known to have been resolved; the oldest makes room.
_MOST_RESOLVED = 16_384
#: For how long it is known which links lead to a model's sources.
_LINKS_S = 1.0
_MOST_LINKS = 4096


class Views:
    """The views of one coordinator's callers, and the pulls that report to it."""

    def __init__(self, state: CoordinatorState, access: Access) -> None:
        """
        Args:
            state: The state.
            access: Who may do what.
        """
        self.state = state
        self.access = access
        #: What watchers read.
        self.log = WatchLog()
        self.board = ProgressBoard(
            link_gb_per_s=self._link_gb_per_s, on_change=lambda change: self.log.push([change])
        )
        #: Who has resolved which models here.
        self.resolved: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._links: dict[str, tuple[float, Callable[[str, str], float]]] = {}

    def of(self, context: Any) -> View:
        """Return the view of a call's caller."""
        return View(self, context)

    def _link_gb_per_s(self, name: str, source_host: str, host: str) -> float:
        """Return the most that a link may carry from the sources of a model on one host to another
        host; 0.0 if no source of it is listed there."""
        now = self.state.now()
        known = self._links.get(name)
        if known is None or known[0] <= now:
            if len(self._links) >= _MOST_LINKS:
                self._links.clear()
            link = functools.cache(functools.partial(fastest_link, self.state.listed(name)))
            known = self._links[name] = now + _LINKS_S, link
        return known[1](source_host, host)


class View:
    """What one caller sees. Each method raises NotAllowedError if it may not ask that."""

    def __init__(self, views: Views, context: Any) -> None:
        """
        Args:
            views: Those of the coordinator.
            context: The call's servicer context.
        """
        self.views, self._context = views, context
        self._state, self._access = views.state, views.access

    @property
    def caller(self) -> Caller:
        """Who calls. Raises NotAllowedError for a certificate that is not accepted any more."""
        return self._access.caller(self._context)

    @property
    def epoch(self) -> str:
        """The epoch of the state."""
        return self._state.epoch

    def require(self, rights: tuple[Right, ...], model: str | None = None, **about: Any) -> Caller:
        """Return the caller, if it may do one of these things; see `Access.require`."""
        return self._access.require(self._context, rights, model, **about)

    def sees(self, name: str = "", rights: tuple[Right, ...] = SEES) -> Sees:
        """Return what says which models the caller sees.

        Args:
            name: The model that it asks about; "" for all.
            rights: The rights of which it has to have one.

        Raises:
            NotAllowedError: It does not see that one, or none.
            ClosedError: Its connection is not trusted any more.
        """
        self._access.check_connection(self._context)  # of a stream that has been open for long
        caller = self.require(rights, name or None, action="list")
        return lambda model: self._access.allows(caller, rights, model)

    # -- models and sources ---------------------------------------------------------------------

    async def resolve(
        self,
        name: str,
        revision: str,
        variant: str,
        *,
        serves: bool,
        allow_older: bool = False,
        seen: Receipt | None = None,
    ) -> ResolveAnswer:
        """Return what a name means, as `Registry.resolve`; an error names what the caller sees.

        Args:
            name: NAME or NAME@PIN.
            revision: As there.
            variant: As there.
            serves: The caller is going to serve it.
            allow_older: As there.
            seen: What the caller has seen of this name in an earlier life; None for nothing.
        """
        model, about = name.partition("@")[0], dict[str, str]()
        caller = self.require((Right.PULL,), model, granted=False)
        if serves:
            self.require((Right.SERVE,), model, granted=False)
        if seen is not None:
            recall = functools.partial(Registry.recall, seen=seen, address=caller.name)
            await self._state.event(recall)
        sees = self._access.seeing(caller, SEES)
        try:
            found = await self._state.ask(
                lambda registry: registry.resolve(
                    name, revision, variant, sees, allow_older=allow_older
                )
            )
            about = {"revision": found.model.revision, "pin": found.ref.pin.hex()}
        finally:
            self._access.granted(caller, Right.PULL.value, model=model, **about)
        resolved = self.views.resolved
        resolved[caller.name, model] = None
        resolved.move_to_end((caller.name, model))
        if len(resolved) > _MOST_RESOLVED:
            resolved.popitem(last=False)
        return found

    async def layout_version(self, key: ModelKey, unlisted: int) -> int:
        """Return the layout version of the next source of a key; see `Registry.layout_version`."""
        self.require((Right.SERVE,), key.name, action="layout")
        return await self._state.ask(lambda registry: registry.layout_version(key, unlisted))

    async def vouches(self, key: ModelKey) -> list[bytes]:
        """Return what owners have said of a variant, as `Registry.vouches`; nothing to a caller
        that may not serve it."""
        allowed = self._access.allows(self.caller, (Right.SERVE,), key.name)
        return await self._state.ask(lambda registry: registry.vouches(key)) if allowed else []

    async def models(self, sees: Sees) -> list[ModelStatus]:
        """Return the models that `sees`, made by this view, is true of."""
        found = await self._state.ask(Registry.models)
        return [each for each in found if sees(each.model.name)]

    async def bundles(self, name: str, sees: Sees) -> list[BundleStatus]:
        """As `models`, the bundles."""
        found = await self._state.ask(lambda registry: registry.bundles(name))
        return [each for each in found if sees(each.name)]

    async def sources(self, name: str, sees: Sees) -> list[ListedSource]:
        """As `models`, the sources."""
        found = await self._state.ask(lambda registry: registry.sources(name))
        return [each for each in found if sees(each.record.model.name)]

    async def owned(self, source_id: str) -> ListedSource:
        """Return a listed source that the caller has registered; without a certificate any, since a
        secret is asked for, too.

        Raises:
            UnknownSourceError: None is listed that the caller sees.
            NotAllowedError: Another principal has registered it.
        """
        caller = self.caller
        listed = await self._source(source_id)
        try:
            check_owner(caller, listed)
        except NotAllowedError as error:
            self._access.refused(caller, error, Right.SERVE.value, source=source_id)
            if not self._access.allows(caller, SEES, listed.record.model.name):
                raise UnknownSourceError(f"source {source_id} is not registered here") from None
            raise
        return listed

    async def check_free(self, source_id: str) -> None:
        """Raise NotAllowedError if another principal has registered a source with this id."""
        with contextlib.suppress(UnknownSourceError):
            await self._source(source_id)
            try:
                await self.owned(source_id)
            except UnknownSourceError:
                raise NotAllowedError(
                    f"source id {source_id} belongs to another source", hint="choose a new UUID"
                ) from None

    def receipt_of(self, source_id: str) -> Receipt | None:
        """Return what the receipt of a source says now, whose secret the caller has shown."""
        return self._state.receipt_of(source_id)

    def outdated_by(self, source_id: str) -> str:
        """Return the revision that a source has to update; "" for none. As `receipt_of`."""
        return self._state.outdated_by(source_id)

    async def _source(self, source_id: str) -> ListedSource:
        return await self._state.ask(lambda registry: registry.source(source_id))

    def sees_rows(self, name: str, *, pulls: bool) -> tuple[Sees, ...]:
        """Return what says of which models the caller sees the sources, and with `pulls` what says
        of which it may observe the pulls. Raises as `sees`."""
        sources = self.sees(name)
        return (sources, self.sees(name, (Right.OBSERVE,))) if pulls else (sources,)

    def watcher(self, name: str, revision: str, *, pulls: bool) -> Watcher:
        """Return a watcher of a model's sources, or with "" of all that the caller sees, and with
        `pulls` of the pulls."""
        return Watcher(self.views.log, name, revision, *self.sees_rows(name, pulls=pulls))

    # -- documents ------------------------------------------------------------------------------

    def known(self) -> Callable[[str], bool] | None:
        """Return what says of which models the caller need not send what is held; None: of all."""
        return self._access.seeing(self.require((Right.SERVE,), granted=False), _HAS)

    async def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the documents that the caller has to send; see `CoordinatorState.missing`."""
        caller = self.require((Right.SERVE,), action="documents")
        return await self._state.missing(digests, caller.name, self.known())

    def documents(self, digests: Sequence[bytes]) -> Callable[[bytes], bytes | None]:
        """Return what returns one of these documents if the caller may pull a model that it is
        of."""
        caller = self.require((Right.PULL,), action="documents")
        sees = self._access.seeing(caller, (Right.PULL,))
        if sees is None:
            return self._state.document
        found = self._state.of_models(digests, sees)
        return lambda digest: self._state.document(digest) if digest in found else None

    def inlined(self, found: ResolveAnswer) -> dict[bytes, bytes]:
        """Return the documents of what the caller has resolved that are held."""
        held = {digest: self._state.document(digest) for digest, _ in found.ref.documents}
        return {digest: data for digest, data in held.items() if data is not None}

    # -- pulls ----------------------------------------------------------------------------------

    def measured(self, caller: Caller, status: PullStatus) -> str:
        """Return the host to which the rate of a pull of the caller's counts: its own; "" if it has
        not resolved the model here."""
        name = status.model.name
        if (caller.name, name) not in self.views.resolved:
            return ""
        return measured_host(self._context, status.host)

    def rates(self, source_hosts: Collection[str]) -> list[Rate]:
        """Return what pulls of the models that the caller sees have measured, from these hosts or
        from all."""
        self.require((Right.OBSERVE, Right.PULL), action="list")
        sees = self._access.seeing(self.caller, SEES)
        return self.views.board.rates.listed(self._state.now(), source_hosts, sees)

    def pulls(self, name: str, sees: Sees) -> list[PullStatus]:
        """As `models`, the pulls that report."""
        found = self.views.board.pulls(self._state.now(), name)
        return [each for each in found if sees(each.model.name)]
