"""A pull that begins once its revision is listed, as a watch of the coordinator tells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from typing import Any

import mx
from mx import config, runtime
from mx.api.common import client_of
from mx.core.types import CHECKPOINT
from mx.errors import UnknownModelError
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind

#: How often, and how many times, a revision is looked for of which something is listed.
_LOOK_AGAIN_S, _LOOKS = 0.01, 20


class AheadPull:
    """Waits for a revision, and pulls it."""

    def __init__(
        self,
        name: str,
        revision: str,
        *,
        coordinator: str | None,
        settings: config.Settings | None = None,
        **how: Any,
    ) -> None:
        """Begin to wait.

        Args:
            name: The model's.
            revision: Of its checkpoint.
            coordinator: HOST:PORT; None takes the settings'.
            settings: As for `mx.pull`.
            how: Other arguments of `mx.pull`.
        """
        self._name, self._revision, self._coordinator = name, revision, coordinator
        self._settings = settings or config.load()
        self._how: Mapping[str, Any] = how
        self._pull: Future[mx.Pull] = Future()
        self._lock, self._closed = threading.Lock(), False
        self._listed: Future[None] = runtime.submit(self._wait)
        self._thread = threading.Thread(target=self._run, name="mx-ahead", daemon=True)
        self._thread.start()

    def pull(self, timeout_s: float | None = None) -> mx.Pull:
        """Wait until the revision is listed, and return its pull.

        Raises:
            TimeoutError: It is not, after so long.
            MxError: The coordinator can't be watched.
        """
        return self._pull.result(timeout_s)

    def close(self) -> None:
        """End the wait, or the pull. Idempotent."""
        with self._lock:
            self._closed = True
        self._listed.cancel()
        self._thread.join()
        with suppress(Exception, CancelledError):  # `pull` has raised it
            pull = self._pull.result()
            pull.close()

    def _run(self) -> None:
        try:
            self._listed.result()
            with self._lock:
                if self._closed:
                    self._pull.cancel()
                    return
                pull = mx.pull(
                    self._name,
                    revision=self._revision,
                    coordinator=self._coordinator,
                    settings=self._settings,
                    **self._how,
                )
            self._pull.set_result(pull)
        except CancelledError:
            self._pull.cancel()
        except BaseException as error:  # noqa: BLE001 - `pull` raises it
            self._pull.set_exception(error)

    async def _wait(self) -> None:
        async with (
            client_of(self._settings, self._coordinator) as client,
            aclosing(client.watch(self._name, self._revision)) as updates,
        ):
            async for update in updates:
                if update.kind in (WatchKind.UP, WatchKind.CHANGED):
                    # Of a trainer its parts come first. Batches of changes are a tenth of a second
                    # apart, and the whole comes sooner.
                    for _ in range(_LOOKS):
                        if await self._is_there(client):
                            return
                        await asyncio.sleep(_LOOK_AGAIN_S)

    async def _is_there(self, client: CoordinatorClient) -> bool:
        try:
            found = await client.resolve(self._name, self._revision, CHECKPOINT, documents=False)
        except UnknownModelError:
            return False
        return any(source.whole for source in found.sources)
