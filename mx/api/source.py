"""The serving side: `serve`, and the `Source` that it returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import (
    DEFAULT_REVISION,
    DEFAULT_VARIANT,
    checked_port,
    resolve_device,
    tls_of,
    transports,
    variant_text,
)
from mx.api.holding import check_names, hold, lend
from mx.codec import check_model_key
from mx.core.limits import Bounds
from mx.core.pages import Pages
from mx.core.reference import parse_reference, pinned_name
from mx.core.types import Manifest, ModelKey
from mx.core.variant import ProcessingKey, membership
from mx.errors import (
    ClosedError,
    ConfigError,
    CoordinatorError,
    CoordinatorVersionError,
    MxError,
)
from mx.memory.live import LiveMemory
from mx.source.handover import Handover
from mx.source.lending import Lending
from mx.source.model import HeldModel
from mx.source.server import SourceOptions, SourceServer, SourceStats
from mx.storage.names import model_name_of
from mx.text import has_control
from mx.transport import Transport, View, host_view
from mx.units import format_bytes, parse_ports
from mx.wire.client import CoordinatorClient

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator

log = logging.getLogger(__name__)

#: Readers of live memory have leases of this length at most: its owner waits for them before it
#: writes.
LIVE_LEASE_S = 2.0
#: Seconds between two attempts to reach a coordinator that does not answer yet.
_ASK_AGAIN_S = 0.5


class Source(Closable):
    """A model that this process serves; `serve` makes it.

    Close it, or use it as a context manager, blocking or async. `endpoint` is the HOST:PORT that
    readers connect to, `coordinator_address` the coordinator that it is registered with.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        server: SourceServer,
        held: HeldModel,
        coordinator_address: str,
        embedded: Coordinator | None,
        settings: config.Settings | None = None,
    ) -> None:
        """Take over a server that serves `held`.

        Args:
            loop: The loop, acquired for this object.
            server: The server, which this object closes.
            held: The model that it serves.
            coordinator_address: HOST:PORT; empty if it is registered with none.
            embedded: The coordinator in this process, if `serve` started one.
            settings: Settings for `update` to hold new weights with; None allows no update.
        """
        self._server = server
        self._held = held
        self._handover = Handover(server)
        self._embedded = embedded
        self._settings = settings
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self.coordinator_address = coordinator_address
        self.endpoint = server.endpoint
        super().__init__(loop)

    def __repr__(self) -> str:
        """Return one line: the model, its size and where it is served."""
        state = "closed" if self._closed.is_set() else f"at {self.endpoint}"
        size = format_bytes(self.manifest.layout.payload_nbytes)
        return f"<Source {self.model}: {size}, {state}>"

    @property
    def model(self) -> ModelKey:
        """The name, revision and variant that are served."""
        return self._held.key

    @property
    def manifest(self) -> Manifest:
        """The manifest of the weights as they are in memory.

        The source may be registered with another layout or chunk size, those in which the same
        weights were listed before.
        """
        return self._held.laid_out.manifest

    @property
    def pages(self) -> Pages:
        """The digests of the model's blocks."""
        return self._held.laid_out.pages

    def buffer(self) -> memoryview:
        """Return the weights as the manifest's arena lays them out.

        Returns:
            A read-only view that keeps the memory alive.

        Raises:
            LocalError: The weights are in a GPU, or lent where they are.
        """
        return host_view(self._held.arena.view)

    def memory(self) -> View:
        """Return the weights as the manifest's arena lays them out, wherever they are.

        Returns:
            A view that keeps the memory alive. Lent tensors are in several places: it must not be
            written to.

        Raises:
            ClosedError: The weights were lent, and the source was closed.
        """
        arena = self._held.arena
        if isinstance(arena, LiveMemory) and arena.released:
            raise ClosedError(f"the source of {self.model} was closed")
        return arena.view

    @property
    def memfd(self) -> int | None:
        """The memory file that readers of this host attach to; None if there is none."""
        return self._held.arena.memfd

    @property
    def identity_hex(self) -> str:
        """The identity of the weights, in hexadecimal."""
        return self._held.manifest.ref.identity.hex()

    @property
    def pinned(self) -> str:
        """NAME@PIN with all digits: these weights, and their files if there are any."""
        return pinned_name(self.model, self.manifest.ref)

    @property
    def embedded(self) -> bool:
        """True if the coordinator runs in this process."""
        return self._embedded is not None

    def stats(self) -> SourceStats:
        """Return what the source serves at the moment, and what it has served."""
        return self._server.stats()

    def accept_requests(self, port: int) -> None:
        """Have routers send requests to this process (`mx.Router`), until the source is closed.

        Returns at once.

        Args:
            port: The port of the endpoint's host where the engine takes requests; 0: it takes none
                any more.

        Raises:
            ConfigError: It is no port.
            ClosedError: The source was closed.
        """
        self._require_own()
        port = checked_port(port)
        if self._closing.is_set():
            raise ClosedError(f"the source of {self.model} was closed")
        self._loop.submit(self._server.accept_requests(port))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the source is closed; return False if `timeout_s` seconds pass first."""
        return self._closed.wait(timeout_s)

    def drain(self, grace_s: float = 10.0) -> bool:
        """Stop giving grants and wait for the current readers, before `close`.

        Args:
            grace_s: Seconds to wait at most.

        Returns:
            True if all readers finished in time.
        """
        return self._loop.run(self._server.drain(grace_s))

    def update(
        self,
        what: str | Path | Any,
        *,
        grace_s: float = 10.0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ModelKey:
        """Serve new weights as a new revision in place of the current ones.

        Blocks until the old weights are out of memory. Weights that are identical change nothing.

        The new weights get memory of their own, so that no memory changes while readers use it;
        for a while both are in memory. Once the new weights are registered, NAME means them.
        Readers of the old ones may finish within `grace_s` seconds and are then cut off: such a
        pull goes on from other sources of the old weights, or fails. No reader gets a mixture of
        the two. Memory that readers attached to keeps the old weights.

        The ranks of a bundle (`variant` with `tp`, `pp` or `ep`) update in step: each calls this
        once per update, even if its own weights stay the same, and gets the same revision. NAME
        means the previous one until all have registered. A rank that others are missing for returns
        and goes on serving the previous weights, too, until they have come.

        Args:
            what: The new weights, as for `serve`.
            grace_s: Seconds that readers of the old weights have to finish.
            on_progress: As for `serve`.

        Returns:
            The new key, which `model` is from then on.

        Raises:
            BindingError: Another source bound the name, and only that source may update it.
            ConfigError: This source holds a pull.
            ClosedError: The source was closed.
            MxError: An error that `serve` raises. After any error the old weights stay served.
        """
        self._require_own()
        with self._lock:
            settings = self._settings
            if settings is None or self._held.borrowed:
                raise ConfigError(
                    f"{self.model} was pulled: only the source that registered it can update it"
                )
            if self._held.live:
                raise ConfigError(
                    f"{self.model} is lent where it is", hint="write to it inside `changing()`"
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
            same = held.manifest.ref.identity == self._held.manifest.ref.identity
            if same and membership(self.model.variant).alone:
                held.release()
            else:
                self._loop.run(self._replace(held, grace_s))
            return self.model

    async def _replace(self, held: HeldModel, grace_s: float) -> None:
        old = self._held
        await self._server.replace(old.source_id, held)
        self._held = held
        await self._handover.hand_over(old, held, grace_s, self._closing.is_set)

    @contextlib.contextmanager
    def changing(
        self, names: Collection[str] | None = None, *, grace_s: float = 0.0
    ) -> Iterator[None]:
        """Write to tensors that are lent, inside the `with` block.

        Entering withdraws them: readers may finish within `grace_s` seconds and are then cut off,
        and no reader trusts anything that it reads from then on. It returns once their leases have
        ended, after two seconds at most. Leaving hashes the tensors and lists them again: as a new
        revision that NAME means from then on if this source bound the name, as they were if nothing
        has changed. A source that did not bind the name lists them only if these weights are bound
        already, and else stays withdrawn (`withdrawn` says why).

        If the block raises, and has changed anything, the tensors stay withdrawn, since they may
        be half written. Another `changing` lists them.

        Args:
            names: The tensors that the block writes to; None: any, and all are hashed again.
            grace_s: Seconds that readers have to finish.

        Raises:
            ConfigError: This source lends no live memory, a name is not among its tensors, or
                another thread is inside.
            ClosedError: The source was closed.
            MxError: The tensors could not be listed again, and stay withdrawn.
        """
        self._require_own()
        lending = self._server.lending
        if lending is None:
            raise ConfigError(
                f"{self.model} is a copy of mx's own: writing to the tensors changes nothing here",
                hint="serve with `copy=False`, or use update()",
            )
        check_names(lending.held.laid_out.manifest.layout, names)
        if self._closed.is_set():
            raise ClosedError(f"the source of {self.model} was closed")
        change = object()
        try:
            self._loop.run(lending.enter(change, grace_s))
        except MxError:
            raise
        except BaseException:  # an interrupt: entering goes on by itself
            self._leave(lending, change, (), failed=True)
            raise
        failed = True
        try:
            yield
            failed = False
        finally:
            self._leave(lending, change, names, failed=failed)

    def _leave(
        self, lending: Lending, change: object, names: Collection[str] | None, *, failed: bool
    ) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            before, now, why = lending.held, None, "`changing` ended with an error"
            try:
                now = lending.hashed(names)
            except MxError as error:
                why = str(error)
            except BaseException:  # a second interrupt
                self._loop.run(lending.leave(change, None, "`changing` was interrupted"))
                raise
            old = before.manifest.ref.identity
            if failed and now is not None and now.manifest.ref.identity != old:
                now = None
            try:
                self._loop.run(lending.leave(change, now, why))
            except MxError:
                if not failed:  # else the block's own error counts; this one was logged
                    raise
            finally:
                self._held = lending.held

    @property
    def withdrawn(self) -> str:
        """Why tensors that were lent are given to no reader any more; "" while they are."""
        lending = self._server.lending
        return "" if lending is None else lending.why

    def close(self) -> None:
        """Deregister, cut the remaining readers and free the memory.

        Idempotent; an interrupted close goes on when it is called again. An update that runs on
        another thread stops waiting for its readers.
        """
        self._closing.set()
        with self._lock:
            super().close()

    def _closing_steps(self) -> list[Step]:
        embedded = [] if self._embedded is None else [self._awaiting(self._embedded.stop)]
        return [
            self._awaiting(self._handover.close),
            self._awaiting(self._server.close),
            *embedded,
            self._closed.set,
        ]

    def forked(self) -> None:
        super().forked()
        self._lock = threading.RLock()
        self._closing, self._closed = threading.Event(), threading.Event()
        self._closing.set()
        self._closed.set()


def source_options(
    settings: config.Settings, coordinator: str | None = None, *, live: bool = False
) -> SourceOptions:
    """Return the settings that a source needs.

    Args:
        settings: The settings of the process.
        coordinator: HOST:PORT of the coordinator to register with, if any.
        live: Whether it gives an engine's memory.
    """
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
        reader_lease_s=min(settings.reader_lease_s, LIVE_LEASE_S if live else math.inf),
        stall_timeout_s=settings.stall_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        bounds=Bounds(settings.max_readers, settings.max_bandwidth),
    )


async def join_or_embed(
    address: str,
    *,
    named_by: str,
    embed: bool,
    wait_s: float,
    settings: config.Settings,
    cancelled: Callable[[], bool],
) -> Coordinator | None:
    """Make sure that a coordinator answers at `address`, and return it if it is embedded here.

    Where `named_by` says that the user named the address, wait for it up to `wait_s` and embed
    none.
    """
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
        if isinstance(error, CoordinatorVersionError):
            raise  # there is a coordinator, so that none can be embedded here
        if named_by and embed:
            error.hint += f"; none is embedded here, since {named_by} names one"
        if must_be_there:
            raise
    finally:
        await client.close()
    # Imported here: a source that joins a coordinator does not need its code.
    from mx.coordinator.daemon import Coordinator

    coordinator = Coordinator(lease_s=settings.lease_s)
    await coordinator.start(address, tls=tls_of(settings), insecure=settings.insecure)
    return coordinator


def _key_of(what: Any, model: str, revision: str, variant: str | ProcessingKey) -> ModelKey:
    if not model and isinstance(what, str | Path):
        model = model_name_of(Path(what))
        if any(sign in model for sign in ":@[]") or has_control(model):
            raise ConfigError(
                f"the checkpoint's name, {model!r}, can't be a model's name",
                hint="give it a name with `model`",
            )
    if not model:
        raise ConfigError("the model has no name", hint="give it a name with `model`")
    reference = parse_reference(model, revision=revision, variant=variant_text(variant))
    if reference.pin:
        raise ConfigError(
            f"{model!r} pins an identity, which only a pull can do",
            hint=f"serve it as {reference.name}",
        )
    key = ModelKey(
        reference.name,
        reference.revision or DEFAULT_REVISION,
        reference.variant or DEFAULT_VARIANT,
    )
    check_model_key(key)  # before the weights are read
    return key


async def _until_it_answers(
    client: CoordinatorClient, wait_s: float, cancelled: Callable[[], bool]
) -> None:
    """Try until the coordinator answers.

    Raises CoordinatorError after `wait_s`, and at once if the coordinator refuses.
    """
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
    variant: str | ProcessingKey = "",
    coordinator: str | None = None,
    embed: bool = True,
    device: str = "cpu",
    copy: bool = True,
    non_persistent_buffers: bool = False,
    files: str | Path | None = None,
    max_readers: int | None = None,
    max_bandwidth: int | str | None = None,
    wait_s: float | None = None,
    settings: config.Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Source:
    """Load a model into memory, register it and let other processes read it.

    With `copy=False` a module's or a state dict's tensors are lent: other processes read them where
    they are, and nothing is copied. The source keeps their memory until it is closed. Write to them
    only inside `Source.changing`: mx can't see a write, and readers would get bytes whose digests
    are wrong. A tensor that is replaced, resized or freed is noticed, and withdrawn.

    Args:
        what: A checkpoint (a safetensors file or a folder), a state dict of CPU tensors, or a
            `torch.nn.Module`. Tensors are copied, and later changes to them not served, unless
            `copy` is False.
        model: NAME or NAME:REVISION; by default the name of the checkpoint's folder.
        revision: The revision, where `model` names none; "main" if empty.
        variant: The variant: a word, or a `ProcessingKey` or its text, such as
            "engine=vllm,tp=0/2,dtype=bf16"; "checkpoint" if empty.
        coordinator: HOST:PORT of the coordinator to register with. None takes the address in the
            settings; if that is the default and no coordinator answers there, embeds one.
        embed: False never embeds a coordinator.
        device: Where to hold the model: "cpu", or "cuda:N" for a copy in that GPU's memory.
        copy: False lends the tensors where they are.
        non_persistent_buffers: With `copy=False`, whether to lend the buffers of a module that its
            state dict leaves out, too: then the identity is not that of the checkpoint.
        files: For a module or a state dict: a folder whose configuration and tokenizer files travel
            with the weights, as a checkpoint's do.
        max_readers: Readers at a time at most; None takes the settings' number, 0 is no bound.
        max_bandwidth: What all readers get together at most: "500MB/s", or bytes per second; None
            takes the settings' bandwidth, 0 is no bound.
        wait_s: Seconds to wait for a coordinator that was named and does not answer yet; None
            takes the time in the settings.
        settings: Settings to use; None loads them from the environment and the files.
        on_progress: Called with (bytes read, bytes in total), from other threads.
        cancelled: Called while waiting and reading; returning True stops the work.

    Returns:
        The source, once it is registered.

    Raises:
        CheckpointError: The checkpoint is truncated, malformed or hostile.
        CapacityError: There is too little memory; raised before any is allocated.
        ConfigError: An argument is wrong, or the coordinator is on another machine and this
            source would listen on loopback.
        LocalError: The port is in use.
        CoordinatorError: The coordinator does not answer.
        BindingError: The name belongs to other weights.
    """
    where = resolve_device(device)
    settings = config.given(
        settings or config.load(),
        max_readers=max_readers,
        max_bandwidth=max_bandwidth,
        wait_s=wait_s,
    )
    if not copy and where != "cpu":
        raise ConfigError("tensors are lent where they are", hint="leave out `device`")
    if files is not None and isinstance(what, str | Path):
        raise ConfigError(
            "a checkpoint's files travel with it", hint="leave out `files`, or serve tensors"
        )
    folder = None if files is None else Path(files)
    key = _key_of(what, model, revision, variant)
    address = coordinator or settings.coordinator
    named_by = "`coordinator`" if coordinator else ""
    if settings.is_set("coordinator") and address == settings.coordinator:
        named_by = settings.origin("coordinator")
    loop = runtime.acquire()
    try:
        options = source_options(settings, address, live=not copy)
        server = loop.run(start_source(options, transports()))
        embedded: Coordinator | None = None
        held: HeldModel | None = None
        try:
            embedded = loop.run(
                join_or_embed(
                    address,
                    named_by=named_by,
                    embed=embed,
                    wait_s=settings.wait_s,
                    settings=settings,
                    cancelled=cancelled,
                )
            )
            if copy:
                held = hold(
                    what,
                    key,
                    where,
                    settings,
                    files=folder,
                    on_progress=on_progress,
                    cancelled=cancelled,
                )
            else:
                held = lend(
                    what,
                    key,
                    settings,
                    files=folder,
                    non_persistent=non_persistent_buffers,
                    cancelled=cancelled,
                )
            loop.run(offer(server, held, address))
        except BaseException:
            loop.run(server.close())
            if held is not None:
                held.release()  # not before: exposures hand out its descriptor
            if embedded is not None:
                loop.run(embedded.stop())
            raise
    except BaseException:
        runtime.release(loop)
        raise
    return Source(loop, server, held, address, embedded, settings)


async def start_source(options: SourceOptions, transports: Mapping[str, Transport]) -> SourceServer:
    """Start a source that holds no model yet and return it; runs on the loop.

    Raises:
        ConfigError, LocalError: As `serve`.
    """
    server = SourceServer(options, transports)
    await server.start()
    return server


async def offer(server: SourceServer, held: HeldModel, coordinator: str | None) -> None:
    """Serve a model and register it; runs on the loop.

    Args:
        server: A source that listens.
        held: The model; the server owns it from then on.
        coordinator: HOST:PORT to register with; None registers with none.

    Raises:
        MxError: As `serve`.
    """
    await server.offer(held)
    if coordinator is not None:
        await server.register(coordinator)
