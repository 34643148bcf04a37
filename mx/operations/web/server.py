"""The server of the page: its files, its stream of events, and what it refuses.

It answers GET and HEAD of a few fixed paths. A request's Host that is not a name of this machine is
refused, so that no other site's name can come to mean this server (DNS rebinding). Other sites'
scripts get nothing, and the page runs no script and loads nothing but its own files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mx.core.budget import Budget
from mx.core.policy import is_own_host
from mx.errors import CapacityError, LocalError
from mx.log import event
from mx.operations.web.board import Board
from mx.operations.web.browsers import Browsers
from mx.operations.web.follow import Follower
from mx.runtime import beside
from mx.transport import TlsFiles
from mx.wire.address import WILDCARDS, is_local, join_address, require_protection, split_address
from mx.wire.client import CoordinatorClient
from mx.wire.https import Certificates
from mx.wire.ports import require_free

log = logging.getLogger(__name__)

FILES = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
#: The headers of each answer.
_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
_MAX_PATH_CHARS = 64
#: How long a TLS handshake may take.
HANDSHAKE_S = 5.0
#: The most connections: a page has two, and a few while it loads.
MAX_CONNECTIONS = 384
#: A connection has so long for its first request, and for each further one that it begins.
REQUEST_S = 10.0
#: How long a connection may take to end as the server does.
END_S = 1.0

MoreAnswers = Callable[[Mapping[str, str]], AbstractContextManager[Mapping[str, ASGIApp]]]


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


@dataclass(frozen=True, slots=True)
class WebOptions:
    """The options of `mx web`: where it listens and what it follows, both HOST:PORT."""

    listen: str
    coordinator: str
    tls: TlsFiles | None = None
    insecure: bool = False
    timeout_s: float = 3.0
    #: Functions of the headers of each answer that return a context manager; it yields, by path,
    #: what answers there.
    more: Sequence[MoreAnswers] = ()


def _pages() -> dict[str, tuple[bytes, str, str]]:
    """Return the files by path as (bytes, type, tag)."""
    found = {}
    for file in sorted(FILES.iterdir()):
        kind = _TYPES.get(file.suffix)
        if kind is not None:
            data = file.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = data, f"{kind}; charset=utf-8", tag
    return found


class Application:
    """The ASGI application: decides about each request, and answers it."""

    def __init__(
        self, browsers: Browsers, hosts: Sequence[str], more: Mapping[str, ASGIApp]
    ) -> None:
        """
        Args:
            browsers: The stream of events.
            hosts: The names that a request's Host may have besides addresses.
            more: What answers at further paths, which packs have added.
        """
        self._browsers = browsers
        self._hosts = hosts
        self._more = more
        self._pages = _pages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refused = self._refusal(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
        elif answer := self._more.get(scope["path"]):
            await answer(scope, receive, send)
        elif scope["path"] == "/events":
            try:
                with self._browsers.open.held((scope.get("client") or ("?", 0))[0]):
                    await self._browsers.serve(scope, receive, send)
            except CapacityError as error:
                await _text(503, error.message, {"retry-after": "5"})(scope, receive, send)
        else:
            await self._page(scope["path"], headers)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        if scope["method"] not in ("GET", "HEAD"):
            return _text(405, "this page can only be read", {"allow": "GET, HEAD"})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_own_host(hosts[0], self._hosts):
            return _text(421, "this server has another name: open it by its address")
        # Old browsers don't send it; they get the page by typing its address, too.
        site = headers.get("sec-fetch-site", "none")
        typed = site in ("same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
        if not typed or (scope["path"] != "/" and site not in ("same-origin", "none")):
            return _text(403, "another site may not read this page")
        if len(scope["path"]) > _MAX_PATH_CHARS or (
            scope["path"] not in {"/events", *self._more, *self._pages}
        ):
            return _text(404, "there is no such file")
        return None

    def _page(self, path: str, headers: Headers) -> Response:
        data, kind, tag = self._pages[path]
        answer = {**_HEADERS, "etag": tag, "content-type": kind}
        if headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=answer)
        return Response(data, headers=answer)


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n", status, {**_HEADERS, **(headers or {})})


class _Server(uvicorn.Server):
    """A server whose signals are its caller's, and whose handshakes end in time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at the sockets."""
        loop, config = asyncio.get_running_loop(), self.config

        def connection() -> asyncio.Protocol:
            return BoundedConnection(config, self.server_state, {}, loop)

        # By default a connection has a minute for its handshake, and none of the bounds before.
        timeout_s = HANDSHAKE_S if config.ssl else None
        self.servers = [
            await loop.create_server(
                connection, sock=each, ssl=config.ssl, ssl_handshake_timeout=timeout_s
            )
            for each in sockets or ()
        ]
        self.started = True

    async def until(self, stop: asyncio.Event, sock: socket.socket, browsers: Browsers) -> None:
        """Serve at a socket until `stop` is set, then end what is open."""

        async def end() -> None:
            await stop.wait()
            browsers.stop()
            self.should_exit = True

        await beside(self._serve([sock]), end())


