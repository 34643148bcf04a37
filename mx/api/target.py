"""The new side: `pull` and the `Pull` it gives."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import resolve_device, transports
from mx.api.layers import layer_tensors, tensors_of
from mx.api.options import pull_options, writable_bytes
from mx.api.reuse import Holder, held_by
from mx.api.source import Source, offer, source_options, start_source
from mx.core.types import Manifest, ModelKey, SourceRole
from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.errors import ClosedError, ConfigError, another, release_frames
from mx.memory.arena import MemfdArena
from mx.memory.device import DeviceArena
from mx.memory.readiness import LayerSignals
from mx.source.model import HeldModel
from mx.source.relay import Relay
from mx.target.events import EventLog
from mx.target.job import Job
from mx.target.options import PullOptions
from mx.target.progress import ProgressReporter
from mx.target.report import LayerEvent, Progress, PullReport, summary
from mx.transport import DeviceView, Span, host_view

if TYPE_CHECKING:
    import torch


class Pull(Closable):
    """A running pull. Iterate `layers()`, or wait; then `state_dict()`.

    The tensors stay valid after `close`: they keep their memory alive.
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
        self._view: Span | None = None
        self._held: Source | None = None
        self._signals: LayerSignals | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._job, self._task = loop.run(self._begin(options))
        super().__init__(loop)

    async def _begin(self, options: PullOptions) -> tuple[Job, asyncio.Task[None]]:
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
        """Each layer in execution order, as soon as it is ready. Raises the pull's error."""
        index = 0
        while (event := self._state.wait_layer(index)) is not None:
            yield event
            index += 1

    async def layers_async(self) -> AsyncIterator[LayerEvent]:
        """`layers` for `async for`, in the caller's own event loop."""
        index = 0
        while (event := await self._state.wait_layer_async(index)) is not None:
            yield event
            index += 1

    def __aiter__(self) -> AsyncIterator[LayerEvent]:
        return self.layers_async()

    def on_layer(self, callback: Callable[[LayerEvent], None]) -> None:
        """Call `callback` as each layer becomes ready (those that are, at once, on this thread),
        in the order in which they do, one call at a time, on a thread of mx's: it must be short
        and must not close the pull. What it raises there is what the pull fails with."""
        self._state.on_layer(callback)

    # -- the end ----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> PullReport:
        """Block until every layer is ready (and written, with `out`).

        Raises what the pull failed with, or TimeoutError while it still runs.
        """
        return self._state.wait_end(timeout_s)

    def __await__(self) -> Generator[Any, None, PullReport]:
        return self._state.wait_end_async().__await__()

    @property
    def report(self) -> PullReport | None:
        """The report, or None while the pull runs or if it failed."""
        return self._state.report

    @property
    def kept(self) -> str:
        """After a failure with `out`: how to go on from what is left there; "" if nothing is."""
        return self._job.kept

    def progress(self) -> Progress:
        """A snapshot for display; cheap enough for ten a second."""
        self._require_own()
        return self._job.progress()

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, once it is known."""
        return self._job.manifest

    @property
    def model(self) -> ModelKey:
        return self._job.key

    def buffer(self) -> memoryview:
        """The model's bytes as an arena lays them out, once everything is ready; a view that
        stays valid after `close`. Writing to it reaches nobody else. Raises LocalError for a pull
        into a GPU."""
        self.wait()
        return host_view(self._arena_view()[1])

    def device_buffer(self) -> DeviceView:
        """The same of a pull into a GPU. Where the memory was attached it is the source's own:
        do not write to it. Raises ConfigError for a pull into host memory."""
        self.wait()
        view = self._arena_view()[1]
        if not isinstance(view, DeviceView):
            raise ConfigError("the pull is into host memory", hint="buffer() gives it")
        return view

    # -- tensors ----------------------------------------------------------------------------------

    def _arena_view(self) -> tuple[Manifest, Span]:
        if self._state.error is not None:
            raise another(self._state.error)
        with self._lock:
            arena, manifest = self._job.arena, self._job.manifest
            if self._closed or arena is None or manifest is None:
                raise ClosedError("the pull has no tensors: it was closed, or has not begun")
            if self._view is None:
                self._view = arena.private_view()
            return manifest, self._view

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors by name, in execution order: views, no copy; ties share their storage.

        Waits for the pull's end. Writing to a tensor reaches neither the source nor any other
        reader. Dtypes that torch has none for come as uint8 of their packed bytes.
        """
        from mx.memory.tensors import state_dict

        self.wait()
        manifest, view = self._arena_view()
        return state_dict(view, manifest.layout)

    def layer_state_dict(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of one layer, as soon as it is ready, and all that are tied to them: each
        belongs to the first layer that needs it. With `out`, do not write to them before the
        pull's end: what is written to disk is read from them.

        Raises IndexError where there is no such layer.
        """
        if layer < 0 or self._state.wait_layer(layer) is None:
            raise IndexError(f"there is no layer {layer}")
        manifest, view = self._arena_view()
        return layer_tensors(view, manifest.layout, layer)

    def signals(self) -> LayerSignals:
        """For a pull into a GPU: have streams wait for layers, instead of the CPU. The object is
        the pull's, and ends with it; `LayerSignals` says how to use it. Blocks until the model's
        layers are known. Raises ConfigError for a pull into host memory, the pull's error.

        `early_state_dict` gives the tensors to queue work on.
        """
        if self._options.device == "cpu":
            raise ConfigError("only a pull into a GPU has signals", hint="give `device=cuda:N`")
        if self._options.fall_back_to_disk:
            raise ConfigError("a pull that may begin again from disk has no signals")
        layers = self._state.wait_planned()
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
        """For a pull into a GPU: all tensors, as soon as they have a place, whatever is in it.
        Only work of streams that wait by `signals` may use them before the pull's end.

        Raises as `signals` does.
        """
        from mx.memory.tensors import state_dict

        self.signals()
        while self._job.arena is None or self._job.manifest is None:
            if self._state.ended:
                self.wait()
            time.sleep(0.001)
        manifest, view = self._arena_view()
        return state_dict(view, manifest.layout)

    # -- staying ----------------------------------------------------------------------------------

    def hold(self) -> Source:
        """Become a source of what was pulled (asked for with `hold=True`); waits for the end.

        The source lives until it, or this pull, is closed; this pull's tensors stay if it is.
        Raises ConfigError without `hold=True`, ClosedError, and as `serve` does.
        """
        self.wait()
        with self._lock:
            if self._held is None:
                self._held = self._begin_to_hold()
            return self._held

    def _begin_to_hold(self) -> Source:
        arena, manifest = self._job.arena, self._job.manifest
        if not isinstance(arena, MemfdArena | DeviceArena) or manifest is None:
            raise ConfigError("only a pull made with hold=True can become a source")
        node = self._job.node
        host = None if node is None else node.host
        if isinstance(host, Relay) and isinstance(arena, MemfdArena):
            return self._settle(host, arena)
        self._loop.run(self._job.leave())
        arena.seal()
        held = HeldModel(self.model, manifest, arena, SourceRole.RELAY, borrowed=True)
        coordinator = self._options.coordinator
        loop = runtime.acquire()
        try:
            options = source_options(self._settings, coordinator)
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

    def _settle(self, relay: Relay, arena: MemfdArena) -> Source:
        """Others read here already, and go on."""
        arena.freeze()
        loop = runtime.acquire()
        try:
            server, held = loop.run(relay.settle())
        except BaseException:
            runtime.release(loop)
            raise
        return Source(loop, server, held, self._options.coordinator or "", None)

    def close(self) -> None:
        """Stop if it still runs, and give up this object's hold on the memory. Idempotent; a close
        that was interrupted goes on when it is called again."""
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
        await self._job.leave()
        # If it was cancelled before its first step.
        self._state.failed(ClosedError("the pull was closed before it was complete"))


def pull(
    model: str,
    *,
    peer: str | None = None,
    path: str | Path | None = None,
    fallback: str | Path | None = None,
    revision: str = "",
    variant: str = "",
    coordinator: str | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
    hold: bool = False,
    transport: str | None = None,
    verify: str = "chunks",
    attach: bool = True,
    into: memoryview | None = None,
    reuse: Holder | Sequence[Holder] = (),
    wait_s: float | None = None,
    resume: bool = True,
    settings: config.Settings | None = None,
) -> Pull:
    """Start pulling `model`; returns at once. It is NAME, NAME:REVISION, or NAME@IDENTITY to pin
    the weights. Without a revision, there or in `revision`, NAME means its newest one, and a pin
    the weights in whichever revision; without a `variant` it is "checkpoint".

    It comes from the sources that the coordinator at `coordinator` knows; with `peer` from that
    one (HOST:PORT), without a coordinator; with `path` from a checkpoint on disk; with
    `fallback` from sources, and from that checkpoint if none can be used. `out` is a folder to
    write a checkpoint to; `hold` keeps the memory in a form that others can read and
    allows `Pull.hold`. `transport` forces one by name. `verify="strong"` also compares every
    tensor with the model's identity. `device` is "cpu", or "cuda:N" for that GPU's memory, which
    `out` and "strong" copy back to the host. `attach=False` copies even where memory could be
    shared. `into` is a writable, contiguous buffer to fill instead of new memory (at least
    `manifest.layout.arena_nbytes` long); it is the caller's, who keeps it until the pull is
    closed. `reuse` are pulls and sources of this process, such as of the revision before or of a
    model that this one was made from: what they hold is copied from there, and not moved.

    When nobody is there to pull from, now or in the middle, `wait_s` (else the settings')
    is how long the pull waits for somebody, keeping what it has. A pull that fails leaves the
    layers that it has written to `out`, if any, beside it for the next one to go on from, and its
    error says so; `resume=False` neither uses nor leaves any.

    Raises ConfigError for arguments that can't be right; everything else is raised by whoever
    waits: CoordinatorError, UnknownModelError, NoSourceError, IncompleteError, IntegrityError,
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
        into=None if into is None else writable_bytes(into),
        reuse=held_by(reuse, where),
        wait_s=wait_s,
        resume=resume,
    )
    loop = runtime.acquire()
    try:
        return Pull(loop, options, settings, started_s)
    except BaseException:
        runtime.release(loop)
        raise
