"""The memory that a pull fills, as its caller sees it: bytes, tensors, and the signals of a GPU."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from mx.errors import ClosedError, ConfigError, another, release_frames

if TYPE_CHECKING:
    import torch

    from mx.api.closing import Step
    from mx.fetching.edition import Edition
    from mx.fetching.events import EventLog
    from mx.fetching.files_job import FilesJob
    from mx.fetching.job import Job
    from mx.fetching.options import PullOptions
    from mx.memory.readiness import LayerSignals
    from mx.transport import View

#: How long no layer may become ready while a stream waits.
PATIENCE_S = 60.0


class FilledMemory:
    """One pull's. `Pull` says what its methods return and raise.

    `lock` guards the signals, and `closed`, after which there are no new ones. `Giving` holds it
    while it makes a source of the memory.
    """

    def __init__(self, options: PullOptions, job: Job | FilesJob, log: EventLog) -> None:
        """
        Args:
            options: The pull's.
            job: Has the memory, once it is allocated.
            log: The pull's events.
        """
        self.lock = threading.Lock()
        self.closed = False
        self._options = options
        self._job = job
        self._log = log
        self._signals: LayerSignals | None = None

    def edition(self) -> Edition:
        """Return the present edition of the weights, which is the last one once the pull has
        ended."""
        if self._log.error is not None:
            raise another(self._log.error)
        if self._options.files_only:
            raise ConfigError("a pull of files only has no tensors", hint="files() gives its files")
        if self.closed:
            raise ClosedError("the pull was closed")
        return self._job.edition

    def view(self) -> View:
        """Return all of the memory."""
        return self.edition().view()[1]

    def signals(self, patience_s: float = PATIENCE_S) -> LayerSignals:
        """Return the signals by which CUDA streams wait for layers."""
        if self._options.device == "cpu":
            raise ConfigError("only a pull into a GPU has signals", hint="give `device=cuda:N`")
        if self._options.stores and self._options.from_sources:
            raise ConfigError("a pull that may begin again from disk has no signals")
        from mx.cuda.device import Device
        from mx.cuda.driver import load
        from mx.memory.device import DeviceArena
        from mx.memory.readiness import LayerSignals

        layers = self._log.keep_memory()
        arena = self._allocated().arena
        if isinstance(arena, DeviceArena):
            arena.finish_preparing()  # a module that is loaded later might wait for the streams
        with self.lock:
            if self.closed:
                raise ClosedError("the pull was closed")
            if self._signals is None:
                device = Device.open(load(), self._options.device)
                self._signals = signals = LayerSignals(device, layers, patience_s)
                self._log.on_layer(lambda event: signals.verified(event.index))
                self._log.on_failure(signals.failed)
            return self._signals

    def early_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors in a GPU's memory as soon as that is allocated."""
        self.signals()
        return self._allocated().tensors()

    def _allocated(self) -> Edition:
        """Return the present edition once its memory is allocated."""
        while (edition := self.edition()).arena is None or edition.manifest is None:
            if self._log.ended:
                self._log.wait_end()
            time.sleep(0.001)
        return edition

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Make no view and no signals any more."""
        with self.lock:
            self.closed = True

    def closing_steps(self) -> list[Step]:
        """Return the steps that let go of the memory, once nothing is read into it."""
        signals = [] if self._signals is None else [self._signals.close]
        return [*signals, self._let_go]

    def _let_go(self) -> None:
        self._job.edition.release()
        self._options.reuse.clear()
        if self._options.into is not None:
            self._options.into.release()
        release_frames(self._log.error)

    def forked(self, log: EventLog) -> None:
        """Close, in a forked child, with this log in place of the parent's."""
        self.lock = threading.Lock()
        self.closed = True
        self._log = log
