"""The warm side: `serve` and the `Source` it gives."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config, runtime, trace
from mx.api.closing import Closable, Step
from mx.api.common import DEFAULT_REVISION, DEFAULT_VARIANT, resolve_device, tls_of, transports
from mx.core.limits import Bounds
from mx.core.reference import parse_reference
from mx.core.types import Manifest, ModelKey
from mx.errors import ClosedError, ConfigError, CoordinatorError
from mx.runtime import uncut
from mx.source.model import HeldModel, hold_checkpoint, hold_tensors
from mx.source.server import SourceOptions, SourceServer, SourceStats
from mx.storage.names import model_name_of
from mx.text import has_control
from mx.transport import Transport, host_view
from mx.units import format_bytes, parse_ports
from mx.wire.client import CoordinatorClient

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator

log = logging.getLogger(__name__)

#: A coordinator that is not up yet is asked again so often.
_ASK_AGAIN_S = 0.5


class Source(Closable):
    """A process's warm model. Made by `serve`; close it, or use it as a context manager."""

    def __init__(
        self,
        loop: runtime.LoopThread,
        server: SourceServer,
        held: HeldModel,
        coordinator_address: str,
        embedded: Coordinator | None,
        settings: config.Settings | None = None,
    ) -> None:
        """`settings` are those to hold new weights with; without them there is no `update`."""
        self._server = server
        self._held = held
        self._embedded = embedded
        self._settings = settings
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self.coordinator_address = coordinator_address
        self.endpoint = server.endpoint
        super().__init__(loop)

    def __repr__(self) -> str:
        """One line: what is served, and where."""
        state = "closed" if self._closed.is_set() else f"at {self.endpoint}"
        size = format_bytes(self.manifest.layout.payload_nbytes)
        return f"<Source {self.model}: {size}, {state}>"

    @property
    def model(self) -> ModelKey:
        return self._held.key

    @property
    def manifest(self) -> Manifest:
        return self._held.manifest

    def buffer(self) -> memoryview:
        """The weights as an arena of the manifest lays them out: read-only, and kept by being
        referred to. Raises LocalError for those in a GPU."""
        return host_view(self._held.arena.view)

    @property
    def identity_hex(self) -> str:
        return self._held.manifest.ref.identity.hex()

    @property
    def embedded(self) -> bool:
        """Does the coordinator live in this process?"""
        return self._embedded is not None

    def stats(self) -> SourceStats:
        return self._server.stats()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the source is closed; False if `timeout_s` passed first."""
        return self._closed.wait(timeout_s)

    def drain(self, grace_s: float = 10.0) -> bool:
        """Give no new grants and wait for the running readers, at most `grace_s`. True if all
        finished. Then `close`."""
        return self._loop.run(self._server.drain(grace_s))

    def update(
        self,
        what: str | Path | Any,
        *,
        grace_s: float = 10.0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ModelKey:
        """Serve new weights in place of these (what it can be, `serve` says), as a new revision.
        Blocks until the old ones are out of memory; returns the new key, which is also `model`
        from then on. Weights that are the same to the bit change nothing.

        The new weights get memory of their own, so for a while there are both: nothing is ever
        written where somebody may read. Once they are registered NAME means them, whoever reads
        the old ones may finish within `grace_s` seconds, and is then cut off: such a pull goes on
        from others that hold the old ones, or fails. None is ever given a mixture. What was
        attached stays as it was.

        Only who has bound the name may update it. Raises what `serve` raises, BindingError,
        ConfigError for a pull that is held, and ClosedError; the old weights are served on then.
        """
        self._require_own()
        with self._lock:
            settings = self._settings
            if settings is None or self._held.borrowed:
                raise ConfigError(
                    f"{self.model} was pulled: its weights are its origin's to update"
                )
            if self._closed.is_set():
                raise ClosedError(f"the source of {self.model} was closed")
            held = hold(
                what,
                self.model,
                self._held.device,
                settings,
                on_progress=on_progress,
                cancelled=self._closing.is_set,
            )
            if held.manifest.ref.identity == self._held.manifest.ref.identity:
                held.arena.release()
            else:
                self._loop.run(self._replace(held, grace_s))
            return self.model

    async def _replace(self, held: HeldModel, grace_s: float) -> None:
        old = self._held
        await self._server.replace(old.source_id, held)
        self._held = held
        await uncut(self._server.retire(old.source_id, grace_s, self._closing.is_set))

    def close(self) -> None:
        """Deregister, cut what still reads, free the memory. Idempotent. An update that runs on
        another thread is hurried; a close that was interrupted goes on when it is called
        again."""
        self._closing.set()
        with self._lock:
            super().close()

    def _closing_steps(self) -> list[Step]:
        embedded = [] if self._embedded is None else [self._awaiting(self._embedded.stop)]
        return [self._awaiting(self._server.close), *embedded, self._closed.set]

    def forked(self) -> None:
        super().forked()
        self._lock = threading.RLock()
        self._closing, self._closed = threading.Event(), threading.Event()
        self._closing.set()
        self._closed.set()


def source_options(settings: config.Settings, coordinator: str | None = None) -> SourceOptions:
    """What a source needs of the settings, to be registered with this coordinator if with any."""
    tls = tls_of(settings)
    return SourceOptions(
        listen=settings.listen,
        advertise=settings.advertise,
        coordinator=coordinator or "",
        data_ports=parse_ports(settings.data_ports),
        tls=tls,
        data_tls=None if settings.data_plaintext else tls,
        insecure=settings.insecure,
        trusted_fabric=settings.trusted_fabric,
        nics=settings.nics,
        reader_lease_s=settings.reader_lease_s,
        stall_timeout_s=settings.stall_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        bounds=Bounds(settings.max_readers, settings.max_bandwidth),
    )


def hold(
    what: str | Path | Any,
    key: ModelKey,
    device: str,
    settings: config.Settings,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> HeldModel:
    """A checkpoint, or a copy of a state dict's or a module's tensors, in memory of its own.
    Raises as `serve` does where that can't be."""
    if isinstance(what, str | Path):
        with trace.span("serve.load", path=str(what)) as span:
            held = hold_checkpoint(
                Path(what),
                key,
                device=device,
                chunk_nbytes=settings.chunk_bytes,
                threads=2,
                progress=on_progress,
                cancelled=cancelled,
            )
            span.set(nbytes=held.manifest.layout.payload_nbytes)
            return held
    from mx.memory.torch_source import describe

    return hold_tensors(*describe(what), key, device=device, chunk_nbytes=settings.chunk_bytes)


