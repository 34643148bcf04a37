"""The connections of browsers, bounded: in number, and in how long they may say nothing."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from mx.core.budget import Budget

#: The most connections: a page has two, and a few while it loads.
MAX_CONNECTIONS = 384
#: A connection has so long for its first request, and for each further one that it begins.
REQUEST_S = 10.0
#: How long a connection may take to end as the server does.
END_S = 1.0


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which has no such bounds of its own."""

    _open: ClassVar[Budget] = Budget(MAX_CONNECTIONS, "{} connections are open")
    _host = ""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or end it if there are too many."""
        super().connection_made(transport)
        host = self.client[0] if self.client else "?"
        if not self._open.fits(host):
            transport.abort()
            return
        self._host = host
        self._open.take(host)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read what a browser sends."""
        super().data_received(data)
        if self._deadline is None and self._is_idle:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection no more."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._host:
            self._open.take(self._host, -1)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection, soon also where its browser does not read what is left."""
        super().shutdown()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(END_S, self.transport.abort)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self._is_late)

    def _is_late(self) -> None:
        self._deadline = None
        if self._is_idle:
            self.transport.abort()
