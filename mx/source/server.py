"""The source side: exposes models, answers readers, stays registered, and drains on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mx import discovery, packs, trace
from mx.core.budget import Limits
from mx.core.grants import Principal
from mx.core.limits import Bounds
from mx.core.topology import Place
from mx.core.types import ModelKey, SourceRecord, SourceState
from mx.errors import ConfigError, LocalError, MxError, PeerUntrustedError
from mx.log import event
from mx.namekey import NameKey
from mx.plugins import NO_CONTEXT, TransportContext
from mx.runtime import in_thread, uncut
from mx.source.doubts import Doubts
from mx.source.endpoint import dialled_host, require_dialable
from mx.source.exposures import expose
from mx.source.grants import Grants
from mx.source.lending import Lending
from mx.source.limits import UNBOUNDED, SourceLimits
from mx.source.model import SourceModel
from mx.source.registrar import Registrar
from mx.source.retirement import Retirement, until
from mx.source.served import ExposedModel, Participant
from mx.source.service import PeerServicer
from mx.swarm.origin import Origin
from mx.tasks import end_tasks
from mx.transport import ExposeOptions, Exposure, TlsFiles, Transport
from mx.wire.address import join_address, split_address
from mx.wire.client import CoordinatorClient
from mx.wire.documents import DocumentsServicer
from mx.wire.same_files import FilesListing, ListedModel
from mx.wire.server import Listening, Service, listen
from mx.wire.v1 import common_pb2, peer_pb2

if TYPE_CHECKING:
    from mx.wire.principals import Access

log = logging.getLogger(__name__)

#: The grace for calls that are about to end: gRPC's client logs an error for each that is cut.
_LAST_WORDS_S = 0.2
#: How long readers of a source that has another id by now have to finish.
_RENAMED_GRACE_S = 3600.0


@dataclass(frozen=True)
class SourceOptions:
    """The options of a source.

    `advertise` is registered in place of `listen`. `coordinator` is the coordinator's address, if
    it is known before the source listens.
    """

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    coordinator: str = ""
    data_ports: range = range(0)
    tls: TlsFiles | None = None
    data_tls: TlsFiles | None = None
    #: The file that says who may pull what; "" for none.
    policy: str = ""
    insecure: bool = False
    trusted_fabric: bool = False
    nics: tuple[str, ...] = ()
    reader_lease_s: float = 6.0
    stall_timeout_s: float = 4.0
    connect_timeout_s: float = 3.0
    bounds: Bounds = UNBOUNDED
    #: What clients may have by calls.
    limits: Limits = field(default_factory=Limits)
    #: What this process owns names with; None: it owns none.
    name_key: NameKey | None = None
    transport_context: TransportContext = NO_CONTEXT


@dataclass(frozen=True, slots=True)
class SourceStats:
    """The state of a source. `readers` counts its running leases. With `pin_only` its name stands
    for other weights at the coordinator, and readers find it by its pin."""

    readers: int
    registered: bool
    state: SourceState
    pin_only: bool = False


#: The sources of this process that have started and are not closed.
running: weakref.WeakSet[SourceServer] = weakref.WeakSet()


class SourceServer:
    """The sources of one process behind one control address. All methods run on the loop."""

    def __init__(self, options: SourceOptions, transports: Mapping[str, Transport]) -> None:
        self.options = options
        self.transports = {**transports, **options.transport_context.broken}
        self._limits = SourceLimits(options.bounds, report_s=options.reader_lease_s / 4)
        self._doubts = Doubts(self._is_right)
        self._grants = Grants(options.reader_lease_s, self._limits)
        self._servicer = PeerServicer(self._record, self._doubts, self._grants)
        #: Takes sources away again.
        self.retirement = Retirement(
            self._servicer, self._grants, self._unlist, options.stall_timeout_s
        )
        #: Looks after live memory, if this process lends any.
        self.lending: Lending | None = None
        self._listening: Listening | None = None
        self._files = FilesListing(self._files_read)
        self.registrar: Registrar | None = None
        #: The port at which this process takes an engine's requests; 0: at none.
        self.requests_port = 0
        self._tasks: list[asyncio.Task[object]] = []
        # Found by `start`: this takes a millisecond, and most pulls' servers never start.
        self._place: Place  # that readers see
        self._expose_place: Place
        self._host = ""  # the host that others dial
        self._at_host = False  # readers find the data where they dial for control

    @property
    def endpoint(self) -> str:
        """The HOST:PORT that others dial; "" before `start`."""
        if self._listening is None:
            return ""
        port = split_address(self.options.advertise)[1] if self.options.advertise else 0
        return join_address(self._host, port or self._listening.port)

    @property
    def access(self) -> Access | None:
        """Who may do what here; None without TLS."""
        return self._servicer.access

    def stats(self) -> SourceStats:
        """Return the number of readers, and the state."""
        registrar, servicer = self.registrar, self._servicer
        return SourceStats(
            len(self._grants.leases),
            registrar is not None and registrar.registered,
            servicer.state,
            any(served.pin_only for served in servicer.models.values()),
        )

    def figures(self) -> dict[str, int]:
        """Return how many leases of readers, slots in use and open swarm streams there are."""
        slots = sum(served.participant.slots for served in self._servicer.models.values())
        streams = self._servicer.streams
        return {"leases": len(self._grants.leases), "slots": slots, "streams": streams}

    def held_bytes(self) -> Counter[str]:
        """Return the bytes of the weights that are served, by model name."""
        found: Counter[str] = Counter()
        for served in self._servicer.models.values():
            found[served.held.key.name] += served.held.manifest.layout.payload_nbytes
        return found

    def given_nbytes(self) -> Counter[str]:
        """Return the bytes that readers had so far on open grants, by transport."""
        return self._grants.given_nbytes()

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address is malformed, refused, or cannot be dialled by others.
            LocalError: The address cannot be listened on, such as a port in use.
        """
        host, _ = split_address(self.options.listen)
        advertise, coordinator = self.options.advertise, self.options.coordinator
        self._host = await in_thread(dialled_host, self.options.listen, advertise, coordinator)
        hosts = discovery.data_hosts(host, self.options.nics)
        self._at_host = bool(advertise)
        if self.options.tls is not None or self.options.policy:
            hosts = await in_thread(self._secure, hosts)
        await uncut(self._listen())  # to its end, so that `close` knows what listens
        running.add(self)
        facts = self.options.transport_context.facts
        self._place = self._expose_place = replace(discovery.here(addresses=hosts), facts=facts)
        if self._at_host:
            # Its own addresses and interfaces are of no use to readers.
            self._place = replace(self._place, addresses=(self._host,), nics=())
        if self._servicer.access is not None:
            self._servicer.access.say()
            watching = self._servicer.access.watch()
            self._tasks.append(asyncio.create_task(watching, name="mx-policy"))
        self._tasks.append(asyncio.create_task(self._grants.expire(), name="mx-lease-expiry"))
        self._tasks.append(asyncio.create_task(self._doubts.run(), name="mx-doubts"))

    def _secure(self, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Read the policy, and return the addresses for data that the certificate names; if it
        names none of them, all: readers then find the data where they dial for control. Blocks."""
        from mx.wire.principals import Access  # without TLS it is not needed
        from mx.wire.tls import check_server_files

        tls = self.options.tls
        access = Access(
            self.options.policy, tls, what="source", error=PeerUntrustedError, by_name=False
        )
        assert tls is not None  # else that has raised
        subject = check_server_files(tls, self._host)
        self._servicer.access = access
        named = tuple(host for host in hosts if subject.is_at(host))
        unnamed = [host for host in hosts if host not in named]
        if unnamed and not self.options.advertise:
            text = "name them in `tls_cert` to have readers use them, too"
            event(log, "source.unnamed", addresses=", ".join(unnamed), text=text)
        self._at_host = self._at_host or not named
        return named or hosts

    async def _listen(self) -> None:
        servicer = self._servicer
        self._listening = await listen(
            self.options.listen,
            [
                Service(
                    peer_pb2.DESCRIPTOR.services_by_name["Peer"],
                    servicer,
                    lambda context, _: servicer.on_call(context),
                    servicer.on_refused,
                ),
                Service(
                    common_pb2.DESCRIPTOR.services_by_name["Documents"],
                    DocumentsServicer(servicer.documents),
                    lambda context, _: servicer.on_call(context),
                    servicer.on_refused,
                ),
                *(service(self) for service in packs.each("services")),
            ],
            tls=self.options.tls,
            insecure=self.options.insecure,
            dialled=self._host,
            access=servicer.access,
            limits=self.options.limits,
        )

    async def offer(self, held: SourceModel, participant: Participant | None = None) -> None:
        """Expose a model; from now on the Peer service describes it and grants reads.

        Args:
            held: The model, and its companions. The server owns their arenas from now on, unless
                the model is borrowed.
            participant: Its part in a swarm; None for that of an origin.

        Raises:
            LocalError: No transport can serve the model.
        """
        # To its end, else what a thread has exposed by then would belong to nothing.
        await uncut(self._offer(held, participant))
        for each in held.companions:  # the ports for data may be few
            await uncut(self._offer(each, None))

    async def _offer(self, held: SourceModel, participant: Participant | None) -> None:
        with trace.span("serve.expose", model=str(held.key)):
            exposures = await self._exposed(held)
            grid = held.manifest.grid
            served = ExposedModel(
                held, exposures, participant or Origin(len(grid), grid.chunk_nbytes)
            )
            served.watchman = self._look_after(held)
            counts, source_id = self._grants.counts, held.source_id
            served.participant.watch(
                lambda name, address: counts.nbytes(source_id, name, address),
                lambda name, change: self._limits.trades(Principal("", "", name), change),
            )
        self._servicer.models[held.source_id] = served
        if held.stamps:
            try:
                await self._files.start()
            except (MxError, OSError) as error:
                log.debug("which files were read is not listed on this host: %s", error)

    def _files_read(self) -> list[ListedModel]:
        """Return the models that were read from files of this host."""
        return [
            ListedModel(
                held.key.name,
                held.key.revision,
                held.manifest.ref.identity.hex(),
                frozenset(held.stamps),
            )
            for held in (served.held for served in self._servicer.models.values())
            if held.stamps
        ]

    def _look_after(self, held: SourceModel) -> Lending | None:
        """Return what looks after live memory that is lent; it outlives the changes of that."""
        if not held.live or held.growing:
            return None
        if self.lending is None:
            self.lending = Lending(held, self.retirement, self.offer, self._list_changed)
            watching = self.lending.watch()
            self._tasks.append(asyncio.create_task(watching, name="mx-lent-memory"))
        return self.lending

    async def _exposed(self, held: SourceModel) -> dict[str, Exposure]:
        loop = asyncio.get_running_loop()

        def on_lost(error: MxError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._lost, held, str(error))

        options = replace(
            self.expose_options(held.device),
            content=held.content,
            background=held.live,
            block_digests=held.shortcuts or None,
            on_lost=on_lost,
        )
        return await in_thread(expose, held, self.transports, options)

    def expose_options(self, device: str) -> ExposeOptions:
        """Return how this process exposes memory on a device, after `start`."""
        return ExposeOptions(
            hosts=self._expose_place.addresses,
            tls=self.options.data_tls,
            stall_timeout_s=self.options.stall_timeout_s,
            place=discovery.at_device(self._expose_place, device),
            trusted_fabric=self.options.trusted_fabric,
            limiter=self._limits.limiter,
            ports=self.options.data_ports,
            at_peer=self._at_host,
            setting=self.options.transport_context.setting,
        )

    def place(self, device: str) -> Place:
        """Return the place that readers of memory on a device see, after `start`."""
        return discovery.at_device(self._place, device)

    async def _is_right(self, served: ExposedModel, chunk: int) -> bool:
        return await self.retirement.is_right(served, chunk)

    def _lost(self, held: SourceModel, why: str) -> None:
        if not self.retirement.closing:
            losing = self.retirement.lost(held, why)
            self._tasks.append(asyncio.create_task(losing, name="mx-lost"))

    async def register(self, coordinator: str, *, update: bool = False) -> None:
        """Register every model and stay registered, even if the coordinator restarts.

        Args:
            coordinator: The coordinator's address.
            update: Register them as updates, where their names mean other weights.

        Raises:
            ConfigError: The coordinator is elsewhere and others cannot dial this source.
            CoordinatorError: The first registration failed.
        """
        await in_thread(require_dialable, self.endpoint, coordinator)
        if self.registrar is None:  # else the last attempt has failed
            self.registrar = self._new_registrar(coordinator)
        registrar = self.registrar
        # Who finds a model finds its companions, too.
        for served in sorted(self._servicer.models.values(), key=lambda s: s.held.takes_name):
            listing = registrar.list_as_newest if update else registrar.list
            list_it = listing if served.held.takes_name else registrar.list
            served.held.key = await uncut(list_it(served.held))
            if served.newer:  # withdrawn meanwhile
                await registrar.unlist(served.held)
            else:
                registrar.keep_listed(served.held)
        registrar.registered = True

    def _new_registrar(self, coordinator: str) -> Registrar:
        client = CoordinatorClient(
            coordinator,
            tls=self.options.tls,
            insecure=self.options.insecure,
            timeout_s=self.options.connect_timeout_s,
        )
        models, limits, leases = self._servicer.models, self._limits, self._grants.leases
        return Registrar(
            client,
            models,
            self._record,
            self._rename,
            lambda source_id: len(leases.of_source(source_id)),
            lambda source_id: limits.gb_per_s(source_id, models[source_id].sent_bytes()),
            self.options.name_key,
        )

    async def _unlist(self, held: SourceModel) -> None:
        if self.registrar is not None:
            # Live memory comes back under its name.
            await self.registrar.unlist(held, keeps_name=held.live)

    async def _list_changed(
        self, held: SourceModel, listed: bytes, stopped: Callable[[], bool]
    ) -> None:
        if self.registrar is not None:
            await self.registrar.list_changed(held, listed, stopped)

    async def _rename(self, held: SourceModel) -> None:
        """Serve a model under another source id. Readers of the source that it was may finish.

        Raises:
            LocalError: No transport can serve it. Then nothing has changed.
        """
        before = self._servicer.models[held.source_id]
        was = before.held = replace(held)
        idle = not self._grants.leases.of_source(was.source_id)
        if idle:  # at once, since the ports for data may be few
            self._servicer.supersede(was.source_id, was.generation + 1, 0.0)
            self._servicer.remove(was.source_id)
            await self.retirement.withdraw(before)
        held.source_id, held.generation = str(uuid.uuid4()), was.generation + 1
        try:
            await self.offer(held)
        except MxError:
            held.source_id, held.generation = was.source_id, was.generation
            before.held = held
            if idle:
                await self.offer(held)
            raise
        if not idle:
            retiring = self.retirement.retire(was.source_id, _RENAMED_GRACE_S)
            self._tasks.append(asyncio.create_task(retiring, name="mx-retire"))

    # -- new weights ----------------------------------------------------------------------------

    async def offer_beside(self, source_id: str, held: SourceModel) -> None:
        """Serve weights beside the source that they will replace, without a name yet: see
        `replace`.

        Args:
            source_id: The source to replace.
            held: The new weights. The server owns its arena from now on, also after an error.

        Raises:
            ConfigError: The source is not registered.
            LocalError: No transport can serve the model.
            CoordinatorError: The coordinator does not answer, or refuses.

            After an error `held` is released, and nothing else has changed.
        """
        registrar, old = self.registrar, self._servicer.models.get(source_id)
        try:
            if registrar is None or old is None:
                raise ConfigError("only a registered source can be updated")
            held.key, held.generation = old.held.key, old.held.generation + 1
            await self.offer(held)
            await registrar.end_settling(old.held)
            # A coordinator that has restarted may not know yet what is replaced.
            await registrar.list(old.held, again=True)
            for each in held.companions:
                await registrar.list(each)
                registrar.keep_listed(each)
        except BaseException:
            await uncut(self._take_back(held))
            raise

    async def replace(self, held: SourceModel) -> None:
        """Register what `offer_beside` serves as an update. Then retire what it replaces.

        Do not cancel this: what may have been published is not taken back, since no reader that
        has seen it is given less.

        Args:
            held: The new weights, whose key gets the new revision.

        Raises:
            CoordinatorError: The coordinator does not answer, or refuses.
            BindingError: The name belongs to another owner, or another source has updated it.

            After an error `held` is released, and nothing else has changed.
        """
        registrar = self.registrar
        assert registrar is not None
        try:
            held.key = await registrar.list(held, replaces=held.key.revision)
        except BaseException:
            await uncut(self._take_back(held))
            raise
        registrar.keep_listed(held)

    async def named_revision(self, key: ModelKey) -> str:
        """Return the revision that NAME means for the bundle of a variant, "" for none.

        Raises:
            CoordinatorError: The coordinator does not answer.
        """
        return "" if self.registrar is None else await self.registrar.named_revision(key)

    async def _take_back(self, held: SourceModel) -> None:
        for each in (held, *held.companions):
            if each.source_id in self._servicer.models:
                await self.retirement.retire(each.source_id, 0.0)
            else:
                each.release()

    # -------------------------------------------------------------------------------------------

    async def advertise(self) -> None:
        """Report to the coordinator which layers are held now.

        Raises:
            CoordinatorError: The coordinator does not answer.
            UnknownSourceError: It does not list the source.
        """
        if self.registrar is not None:
            await self.registrar.advertise()

    async def settle(self, source_id: str) -> None:
        """Expose a model again that is complete and sealed now, so that new readers may attach.

        Running reads go on over the earlier exposures.

        Raises:
            LocalError: It was withdrawn.
        """
        served = self._servicer.models.get(source_id)
        if served is None or served.newer:
            why = self.retirement.withdrawn or "it was withdrawn"
            raise LocalError(
                f"the pulled weights can't be served: {why}",
                hint="serve it as it is now, under a name of its own",
            )
        served.held.growing, served.held.layers = False, None
        served.watchman = self._look_after(served.held)

        async def exposed() -> None:
            exposures = await self._exposed(served.held)
            served.retired += served.exposures.values()
            served.exposures = exposures

        await uncut(exposed())

    def record(self, held: SourceModel) -> SourceRecord:
        """Return the record of a model that was served; once withdrawn it has no transports."""
        served = self._servicer.models.get(held.source_id)
        transports = () if served is None or served.newer else served.transports
        place = self.place(held.device)  # what NVML says is known since the model was exposed
        record = held.record(self.endpoint, place, transports, self._servicer.state)
        return replace(record, requests_port=0 if held.is_companion else self.requests_port)

    def _record(self, served: ExposedModel) -> SourceRecord:
        return self.record(served.held)

    async def accept_requests(self, port: int) -> None:
        """List this process's sources with the port at which it takes requests; 0: at none."""
        self.requests_port = port
        if self.registrar is not None:
            self.registrar.tell()

    async def drain(self, grace_s: float) -> bool:
        """Grant no more reads, and wait until all readers have finished and all streams have ended.

        Returns:
            False if `grace_s` passed first.
        """
        self._servicer.drain(grace_s)
        readers = len(self._grants.leases)
        event(log, "source.draining", endpoint=self.endpoint, readers=readers, grace_s=grace_s)
        if not await until(lambda: not len(self._grants.leases), grace_s):
            return False
        # A stream without a lease has nothing to finish.
        for served in self._servicer.models.values():
            served.participant.end()
        return await until(lambda: not self._servicer.streams, grace_s)

    async def close(self) -> None:
        """Deregister, stop listening, revoke every ticket, release the memory. Idempotent."""
        self.retirement.closing = True
        running.discard(self)
        self._servicer.state = SourceState.DRAINING
        if self.lending is not None:
            await self.lending.close()
        await end_tasks(*self._tasks)
        self._tasks.clear()
        await self._files.close()
        if self.registrar is not None:
            registrar, self.registrar = self.registrar, None
            await registrar.close()
        for served in self._servicer.models.values():
            served.participant.end()
        if self._listening is not None:
            endpoint, listening, self._listening = self.endpoint, self._listening, None
            await listening.stop(_LAST_WORDS_S)
            if self._servicer.models:  # else its start has failed, and it never was a source
                event(log, "source.stopped", endpoint=endpoint)
        for source_id in list(self._servicer.models):
            gone = self._servicer.remove(source_id)
            if gone is not None:
                await self.retirement.free(gone)
        if self.lending is not None:
            held = self.lending.held
            if not held.borrowed:
                held.release()  # also where it is not lent at the moment
            await self.retirement.let_go(held.key, 0.0)  # exposures that are attached to keep it
