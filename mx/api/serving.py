"""The warm side: `serve` and the `Source` it gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mx import config, runtime, trace
from mx.api.common import DEFAULT_REVISION, DEFAULT_VARIANT, resolve_device, tls_of, transports
from mx.core.types import Manifest, ModelKey
from mx.errors import CoordinatorError
from mx.source.model import HeldModel, hold_checkpoint, hold_tensors
from mx.source.server import SourceOptions, SourceServer, SourceStats
from mx.transport import Transport
from mx.wire.client import CoordinatorClient

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator


class Source:
    """A process's warm model. Made by `serve`; close it, or use it as a context manager."""

    def __init__(
        self,
        loop: runtime.LoopThread,
        server: SourceServer,
        held: HeldModel,
        coordinator_address: str,
        embedded: Coordinator | None,
    ) -> None:
        self._loop = loop
        self._server = server
        self._held = held
        self._embedded = embedded
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.coordinator_address = coordinator_address
        self.endpoint = server.endpoint

    @property
    def model(self) -> ModelKey:
        return self._held.key

    @property
    def manifest(self) -> Manifest:
        return self._held.manifest

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

    def close(self) -> None:
        """Deregister, cut what still reads, free the memory. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            try:
                self._loop.run(self._close())
            finally:
                self._closed.set()
                runtime.release(self._loop)

    async def _close(self) -> None:
        await self._server.close()
        if self._embedded is not None:
            await self._embedded.stop()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Source:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


def source_options(settings: config.Settings) -> SourceOptions:
    """What a source needs of the settings."""
    tls = tls_of(settings)
    return SourceOptions(
        listen=settings.listen,
        tls=tls,
        data_tls=None if settings.data_plaintext else tls,
        insecure=settings.insecure,
        trusted_fabric=settings.trusted_fabric,
        nics=settings.nics,
        reader_lease_s=settings.reader_lease_s,
        stall_timeout_s=settings.stall_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
    )


async def _join_or_embed(
    address: str, *, explicit: bool, embed: bool, settings: config.Settings
) -> Coordinator | None:
    """Make sure that a coordinator answers at `address`. Returns the one embedded, if it was."""
    client = CoordinatorClient(
        address,
        tls=tls_of(settings),
        insecure=settings.insecure,
        timeout_s=settings.connect_timeout_s,
    )
    try:
        await client.list_models()
        return None
    except CoordinatorError:
        if explicit or not embed:
            raise
    finally:
        await client.close()
    # Only here: who joins a coordinator does not need the code of one.
    from mx.coordinator.daemon import Coordinator

    coordinator = Coordinator(lease_s=settings.lease_s)
    await coordinator.start(address, tls=tls_of(settings), insecure=settings.insecure)
    return coordinator


def serve(
    what: str | Path | Any,
    *,
    model: str,
    revision: str = DEFAULT_REVISION,
    variant: str = DEFAULT_VARIANT,
    coordinator: str | None = None,
    embed: bool = True,
    device: str = "cpu",
    settings: config.Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Source:
    """Hold a model warm and let others read it. Returns once it is registered.

    `what` is a checkpoint (a safetensors file or a folder), a state dict of CPU tensors, or a
    `torch.nn.Module`; tensors are copied, so that later changes to them reach nobody. Without
    `coordinator` (HOST:PORT) it joins the one that answers at the settings' address, else embeds
    one there (unless `embed` is False). `device` is where it is held: "cpu", or "cuda:N" for a
    copy in that GPU's memory. `on_progress` is told (bytes read, bytes in all) from
    other threads; `cancelled` is asked while reading.

    Raises CheckpointError, CapacityError (before memory is taken), ConfigError, LocalError (port
    in use), CoordinatorError, BindingError (the name belongs to other weights).
    """
    where = resolve_device(device)
    settings = settings or config.load()
    key = ModelKey(model, revision, variant)
    explicit = coordinator is not None or settings.is_set("coordinator")
    address = coordinator or settings.coordinator
    loop = runtime.acquire()
    try:
        server = loop.run(start_source(source_options(settings), transports()))
        embedded: Coordinator | None = None
        held: HeldModel | None = None
        try:
            embedded = loop.run(
                _join_or_embed(address, explicit=explicit, embed=embed, settings=settings)
            )
            if isinstance(what, str | Path):
                with trace.span("serve.load", path=str(what)) as span:
                    held = hold_checkpoint(
                        Path(what),
                        key,
                        device=where,
                        chunk_nbytes=settings.chunk_bytes,
                        threads=2,
                        progress=on_progress,
                        cancelled=cancelled,
                    )
                    span.set(nbytes=held.manifest.layout.payload_nbytes)
            else:
                from mx.memory.torch_source import describe

                held = hold_tensors(
                    *describe(what), key, device=where, chunk_nbytes=settings.chunk_bytes
                )
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
    return Source(loop, server, held, address, embedded)


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
