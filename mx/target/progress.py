"""Reports a pull's progress to the coordinator, for people. The pull does not depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable

from mx.core.progress import Progress, PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.errors import MxError
from mx.target.events import EventLog
from mx.target.options import PullOptions
from mx.wire.client import CoordinatorClient
from mx.wire.progress import Report

#: A pull that ends before this is not reported.
FIRST_S = 0.3
INTERVAL_S = 1.0
#: Pause after a failed report.
AGAIN_S = 2.0
#: How long the last report may delay the pull's end.
FAREWELL_S = 0.5


class ProgressReporter:
    """One pull's; on the loop. `close` it when the pull has ended."""

    def __init__(
        self,
        options: PullOptions,
        state: EventLog,
        progress: Callable[[], Progress],
        key: Callable[[], ModelKey],
        pull_id: str = "",
    ) -> None:
        """`pull_id` is the source id that the pull has as a relay, if it can be one."""
        self._options = options
        self._state = state
        self._progress = progress
        self._key = key
        self._pull_id = pull_id or str(uuid.uuid4())
        self._done_bytes, self._at_s = 0, state.started_s
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if options.coordinator is not None and options.peer is None:
            self._task = asyncio.create_task(self._run(options.coordinator), name="mx-progress")

    async def _run(self, coordinator: str) -> None:
        pause_s = FIRST_S
        client: CoordinatorClient | None = None
        try:
            while not await self._closed_within(pause_s):
                if not self._state.first_read_s:  # do not compete with the pull's own calls
                    continue
                client = client or CoordinatorClient(
                    coordinator,
                    tls=self._options.tls,
                    insecure=self._options.insecure,
                    timeout_s=self._options.connect_timeout_s,
                )
                with contextlib.suppress(MxError):
                    async with client.reporting() as report:
                        await self._report(report)
                pause_s = AGAIN_S
        finally:
            if client is not None:
                await client.close()

    async def _report(self, report: Report) -> None:
        """Report until the pull has ended, and its end too."""
        while True:
            ended = self._closing.is_set()
            await report(self._status())
            if ended:
                return
            await self._closed_within(INTERVAL_S)

    async def _closed_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()

    def _status(self) -> PullStatus:
        progress, now_s = self._progress(), time.monotonic()
        passed_s = max(now_s - self._at_s, 1e-3)
        rate = max(0, progress.bytes_done - self._done_bytes) / passed_s / 1e9
        self._done_bytes, self._at_s = progress.bytes_done, now_s
        phase = PullPhase.RUNNING
        if self._closing.is_set():
            phase = PullPhase.FAILED if self._state.report is None else PullPhase.COMPLETE
        return PullStatus(
            pull_id=self._pull_id,
            model=self._key(),
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=phase,
            layers=progress.layers_total,
            ready=sum(1 << index for index, layer in enumerate(progress.layers) if layer.ready),
            nbytes=progress.bytes_total,
            done_bytes=min(progress.bytes_done, progress.bytes_total),
            seconds=now_s - self._state.started_s,
            sources=progress.sources,
            retries=progress.retries,
            gb_per_s=rate,
        )

    def ended(self) -> None:
        """Report the pull's end, and end."""
        self._closing.set()

    async def close(self) -> None:
        """`ended`, and wait for it up to `FAREWELL_S`. Idempotent."""
        self.ended()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=FAREWELL_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
