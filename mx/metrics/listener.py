"""Answers `GET /metrics`, over HTTP or HTTPS.

(The server of `prometheus_client` shakes hands on its only accepting thread, and has any number of
threads for any time: a client that connects and sends nothing would hold it up for good.)
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mx import forks
from mx.core.policy import is_own_host, subject_shown
from mx.errors import LocalError, NotAllowedError
from mx.revocations import is_revoked
from mx.transport import TlsFiles
from mx.wire.address import join_address, split_address
from mx.wire.https import Certificates
from mx.wire.principals import Caller

_log = logging.getLogger(__name__)

#: Connections at a time; the oldest makes room for another one.
MOST_CONNECTIONS = 16
#: How long a client may take for its handshake, for each part of its request, and for the answer.
CLIENT_S = 10.0

#: Returns the type of the content and the content for an Accept header and a caller. Raises
#: TimeoutError, and NotAllowedError for one that may not see it.
Render = Callable[[str, Caller], tuple[str, bytes]]


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; for any other method the class it derives from has an error."""

    server: Listener
    server_version, sys_version = "mx", ""

    def do_GET(self) -> None:
        kind, body, status = "text/plain; charset=utf-8", b"metrics are at /metrics\n", 404
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_own_host(hosts[0], self.server.names):
            body, status = b"this server has another name: scrape it by its address\n", 421
        elif self.path.partition("?")[0] == "/metrics":
            try:
                caller = self.server.caller(self.request, self.client_address[0])
                kind, body = self.server.render(self.headers.get("Accept", ""), caller)
                status = 200
            except NotAllowedError as error:
                body, status = f"{error.message}\n".encode(), 403
            except TimeoutError:
                body, status = b"this process is too busy\n", 503
        self.send_response_only(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: what clients send is theirs."""


class Listener(ThreadingHTTPServer):
    """Listens from the beginning, and answers from `start` to `stop`. `address` is HOST:PORT."""

    daemon_threads = False  # `server_close` waits for them
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: str, render: Render, tls: TlsFiles | None = None) -> None:
        """
        Args:
            address: HOST:PORT; port 0 for any free one.
            render: Makes the answer, on any thread.
            tls: Clients must show a certificate of this authority; None: plain text. The files are
                read again when they have changed.

        Raises:
            LocalError: The address can't be listened on.
            ConfigError: A file is wrong.
            NotAllowedError: The certificate is not for servers, or has expired.
        """
        self.render = render
        self._tls = tls
        self._certificates = None if tls is None else Certificates(tls, "", _say_refused)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        host, port = split_address(address)
        named = self._certificates.names if self._certificates is not None else ()
        #: What a request's Host may be besides an address: other sites' names can come to mean this
        #: server (DNS rebinding).
        self.names = ("localhost", host, socket.gethostname(), *named)
        try:
            (family, _, _, _, where), *_ = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family = family
            super().__init__((str(where[0]), port), _Handler)
        except OSError as error:
            raise LocalError(
                f"metrics can't be served at {address}: {error.strerror or error}",
                hint="name another address with `metrics`",
            ) from error
        forks.own(self.socket)
        self.address = join_address(host, self.socket.getsockname()[1])
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), name="mx-metrics", daemon=True
        )

    def server_bind(self) -> None:
        """Bind, without the look-up of a name for the address."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections and threads. A `render` that waits has to be ended before."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                _cut(connection)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; the oldest connection makes room."""
        request.settimeout(CLIENT_S)
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                _cut(next(iter(self._open)))
            self._open[request] = None
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, after the handshake."""
        if self._certificates is None:
            super().finish_request(request, client_address)
            return
        # The socket stays this one's, which is closed in any case.
        with self._certificates.newest().wrap_socket(request.dup(), server_side=True) as secure:
            super().finish_request(secure, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def caller(self, connection: Any, address: str) -> Caller:
        """Return who has made a connection.

        Raises:
            NotAllowedError: His certificate is revoked, or names no process.
        """
        if self._tls is None:
            return Caller(None, address)
        if is_revoked(connection, self._tls):
            raise NotAllowedError("your certificate is revoked")
        return Caller(subject_shown(connection.getpeercert() or {}), address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what has ended a connection."""
        _log.debug("a client of the metrics", exc_info=True)


def _say_refused(why: str) -> None:
    _log.info("metrics go on with the earlier certificate: %s", why)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
