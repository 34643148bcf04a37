"""The source side: exposes models, answers readers, stays registered, and drains on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mx import discovery, trace
from mx.core.grants import Principal
from mx.core.leases import MARGIN_S
from mx.core.limits import Bounds
from mx.core.topology import Place
from mx.core.types import ModelKey, SourceRecord, SourceState
from mx.cuda.errors import GONE_CODES, CudaError
from mx.errors import ConfigError, LocalError, MxError
from mx.log import event
from mx.memory.live import Memory
from mx.namekey import NameKey
from mx.runtime import in_thread, uncut
from mx.source.doubts import Doubts, looked_at
from mx.source.endpoint import dialled_host, require_dialable
from mx.source.exposures import expose, withdraw
from mx.source.grants import Grants
from mx.source.lending import Lending
from mx.source.limits import UNBOUNDED, SourceLimits
from mx.source.model import HeldModel
from mx.source.registrar import Registrar
from mx.source.served import Participant, Served
from mx.source.service import PeerServicer
from mx.swarm.origin import Origin
from mx.transport import ExposeOptions, Exposure, TlsFiles, Transport
from mx.wire.address import join_address, split_address
from mx.wire.client import CoordinatorClient
from mx.wire.documents import DocumentsServicer
from mx.wire.same_files import FilesListing, Listed
from mx.wire.server import Listening, Service, listen
from mx.wire.v1 import common_pb2, peer_pb2

log = logging.getLogger(__name__)

#: The grace for calls that are about to end: gRPC's client logs an error for each that is cut.
_LAST_WORDS_S = 0.2
#: How long readers that copy from frozen memory have to let it go.
_LET_GO_S = 1.0
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
    insecure: bool = False
    trusted_fabric: bool = False
    nics: tuple[str, ...] = ()
    reader_lease_s: float = 6.0
    stall_timeout_s: float = 4.0
    connect_timeout_s: float = 3.0
    bounds: Bounds = UNBOUNDED
    #: What this process owns names with; None: it owns none.
    name_key: NameKey | None = None


@dataclass(frozen=True, slots=True)
class SourceStats:
    """The state of a source. `readers` counts its running leases. With `pin_only` its name stands
    for other weights at the coordinator, and readers find it by its pin."""

    readers: int
    registered: bool
    state: SourceState
    pin_only: bool = False


class SourceServer:
    """The sources of one process behind one control address. All methods run on the loop."""

    def __init__(self, options: SourceOptions, transports: Mapping[str, Transport]) -> None:
        self.options = options
        self._transports = transports
        self._limits = SourceLimits(options.bounds, report_s=options.reader_lease_s / 4)
        self._doubts = Doubts(self._is_right)
        self._grants = Grants(options.reader_lease_s, self._limits)
        self._servicer = PeerServicer(self._record, self._doubts, self._grants)
        #: Why a source that lends nothing is given to no reader any more; "" while it is.
        self.withdrawn = ""
        #: Looks after live memory, if this process lends any.
        self.lending: Lending | None = None
        self._listening: Listening | None = None
        self._files = FilesListing(self._files_read)
        self.registrar: Registrar | None = None
        #: The port at which this process takes an engine's requests; 0: at none.
        self.requests_port = 0
        self._tasks: list[asyncio.Task[object]] = []
        self._closing = False
        #: Exposures of frozen memory, withdrawn, to which readers are still attached.
        self._attached: list[Exposure] = []
        # Found by `start`: this takes a millisecond, and most pulls' servers never start.
        self._place: Place  # that readers see
        self._expose_place: Place
        self._host = ""  # the host that others dial

    @property
    def endpoint(self) -> str:
        """The HOST:PORT that others dial; "" before `start`."""
        if self._listening is None:
            return ""
        port = split_address(self.options.advertise)[1] if self.options.advertise else 0
        return join_address(self._host, port or self._listening.port)

    def stats(self) -> SourceStats:
        """Return the number of readers, and the state."""
        registrar, servicer = self.registrar, self._servicer
        return SourceStats(
            len(self._grants.leases),
            registrar is not None and registrar.registered,
            servicer.state,
            any(served.pin_only for served in servicer.models.values()),
        )

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
        await uncut(self._listen())  # to its end, so that `close` knows what listens
        self._place = self._expose_place = discovery.here(addresses=hosts)
        if advertise:
            # Its own addresses and interfaces are of no use to readers.
            self._place = replace(self._place, addresses=(self._host,), nics=())
        self._tasks.append(asyncio.create_task(self._grants.expire(), name="mx-lease-expiry"))
        self._tasks.append(asyncio.create_task(self._doubts.run(), name="mx-doubts"))

    async def _listen(self) -> None:
        self._listening = await listen(
            self.options.listen,
            [
                Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], self._servicer),
                Service(
                    common_pb2.DESCRIPTOR.services_by_name["Documents"],
                    DocumentsServicer(self._servicer.document),
                ),
            ],
            tls=self.options.tls,
            insecure=self.options.insecure,
            dialled=self._host,
        )

    async def offer(self, held: HeldModel, participant: Participant | None = None) -> None:
        """Expose a model; from now on the Peer service describes it and grants reads.

        Args:
            held: The model. The server owns its arena from now on, unless it is borrowed.
            participant: Its part in a swarm; None for that of an origin.

        Raises:
            LocalError: No transport can offer the model.
        """
        # To its end, else what a thread has exposed by then would belong to nothing.
        await uncut(self._offer(held, participant))

    async def _offer(self, held: HeldModel, participant: Participant | None) -> None:
        with trace.span("serve.expose", model=str(held.key)):
            exposures = await self._exposed(held)
            grid = held.manifest.grid
            served = Served(held, exposures, participant or Origin(len(grid), grid.chunk_nbytes))
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

    def _files_read(self) -> list[Listed]:
        """Return the models that were read from files of this host."""
        return [
            Listed(
                held.key.name,
                held.key.revision,
                held.manifest.ref.identity.hex(),
                frozenset(held.stamps),
            )
            for held in (served.held for served in self._servicer.models.values())
            if held.stamps
        ]

    def _look_after(self, held: HeldModel) -> Lending | None:
        """Return what looks after live memory that is lent; it outlives the changes of that."""
        if not held.live or held.growing:
            return None
        if self.lending is None:
            self.lending = Lending(self, held)
            watching = self.lending.watch()
            self._tasks.append(asyncio.create_task(watching, name="mx-lent-memory"))
        return self.lending

    async def _exposed(self, held: HeldModel) -> dict[str, Exposure]:
        loop = asyncio.get_running_loop()

        def on_lost(error: MxError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._lost, held, str(error))

        options = ExposeOptions(
            hosts=self._expose_place.addresses,
            tls=self.options.data_tls,
            stall_timeout_s=self.options.stall_timeout_s,
            place=discovery.at_device(self._expose_place, held.device),
            trusted_fabric=self.options.trusted_fabric,
            limiter=self._limits.limiter,
            ports=self.options.data_ports,
            at_peer=bool(self.options.advertise),
            content=held.content,
            background=held.live,
            block_digests=held.shortcuts or None,
            on_lost=on_lost,
        )
        return await in_thread(expose, held, self._transports, options)

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
        for served in list(self._servicer.models.values()):
            listing = registrar.list_as_newest if update else registrar.list
            served.held.key = await uncut(listing(served.held))
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

    async def _rename(self, held: HeldModel) -> None:
        """Serve a model under another source id. Readers of the source that it was may finish.

        Raises:
            LocalError: No transport can offer it. Then nothing has changed.
        """
        before = self._servicer.models[held.source_id]
        was = before.held = replace(held)
        idle = not self._grants.leases.of_source(was.source_id)
        if idle:  # at once, since the ports for data may be few
            self._servicer.supersede(was.source_id, was.generation + 1, 0.0)
            self._servicer.remove(was.source_id)
            await self._withdraw(before)
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
            retiring = self.retire(was.source_id, _RENAMED_GRACE_S)
            self._tasks.append(asyncio.create_task(retiring, name="mx-retire"))

    # -- new weights ----------------------------------------------------------------------------

    async def replace(self, source_id: str, held: HeldModel) -> None:
        """Serve `held` as a new revision beside the source that it replaces. Then `retire` that
        source.

        Args:
            source_id: The source to replace.
            held: The new weights. The server owns its arena from now on, also after an error.
                Its key gets the new revision.

        Raises:
            ConfigError: The source is not registered.
            LocalError: No transport can offer the model.
            CoordinatorError: The coordinator does not answer, or refuses.
            BindingError: The name belongs to another owner, or another source has updated it.

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
            # To its end: what is taken back has to be listed before, or not at all.
            held.key = await uncut(registrar.list(held, replaces=old.held.key.revision))
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

    async def _take_back(self, held: HeldModel) -> None:
        if held.source_id in self._servicer.models:
            await self.retire(held.source_id, 0.0)
        else:
            held.release()

    async def retire(
        self,
        source_id: str,
        grace_s: float,
        hurry: Callable[[], bool] = lambda: False,
        *,
        changed: bool = False,
    ) -> bool:
        """Stop serving a source, and release its memory once no reader can trust it any more.

        No new grants are given. Readers may finish within `grace_s`; the rest are cut off.

        Args:
            source_id: The source.
            grace_s: How long its readers have to finish.
            hurry: Polled; if it returns True, the grace ends at once.
            changed: Nothing replaces it: this process has written to its memory. Readers are told
                at once.

        Returns:
            False if readers were cut off.
        """
        served = self._servicer.models.get(source_id)
        if served is None:
            return True
        self._servicer.supersede(source_id, served.held.generation + 1, grace_s)
        if changed:
            served.changed = True
            self._servicer.cut(source_id)
        event(log, "source.retiring", model=str(served.held.key), source=source_id, grace_s=grace_s)
        if self.registrar is not None:
            # Live memory comes back under its name.
            await self.registrar.unlist(served.held, keeps_name=served.held.live)
        leases = self._grants.leases
        await self._until(lambda: not leases.of_source(source_id) or hurry(), grace_s)
        finished = not leases.of_source(source_id)
        self._servicer.cut(source_id)
        # No lease is renewed any more, so all have ended by then.
        longest_s = leases.lease_s + MARGIN_S
        await self._until(lambda: not self._grants.has_unexpired(source_id), longest_s)
        if self._servicer.remove(source_id) is not None:
            await self._free(served)
        return finished

    async def retire_memory(
        self,
        memory: Memory,
        grace_s: float,
        hurry: Callable[[], bool] = lambda: False,
        *,
        changed: bool = False,
    ) -> None:
        """Retire every source of this memory: readers may have it under an earlier id, too."""
        models = self._servicer.models.items()
        ids = [source_id for source_id, served in models if served.held.arena is memory]
        retiring = (self.retire(source_id, grace_s, hurry, changed=changed) for source_id in ids)
        await asyncio.gather(*retiring)

    async def _is_right(self, served: Served, chunk: int) -> bool:
        """Hash a chunk again that a reader found wrong, and withdraw its source if it is wrong in
        this process's memory. Returns True if it is right."""
        held = served.held
        if served.newer or self._servicer.models.get(held.source_id) is not served:
            return False
        try:
            if served.watchman is not None:
                return await served.watchman.doubt(lambda: looked_at(held, chunk))
            found = await uncut(in_thread(looked_at, held, chunk))
        except MxError as error:  # such as a GPU's
            log.warning("%s could not be hashed again: %s", held.key, error)
            if isinstance(error, CudaError) and error.code in GONE_CODES:
                self._lost(held, str(error))
            return False
        wrong = found.moved or (found.wrong and f"{found.wrong}: written to while others read")
        if wrong and not served.newer:
            await uncut(self._give_up(held, wrong))
        return not wrong

    def _lost(self, held: HeldModel, why: str) -> None:
        """Withdraw a source whose memory can't be read any more, as it is on a lost GPU."""
        served = self._servicer.models.get(held.source_id)
        if served is not None and not (served.newer or served.changed or self._closing):
            served.changed = True
            giving_up = self._give_up(held, why)
            self._tasks.append(asyncio.create_task(giving_up, name="mx-lost"))

    async def _give_up(self, held: HeldModel, why: str) -> None:
        self.withdrawn = why
        event(
            log,
            "source.withdrawn",
            level=logging.ERROR,
            model=str(held.key),
            source=held.source_id,
            text=f"{self.withdrawn}; no reader gets anything of it here any more",
        )
        await self.retire_memory(held.arena, 0.0, changed=True)

    async def _free(self, served: Served) -> None:
        await self._withdraw(served)
        # The same memory may be served under an earlier id, too.
        shared = any(
            each.held.arena is served.held.arena for each in self._servicer.models.values()
        )
        # Live memory stays while its owner changes it.
        stays = served.held.borrowed or (served.held.live and not self._closing)
        if not stays and not shared:
            served.held.release()

    async def _withdraw(self, served: Served) -> None:
        served.participant.withdrawn()
        frozen = served.held.frozen
        # Readers that copy let go at once, and who has attached is waited for by `let_go`.
        timeout_s = _LET_GO_S if frozen else 2 * self.options.stall_timeout_s
        left = await in_thread(withdraw, served.all_exposures(), timeout_s)
        if frozen:
            self._attached += left

    async def let_go(self, key: ModelKey, timeout_s: float) -> None:
        """Wait until no reader is attached to frozen memory that was withdrawn.

        Args:
            key: The model, for the error.
            timeout_s: How long to wait at most, if it is longer than a message may take.

        Raises:
            LocalError: Some still are. Nothing was freed.
        """
        if self._attached:
            # Who has closed just now is heard of a moment later.
            waited_s = max(timeout_s, _LET_GO_S)
            self._attached = await in_thread(withdraw, self._attached, waited_s)
        if self._attached:
            raise _in_use(key)

    def require_let_go(self) -> None:
        """Raise as `let_go` does, after `close`. Blocks, and needs no loop."""
        self._attached = withdraw(self._attached, _LET_GO_S)
        if self._attached and self.lending is not None:
            raise _in_use(self.lending.held.key)

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
            raise LocalError(
                f"what was pulled can't be given to others: {self.withdrawn or 'it was withdrawn'}",
                hint="serve it as it is now, under a name of its own",
            )
        served.held.growing, served.held.layers = False, None
        served.watchman = self._look_after(served.held)

        async def exposed() -> None:
            exposures = await self._exposed(served.held)
            served.retired += served.exposures.values()
            served.exposures = exposures

        await uncut(exposed())

    def record(self, held: HeldModel) -> SourceRecord:
        """Return the record of a model that was offered; once withdrawn it has no transports."""
        served = self._servicer.models.get(held.source_id)
        transports = () if served is None or served.newer else served.transports
        # What NVML says is known since the model was exposed.
        place = discovery.at_device(self._place, held.device)
        record = held.record(self.endpoint, place, transports, self._servicer.state)
        return replace(record, requests_port=self.requests_port)

    def _record(self, served: Served) -> SourceRecord:
        return self.record(served.held)

    async def accept_requests(self, port: int) -> None:
        """List this process's sources with the port at which it takes requests; 0: at none."""
        self.requests_port = port
        if self.registrar is not None:
            self.registrar.tell()

    async def drain(self, grace_s: float) -> bool:
        """Give no new grants, and wait until all readers have finished and all streams have ended.

        Returns:
            False if `grace_s` passed first.
        """
        self._servicer.drain(grace_s)
        readers = len(self._grants.leases)
        event(log, "source.draining", endpoint=self.endpoint, readers=readers, grace_s=grace_s)
        if not await self._until(lambda: not len(self._grants.leases), grace_s):
            return False
        # A stream without a lease has nothing to finish.
        for served in self._servicer.models.values():
            served.participant.end()
        return await self._until(lambda: not self._servicer.streams, grace_s)

    @staticmethod
    async def _until(done: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not done():
            if asyncio.get_running_loop().time() >= deadline_s:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """Deregister, stop listening, revoke every ticket, release the memory. Idempotent."""
        self._closing = True
        self._servicer.state = SourceState.DRAINING
        if self.lending is not None:
            await self.lending.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
                await self._free(gone)
        if self.lending is not None and not self.lending.held.borrowed:
            self.lending.held.release()  # also where it is not lent at the moment
        if self._attached and self.lending is not None:  # their exposures keep the memory
            await self.let_go(self.lending.held.key, _LET_GO_S)


def _in_use(key: ModelKey) -> LocalError:
    return LocalError(
        f"{key} is in use: readers are attached to its memory, which must be neither written to "
        "nor freed",
        hint="close what has attached to it, and try again",
    )
