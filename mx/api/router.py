"""What routers ask: who holds a model, how long another replica takes, and where: `Router`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mx import config, discovery, runtime
from mx.api.closing import Closable, Step
from mx.api.common import check_type, tls_of, transports, variant_text
from mx.api.router_watch import Watch
from mx.core.estimates import Estimate, Load, Size, estimate, in_order_of_readiness
from mx.core.fleet import Fleet
from mx.core.locality import with_verified_place
from mx.core.planner import plan
from mx.core.pull_status import PullStatus
from mx.core.reference import ModelReference, parse_reference
from mx.core.replicas import Replica
from mx.core.topology import Place
from mx.core.types import Layout, ModelKey, SourceRecord
from mx.core.variant import ProcessingKey
from mx.errors import CapacityError, ClosedError, ConfigError
from mx.runtime import in_thread
from mx.target.paths import path_or_reason
from mx.target.resolver import describe
from mx.transport import Path, TlsFiles, Unavailable
from mx.wire.client import CoordinatorClient
from mx.wire.listing import SourceStatus
from mx.wire.locate import Locator

T = TypeVar("T")

#: The most open watches of one router.
MAX_WATCHES = 64
#: The most places of one question.
MAX_PLACES = 4096


@dataclass(frozen=True)
class _Where:
    """Where the manifest is looked up; see `mx.wire.locate.Where`."""

    name: str
    revision: str
    variant: str
    coordinator: str | None
    tls: TlsFiles | None
    insecure: bool
    connect_timeout_s: float
    peer: str | None = None


@dataclass(frozen=True)
class _At:
    """Where a pull would run: the host's name for messages, its place, whether it is this host."""

    host: str
    place: Place
    here: bool


@dataclass(frozen=True)
class _Facts:
    """What is known of a model when a question is asked."""

    model: ModelKey
    size: Size
    sources: tuple[SourceRecord, ...]
    statuses: tuple[SourceStatus, ...]
    pulls: tuple[PullStatus, ...]
    rates: dict[str, dict[str, float]]  # GB/s by the reader's host, then by the source's


