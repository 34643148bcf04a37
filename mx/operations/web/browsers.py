"""The stream that a browser reads: server-sent events of what has changed on the board.

Events: `begin` (all rows follow), `rows`, `synced` (all rows were sent), `connection` (whether the
coordinator answers), and `tick`, so that both ends notice when the other is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.types import Receive, Scope, Send

from mx.core.budget import Budget
from mx.operations.web.follow import Connectivity, Follower
from mx.tasks import end_tasks

#: The most browsers.
MAX_BROWSERS = 128
#: The least time between two messages: a browser that is told more often shows no more.
INTERVAL_S = 0.25
TICK_S = 5.0
#: How long the end of a stream may take.
END_S = 0.5
#: The most rows of one message.
SLICE = 200


class Browsers:
    """The browsers that read; `serve` is one's stream, as an ASGI application."""

    def __init__(
        self, follower: Follower, address: str, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """
        Args:
            follower: What follows the coordinator.
            address: The coordinator's, to be shown.
            headers: The headers of each answer.
        """
        self._follower = follower
        self._address = address
        self._headers = headers
        #: The pages that are open, by address.
        self.open = Budget(MAX_BROWSERS, "{} pages are open")
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream."""
        self._stopping.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser is gone. The caller has admitted it."""
        headers = [*self._headers, (b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        with self._follower.browser():
            ends = [
                asyncio.create_task(_gone(receive), name="mx-web-gone"),
                asyncio.create_task(self._stopping.wait(), name="mx-web-stop"),
                asyncio.create_task(self._send(send), name="mx-web-send"),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(*ends)
            if not ends[-1].cancelled():
                ends[-1].result()  # it ends by itself only with an error
        try:
            async with asyncio.timeout(END_S):
                await send({"type": "http.response.body"})
        except TimeoutError:  # it does not read: its connection ends with the server
            await _gone(receive)

    async def _send(self, send: Send) -> None:
        async def tell(name: str, text: str) -> None:
            # Waits while the browser reads slowly: nothing is kept for it meanwhile.
            data = f"event: {name}\ndata: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        follower, board = self._follower, self._follower.board
        number = began = 0
        begun = synced = False
        told: Connectivity | None = None
        while True:
            changing = follower.changing  # before the board is read: what comes after is not missed
            if follower.connection is not told:
                told = follower.connection
                await tell("connection", self._connection(told))
            # Before each page: ends may have been forgotten while the last one was sent.
            if not begun or board.forgotten > max(number, began):
                number, began, begun, synced = 0, board.latest, True, False
                await tell("begin", "{}")
            page = board.after(number, SLICE)
            if page is not None:
                number = page.latest
                await tell("rows", page.text)
            elif not synced:
                synced = True
                await tell("synced", "{}")
            else:
                await tell("tick", json.dumps({"now": round(follower.clock(), 1)}))
            if synced:
                await asyncio.sleep(INTERVAL_S)
                if number >= board.latest:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(TICK_S):
                            await changing.wait()

    def _connection(self, connection: Connectivity) -> str:
        return json.dumps(
            {
                "address": self._address,
                "up": connection.is_up,
                "since": round(connection.since_s, 1),
                "now": round(self._follower.clock(), 1),
                "why": connection.why,
            }
        )


async def _gone(receive: Receive) -> None:
    """Wait until the browser is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
