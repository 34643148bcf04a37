"""Keeps a process's models listed at a coordinator."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mx import trace
from mx.core.answers import ModelStatus
from mx.core.bound_name import not_the_owner
from mx.core.reference import pinned_name
from mx.core.revisions import placed
from mx.core.types import Intent, ModelKey, Registration, SourceRecord, SourceRole
from mx.core.variant import membership
from mx.errors import (
    BindingError,
    ClosedError,
    CoordinatorError,
    LocalError,
    MxError,
    NotAllowedError,
    UnknownModelError,
    UnsettledError,
)
from mx.log import event
from mx.namekey import NameKey
from mx.runtime import in_thread, uncut
from mx.source.model import SourceModel
from mx.source.served import ExposedModel
from mx.tasks import end_tasks
from mx.wire.client import CoordinatorClient, RegisterAnswer

log = logging.getLogger(__name__)

#: For how long a registration is tried again while a coordinator that has lost its state can't say
#: whose the name is, and how often.
_SETTLE_S, _SETTLE_LOOK_S = 80.0, 1.0
#: What a change that is not waited for any more ends with.
INTERRUPTED = "`changing` was interrupted"


class Registrar:
    """The registrations of one process; on the loop. `close` it."""

    def __init__(
        self,
        client: CoordinatorClient,
        models: Mapping[str, ExposedModel],
        record: Callable[[ExposedModel], SourceRecord],
        rename: Callable[[SourceModel], Awaitable[None]],
        readers: Callable[[str], int],
        gb_per_s: Callable[[str], float],
        name_key: NameKey | None = None,
    ) -> None:
        """
        Args:
            client: The coordinator; the registrar closes it.
            models: What the process serves, by source id.
            record: Returns the record of a served model.
            rename: Serves a model under another source id.
            readers: Returns the number of a source's readers.
            gb_per_s: Returns a source's rate.
            name_key: What this process owns names with; None: it owns none.
        """
        self._client = client
        self._models = models
        self._record = record
        self._serve_renamed = rename
        self._readers = readers
        self._gb_per_s = gb_per_s
        self._secret = secrets.token_bytes(32)
        self._name_key = name_key
        self._receipts: dict[ModelKey, bytes] = {}
        self._replaced: set[ModelKey] = set()  # of these, by updates
        self._vouches: dict[tuple[str, str], bytes] = {}  # the last, by name and variant
        self._owners: dict[str, bytes] = {}  # the commitments that names belong to
        self._published_s: dict[SourceModel, float] = {}  # when the owner has published them
        self._published: set[tuple[str, bytes]] = set()  # weights, under names, by this process
        self._keeping: dict[SourceModel, asyncio.Task[None]] = {}
        self._news: dict[SourceModel, asyncio.Event] = {}
        self._settling: dict[SourceModel, asyncio.Task[None]] = {}
        self._listing = asyncio.Lock()
        self._renamed: set[SourceModel] = set()  # since they were registered last
        self._closed = False
        self.registered = False

    async def list(
        self,
        held: SourceModel,
        *,
        again: bool = False,
        replaces: str = "",
        publishes: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> ModelKey:
        """Register a model. While the coordinator can't say whose the name is, it is tried again.

        Args:
            held: The model.
            again: It was listed before: others may have taken its name since.
            replaces: Register an update of this revision; "" for none.
            publishes: It is to be what its name means: see `mx.core.types.Intent`.
            stopped: Polled between the tries; if it returns True, there is none any more.

        Returns:
            The key that it is listed under.

        Raises:
            MxError: As `CoordinatorClient.register`.
        """
        until_s = time.monotonic() + _SETTLE_S
        while True:
            try:
                return await self._list(held, again=again, replaces=replaces, publishes=publishes)
            except UnsettledError:
                if time.monotonic() >= until_s or self._closed or stopped():
                    raise
            await asyncio.sleep(_SETTLE_LOOK_S)

    async def _list(
        self, held: SourceModel, *, again: bool, replaces: str, publishes: bool
    ) -> ModelKey:
        async def register() -> RegisterAnswer:
            if held.scattered:
                await in_thread(held.find_rows)
            record = self._current(held)
            if not record.vouch:  # what is said of these comes after what was said last
                last = self._vouches.get((held.key.name, held.key.variant), b"")
                record = replace(record, vouch=last)
            receipt = self._receipts.get(before, b"")
            published_s = self._published_s.get(held, 0.0)
            keeps_pin = again or not held.takes_name
            intent = Intent(replaces, keeps_pin, receipt, publishes, published_s)
            return await self._client.register(
                Registration(record, self._secret, intent),
                held.documents,
                name_key=self._name_key if held.takes_name else None,
            )

        if again:
            await self.end_settling(held)
        before = held.key._replace(revision=replaces or held.key.revision)
        async with self._listing:
            with trace.span("serve.register", model=str(held.key)):
                try:
                    listed = await register()
                except NotAllowedError:
                    if not again or not held.takes_name or held in self._renamed:
                        raise
                    await uncut(self._rename(held))
                    listed = await register()
        self._renamed.discard(held)
        if listed.receipt:
            self._receipts[listed.model] = listed.receipt
        self._owners[listed.model.name] = listed.owner
        if listed.published_s:
            self._published_s[held] = listed.published_s
        held.vouch = self._vouches[held.key.name, held.key.variant] = listed.vouch
        if replaces or publishes:
            self._published.add((held.key.name, held.manifest.ref.identity))
        if replaces:
            self._forget_replaced(before, listed.model, held)
        event(
            log,
            "source.registered",
            model=str(listed.model),
            source=held.source_id,
            endpoint=self._current(held).endpoint,
            coordinator=self._client.remote.address,
        )
        self._on_pin_only(held, listed.pin_only, listed.model)
        return listed.model

    def _forget_replaced(self, before: ModelKey, now: ModelKey, held: SourceModel) -> None:
        """Drop the receipts of what updates have replaced, and this process serves no more."""
        self._replaced.add(before)
        others = (served.held for served in self._models.values())
        used = {now, *(other.key for other in others if other is not held)}
        for key in self._replaced - used:
            self._receipts.pop(key, None)
        self._replaced &= used

    async def list_changed(
        self, held: SourceModel, listed: bytes, stopped: Callable[[], bool]
    ) -> None:
        """Register live memory as it is after a change, and keep it listed: under a new revision
        if this process owns its name, else only where its weights are bound already.

        Args:
            held: The model, whose key gets the revision.
            listed: The identity that it was registered with before.
            stopped: As `list` does.

        Raises:
            ClosedError: It was stopped.
            MxError: As `list`.
        """
        try:
            same = held.manifest.ref.identity == listed
            if same and (held.role is SourceRole.RELAY or membership(held.key.variant).alone):
                held.key = await self.list(held, again=True)
            elif held.role is SourceRole.ORIGIN:
                held.key = await self.list(held, replaces=held.key.revision, stopped=stopped)
            else:
                raise BindingError(f"{held.key} was pulled, and belongs to another source")
        except (BindingError, NotAllowedError) as error:
            if stopped():
                raise ClosedError(INTERRUPTED) from error
            try:
                held.key = await self.key_of(held)
                held.key = await self.list(held)
            except (BindingError, UnknownModelError):
                raise type(error)(
                    f"{error.message}; no source has registered the new weights",
                    hint=error.hint
                    or "once the name's owner has registered them, call `changing` again",
                ) from error
        self.keep_listed(held)

    async def list_as_newest(self, held: SourceModel) -> ModelKey:
        """Register a model as what its name means: as an update, unless the newest revision has
        these weights or there is none. Raises as `list`.

        A coordinator that has just started may learn of earlier revisions a little later. Then it
        tells, with its answers to heartbeats, what is to be updated.
        """
        asked = held.key
        for last in (False, True):
            # Revisions that have lapsed are not listed: then it updates the first one.
            listed = await self._listed(asked.name)
            bound = {each.model: each.ref.identity for each in listed}
            place = placed(asked, held.manifest.ref.identity, bound)
            try:
                if place.updates or last:
                    return await self.list(held, replaces=place.revision)
                held.key = asked._replace(revision=place.revision)
                key = await self.list(held, publishes=True)
            except BindingError:
                if place.updates or last:
                    raise
                continue  # it was bound meanwhile
            # If its own key owns the name, or none does yet, the state is in doubt: the name comes
            # when that ends.
            own = b"" if self._name_key is None else self._name_key.commitment(asked.name)
            if self._models[held.source_id].pin_only and self._owners[asked.name] not in (b"", own):
                raise not_the_owner(asked.name, "bind another revision or variant of it")
            return key
        raise AssertionError

    def _on_outdated(self, held: SourceModel, replaces: str) -> None:
        # A coordinator can't have published what its owner has not.
        published = (held.key.name, held.manifest.ref.identity) in self._published
        if published and held not in self._settling:
            settling = self._publish_again(held, replaces)
            self._settling[held] = asyncio.create_task(settling, name="mx-settle")

    async def _publish_again(self, held: SourceModel, replaces: str) -> None:
        """Register a model as an update: its name turns out to have meant others before."""
        self._receipts.pop(held.key._replace(revision=replaces), None)  # it is not its own

        def ended() -> bool:
            return held not in self._settling

        async def publish() -> None:
            while True:
                try:
                    held.key = await self.list(held, replaces=replaces, stopped=ended)
                    return
                except CoordinatorError as error:  # the answer may be lost: it joins its update
                    if type(error) is not CoordinatorError or ended():
                        raise
                await asyncio.sleep(_SETTLE_LOOK_S)

        try:
            await uncut(publish())  # what is registered has that key, also if this is cancelled
        except MxError as error:
            log.warning("%s is not what its name means: %s", held.key, error)
        finally:
            self._settling.pop(held, None)

    async def end_settling(self, held: SourceModel) -> None:
        """Leave a model registered as it is now."""
        await end_tasks(self._settling.pop(held, None))

    async def _listed(self, name: str) -> Sequence[ModelStatus]:
        """Return what a name's revisions and variants stand for. Raises as
        `CoordinatorClient.list_models`."""
        listed = await self._client.list_models()
        return [each for each in listed if each.model.name == name and not each.pin_only]

    async def key_of(self, held: SourceModel) -> ModelKey:
        """Return the key that a model's weights are bound to under its name.

        Raises:
            UnknownModelError: They are bound to none: they are found by their pin at most.
            CoordinatorError: The coordinator does not answer.
        """
        identity, variant = held.manifest.ref.identity, held.key.variant
        for each in await self._listed(held.key.name):
            if each.ref.identity == identity and each.model.variant == variant:
                return each.model
        raise UnknownModelError(f"{held.key.name} stands for no such weights")

    async def _rename(self, held: SourceModel) -> None:
        """Take another source id. After a coordinator's restart a stranger may have registered the
        one that this source had, which every listing showed."""
        self._renamed.add(held)
        was = held.source_id
        await self._serve_renamed(held)
        event(log, "source.renamed", model=str(held.key), source=held.source_id, was=was)

    def keep_listed(self, held: SourceModel) -> None:
        """Keep a listed model listed, even if the coordinator restarts."""
        self._news[held] = asyncio.Event()
        keeping = self._client.keep_alive(
            lambda: self._current(held),
            lambda: self.list(held, again=True),
            readers=lambda: self._readers(held.source_id),
            gb_per_s=lambda: self._gb_per_s(held.source_id),
            news=self._news[held],
            on_state=self._on_registered,
            on_pin_only=lambda pin_only: self._on_pin_only(held, pin_only, held.key),
            on_receipt=lambda receipt: self._receipts.update({held.key: receipt}),
            on_outdated=lambda replaces: self._on_outdated(held, replaces),
        )
        self._keeping[held] = asyncio.create_task(keeping, name="mx-keep-alive")

    async def unlist(self, held: SourceModel, *, keeps_name: bool = False) -> None:
        """Deregister a model, and no longer keep it listed. With `keeps_name` its name stays bound
        for a while."""
        await self.end_settling(held)
        self._published_s.pop(held, None)
        self._news.pop(held, None)
        await end_tasks(self._keeping.pop(held, None))
        try:
            await self._client.deregister(held.source_id, keeps_name=keeps_name)
        except MxError as error:
            log.debug("could not deregister; the lease will end by itself: %s", error)

    async def named_revision(self, key: ModelKey) -> str:
        """Return the revision that NAME means for the bundle of a variant, "" for none. Raises as
        `CoordinatorClient.list_bundles`."""
        bundle = membership(key.variant).bundle
        for each in await self._client.list_bundles(key.name):
            if each.named and each.variant == bundle:
                return each.revision
        return ""

    def tell(self) -> None:
        """Send the records' changes with a heartbeat of each model at once."""
        for news in self._news.values():
            news.set()

    async def advertise(self) -> None:
        """Report which layers are held now. Raises as `CoordinatorClient.advertise`."""
        for served in list(self._models.values()):
            record = self._record(served)
            await self._client.advertise(record.source_id, record.generation, record.table.held)

    async def close(self) -> None:
        """Deregister every model, and close the client."""
        self._closed = True
        for held in list(self._settling):
            await self.end_settling(held)
        await end_tasks(*self._keeping.values())
        self._keeping.clear()
        for served in list(self._models.values()):
            await self.unlist(served.held)
        await self._client.close()
        self.registered = False

    def _current(self, held: SourceModel) -> SourceRecord:
        served = self._models.get(held.source_id)
        if served is None:
            raise LocalError(f"{held.key} is not served any more")
        return self._record(served)

    def _on_registered(self, registered: bool, why: str) -> None:
        if registered != self.registered or not registered:
            name = "source.reregistered" if registered else "source.unregistered"
            level = logging.INFO if registered else logging.WARNING
            endpoints = [self._record(served).endpoint for served in self._models.values()]
            event(log, name, level=level, endpoint=next(iter(endpoints), ""), text=why)
        self.registered = registered

    def _on_pin_only(self, held: SourceModel, pin_only: bool, key: ModelKey) -> None:
        served = self._models.get(held.source_id)
        if served is None or served.pin_only == pin_only or held.is_companion:
            return
        name = pinned_name(key, held.manifest.ref)
        who: dict[str, Any] = {"model": str(key), "source": held.source_id, "pinned": name}
        if pin_only:
            text = f"{key} does not stand for these weights there: readers find {name} only"
            event(log, "source.pin_only", level=logging.WARNING, **who, text=text)
        else:
            event(log, "source.named", **who, text=f"readers find these as {key} again")
        served.pin_only = pin_only  # who sees it finds the event, too
