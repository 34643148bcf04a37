"""The stream that a browser reads, and what becomes of one that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mx.errors import NotAllowedError
from mx.operations.web import follow
from mx.operations.web.board import Board
from mx.operations.web.browsers import Browsers
from mx.operations.web.follow import Follower


async def test_a_browser_that_does_not_read_has_no_queue() -> None:
    """It gets the latest form of what has changed meanwhile, once, when it reads again."""
    board = Board(max_gone=50)
    follower = Follower(None, board)  # type: ignore[arg-type]
    browsers = Browsers(follower, "127.0.0.1:7600", [])
    reads, sent = asyncio.Event(), list[tuple[str, Any]]()
    reads.set()

    async def send(message: Any) -> None:
        await reads.wait()
        for event in message.get("body", b"").decode().split("\n\n"):
            if event:
                name, data = event.split("\n")
                sent.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))

    async def receive() -> Any:
        await asyncio.Event().wait()

    def put(number: int) -> None:
        board.put("source", "one", {"number": number})
        follower._tell()

    put(0)
    scope = {"type": "http", "method": "GET"}
    serving = asyncio.create_task(browsers.serve(scope, receive, send))
    async with asyncio.timeout(30):
        while ("synced", {}) not in sent:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        reads.clear()
        for number in range(1, 5001):
            put(number)
            if number % 500 == 0:
                await asyncio.sleep(0)
        before = len(sent)
        reads.set()
        while not any(
            ["source", "one", {"number": 5000}] in said.get("put", []) for _, said in sent
        ):
            await asyncio.sleep(0.01)
        assert len(sent) - before < 10
        # So many ended that the board has forgotten some: everything is told again.
        reads.clear()
        for number in range(200):
            board.put("pull", str(number), {})
            board.drop("pull", str(number))
        put(-1)
        before = len(sent)
        reads.set()
        while ("synced", {}) not in sent[before:]:
            await asyncio.sleep(0.01)
        assert ("begin", {}) in sent[before:]
        browsers.stop()
        await serving


class Refusing:
    """A coordinator that lets this page see nothing, and counts who asks it for lists."""

    def __init__(self) -> None:
        self.lists, self.refuses = 0, True

    async def watch(self, *, pulls: bool) -> AsyncIterator[None]:
        assert pulls
        if self.refuses:
            raise NotAllowedError("this certificate may not observe")
        yield

    async def list_models(self) -> tuple[()]:
        self.lists += 1
        return ()


async def test_what_may_not_be_seen_is_not_asked_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    client: Any = Refusing()
    follower = Follower(client, Board())
    running = asyncio.create_task(follower.run())
    with follower.browser():
        while not follower.connection.why:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert client.lists == 0
