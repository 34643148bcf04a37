"""Just enough HTTP for examples/router.py, over asyncio and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

MAX_BODY_BYTES = 1 << 20
#: How long a client may take to send its request.
REQUEST_S = 10.0
#: The most connections at a time; one more is closed at once.
MAX_CONNECTIONS = 512
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            413: "Content Too Large", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """`body` is bytes, or a stream of them, which ends as `headers` say, or with the connection."""

    body: bytes | AsyncIterator[bytes]
    kind: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class BadRequestError(Exception):
    """The request can't be answered; `status` says why."""

    def __init__(self, status: int) -> None:
        super().__init__(_REASONS[status])
        self.status = status


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    """Return a value as JSON."""
    return Answer(json.dumps(value).encode(), "application/json", status, headers or {})


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Read one request. Raises BadRequestError."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        method, target, _ = head[0].split(" ")
        url = urlsplit(target)
        lines = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in lines}
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise BadRequestError(400) from None
    if not 0 <= length <= MAX_BODY_BYTES:
        raise BadRequestError(413)
    return Request(method, url.path, dict(parse_qsl(url.query)), await reader.readexactly(length))


@contextlib.asynccontextmanager
async def serving(
    handle: Callable[[Request], Awaitable[Answer]], listen: str
) -> AsyncIterator[asyncio.Server]:
    """Serve at HOST:PORT until the block ends. Each connection has one request."""
    running: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        running[task] = writer
        try:
            if len(running) <= MAX_CONNECTIONS:
                await _answer(handle, reader, writer)
            writer.close()
            await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the client has gone, or sends no request
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            del running[task]
            writer.transport.abort()

    host, _, port = listen.rpartition(":")
    server = await asyncio.start_server(connected, host.strip("[]"), int(port))
    try:
        yield server
    finally:
        # The server's own end waits for the clients, and a page that follows along never leaves.
        server.close()
        tasks = [task for task in running if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    handle: Callable[[Request], Awaitable[Answer]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await read_request(reader)
        answer = await handle(request)
    except BadRequestError as error:
        answer = json_answer({"error": str(error)}, error.status)
    body = answer.body
    reason = _REASONS.get(answer.status, "")
    lines = [f"HTTP/1.1 {answer.status} {reason}", f"Content-Type: {answer.kind}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    lines += ["Connection: close", "Cache-Control: no-store"]
    if isinstance(body, bytes):
        lines.append(f"Content-Length: {len(body)}")
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    if isinstance(body, bytes):
        writer.write(body)
        await writer.drain()
        return
    async with contextlib.aclosing(body) as parts:  # type: ignore[type-var]
        async for part in parts:
            writer.write(part)
            await writer.drain()


@dataclass(frozen=True)
class Reply:
    """A server's answer, while it comes. `parts` is its body as it was sent, and `framing` the
    header that says how it ends; the two go together to the client.

    `parts` raises EOFError where the body breaks off, OSError where the connection does.
    """

    status: int
    kind: str
    framing: Mapping[str, str]
    parts: AsyncIterator[bytes]


@contextlib.asynccontextmanager
async def posted(address: str, path: str, body: bytes) -> AsyncIterator[Reply]:
    """POST to HOST:PORT; yield the answer once its head is there.

    Raises:
        OSError: It does not take the connection, or breaks it.
        EOFError: It breaks it before it answers.
        ValueError: Its answer is not HTTP.
    """
    async with _asked(address, f"POST {path} HTTP/1.1\r\n", body) as reply:
        yield reply


async def get(address: str, path: str) -> bytes:
    """GET from HOST:PORT and return the answer's body. Raises as `post`."""
    return await _whole(address, f"GET {path} HTTP/1.1\r\n", b"")


async def post(address: str, path: str, body: bytes) -> bytes:
    """POST to HOST:PORT and return the answer's body.

    Raises:
        OSError, EOFError, ValueError: As `posted`; or its answer is not a success, or too long.
    """
    return await _whole(address, f"POST {path} HTTP/1.1\r\n", body)


async def _whole(address: str, first_line: str, body: bytes) -> bytes:
    found = b""
    async with _asked(address, first_line, body) as reply:
        if reply.status != 200 or "Content-Length" not in reply.framing:
            raise ValueError(f"it answered with {reply.status}")
        async for part in reply.parts:
            found += part
            if len(found) > MAX_BODY_BYTES:
                raise ValueError("its answer is too long")
    return found


@contextlib.asynccontextmanager
async def _asked(address: str, first_line: str, body: bytes) -> AsyncIterator[Reply]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        head = f"Host: {address}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{first_line}{head}Content-Type: application/json\r\n\r\n".encode() + body)
        await writer.drain()
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("its answer has too long a head") from error
        status = int(lines[0].split(" ")[1]) if " " in lines[0] else 0
        headers = {n.lower(): v.strip() for n, _, v in (x.partition(":") for x in lines[1:])}
        framing = {}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            framing = {"Transfer-Encoding": "chunked"}
        elif "content-length" in headers:
            framing = {"Content-Length": str(int(headers["content-length"]))}
        kind = headers.get("content-type", "application/octet-stream")
        yield Reply(status, kind, framing, _parts(reader, framing))
    finally:
        writer.transport.abort()


async def _parts(reader: asyncio.StreamReader, framing: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield a body as it comes, up to its end. Raises EOFError: it breaks off."""
    left, last = int(framing.get("Content-Length", -1)), b""
    while left and (part := await reader.read(64 << 10 if left < 0 else min(left, 64 << 10))):
        left -= len(part) if left > 0 else 0
        last = (last + part)[-5:]
        yield part
    if left > 0 or ("Transfer-Encoding" in framing and last != b"0\r\n\r\n"):
        raise EOFError("its answer breaks off")


def address_of(server: asyncio.Server) -> str:
    """Return the HOST:PORT at which a server listens."""
    host, port, *_ = server.sockets[0].getsockname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
