"""The pulling side: `pull`, and the `Pull` that it returns."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import resolve_device, transports
from mx.api.described import Described
from mx.api.layers import tensors_in, tensors_of
from mx.api.options import destination, pull_options
from mx.api.reuse import Holder, held_by
from mx.api.source import Source, offer, source_options, start_source
from mx.core.local_ranks import LocalRanks
from mx.core.pages import Pages
from mx.core.progress import Progress, summary
from mx.core.selection import Slice, Subset
from mx.core.types import Layout, Manifest, ModelKey, SourceRole
from mx.core.variant import ProcessingKey
from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.errors import ClosedError, ConfigError, another, release_frames
from mx.memory.arena import MemfdArena
from mx.memory.device import DeviceArena
from mx.memory.live import LiveMemory
from mx.memory.readiness import LayerSignals
from mx.source.model import HeldModel
from mx.source.relay import Relay
from mx.target.events import EventLog
from mx.target.files_job import FilesJob
from mx.target.job import Job
from mx.target.options import PullOptions
from mx.target.progress import ProgressReporter
from mx.target.report import LayerEvent, PullReport
from mx.transport import DeviceView, View, host_view

if TYPE_CHECKING:
    import torch


class Pull(Described, Closable):
    """A running pull. Iterate `layers()`, or `wait()`; then call `state_dict()`.

    A context manager, blocking or async, that closes the pull at its end. `await pull` waits as
    `wait` does, and `async for` iterates `layers_async()`. The tensors stay valid after `close`:
    they keep their memory alive.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        options: PullOptions,
        settings: config.Settings,
        started_s: float,
    ) -> None:
        self._options = options
        self._settings = settings
        self._state = EventLog(started_s, tensors_of(weakref.ref(self)))
        self._view: View | None = None
        self._held: Source | None = None
        self._signals: LayerSignals | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._job, self._task = loop.run(self._begin(options))
        super().__init__(loop)

    async def _begin(self, options: PullOptions) -> tuple[Job | FilesJob, asyncio.Task[None]]:
        job: Job | FilesJob
        if options.files_only:
            job = FilesJob(options, self._state)
        else:
            job = Job(options, transports(), self._state)
        task = asyncio.create_task(job.run(), name="mx-pull")
        self._reporter = ProgressReporter(
            options, self._state, job.progress, lambda: job.key, job.reader_id
        )
        task.add_done_callback(lambda _: self._reporter.ended())
        return job, task

    def __repr__(self) -> str:
        """One line: the model and how far it is."""
        state = "closed" if self._closed else self._state.error or summary(self.progress())
        return f"<Pull {self.model}: {state}>"

    # -- layers -----------------------------------------------------------------------------------

    def layers(self) -> Iterator[LayerEvent]:
        """Yield each layer in execution order, as soon as it is ready.

        Raises:
            RevisionChangedError: With `follow`, the model changed after some layers were yielded.
            MxError: The error that ended the pull, see `pull`.
        """
        index, edition = 0, None
        while True:
            before = self._state.edition
            if (event := self._state.wait_layer(index, edition)) is None:
                return
            if edition is None and before != self._state.edition:
                continue  # none was yielded yet
            edition = before
            yield event
            index += 1

    async def layers_async(self) -> AsyncIterator[LayerEvent]:
        """Yield what `layers` yields, for `async for` in the caller's own event loop.

        Raises:
            MxError: The error that ended the pull, see `pull`.
        """
        index, edition = 0, None
        while True:
            before = self._state.edition
            if (event := await self._state.wait_layer_async(index, edition)) is None:
                return
            if edition is None and before != self._state.edition:
                continue  # none was yielded yet
            edition = before
            yield event
            index += 1

    def __aiter__(self) -> AsyncIterator[LayerEvent]:
        return self.layers_async()

    def on_layer(self, callback: Callable[[LayerEvent], None]) -> None:
        """Call `callback` for each layer, in the order in which layers become ready.

        Layers that are ready already are reported at once, on this thread; later ones on a thread
        of mx's, one call at a time.

        Args:
            callback: Must be short and must not close the pull. An error that it raises on mx's
                thread ends the pull.
        """
        self._state.on_layer(callback)

    # -- the end ----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> PullReport:
        """Block until every layer is ready and, with `out`, written.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Returns:
            The report of the pull.

        Raises:
            TimeoutError: The pull still runs after `timeout_s`.
            MxError: The error that ended the pull, see `pull`.
        """
        return self._state.wait_end(timeout_s)

    def __await__(self) -> Generator[Any, None, PullReport]:
        return self._state.wait_end_async().__await__()

    @property
    def report(self) -> PullReport | None:
        """The report of the pull; None while it runs, or if it failed."""
        return self._state.report

    @property
    def kept(self) -> str:
        """After a failure with `out`: how to resume from what is left there; "" if nothing is."""
        return self._job.kept

    def progress(self) -> Progress:
        """Return a snapshot of the pull's progress, cheap enough to take ten times a second.

        Raises:
            ForkError: This process was forked from the one that pulls.
        """
        self._require_own()
        return self._job.progress()

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None until it is known. `wait_manifest` waits for it."""
        return self._job.manifest

    @property
    def cached_at(self) -> str:
        """HOST:PORT where this host's cache holds the model, as it says; "" if it does not."""
        return self._job.cached_at

    @property
    def subset(self) -> Subset | None:
        """The tensors that are pulled, with their layout in `buffer`; None: all, or the model is
        not known yet."""
        return self._job.subset

    @property
    def pages(self) -> Pages | None:
        """The digests of the model's blocks that are known; None until the manifest is."""
        return self._job.pages

    @property
    def model(self) -> ModelKey:
        """The name, revision and variant that are pulled, as far as they are known."""
        return self._job.key

    def buffer(self) -> memoryview:
        """Wait for the end of the pull and return the model's bytes as the arena lays them out (of
        some tensors: as `subset.layout` does).

        Returns:
            A view that stays valid after `close`. Writing to it changes no other process's bytes.

        Raises:
            LocalError: The pull is into a GPU.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        self.wait()
        return host_view(self._arena_view()[1])

    def memory(self) -> View:
        """Wait for the end of the pull and return the model's bytes, wherever they are.

        Returns:
            What `buffer` or `device_buffer` returns, or with `into` a module or a state dict the
            memory of its tensors, in several places, which must not be written to.

        Raises:
            ClosedError: The pull was closed, or gave the tensors back.
            MxError: The error that ended the pull, see `pull`.
        """
        self.wait()
        view = self._arena_view()[1]
        self._require_memory()
        return view

    def _require_memory(self) -> None:
        if isinstance(self._job.arena, LiveMemory) and self._job.arena.released:
            raise ClosedError("the pull has given back the tensors of `into`")

    def device_buffer(self) -> DeviceView:
        """Wait for the end of a pull into a GPU and return the model's bytes in that GPU's memory.

        Returns:
            A view of device memory. Attached memory belongs to the source: do not write to it.

        Raises:
            ConfigError: The pull is into host memory.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        self.wait()
        view = self._arena_view()[1]
        if not isinstance(view, DeviceView):
            raise ConfigError("the pull is into host memory", hint="buffer() gives it")
        return view

    # -- tensors ----------------------------------------------------------------------------------

    def _arena_view(self) -> tuple[Layout, View]:
        if self._state.error is not None:
            raise another(self._state.error)
        if self._options.files_only:
            raise ConfigError("a pull of files only has no tensors", hint="files() gives its files")
        with self._lock:
            arena, layout = self._job.arena, self._job.layout
            if self._closed or arena is None or layout is None:
                raise ClosedError("the pull has no tensors: it was closed, or has not begun")
            if self._view is None:
                self._view = arena.private_view()
            return layout, self._view

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Wait for the end of the pull and return its tensors by name, in execution order.

        Returns:
            Views of the pull's memory, which they keep alive; tied tensors share their storage.
            Writing to a tensor changes neither the source nor any other reader. A tensor whose
            dtype torch lacks comes as uint8 of its packed bytes. With `into` a module or a state
            dict: its own tensors.

        Raises:
            ConfigError: torch is not installed.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        self.wait()
        layout, view = self._arena_view()
        return tensors_in(view, layout, self._options.into)

    def layer_state_dict(self, layer: int) -> dict[str, torch.Tensor]:
        """Wait for one layer and return its tensors, and the tensors that are tied to them.

        A tensor belongs to the first layer that needs it. With `out`, do not write to the tensors
        before the end of the pull: the checkpoint is written from the same memory.

        Args:
            layer: The layer's index in execution order.

        Returns:
            Views of the pull's memory, which they keep alive; no copy.

        Raises:
            IndexError: There is no such layer.
            ConfigError: torch is not installed.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        if layer < 0 or self._state.wait_layer(layer) is None:
            raise IndexError(f"there is no layer {layer}")
        layout, view = self._arena_view()
        return tensors_in(view, layout, self._options.into, layer)

    def signals(self) -> LayerSignals:
        """Return the signals by which CUDA streams, instead of the CPU, wait for layers.

        Blocks until the model's layers are known. `early_state_dict` gives the tensors to queue
        work on.

        Returns:
            The same object at each call; the pull owns it and closes it. `LayerSignals` says how
            to use it.

        Raises:
            ConfigError: The pull is into host memory, or has a `fallback` on disk.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        if self._options.device == "cpu":
            raise ConfigError("only a pull into a GPU has signals", hint="give `device=cuda:N`")
        if self._options.fall_back_to_disk:
            raise ConfigError("a pull that may begin again from disk has no signals")
        layers = self._state.keep_memory()
        with self._lock:
            if self._closed:
                raise ClosedError("the pull was closed")
            if self._signals is None:
                device = Device.open(load(), self._options.device)
                self._signals = signals = LayerSignals(device, layers)
                self._state.on_layer(lambda event: signals.verified(event.index))
                self._state.on_failure(signals.failed)
            return self._signals

    def early_state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors of a pull into a GPU as soon as their memory is allocated.

        Their bytes may not have arrived yet: until the end of the pull only streams that wait by
        `signals` may use them.

        Returns:
            Views of the pull's device memory by name, which they keep alive.

        Raises:
            ConfigError: As `signals`; or torch is not installed.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        self.signals()
        while self._job.arena is None or self._job.manifest is None:
            if self._state.ended:
                self.wait()
            time.sleep(0.001)
        layout, view = self._arena_view()
        return tensors_in(view, layout)

    # -- staying ----------------------------------------------------------------------------------

    def hold(self) -> Source:
        """Wait for the end of a pull made with `hold=True` and serve its memory to others.

        Returns:
            The same source at each call. It serves until it, or this pull, is closed; the pull's
            tensors outlive it.

        Raises:
            ConfigError: The pull was made without `hold=True`.
            ClosedError: The pull was closed, or has given its memory back (`release`).
            MxError: The error that ended the pull, see `pull`, or that `serve` raises.
        """
        self.wait()
        with self._lock:
            if self._held is None:
                self._held = self._begin_to_hold()
            return self._held

    def _begin_to_hold(self) -> Source:
        arena, manifest, pages = self._job.arena, self._job.manifest, self._job.pages
        if (
            not self._options.hold
            or not isinstance(arena, MemfdArena | DeviceArena | LiveMemory)
            or manifest is None
            or pages is None
        ):
            raise ConfigError("only a pull made with hold=True can become a source")
        self._require_memory()
        node = self._job.node
        host = None if node is None else node.sharing.host
        if isinstance(host, Relay) and isinstance(arena, MemfdArena | LiveMemory):
            return self._settle(host, arena)
        self._loop.run(self._job.leave())
        live = isinstance(arena, LiveMemory)
        if not isinstance(arena, LiveMemory):
            arena.seal()
        held = HeldModel(
            self.model,
            manifest,
            arena,
            pages,
            role=SourceRole.RELAY,
            borrowed=True,
        )
        coordinator = self._options.coordinator
        loop = runtime.acquire()
        try:
            options = source_options(self._settings, coordinator, live=live)
            server = loop.run(start_source(options, transports()))
            try:
                loop.run(offer(server, held, coordinator))
            except BaseException:
                loop.run(server.close())
                raise
        except BaseException:
            runtime.release(loop)
            raise
        return Source(loop, server, held, coordinator or "", None)

    def _settle(self, relay: Relay, arena: MemfdArena | LiveMemory) -> Source:
        """Turn the relay, which others read from without a break, into a source."""
        if isinstance(arena, MemfdArena):
            arena.freeze()
        loop = runtime.acquire()
        try:
            server, held = loop.run(relay.settle())
        except BaseException:
            runtime.release(loop)
            raise
        return Source(loop, server, held, self._options.coordinator or "", None)

    def release(self) -> None:
        """Stop giving the pull's memory to others, after the pull has ended. Idempotent.

        Readers may finish for a moment and are then cut off. Afterwards the tensors that `into`
        named are the caller's alone: it may write to them, or lend them with `serve`.

        Raises:
            ConfigError: The pull has not ended.
        """
        self._require_own()
        if not self._state.ended:
            raise ConfigError("the pull still runs", hint="wait for its end, or close it")
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.close()
        self._loop.run(self._job.leave())
        if isinstance(self._job.arena, LiveMemory):
            self._job.arena.release()

    def close(self) -> None:
        """Stop the pull if it still runs, and drop this object's reference to the memory.

        Idempotent; a close that was interrupted goes on when it is called again.
        """
        super().close()

    def _closing_steps(self) -> list[Step]:
        with self._lock:
            self._closed = True
        held = [] if self._held is None else [self._held.close]
        signals = [] if self._signals is None else [self._signals.close]
        return [*held, self._awaiting(self._stop), *signals, self._let_go]

    def _let_go(self) -> None:
        self._view = None
        if self._job.arena is not None:
            self._job.arena.release()
        if self._options.into is not None:
            self._options.into.release()
        release_frames(self._state.error)

    def forked(self) -> None:
        super().forked()
        self._lock = threading.Lock()
        self._closed = True
        self._state = EventLog(self._state.started_s)
        self._state.failed(runtime.fork_error())

    async def _stop(self) -> None:
        self._job.close()
        if not self._task.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._reporter.close()
        await self._job.files.close()
        await self._job.leave()
        # The task records no error if it was cancelled before its first step.
        self._state.failed(ClosedError("the pull was closed before it was complete"))


