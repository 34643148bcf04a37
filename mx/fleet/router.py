"""What routers ask: who holds a model, how long another replica takes, and where: `Router`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from mx import config, runtime
from mx.api.closing import Step
from mx.api.common import check_type, variant_text
from mx.api.listing import CoordinatorUser
from mx.core.estimates import Estimate, in_order_of_readiness
from mx.core.reference import ModelReference, parse_reference
from mx.core.replicas import Replica
from mx.core.topology import Place
from mx.core.variant import ProcessingKey
from mx.errors import CapacityError, ConfigError
from mx.fleet.allowed import AllowedHosts
from mx.fleet.known_replicas import Fleet
from mx.fleet.router_estimates import estimates
from mx.fleet.router_watch import FollowedModel, Watch
from mx.wire.client import CoordinatorClient
from mx.wire.listing import SourceStatus

T = TypeVar("T")

#: The most open watches of one router: each is a stream, and a connection has at most 100.
MAX_WATCHES = 40
#: The most places of one question.
MAX_PLACES = 4096


class Router(CoordinatorUser):
    """A router's view of the replicas that a coordinator knows; blocking and async.

    Close it, or use it as a context manager, by `with` or `async with`. Each question has a
    blocking form and one for the caller's own event loop (`..._async`).

        with mx.Router("10.0.0.1:7600") as router:
            for event in router.watch("llama-8b"):
                ...
    """

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        allow: Collection[str] | None = None,
        settings: config.Settings | None = None,
    ) -> None:
        """Connect on first use.

        Args:
            coordinator: HOST:PORT; None takes the address in the settings.
            allow: The hosts of replicas to use: networks ("10.0.0.0/8"), addresses, names
                ("replica-1.example", "*.example"). Replicas elsewhere are told with `allowed`
                False and no `requests`, and no estimate uses them. None: all that the coordinator
                lists.
            settings: Settings to use; None loads them from the environment and the files.

        Raises:
            ConfigError: A setting is wrong, or an entry of `allow`.
        """
        if allow is not None:
            check_type("allow", allow, Collection, "it is a list of hosts and networks")
        if isinstance(allow, str):
            raise ConfigError("`allow` is text", hint="it is a list of hosts and networks")
        self._allow = None if allow is None else AllowedHosts(allow)
        #: What open watches follow, and the watches, which their users keep.
        self._watches: dict[FollowedModel, weakref.ref[Watch]] = {}
        super().__init__(coordinator, settings)

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
        """Return what `sources` returns, without blocking the caller's event loop.

        Args:
            model: As for `sources`.

        Raises:
            MxError: As `sources`.
        """
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
        """Return what `replicas` returns, without blocking the caller's event loop.

        Args:
            model: As for `replicas`.

        Raises:
            MxError: As `replicas`.
        """
        return await self._asking(self._replicas(_reference(model)))

    def watch(self, model: str = "") -> Watch:
        """Return a stream of events: what is there, then every change. Returns at once.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN; empty for all models. It need not be there yet.

        Raises:
            CapacityError: The router has 40 watches open.
            ConfigError: `model` is not a model's name.
            ClosedError: The router was closed.
        """
        wanted, client = _reference(model), self._open_client()
        if len(self._watches) >= MAX_WATCHES:
            raise CapacityError(
                f"this router has {MAX_WATCHES} watches open, its limit", hint="close some"
            )

        async def make(loop: runtime.LoopThread) -> Watch:
            stream = FollowedModel(client, wanted, self._allow)
            watch = Watch(loop, stream, self._forget)
            self._watches[stream] = weakref.ref(watch)
            return watch

        return runtime.made(make)

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
        the interfaces declare, less what the sources serve to others now. No weight is moved.

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
            ConfigError: An argument is wrong, nothing is known of that host, or `allow` of the
                router leaves it out.
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
        """Return what `estimate` returns, without blocking the caller's event loop.

        Args:
            model: As for `estimate`, as are the others.
            at: The place.
            variant: The variant.
            attach: False leaves out sharing memory.

        Raises:
            MxError: As `estimate`.
        """
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
        """Return what `place` returns, without blocking the caller's event loop.

        Args:
            model: As for `place`, as are the others.
            hosts: The places.
            variant: The variant.
            attach: False leaves out sharing memory.

        Raises:
            MxError: As `place`.
        """
        found = await self._asking(self._estimates(_named(model, variant), hosts, attach))
        return in_order_of_readiness(found)

    def _forget(self, stream: FollowedModel) -> None:
        self._watches.pop(stream, None)

    # -- inside ---------------------------------------------------------------------------------

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

    def _replicas(
        self,
        wanted: ModelReference,
    ) -> Callable[[CoordinatorClient], Coroutine[Any, Any, list[Replica]]]:
        async def question(client: CoordinatorClient) -> list[Replica]:
            found, fleet = (await client.overview(wanted.name)).of(wanted), Fleet(allow=self._allow)
            for status in found.sources:
                fleet.source(status.record)
            for pull in found.pulls:
                fleet.pull(pull)
            return list(fleet.replicas)

        return question

    def _estimates(
        self, wanted: ModelReference, hosts: Sequence[str | Place], attach: bool
    ) -> Callable[[CoordinatorClient], Coroutine[Any, Any, list[Estimate]]]:
        if isinstance(hosts, str) or len(hosts) > MAX_PLACES:
            raise ConfigError("`hosts` is not usable", hint=f"give a list of 1 to {MAX_PLACES}")
        return lambda client: estimates(
            client,
            self.coordinator,
            self._settings,
            wanted,
            hosts,
            attach=attach,
            allow=self._allow,
        )

    def _label(self) -> str:
        return f"<Router at {self.coordinator}>"

    def _closing_steps(self) -> list[Step]:
        watches = [watch() for watch in list(self._watches.values())]
        closing = [watch.close for watch in watches if watch is not None]
        return [*closing, *super()._closing_steps()]

    async def _disconnect(self) -> None:
        for stream in list(self._watches):  # of watches that were dropped
            await stream.stop()
        await super()._disconnect()


def _reference(model: str) -> ModelReference:
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    return parse_reference(model)


def _named(model: str, variant: str | ProcessingKey) -> ModelReference:
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    wanted = parse_reference(model, variant=variant_text(variant))
    if not wanted.name:
        raise ConfigError("`model` is empty", hint="it is NAME, NAME:REVISION or NAME@PIN")
    return wanted
