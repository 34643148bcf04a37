"""The serving side: `serve`, and what it needs of a source and a coordinator."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mx import config, namekey, packs, runtime
from mx.api.common import (
    DEFAULT_REVISION,
    DEFAULT_VARIANT,
    client_of,
    resolve_device,
    transports,
    variant_text,
)
from mx.api.holding import hold, lend, taken_in
from mx.api.source import Source
from mx.codec import check_model_key
from mx.core import layout_rules
from mx.core.budget import Limits
from mx.core.limits import Bounds
from mx.core.reference import parse_reference
from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey
from mx.errors import (
    ConfigError,
    CoordinatorError,
    CoordinatorVersionError,
    LocalError,
    NotAllowedError,
)
from mx.namekey import NameKey
from mx.plugins import transport_context
from mx.runtime import uncut
from mx.source.model import PINNED, SourceModel
from mx.source.server import SourceOptions, SourceServer
from mx.storage.names import model_name_of
from mx.storage.safetensors import tensor_files
from mx.storage.side_files import resolved_folders
from mx.text import has_control
from mx.transport import Transport
from mx.units import parse_ports
from mx.wire.address import tls_of
from mx.wire.client import CoordinatorClient

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Readers of live memory have leases of this length at most: its owner waits for them before it
#: writes.
LIVE_LEASE_S = 2.0
#: Seconds between two attempts to reach a coordinator that does not answer yet.
_ASK_AGAIN_S = 0.5


def source_options(
    settings: config.Settings,
    coordinator: str | None = None,
    *,
    live: bool = False,
    name_key: NameKey | None = None,
) -> SourceOptions:
    """Return the settings that a source needs.

    Args:
        settings: The settings of the process.
        coordinator: HOST:PORT of the coordinator to register with, if any.
        live: Whether it lends an engine's memory.
        name_key: What it owns names with; None: it binds none, as a pull.
    """
    tls = tls_of(settings)
    return settings.fill(
        SourceOptions,
        coordinator=coordinator or "",
        data_ports=parse_ports(settings.data_ports),
        tls=tls,
        data_tls=None if settings.data_plaintext else tls,
        transport_context=transport_context(settings),
        reader_lease_s=min(settings.reader_lease_s, LIVE_LEASE_S if live else math.inf),
        bounds=Bounds(settings.max_readers, settings.max_bandwidth),
        limits=Limits.of(settings.control_memory, settings.max_request),
        name_key=name_key,
    )


def named_by(coordinator: str | None, settings: config.Settings) -> str:
    """Return what names the coordinator: an argument, or where the setting comes from; "" if it is
    the default."""
    if settings.is_set("coordinator") and coordinator in (None, "", settings.coordinator):
        return settings.origin("coordinator")
    return "`coordinator`" if coordinator else ""


async def join_or_embed(
    address: str,
    ask: Callable[[CoordinatorClient], Awaitable[_T]],
    *,
    named_by: str,
    embed: bool,
    wait_s: float,
    settings: config.Settings,
    cancelled: Callable[[], bool],
) -> tuple[Coordinator | None, _T | None]:
    """Ask the coordinator at `address`. Return None and its answer; where there is none, the one
    that is embedded here, and None.

    Where `named_by` says that the user named the address, wait for it up to `wait_s` and embed
    none.
    """
    must_be_there = bool(named_by) or not embed
    try:
        patience_s = wait_s if must_be_there else 0.0
        async with client_of(settings, address) as client:
            return None, await _answered(client, ask, patience_s, cancelled)
    except CoordinatorError as error:
        if isinstance(error, CoordinatorVersionError | NotAllowedError):
            raise  # there is a coordinator, so that none can be embedded here
        if named_by and embed:
            error.hint += f"; none is embedded here, since {named_by} names one"
        if must_be_there:
            raise
    # Imported here: a source that joins a coordinator does not need its code.
    from mx.coordinator.daemon import Coordinator, receipt_key_of
    from mx.wire.principals import Access

    named = settings.origin("receipt_key") if settings.is_set("receipt_key") else ""
    key = await runtime.in_thread(receipt_key_of, settings.receipt_key, named, address)
    tls = tls_of(settings)
    access = Access(settings.policy, tls, what="coordinator")
    limits = Limits.of(settings.control_memory, settings.max_request)
    coordinator = Coordinator(
        lease_s=settings.lease_s, receipt_key=key, access=access, limits=limits
    )
    try:
        await coordinator.start(address, tls=tls, insecure=settings.insecure)
    except BaseException as error:
        await uncut(coordinator.stop())
        if type(error) is LocalError:  # its hint is about a source's own address
            error.hint = "something else is there: end it, or name a coordinator with `coordinator`"
        raise
    return coordinator, None


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


async def _answered(
    client: CoordinatorClient,
    ask: Callable[[CoordinatorClient], Awaitable[_T]],
    wait_s: float,
    cancelled: Callable[[], bool],
) -> _T:
    """Ask until the coordinator answers.

    Raises CoordinatorError after `wait_s`, and at once if the coordinator refuses.
    """
    deadline_s = time.monotonic() + wait_s
    said = False
    while True:
        try:
            return await ask(client)
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
    pinned: bool = False,
    copy: bool = True,
    frozen: bool = False,
    update: bool = False,
    non_persistent_buffers: bool = False,
    files: str | Path | None = None,
    follow: Collection[str | Path] = (),
    weights: Collection[str] = (),
    max_readers: int | None = None,
    max_bandwidth: int | str | None = None,
    wait_s: float | None = None,
    settings: config.Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Source:
    """Load a model into memory, register it and let other processes read it.

    Parameters that are DTensors, as FSDP2 makes them, are served as they are sharded, by all ranks,
    with `copy=False`: docs/trainers.md.

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
        pinned: Whether to hold it in host memory that CUDA's driver makes, so that GPUs of this
            host copy from it without pinning it first. Processes without a GPU can't attach to it.
        copy: False lends the tensors where they are.
        frozen: With `copy=False` and tensors in GPU memory, whether readers on the same GPU may
            attach to them, without a copy. What was attached can't be taken back: entering
            `changing` waits for such readers for its `grace_s`, and then raises LocalError ("in
            use"), as `close` does after a second. Then nothing may be written or freed.
        update: Whether the name may stand for other weights: then these are an update of it, a new
            revision, if this process holds the name's key (`name_key` in the settings).
        non_persistent_buffers: With `copy=False`, whether to lend the buffers of a module that its
            state dict leaves out, too: then the identity is not that of the checkpoint.
        files: For a module or a state dict: a folder whose configuration and tokenizer files travel
            with the weights, as a checkpoint's do.
        follow: Folders that a checkpoint's configuration and tokenizer files may be links into.
            Others may be so only inside its own folder, or in Hugging Face's cache inside the same
            repository.
        weights: Patterns of the paths of copies of the checkpoint's main weights (another
            precision, another form, an average) that travel too, as its other tensor files do.
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
        BindingError: The name stands for other weights; or `update`, and it belongs to another name
            key, or another process updates it at the same time.
    """
    where = resolve_device(device)
    settings = config.given(
        settings or config.load(),
        max_readers=max_readers,
        max_bandwidth=max_bandwidth,
        wait_s=wait_s,
    )
    if not copy and (where != "cpu" or pinned):
        hint = f"leave out `{'pinned' if pinned else 'device'}`"
        raise ConfigError("tensors are lent where they are", hint=hint)
    if pinned and where != "cpu":
        raise ConfigError("only memory of the host is pinned", hint="leave out `device`")
    if copy and frozen:
        raise ConfigError("only tensors that are lent can be frozen", hint="give `copy=False`")
    if files is not None and isinstance(what, str | Path):
        raise ConfigError(
            "a checkpoint's files travel with it", hint="leave out `files`, or serve tensors"
        )
    if "torch.distributed.tensor" in sys.modules:
        parted = packs.optional("mx.trainers.serving:served_parts")
        common = (model, revision, variant, coordinator, embed, files, wait_s, settings, update)
        if part := parted and parted(what, *common, cancelled, copy, frozen):
            return cast("Source", part)
    folder = None if files is None else Path(files)
    followed = resolved_folders(follow)
    key = _key_of(what, model, revision, variant)
    if copy and isinstance(what, str | Path):
        tensor_files(Path(what))  # before a coordinator is started for them
    name_key = namekey.load(settings)
    address = coordinator or settings.coordinator

    def take(layout_version: int | None, stopped: Callable[[], bool]) -> SourceModel:
        if copy:
            return hold(
                what,
                key,
                PINNED if pinned else where,
                layout_version=layout_version,
                files=folder,
                follow=followed,
                weights=weights,
                on_progress=on_progress,
                cancelled=stopped,
            )
        return lend(
            what,
            key,
            layout_version=layout_version,
            files=folder,
            non_persistent=non_persistent_buffers,
            frozen=frozen,
            cancelled=stopped,
        )

    async def make(loop: runtime.LoopThread) -> Source:
        options = source_options(settings, address, live=not copy, name_key=name_key)
        server = await start_source(options, transports())
        embedded: Coordinator | None = None
        held: SourceModel | None = None
        try:
            embedded, layout_version = await join_or_embed(
                address,
                lambda client: client.layout_version(key),
                named_by=named_by(coordinator, settings),
                embed=embed,
                wait_s=settings.wait_s,
                settings=settings,
                cancelled=cancelled,
            )
            if embedded is not None:  # what others hold, who have yet to register here, is older
                layout_version = layout_rules.oldest()
            held = await taken_in(partial(take, layout_version), cancelled)
            await offer(server, held, address, update=update)
            return Source(loop, server, held, address, embedded, updatable=True)
        except BaseException:
            await uncut(_ended(server, held, embedded))
            raise

    return runtime.made(make)


async def _ended(
    server: SourceServer, held: SourceModel | None, embedded: Coordinator | None
) -> None:
    """Close what `serve` has made before it failed."""
    await server.close()
    if held is not None:
        held.release_all()  # not before: exposures hand out its descriptor
    if embedded is not None:
        await embedded.stop()


async def start_source(options: SourceOptions, transports: Mapping[str, Transport]) -> SourceServer:
    """Start a source that holds no model yet and return it; runs on the loop.

    Args:
        options: The source's options.
        transports: Those that may serve, by name.

    Raises:
        ConfigError, LocalError: As `serve`.
    """
    server = SourceServer(options, transports)
    try:
        await server.start()
    except BaseException:
        await uncut(server.close())
        raise
    return server


def serve_held(
    held: SourceModel,
    coordinator: str | None,
    settings: config.Settings,
    *,
    live: bool = False,
    may_update: bool = False,
    update: bool = False,
) -> Source:
    """Serve a model that this process holds, and register it.

    Args:
        held: The model, which the source owns from then on; the caller's if this raises.
        coordinator: HOST:PORT to register with; None registers with none.
        settings: The settings of the source.
        live: Whether the memory is an engine's.
        may_update: Whether `Source.update` may replace the model.
        update: As for `serve`.

    Raises:
        MxError: As `serve`.
    """
    name_key = namekey.load(settings)

    async def make(loop: runtime.LoopThread) -> Source:
        options = source_options(settings, coordinator, live=live, name_key=name_key)
        server = await start_source(options, transports())
        try:
            await offer(server, held, coordinator, update=update)
            return Source(loop, server, held, coordinator or "", None, updatable=may_update)
        except BaseException:
            await uncut(server.close())
            raise

    return runtime.made(make)


async def offer(
    server: SourceServer, held: SourceModel, coordinator: str | None, *, update: bool = False
) -> None:
    """Serve a model and register it; runs on the loop.

    Args:
        server: A source that listens.
        held: The model; the server owns it from then on.
        coordinator: HOST:PORT to register with; None registers with none.
        update: Register it as an update, if the name stands for other weights.

    Raises:
        MxError: As `serve`.
    """
    await server.offer(held)
    if coordinator is not None:
        await server.register(coordinator, update=update)