async def serve(options: WebOptions, stop: asyncio.Event, listening: Callable[[str], None]) -> None:
    """Serve the page until `stop` is set.

    Args:
        options: Where, and what.
        stop: Ends it.
        listening: Called with the page's URL.

    Raises:
        ConfigError: An option is not valid, or plain text beyond this machine is not allowed.
        NotAllowedError: No browser would accept the certificate.
        LocalError: The address cannot be bound.
    """
    host, port = split_address(options.listen)
    require_protection(options.listen, tls=options.tls, insecure=options.insecure, verb="listen on")
    # What stays on this machine needs no certificates, which browsers of this user may not have.
    secure = None if is_local(options.listen) else options.tls
    names = ["localhost", host, socket.gethostname()]
    shown = Certificates(secure, host, _say_refused) if secure is not None else None
    async with CoordinatorClient(
        options.coordinator,
        tls=options.tls,
        insecure=options.insecure,
        timeout_s=options.timeout_s,
    ) as client:
        await require_free(host, port)
        with _bound(host, port) as sock, ExitStack() as stack:
            more: dict[str, ASGIApp] = {}
            for answers in options.more:
                more |= stack.enter_context(answers(_HEADERS))
            follower = Follower(client, Board())
            browsers = Browsers(follower, options.coordinator, _RAW_HEADERS)
            if shown is not None:
                names += shown.names
            server = _Server(_config(Application(browsers, names, more)))
            if shown is not None:
                server.config.ssl = _context(shown)
            where = join_address(_shown(host, shown), sock.getsockname()[1])
            url = f"{'https' if shown else 'http'}://{where}/"
            event(log, "web.listening", url=url, tls=shown is not None)
            listening(url)
            await beside(server.until(stop, sock, browsers), follower.run())
    event(log, "web.stopped", url=url)


def _say_refused(why: str) -> None:
    event(log, "web.certificates", level=logging.WARNING, text=why)


def _context(certificates: Certificates) -> ssl.SSLContext:
    """Return a context that shows each browser the newest certificate."""

    def on_handshake(browser: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        browser.context = certificates.newest()

    context = certificates.newest()
    context.sni_callback = on_handshake  # called with and without a server's name
    return context


def _shown(host: str, shown: Certificates | None) -> str:
    """Return the host by which a browser can open what listens at `host`."""
    if host not in WILDCARDS:
        return host
    return shown.names[0] if shown is not None and shown.names else socket.gethostname()


def _config(app: ASGIApp) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else a client could say that it is another
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=16 << 10,
    )
    # What strangers send is not a warning of this process.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config.load()
    return config


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises LocalError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        where = join_address(host, port)
        raise LocalError(f"cannot listen on {where}: {error.strerror or error}") from error
    # Accepted connections inherit it. One whose other end takes nothing for so long is ended, and
    # with it what is under way to it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    return sock
