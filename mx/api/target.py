"""The pulling side: the `Pull` that `mx.api.pulling.pull` returns."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import checked_port, known_host, transports
from mx.api.filled import PATIENCE_S, FilledMemory
from mx.api.giving import Giving
from mx.core.progress import Progress, summary
from mx.errors import ClosedError, ConfigError, MxError, RevisionChangedError
from mx.fetching.events import EventLog
from mx.fetching.job import Job
from mx.fetching.progress import ProgressReporter
from mx.tasks import end_tasks
from mx.transport import DeviceView, ScatteredView, View, host_view

if TYPE_CHECKING:
    import torch

    from mx.api.source import Source
    from mx.core.pages import Pages
    from mx.core.selection import Subset
    from mx.core.types import Manifest, ModelKey
    from mx.fetching.files_job import FilesJob
    from mx.fetching.options import PullOptions
    from mx.fetching.report import LayerEvent, PathReport, PullReport
    from mx.memory.readiness import LayerSignals


class DescribedPull:
    """A pull that waits for its manifest and gets its side files: a part of `Pull`."""

    _filled: FilledMemory
    _job: Job | FilesJob
    _loop: runtime.LoopThread
    _options: PullOptions
    _state: EventLog

    def wait_manifest(self, timeout_s: float | None = None) -> Manifest:
        """Block until the manifest is known, which is long before the weights are here.

        From then on the pull is of these weights: if it has to begin again, from its fallback, and
        finds other weights, it fails.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit. A pull from `path` knows
                its manifest when it has read the weights.

        Returns:
            The manifest.

        Raises:
            TimeoutError: It is not known after `timeout_s`.
            ConfigError: The pull is of files only, and from a disk: there is no manifest.
            MxError: The error that ended the pull, see `pull`.
        """
        return self._state.wait_manifest(timeout_s)

    async def wait_manifest_async(self) -> Manifest:
        """Return what `wait_manifest` returns, without a limit, in the caller's own event loop.

        Raises:
            MxError: As `wait_manifest`.
        """
        return await self._state.wait_manifest_async()

    def files(self, timeout_s: float | None = None) -> dict[str, bytes]:
        """Get the model's side files (configuration, tokenizer) into memory.

        Does not wait for weights, except in a pull of NAME@PIN from `path`, whose pin only the
        weights prove. The first call fetches them, beside the weights, from any source that has the
        same files, or from `fallback` if that has them; the pull keeps them until it is closed. A
        first call may come after the end of the pull, too.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Returns:
            The bytes of each file by its path in the checkpoint's folder, at most 256 MiB together;
            each has the digest that the manifest's packaging names. Empty if the model has none. A
            pin of the weights alone does not cover them.

        Raises:
            TimeoutError: They are not here after `timeout_s`. They go on coming; call it again.
            ClosedError: The pull was closed.
            NoSourceError: No source served them. The pull goes on; a later call tries again.
            DigestError: As NoSourceError; the last source sent wrong bytes.
            MxError: The error that ended the pull before they were here, see `pull`.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self._options.files_only:
            self._state.wait_end(timeout_s)
        self._require_open()
        here = self._job.edition.files.here
        if here is not None:
            return here
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        try:
            return self._loop.run(_files_of(self._job), left_s)
        except TimeoutError:
            raise TimeoutError("the side files have not arrived yet") from None

    async def files_async(self) -> dict[str, bytes]:
        """Return what `files` returns, without a limit of time, in the caller's own event loop.

        Raises:
            MxError: As `files`.
        """
        if self._options.files_only:
            await self._state.wait_end_async()
        self._require_open()
        return await asyncio.wrap_future(self._loop.submit(_files_of(self._job)))

    def _require_open(self) -> None:
        """Raise ClosedError if the pull was closed, ForkError in a forked child."""
        if self._loop.inherited:
            raise runtime.fork_error()
        if self._filled.closed:
            raise ClosedError("the pull was closed")


async def _files_of(job: Job | FilesJob) -> dict[str, bytes]:
    """Return the files of the present edition; if another one follows meanwhile, of that one."""
    while True:
        edition = job.edition
        try:
            files = await edition.files.get()
        except MxError:
            if edition is job.edition:
                raise
        else:
            if edition is job.edition:
                return files