def pull(
    model: str,
    *,
    peer: str | None = None,
    path: str | Path | None = None,
    fallback: str | Path | None = None,
    revision: str = "",
    variant: str | ProcessingKey = "",
    coordinator: str | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
    hold: bool = False,
    transport: str | None = None,
    verify: str = "chunks",
    attach: bool = True,
    into: Any = None,
    reuse: Holder | Sequence[Holder] = (),
    follow: bool = False,
    only: str | Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
    local_ranks: LocalRanks | None = None,
    wait_s: float | None = None,
    resume: bool = True,
    files_only: bool = False,
    settings: config.Settings | None = None,
) -> Pull:
    """Start to pull `model`, and return at once.

    The weights come from the sources that the coordinator lists, unless `peer`, `path` or
    `fallback` (at most one of them) says otherwise.

    Args:
        model: NAME, NAME:REVISION, or NAME@PIN to pin the weights. NAME alone is its newest
            revision; a pin accepts its weights in any revision.
        peer: HOST:PORT of the one source to read from, without a coordinator.
        path: A checkpoint on disk to read, instead of sources.
        fallback: A checkpoint on disk to read if no source can be used.
        revision: The revision, where `model` names none.
        variant: The variant: a word, or a `ProcessingKey` or its text. If empty, "checkpoint", or
            the only one that is listed.
        coordinator: HOST:PORT; None takes the address in the settings.
        device: "cpu", or "cuda:N" for that GPU's memory, which `out` and `verify="strong"` copy
            back to the host.
        out: A folder to write a checkpoint to.
        hold: Keep the memory in a form that others can read, and allow `Pull.hold`.
        transport: The name of the only transport to use.
        verify: "chunks", or "strong" to compare every tensor with the model's identity as well.
        attach: False copies even where memory could be shared.
        into: What to fill instead of new memory: a `torch.nn.Module` or a state dict, whose own
            tensors are filled where they are; or a writable, contiguous buffer of at least
            `manifest.layout.arena_nbytes` bytes. The caller owns it. Nothing is written to tensors
            unless all names, shapes, dtypes and ties agree. They must not be used before the pull
            has ended; after a failure they hold a part of the new weights. While the pull gives
            them to others they must not be written to, which ends with `release` or `close`.
        reuse: Pulls and sources of this process, for example of the previous revision or of the
            model that this one was made from. Bytes that they hold are copied locally instead of
            transferred.
        follow: Where the weights change while they are pulled, go over to the new revision instead
            of failing, and keep what is equal: layers that were ready are not any more, and are
            reported again with their `revision`. Wait for the end, or use `on_layer`: `layers()`
            raises RevisionChangedError. A pull that is complete follows no further.
        only: Names or shell-style patterns of the tensors to pull; None: all. Layers without any
            of them are ready at once, and empty. With `only` or `slices` the pull gives nothing to
            others and attaches to nothing, and can't have `out`, `hold`, `reuse`, `follow` or a
            GPU as its `device`; `into` has just these tensors, with their sliced shapes.
        slices: By names or patterns of tensors the part that is wanted of them: (dim, begin, end),
            or `mx.Shard(dim, rank, size)` for one rank's even share. Along the first dimension
            little more than the slice is moved; along others every block that holds some of it, up
            to the whole tensor: `plan` says how much. No byte is put in its place before its block
            is verified. From disk the checkpoint is read and hashed whole.
        local_ranks: Which of several pulls on this host, with `only` or `slices`, this one is, as
            `mx.LocalRanks(rank, size)`. They wait for each other, divide what they want among
            them, and hand each other what they have verified: each block is moved to the host
            once. The share of one that ends, or does not answer for `stall_timeout_s`, is read by
            the others. They are processes of one user, and trust each other: not with
            `verify="strong"`.
        wait_s: Seconds to wait for a source when there is none, at the start or later, keeping
            what has arrived; None takes the time in the settings.
        resume: False neither resumes from what a failed pull left beside `out` nor leaves
            anything there. Otherwise a pull that fails keeps the layers that it has written, and
            its error says so.
        files_only: Pull only the model's side files (configuration, tokenizer), to `out`, or into
            memory, where `Pull.files` has them. No weights are read, and nothing is said of them:
            the report has `files`, and 0 bytes. Not together with `hold`, `into`, `reuse` or a
            `device`, nor, from `path`, with a pin, which only the weights prove; other options of
            the weights have no effect.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The running pull.

    Raises:
        ConfigError: An argument is wrong. Every other error comes from the methods that wait:
            CoordinatorError, UnknownModelError, NoSourceError, IncompleteError, IntegrityError,
            CapacityError, OutputError.
    """
    started_s = time.monotonic()
    where = resolve_device(device)
    if into is not None and where != "cpu":
        raise ConfigError("`into` is host memory", hint="leave out either `into` or `device`")
    settings = settings or config.load()
    if verify not in ("chunks", "strong"):
        raise ConfigError(f"`verify={verify}` is not understood", hint="it is chunks or strong")
    options = pull_options(
        model,
        settings,
        peer=peer,
        path=path,
        fallback=fallback,
        out=out,
        revision=revision,
        variant=variant,
        coordinator=coordinator or settings.coordinator,
        device=where,
        hold=hold,
        transport=transport,
        strong=verify == "strong",
        attach=attach,
        into=destination(into),
        reuse=held_by(reuse, where),
        wait_s=wait_s,
        resume=resume,
        follow=follow,
        only=only,
        slices=slices,
        local_ranks=local_ranks,
        files_only=files_only,
    )
    loop = runtime.acquire()
    try:
        return Pull(loop, options, settings, started_s)
    except BaseException:
        runtime.release(loop)
        raise
