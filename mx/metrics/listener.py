"""Answers `GET /metrics` on a thread and an event loop of its own.

(The server of `prometheus_client` shakes hands on its only accepting thread, and starts a thread
for each connection: a client that connects and sends nothing would hold it up for good.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable

from mx import forks
from mx.errors import LocalError
from mx.transport import TlsFiles
from mx.wire.address import join_address, split_address

_log = logging.getLogger(__name__)

#: Connections at a time; the oldest makes room for another one.
MOST_CONNECTIONS = 16
#: How long a client may take for its handshake, its request, and to take the answer.
CLIENT_S = 10.0
_MOST_REQUEST_BYTES = 8192

#: Returns the type of the content and the content for an Accept header.
Render = Callable[[str], Awaitable[tuple[str, bytes]]]


class Listener:
    """A listener; from `start` to `stop`."""

    def __init__(self, address: str, render: Render, tls: TlsFiles | None = None) -> None:
        """
        Args:
            address: HOST:PORT; port 0 for any free one.
            render: Makes the answer, on the listener's own event loop. TimeoutError: it can't now.
            tls: Clients must show a certificate of this authority; None: plain text. The files are
                read again when they have changed.

        Raises:
            LocalError: The address can't be listened on.
        """
        host, port = split_address(address)
        self._render = render
        self._tls = tls
        self._context: tuple[tuple[int, ...], ssl.SSLContext] | None = None
        self._answering: dict[asyncio.Task[None], None] = {}  # the oldest first
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise _cannot(address, error) from error
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(MOST_CONNECTIONS)
        except OSError as error:
            self._socket.close()
            raise _cannot(address, error) from error
        forks.own(self._socket)
        self.address = join_address(host, self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="mx-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections, and the thread. It waits for nothing but that."""
        if self._thread.ident is None:
            self._loop.close()
            self._socket.close()
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=_MOST_REQUEST_BYTES
        )
        await self._stopping.wait()
        server.close()
        for task in tuple(self._answering):
            task.cancel()
        while self._answering:
            await asyncio.wait(tuple(self._answering))
        for _ in range(4):  # what was aborted is closed in the next rounds of the loop
            await asyncio.sleep(0)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._answering) >= MOST_CONNECTIONS:
            next(iter(self._answering)).cancel()
            del self._answering[next(iter(self._answering))]
        task = asyncio.create_task(self._answer(reader, writer), name="mx-metrics-client")
        self._answering[task] = None

        def ended(_: object) -> None:
            self._answering.pop(task, None)
            writer.transport.abort()  # here, since a task may be cancelled before it begins

        task.add_done_callback(ended)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CLIENT_S):
                if self._tls is not None:
                    await writer.start_tls(self._context_of(self._tls))
                await self._exchange(reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            _log.debug("a client of the metrics: %s", error or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - metrics end nothing else
            _log.warning("metrics can't be read: %s", error, exc_info=True)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        method, target, *_ = [*line.split(" "), "", ""]
        kind, body, status = "text/plain; charset=utf-8", b"", "200 OK"
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET\n"
        elif target.partition("?")[0] != "/metrics":
            status, body = "404 Not Found", b"metrics are at /metrics\n"
        else:
            headers = dict(each.lower().split(": ", 1) for each in lines if ": " in each)
            try:
                kind, body = await self._render(headers.get("accept", ""))
            except TimeoutError:
                status, body = "503 Service Unavailable", b"this process is too busy\n"
        answer = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        answer += "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        writer.write(f"{answer}Connection: close\r\n\r\n".encode())
        if method != "HEAD":
            writer.write(body)
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _context_of(self, tls: TlsFiles) -> ssl.SSLContext:
        """Return the context for the files as they are now, or were when they last fitted together.
        Raises OSError (ssl.SSLError too)."""
        files = (tls.certificate, tls.key, tls.authority)
        try:
            state = tuple(os.stat(file).st_mtime_ns for file in files)
            if self._context is None or self._context[0] != state:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_cert_chain(tls.certificate, tls.key)
                context.load_verify_locations(tls.authority)
                self._context = state, context
        except OSError as error:
            if self._context is None:
                raise
            _log.info("metrics go on with the earlier certificate: %s", error)
        return self._context[1]


def _cannot(address: str, error: OSError) -> LocalError:
    return LocalError(
        f"metrics can't be served at {address}: {error.strerror or error}",
        hint="name another address with `metrics`",
    )