async def _join_or_embed(
    address: str,
    *,
    named_by: str,
    embed: bool,
    wait_s: float,
    settings: config.Settings,
    cancelled: Callable[[], bool],
) -> Coordinator | None:
    """Make sure that a coordinator answers at `address`; if `named_by` names it, within `wait_s`.
    Returns the one embedded, if it was."""
    client = CoordinatorClient(
        address,
        tls=tls_of(settings),
        insecure=settings.insecure,
        timeout_s=settings.connect_timeout_s,
    )
    must_be_there = bool(named_by) or not embed
    try:
        await _until_it_answers(client, wait_s if must_be_there else 0.0, cancelled)
        return None
    except CoordinatorError as error:
        if named_by and embed:
            error.hint += f"; none is embedded here, since {named_by} names one"
        if must_be_there:
            raise
    finally:
        await client.close()
    # Only here: who joins a coordinator does not need the code of one.
    from mx.coordinator.daemon import Coordinator

    coordinator = Coordinator(lease_s=settings.lease_s)
    await coordinator.start(address, tls=tls_of(settings), insecure=settings.insecure)
    return coordinator


def _key_of(what: Any, model: str, revision: str, variant: str) -> ModelKey:
    if not model and isinstance(what, str | Path):
        model = model_name_of(Path(what))
        if any(sign in model for sign in ":@[]") or has_control(model):
            raise ConfigError(
                f"{model!r}, as the checkpoint is called, can't be a model's name",
                hint="give it one with `model`",
            )
    if not model:
        raise ConfigError("what is served has no name", hint="give it one with `model`")
    reference = parse_reference(model, revision=revision, variant=variant)
    if reference.pin:
        raise ConfigError(
            f"{model!r} pins an identity, and what is served has the one that it has",
            hint=f"serve it as {reference.name}",
        )
    return ModelKey(
        reference.name,
        reference.revision or DEFAULT_REVISION,
        reference.variant or DEFAULT_VARIANT,
    )


