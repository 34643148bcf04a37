"""A TCP link to a server, which can be held: nothing goes through, and nothing is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class HeldLink:
    """A link to a port on this host, in this event loop."""

    def __init__(self) -> None:
        self.port = 0
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def held_link(port: int) -> AsyncIterator[HeldLink]:
    """A link to `port`, at a port of its own."""
    link, tasks = HeldLink(), set[asyncio.Task[None]]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        for one, other in ((reader, back), (there, writer)):
            task = asyncio.create_task(link.copy(one, other))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