class Router(Closable):
    """A router's view of the replicas that a coordinator knows; blocking and async.

    Close it, or use it as a context manager, by `with` or `async with`. Each question has a
    blocking form and one for the caller's own event loop (`..._async`).

        with mx.Router("10.0.0.1:7600") as router:
            for event in router.watch("llama-8b"):
                ...
    """

    def __init__(
        self, coordinator: str | None = None, *, settings: config.Settings | None = None
    ) -> None:
        """Connect on first use.

        Args:
            coordinator: HOST:PORT; None takes the address in the settings.
            settings: Settings to use; None loads them from the environment and the files.

        Raises:
            ConfigError: A setting is wrong.
        """
        self._settings = settings = settings or config.load()
        self.coordinator = coordinator or settings.coordinator
        loop = runtime.acquire()
        try:
            self._client: CoordinatorClient | None = loop.run(self._dial())
        except BaseException:
            runtime.release(loop)
            raise
        self._watches: set[Watch] = set()
        super().__init__(loop)

    async def _dial(self) -> CoordinatorClient:
        return CoordinatorClient(
            self.coordinator,
            tls=tls_of(self._settings),
            insecure=self._settings.insecure,
            timeout_s=self._settings.connect_timeout_s,
        )

    def __repr__(self) -> str:
        """Return one line: the coordinator's address."""
        return f"<Router at {self.coordinator}{'' if self._client else ', closed'}>"

    # -- who is there ---------------------------------------------------------------------------

    def sources(self, model: str = "") -> list[SourceStatus]:
        """Return the sources that are listed, with their readers and rates.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN; empty for those of all models.

        Raises:
            CoordinatorError: The coordinator does not answer.
            ConfigError: `model` is not a model's name.
            ClosedError: The router was closed.
        """
        return self._ask(self._sources(_reference(model)))

    async def sources_async(self, model: str = "") -> list[SourceStatus]:
        """Return what `sources` returns, without blocking the caller's event loop."""
        return await self._asking(self._sources(_reference(model)))

    def replicas(self, model: str = "") -> list[Replica]:
        """Return the replicas as they are now: which layers each has, whether it takes requests.

        Args:
            model: As for `sources`.

        Raises:
            MxError: As `sources`.
        """
        return self._ask(self._replicas(_reference(model)))

    async def replicas_async(self, model: str = "") -> list[Replica]:
        """Return what `replicas` returns, without blocking the caller's event loop."""
        return await self._asking(self._replicas(_reference(model)))

    def watch(self, model: str = "") -> Watch:
        """Return a stream of events: what is there, then every change. Returns at once.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN; empty for all models. It need not be there yet.

        Raises:
            CapacityError: The router has 64 watches open.
            ConfigError: `model` is not a model's name.
            ClosedError: The router was closed.
        """
        wanted, client = _reference(model), self._open_client()
        if len(self._watches) >= MAX_WATCHES:
            raise CapacityError(
                f"this router has {MAX_WATCHES} watches open, its limit", hint="close some"
            )
        loop = runtime.acquire()
        try:
            watch = Watch(loop, client, wanted, self._watches.discard)
        except BaseException:
            runtime.release(loop)
            raise
        self._watches.add(watch)
        return watch

    # -- how long, and where --------------------------------------------------------------------

    def estimate(
        self,
        model: str,
        at: str | Place = "",
        *,
        variant: str | ProcessingKey = "",
        attach: bool = True,
    ) -> Estimate:
        """Return how long a pull would take somewhere, by which paths, and at what cost.

        Bandwidths are those that pulls between the two hosts have measured lately, else those that
        the interfaces declare, less what the sources give to others now. No weight is moved.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN.
            at: Where the pull would run: "" for this process; the name, address or HOST:PORT of a
                host where a source is listed, of any model; or another host's `Place`, or its JSON
                (`mx topo --json` there has it).
            variant: The variant: a word, or a `ProcessingKey` or its text. If empty, "checkpoint",
                or the only one that is listed.
            attach: False leaves out sharing memory, as for a replica that holds what it pulls.

        Raises:
            UnknownModelError: The coordinator knows no such model.
            CoordinatorError: The coordinator does not answer.
            ConfigError: An argument is wrong, or nothing is known of that host.
            ClosedError: The router was closed.
        """
        return self._ask(self._estimates(_named(model, variant), [at], attach))[0]

    async def estimate_async(
        self,
        model: str,
        at: str | Place = "",
        *,
        variant: str | ProcessingKey = "",
        attach: bool = True,
    ) -> Estimate:
        """Return what `estimate` returns, without blocking the caller's event loop."""
        return (await self._asking(self._estimates(_named(model, variant), [at], attach)))[0]

    def place(
        self,
        model: str,
        hosts: Sequence[str | Place],
        *,
        variant: str | ProcessingKey = "",
        attach: bool = True,
    ) -> list[Estimate]:
        """Return an estimate for each of several hosts, the one that would be ready first at first.

        Each is for a pull there alone. Its `paths` say from whom it would read, and its `costs`
        what it would take from each source.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN.
            hosts: As `at` of `estimate`; 4096 at most.
            variant: As there.
            attach: As there.

        Raises:
            MxError: As `estimate`.
        """
        return in_order_of_readiness(
            self._ask(self._estimates(_named(model, variant), hosts, attach))
        )

    async def place_async(
        self,
        model: str,
        hosts: Sequence[str | Place],
        *,
        variant: str | ProcessingKey = "",
        attach: bool = True,
    ) -> list[Estimate]:
        """Return what `place` returns, without blocking the caller's event loop."""
        found = await self._asking(self._estimates(_named(model, variant), hosts, attach))
        return in_order_of_readiness(found)

    # -- inside ---------------------------------------------------------------------------------

    def _open_client(self) -> CoordinatorClient:
        self._require_own()
        if self._client is None:
            raise ClosedError("the router was closed")
        return self._client

    def _ask(self, question: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        return self._loop.run(question(self._open_client()))

    def _asking(
        self, question: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]
    ) -> Awaitable[T]:
        return asyncio.wrap_future(self._loop.submit(question(self._open_client())))

    @staticmethod
    def _sources(
        wanted: ModelReference,
    ) -> Callable[[CoordinatorClient], Coroutine[Any, Any, list[SourceStatus]]]:
        async def question(client: CoordinatorClient) -> list[SourceStatus]:
            found = await client.list_sources(wanted.name)
            return [each for each in found if wanted.fits(each.record.model, each.record.ref)]

        return question

    @staticmethod
    def _replicas(
        wanted: ModelReference,
    ) -> Callable[[CoordinatorClient], Coroutine[Any, Any, list[Replica]]]:
        async def question(client: CoordinatorClient) -> list[Replica]:
            sources, pulls = await asyncio.gather(
                client.list_sources(wanted.name), client.list_pulls(wanted.name)
            )
            fleet = Fleet()
            for status in sources:
                if wanted.fits(status.record.model, status.record.ref):
                    fleet.source(status.record)
            for pull in pulls:
                if wanted.fits_key(pull.model):
                    fleet.pull(pull)
            return list(fleet.replicas)

        return question

    def _estimates(
        self, wanted: ModelReference, hosts: Sequence[str | Place], attach: bool
    ) -> Callable[[CoordinatorClient], Coroutine[Any, Any, list[Estimate]]]:
        if isinstance(hosts, str) or len(hosts) > MAX_PLACES:
            raise ConfigError("`hosts` is not usable", hint=f"give a list of 1 to {MAX_PLACES}")

        async def question(client: CoordinatorClient) -> list[Estimate]:
            facts = await self._facts(client, wanted)
            places = await self._places(client, hosts)
            # A thousand places take a while: off the loop, which has leases to renew.
            return await in_thread(lambda: [self._estimate(facts, each, attach) for each in places])

        return question

    async def _facts(self, client: CoordinatorClient, wanted: ModelReference) -> _Facts:
        where = _Where(
            wanted.pinned_name,
            wanted.revision,
            wanted.variant,
            self.coordinator,
            tls_of(self._settings),
            self._settings.insecure,
            self._settings.connect_timeout_s,
        )
        locator = Locator(where)
        try:
            located, manifest = await describe(locator)
        finally:
            await locator.close()
        hosts = {record.endpoint.rpartition(":")[0] for record in located.sources}
        statuses, pulls, measured = await asyncio.gather(
            client.list_sources(wanted.name),
            client.list_pulls(wanted.name),
            client.list_rates(sorted(hosts)[:256]),
        )
        rates: dict[str, dict[str, float]] = {}
        for each in measured:
            rates.setdefault(each.host, {})[each.source_host] = each.gb_per_s
        whole = tuple(source for source in located.sources if source.whole)
        return _Facts(
            located.key,
            _size(manifest.layout),
            whole or tuple(located.sources),
            tuple(statuses),
            tuple(pulls),
            rates,
        )

    async def _places(self, client: CoordinatorClient, hosts: Sequence[str | Place]) -> list[_At]:
        here = await in_thread(discovery.here, nics=self._settings.nics)
        listed: list[SourceRecord] = []
        if any(isinstance(host, str) and host for host in hosts):
            listed = [status.record for status in await client.list_sources()]
        return [_place(host, here, listed) for host in hosts]

    def _estimate(self, facts: _Facts, at: _At, attach: bool) -> Estimate:
        host, place, here = at.host, at.place, at.here
        known = transports()

        def reach(name: str, there: Place) -> Path | str:
            trusted = self._settings.trusted_fabric
            path = path_or_reason(known[name], place, there, trusted_fabric=trusted)
            if isinstance(path, Path) and here:  # elsewhere it can't be tried
                viable = known[name].probe()
                if isinstance(viable, Unavailable):
                    return viable.reason
            return path

        sources = [with_verified_place(source, place) for source in facts.sources]
        found = plan(place, sources, sorted(known), reach, attach=attach)
        chosen = {path.source.source_id for path in found.chosen}
        loads = {
            status.record.source_id: Load(status.readers, status.gb_per_s)
            for status in facts.statuses
            if status.record.source_id in chosen
        }
        arriving = [
            (pull.nbytes - pull.done_bytes) / max(pull.gb_per_s * 1e9, 1.0)
            for pull in facts.pulls
            if pull.pull_id in chosen
        ]
        return estimate(
            facts.model,
            host,
            facts.size,
            found,
            measured=facts.rates.get(place.hostname, {}),
            loads=loads,
            arriving_s=max(arriving, default=0.0),
        )

    def _closing_steps(self) -> list[Step]:
        watches = [watch.close for watch in list(self._watches)]
        return [*watches, self._awaiting(self._disconnect)]

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _reference(model: str) -> ModelReference:
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    return parse_reference(model)


