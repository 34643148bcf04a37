"""What a pull gives before its weights: the manifest, and the side files."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from mx import runtime
from mx.errors import ClosedError, MxError

if TYPE_CHECKING:
    from mx.api.filled import FilledMemory
    from mx.core.types import Manifest
    from mx.target.events import EventLog
    from mx.target.files_job import FilesJob
    from mx.target.job import Job
    from mx.target.options import PullOptions


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
            raise TimeoutError("the side files have not come yet") from None

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
