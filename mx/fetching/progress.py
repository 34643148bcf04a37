"""Reports a pull's progress to the coordinator, for people. The pull does not depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable

from mx.core.progress import Progress
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.errors import MxError
from mx.fetching.events import EventLog
from mx.fetching.options import PullOptions
from mx.runtime import set_by
from mx.wire.address import each_address
from mx.wire.client import CoordinatorClient
from mx.wire.progress import Report

#: A pull that ends before this is not reported.
FIRST_S = 0.3
INTERVAL_S = 1.0
#: While layers still arrive and requests are taken already, routers want to know sooner.
EARLY_S = 0.25
#: Pause after a failed report.
AGAIN_S = 2.0
#: How long the last report may delay the pull's end.
FAREWELL_S = 0.5


class ProgressReporter:
    """One pull's; on the loop. `close` it when the pull is closed.

    It reports until the pull has ended, or until it is closed while the pull's process takes an
    engine's requests: then no task is left. Each edition of the pull is reported by its own id.
    """

    def __init__(
        self,
        options: PullOptions,
        coordinator: str,
        state: EventLog,
        progress: Callable[[], Progress],
        key: Callable[[], ModelKey],
        reader_id: Callable[[], str] = str,
        requests_host: str = "",
    ) -> None:
        """
        Args:
            options: The pull's.
            coordinator: Its address, or those of several; see `CoordinatorClient`.
            state: The pull's events.
            progress: Returns a snapshot.
            key: Returns the model, as far as it is known.
            reader_id: Returns the source id that the pull has as a relay at the moment; "" if it
                can't be one.
            requests_host: Where requests reach this process; "": at the address from which it
                reports.
        """
        self._reader_id = reader_id
        self._own_id = str(uuid.uuid4())
        self._options = options
        self._coordinator = coordinator
        self._state = state
        self._progress = progress
        self._key = key
        self._requests_host = requests_host
        self._requests_port = 0
        self._done_nbytes, self._at_s = 0, state.started_s
        self._ended = self._closing = False
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._start()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="mx-progress")

    @property
    def pull_id(self) -> str:
        """The id by which routers know the pull: an edition's source id, where it has one."""
        return self._reader_id() or self._own_id

    @property
    def _active(self) -> bool:
        """True while there is something to report: the pull runs, or its process takes requests."""
        if not self._ended:
            return True
        return bool(self._requests_port) and self._state.report is not None

    async def _run(self) -> None:
        await self._sleep(FIRST_S)
        while self._active and not self._closing:
            if not (self._state.first_read_s or self._requests_port):
                await self._sleep(FIRST_S)  # do not compete with the pull's own calls
                continue
            pull_id = self.pull_id
            await self._connected()
            if self._active and not self._closing and pull_id == self.pull_id:
                await self._sleep(AGAIN_S)

    async def _connected(self) -> None:
        client = CoordinatorClient(
            self._coordinator,
            tls=self._options.tls,
            insecure=self._options.insecure,
            timeout_s=self._options.connect_timeout_s,
        )
        try:
            for _ in each_address(self._coordinator):  # at once, if one does not answer
                with contextlib.suppress(MxError):
                    async with client.reporting() as report:
                        await self._report(report)
                    return
        finally:
            await client.close()

    async def _report(self, report: Report) -> None:
        """Report as long as there is something to report of this edition, and the end too."""
        pull_id = self.pull_id
        while pull_id == self.pull_id:
            over = self._closing or not self._active
            await report(self._status())
            if over:
                return
            early = self._requests_port and not self._ended
            await self._sleep(EARLY_S if early else INTERVAL_S)

    async def _sleep(self, seconds: float) -> None:
        """Wait so long, or until something has changed that is to be reported at once."""
        await set_by(self._woken, time.monotonic() + seconds)
        self._woken.clear()

    def _status(self) -> PullStatus:
        progress, now_s = self._progress(), time.monotonic()
        passed_s = max(now_s - self._at_s, 1e-3)
        rate = max(0, progress.bytes_done - self._done_nbytes) / passed_s / 1e9
        self._done_nbytes, self._at_s = progress.bytes_done, now_s
        phase = PullPhase.RUNNING
        if self._ended or self._closing:
            phase = PullPhase.FAILED if self._state.report is None else PullPhase.COMPLETE
        return PullStatus(
            pull_id=self.pull_id,
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
            requests_port=0 if self._closing else self._requests_port,
            requests_host=self._requests_host,
        )

    async def accept_requests(self, port: int) -> None:
        """Report at once that this process takes an engine's requests at a port; 0: at none."""
        self._requests_port = port
        if self._active and not self._closing:
            self._start()  # it may have ended with the pull
        self._woken.set()

    def ended(self) -> None:
        """Report the pull's end."""
        self._ended = True
        self._woken.set()

    async def close(self) -> None:
        """End, and wait up to `FAREWELL_S` until that is reported. Idempotent."""
        self._closing = True
        self._woken.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=FAREWELL_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