def _named(model: str, variant: str | ProcessingKey) -> ModelReference:
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    wanted = parse_reference(model, variant=variant_text(variant))
    if not wanted.name:
        raise ConfigError("`model` is empty", hint="it is NAME, NAME:REVISION or NAME@PIN")
    return wanted


def _size(layout: Layout) -> Size:
    sizes = [sum(nbytes for _, nbytes in layer.extents) for layer in layout.layers]
    return Size(sum(sizes), next((nbytes for nbytes in sizes if nbytes), 0))


def _place(host: str | Place, here: Place, listed: Sequence[SourceRecord]) -> _At:
    if isinstance(host, str) and host in ("", here.hostname):
        return _At(here.hostname, here, here=True)
    place: Place | None = host if isinstance(host, Place) else None
    if place is None:
        check_type("at", host, str, "it is a host's name, HOST:PORT of a source, or a Place")
        place = _read(str(host)) if str(host).startswith("{") else _listed(str(host), listed)
    name = host if isinstance(host, str) and not host.startswith("{") else place.hostname
    return _At(name or "there", place, here=place.same_host_key == here.same_host_key)


def _read(text: str) -> Place:
    try:
        return Place.from_json(text)
    except ValueError as error:
        raise ConfigError(f"`at` is no place: {error}", hint="give a Place's JSON") from None


def _listed(host: str, listed: Sequence[SourceRecord]) -> Place:
    for record in listed:
        if host in (record.endpoint, record.endpoint.rpartition(":")[0], record.place.hostname):
            return record.place
    raise ConfigError(
        f"nothing is known of the host {host[:80]!r}: no source is listed there",
        hint="give its Place, which `mx topo --json` shows on that host",
    )