async def _until_it_answers(
    client: CoordinatorClient, wait_s: float, cancelled: Callable[[], bool]
) -> None:
    """Ask until the coordinator answers. One that refuses is not asked again. Raises
    CoordinatorError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    said = False
    while True:
        try:
            await client.list_models()
            return
        except CoordinatorError as error:
            left_s = deadline_s - time.monotonic()
            if type(error) is not CoordinatorError or left_s <= 0 or cancelled():
                raise
            if not said:
                said = True
                log.warning("waiting up to %g s for a coordinator: %s", wait_s, error.message)
            await asyncio.sleep(min(_ASK_AGAIN_S, left_s))


def serve(
    what: str | Path | Any,
    *,
    model: str = "",
    revision: str = "",
    variant: str = "",
    coordinator: str | None = None,
    embed: bool = True,
    device: str = "cpu",
    max_readers: int | None = None,
    max_bandwidth: int | str | None = None,
    wait_s: float | None = None,
    settings: config.Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Source:
    """Hold a model warm and let others read it. Returns once it is registered.

    `what` is a checkpoint (a safetensors file or a folder), a state dict of CPU tensors, or a
    `torch.nn.Module`; tensors are copied, so that later changes to them reach nobody. `model` is
    NAME or NAME:REVISION; a checkpoint has its folder's name by default. Without `coordinator`
    (HOST:PORT) it joins the one that answers at the settings' address, else embeds
    one there (unless `embed` is False). `device` is where it is held: "cpu", or "cuda:N" for a
    copy in that GPU's memory. At most `max_readers` read at a time, and get at most
    `max_bandwidth` together ("500MB/s", or a number of bytes per second; None: as the settings
    say, 0: no bound). `wait_s` (else the settings') is how long a coordinator that was named, and
    does not answer yet, is waited for. `on_progress` is told (bytes read, bytes in all) from
    other threads; `cancelled` is asked while waiting and reading.

    Raises CheckpointError, CapacityError (before memory is taken), ConfigError (also where the
    coordinator is on another machine, and this source would listen on loopback), LocalError
    (port in use), CoordinatorError, BindingError (the name belongs to other weights).
    """
    where = resolve_device(device)
    settings = config.given(
        settings or config.load(),
        max_readers=max_readers,
        max_bandwidth=max_bandwidth,
        wait_s=wait_s,
    )
    key = _key_of(what, model, revision, variant)
    address = coordinator or settings.coordinator
    named_by = "`coordinator`" if coordinator else ""
    if settings.is_set("coordinator") and address == settings.coordinator:
        named_by = settings.origin("coordinator")
    loop = runtime.acquire()
    try:
        server = loop.run(start_source(source_options(settings, address), transports()))
        embedded: Coordinator | None = None
        held: HeldModel | None = None
        try:
            embedded = loop.run(
                _join_or_embed(
                    address,
                    named_by=named_by,
                    embed=embed,
                    wait_s=settings.wait_s,
                    settings=settings,
                    cancelled=cancelled,
                )
            )
            held = hold(what, key, where, settings, on_progress=on_progress, cancelled=cancelled)
            loop.run(offer(server, held, address))
        except BaseException:
            loop.run(server.close())
            if held is not None:
                held.arena.release()  # not before: exposures hand out its descriptor
            if embedded is not None:
                loop.run(embedded.stop())
            raise
    except BaseException:
        runtime.release(loop)
        raise
    return Source(loop, server, held, address, embedded, settings)


async def start_source(options: SourceOptions, transports: Mapping[str, Transport]) -> SourceServer:
    """A source that listens and holds nothing yet; on the loop. Errors as `serve`."""
    server = SourceServer(options, transports)
    await server.start()
    return server


async def offer(server: SourceServer, held: HeldModel, coordinator: str | None) -> None:
    """Serve a held model, which the server then owns, and register it; on the loop."""
    await server.offer(held)
    if coordinator is not None:
        await server.register(coordinator)