class Pull(DescribedPull, Closable):
    """A running pull. Iterate `layers()`, or `wait()`; then call `state_dict()`.

    A context manager, blocking or async, that closes the pull at its end. `await pull` waits as
    `wait` does, and `async for` iterates `layers_async()`. The tensors stay valid after `close`:
    they keep their memory alive. A pull that is dropped without `close` is closed by itself, with a
    ResourceWarning if it has not ended, or others may read from it (`hold=True`) or send requests.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        options: PullOptions,
        settings: config.Settings,
        started_s: float,
    ) -> None:
        """Begin to pull; on the loop, which is acquired for this object (`runtime.made`)."""
        self._options = options
        self._settings = settings
        self._state = EventLog(started_s)
        self._job, self._task = self._begin(options)
        self._filled = FilledMemory(options, self._job, self._state)
        self._giving = Giving(loop, options, settings, self._job, self._reporter, self._filled)
        super().__init__(loop)

    def _begin(self, options: PullOptions) -> tuple[Job | FilesJob, asyncio.Task[None]]:
        self._reporter: ProgressReporter | None = None
        job: Job | FilesJob
        if options.files_only:
            from mx.fetching.files_job import FilesJob

            job = FilesJob(options, self._state)
        else:
            job = Job(options, transports(), self._state)
        task = asyncio.create_task(job.run(), name="mx-pull")
        if options.coordinator is None or options.peer is not None:
            return job, task  # there is no coordinator to report to
        self._reporter = ProgressReporter(
            options,
            options.coordinator,
            self._state,
            job.progress,
            lambda: job.key,
            lambda: job.edition.reader_id,
            known_host(self._settings),
        )
        ended = self._reporter.ended
        task.add_done_callback(lambda _: ended())
        return job, task

    def __repr__(self) -> str:
        """One line: the model and how far it is."""
        return f"<Pull {self.model}: {self._state_text()}>"

    def _repr_html_(self) -> str:
        """The same for a notebook, with a bar."""
        from mx.api.notebook import as_html

        return as_html(str(self.model), self._state_text(), self._job.progress())

    def _state_text(self) -> str:
        if self._filled.closed:
            return "closed"
        return str(self._state.error or summary(self.progress()))

    # -- layers -----------------------------------------------------------------------------------

    def layers(self) -> Iterator[LayerEvent]:
        """Yield each layer in execution order, as soon as it is ready.

        Raises:
            RevisionChangedError: With `follow`, the model changed after some layers were yielded.
            MxError: The error that ended the pull, see `pull`.
        """
        reader = self._state.layers()
        while (event := reader.next()) is not None:
            yield event

    async def layers_async(self) -> AsyncIterator[LayerEvent]:
        """Yield what `layers` yields, for `async for` in the caller's own event loop.

        Raises:
            MxError: The error that ended the pull, see `pull`.
        """
        reader = self._state.layers()
        while (event := await reader.next_async()) is not None:
            yield event

    def __aiter__(self) -> AsyncIterator[LayerEvent]:
        return self.layers_async()

    def on_layer(self, callback: Callable[[LayerEvent], None]) -> None:
        """Call `callback` for each layer, in the order in which layers become ready.

        Layers that are ready already are reported at once, on this thread; later ones on a thread
        of mx's, one call at a time.

        Args:
            callback: Must be short and must not close the pull: until it returns no later layer
                is reported to anyone, and the pull's time goes on. An error that it raises on
                mx's thread ends the pull; one that it raises on this thread is passed on, and it is
                called no more.
        """
        self._state.on_layer(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the pull has ended, well or not, after the last layer's callbacks.

        Args:
            callback: Must be short. It is called on a thread of mx's.

        Raises:
            ForkError: This process was forked from the one that pulls.
        """
        self._require_own()
        self._loop.submit(asyncio.wait((self._task,))).add_done_callback(lambda _: callback())

    # -- the end ----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> PullReport:
        """Block until every layer is ready and, with `out`, written. A notebook shows a bar.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Returns:
            The report of the pull.

        Raises:
            TimeoutError: The pull still runs after `timeout_s`.
            MxError: The error that ended the pull, see `pull`.
        """
        if "IPython" in sys.modules and self._state.report is None:
            from mx.api.notebook import shows_bars, watched

            if shows_bars():
                return watched(self, self._state.wait_end, timeout_s)
        return self._state.wait_end(timeout_s)

    def __await__(self) -> Generator[Any, None, PullReport]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> PullReport:
        return await self._state.wait_end_async()  # its frame keeps the pull until then

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
    def moving(self) -> tuple[int, Callable[[], list[PathReport]]]:
        """The pull's number in traces (`job`), and what returns what each path has brought so
        far."""
        job = self._job
        return id(job), job.paths if isinstance(job, Job) else list

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None until it is known. `wait_manifest` waits for it."""
        return self._job.edition.manifest

    @property
    def cached_at(self) -> str:
        """HOST:PORT where this host's cache holds the model, as it says; "" if it does not."""
        return self._job.cached_at

    @property
    def subset(self) -> Subset | None:
        """The tensors that are pulled, with their layout in `buffer`; None: all, or the model is
        not known yet."""
        return self._job.edition.subset

    @property
    def pages(self) -> Pages | None:
        """The digests of the model's blocks that are known; None until the manifest is."""
        return self._job.edition.pages

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
        return host_view(self._filled.view())

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
        view = self._filled.view()
        if self._job.edition.given_back:
            raise ClosedError("the pull has given back the tensors of `into`")
        return view

    def device_buffer(self) -> DeviceView:
        """Wait for the end of a pull into a GPU and return the model's bytes in that GPU's memory.

        Returns:
            A view of device memory. Attached memory belongs to the source: do not write to it.

        Raises:
            ConfigError: The pull is into host memory, into tensors of the caller's, or has attached
                to tensors that were lent.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        self.wait()
        view = self._filled.view()
        if isinstance(view, ScatteredView):
            raise ConfigError("the tensors are in several places", hint="memory() gives them")
        if not isinstance(view, DeviceView):
            raise ConfigError("the pull is into host memory", hint="buffer() gives it")
        return view

    # -- tensors ----------------------------------------------------------------------------------

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
        return self._filled.edition().tensors()

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
        while layer >= 0 and (event := self._state.wait_layer(layer)) is not None:
            with contextlib.suppress(RevisionChangedError):  # just now: it becomes ready again
                return event.tensors()
        raise IndexError(f"there is no layer {layer}")

    def signals(self, patience_s: float = PATIENCE_S) -> LayerSignals:
        """Return the signals by which CUDA streams, instead of the CPU, wait for layers.

        Blocks until the model's layers are known, its memory is allocated and what hashes it is
        loaded. `early_state_dict` gives the tensors to queue work on. `layers()`, by which the CPU
        waits, is simpler, and can't be held up by the streams themselves.

        Args:
            patience_s: Seconds after which a stream that waits is let go with an error if no layer
                became ready. The first call's counts.

        Returns:
            The same object at each call; the pull owns it and closes it. `LayerSignals` says how
            to use it.

        Raises:
            ConfigError: The pull is into host memory, or has a `fallback` on disk.
            ClosedError: The pull was closed.
            MxError: The error that ended the pull, see `pull`.
        """
        return self._filled.signals(patience_s)

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
        return self._filled.early_tensors()

    # -- staying ----------------------------------------------------------------------------------

    def hold(self) -> Source:
        """Wait for the end of a pull made with `hold=True` and serve its memory to others.

        Returns:
            The same source at each call. It serves until it, or this pull, is closed, and goes on
            if the pull is dropped; the pull's tensors outlive it.

        Raises:
            ConfigError: The pull was made without `hold=True`.
            ClosedError: The pull, or the source, was closed, or the pull has given its memory back
                (`release`).
            MxError: The error that ended the pull, see `pull`, or that `serve` raises.
        """
        self.wait()
        return self._giving.hold()

    def accept_requests(self, port: int) -> None:
        """Have routers send requests to this process (`mx.Router`), also while layers still arrive.

        The coordinator lists the port with the pull, and with the source that `hold` returns, until
        the pull is closed. Routers find the host by the settings (`advertise`, else `listen`), or
        by the address from which this process reaches the coordinator. Who asks before all
        layers are ready waits for them as `layers()` does.

        Returns at once, also in a callback of `on_layer`.

        Args:
            port: Where the engine takes requests; 0: it takes none any more.

        Raises:
            ConfigError: It is not a port, or the pull has no coordinator.
            ClosedError: The pull was closed.
        """
        self._require_own()
        self._giving.accept_requests(checked_port(port))

    def release(self) -> None:
        """Stop serving the pull's memory to others, after the pull has ended. Idempotent.

        Readers may finish for a moment and are then cut off. Afterwards the tensors that `into`
        named are the caller's alone: it may write to them, or lend them with `serve`. `hold` raises
        ClosedError from then on.

        Raises:
            ConfigError: The pull has not ended.
        """
        self._require_own()
        if not self._state.ended:
            raise ConfigError("the pull still runs", hint="wait for its end, or close it")
        self._giving.end()

    def close(self) -> None:
        """Stop the pull if it still runs, and drop this object's reference to the memory.

        Idempotent; a close that was interrupted goes on when it is called again.

        Raises:
            ConfigError: A callback of `on_layer` or `on_end` called it on a thread of mx's.
        """
        super().close()

    def _closing_steps(self) -> list[Step]:
        self._filled.close()
        giving, memory = self._giving.closing_steps(), self._filled.closing_steps()
        return [*giving, self._awaiting(self._stop), *memory]

    def forked(self) -> None:
        super().forked()
        self._state = EventLog(self._state.started_s)
        self._state.failed(runtime.fork_error())
        self._filled.forked(self._state)

    def _label(self) -> str:
        return f"<Pull {self.model}>"

    def _idle(self) -> bool:
        options = self._options  # once every layer is ready, there may be more to do
        more = options.out is not None or options.strong or options.files_only
        ended = self._state.ended or (self._state.complete and not more)
        return ended and not self._giving.gives

    def _dropped(self) -> None:
        # A source that `hold` has returned goes on, and keeps the memory that it serves.
        source = self._giving.hand_over()
        if source is None or not source.keep(self):
            super()._dropped()

    async def _stop(self) -> None:
        self._job.close()
        await end_tasks(self._task)
        if self._reporter is not None:
            await self._reporter.close()
        edition = self._job.edition
        edition.end(ClosedError("the pull was closed"))
        await edition.files.close()
        await self._job.leave()
        # The task records no error if it was cancelled before its first step.
        self._state.failed(ClosedError("the pull was closed before it was complete"))
