"""Sources that readers connect to. Only a reader that presents a grant's secret is admitted; over
TLS only the principal that it was granted to.

One thread holds all connections that have not proved themselves, without blocking on any: each
has a short deadline, and there is a cap beyond which one is dropped for the newest: the oldest of
the address that has most (`listeners`). What is let in gets a thread of its own, as it moves bytes;
grants have a cap on those too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import secrets
import selectors
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from mx import forks, users
from mx.errors import ClosedError, LocalError, MxError
from mx.transport import ExposeOptions, TlsFiles
from mx_transports.toolkit import framing, proof
from mx_transports.toolkit.listeners import Listen, UnprovedConnection, dispensable, host_of
from mx_transports.toolkit.stream import SocketStream

PREAMBLE_DEADLINE_S = 2.0
MAX_UNPROVED = 64
MAX_CONNECTIONS_PER_GRANT = 32
#: All grants of an exposure together have connections for this part of the process's descriptors.
_DESCRIPTORS_PART = 4
_MOST_CONNECTIONS = 4096
#: The niceness of threads that serve readers in the background: a tenth of the usual weight.
_BACKGROUND_NICE = 10


def _most_connections() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(max(descriptors // _DESCRIPTORS_PART, 1), _MOST_CONNECTIONS)


@dataclass
class GrantState:
    """One grant as its source sees it. `busy` counts its running reads, `sent_nbytes` what was
    sent on it, `saved_nbytes` how much more than that its reader got, as it was sent compressed;
    `connected` is True once a connection has shown its secret. Over TLS the connections are those
    of `principal`; "" for any."""

    grant_id: str
    key: bytes
    secret: bytes
    principal: str = ""
    streams: set[SocketStream] = field(default_factory=set)
    busy: int = 0
    revoked: bool = False
    connected: bool = False
    sent_nbytes: int = 0
    saved_nbytes: int = 0


class SocketExposure(ABC):
    """An exposure whose readers connect to sockets. See `mx.transport.Exposure`.

    A subclass serves each connection on a thread of its own. Its constructor ends with `start()`.
    It may read `generation`, `closed` and `grants`, under `lock`.

    Args:
        name: What its threads are called.
        magic: The transport and its version, MAGIC_BYTES long.
        options: The options: how to listen; `stall_timeout_s` and `background` apply to each
            connection.
        listen: The way to listen, which is called with the options.

    Raises:
        LocalError: This process can't listen.
        ConfigError: A TLS file can't be used.
    """

    def __init__(self, *, name: str, magic: bytes, options: ExposeOptions, listen: Listen) -> None:
        if len(magic) != framing.MAGIC_BYTES:
            raise ValueError(f"the magic {magic!r} is not {framing.MAGIC_BYTES} bytes long")
        self.name = name
        self.stall_timeout_s = options.stall_timeout_s
        self._background = options.background
        self.lock = threading.Lock()
        #: The standing grants by key.
        self.grants: dict[bytes, GrantState] = {}
        self.generation = 0
        self.closed = False
        self._magic = magic
        self._threads: set[threading.Thread] = set()
        self._most_connections = _most_connections()
        #: Where readers connect; see `mx_transports.toolkit.listeners`.
        self.listeners = listen(options)
        try:
            self._selector = selectors.DefaultSelector()
            self._wake_read, self._wake_write = socket.socketpair()
        except OSError as error:
            self.listeners.close()
            raise LocalError(f"{name}: no socket for readers: {error.strerror}") from error
        self._unproved: dict[socket.socket, UnprovedConnection] = {}
        self._acceptor = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        """Let readers connect."""
        listening = (*self.listeners.sockets, *self.listeners.provers, self._wake_read)
        forks.own(*listening, self._wake_write)
        for sock in listening:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._acceptor.start()

    # --- what subclasses fill in

    @abstractmethod
    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        """Serve one connection until it ends; runs on its thread.

        Args:
            stream: The connection, HELLO sent. It is closed when this returns or raises, and
                aborted when the grant or the exposure ends.
            grant: The grant whose secret was presented.

        Raises:
            OSError: The connection has ended.
        """

    def ticket_fields(self) -> dict[str, object]:
        """Return the ticket's fields beside key and secret, as JSON has them: where to connect."""
        return dict(self.listeners.fields)

    def admits(self, sock: socket.socket) -> bool:
        """Return True if a connection may present a secret: over a unix socket, if the process at
        the other end has the same user as this one."""
        return sock.family != socket.AF_UNIX or users.is_own_peer(sock)

    def regenerate(self, generation: int) -> None:
        """Prepare for a generation that is about to be set; `lock` is held."""
        del generation

    def changed(self, grant: GrantState) -> None:
        """Notify readers that the generation or a grant's state has changed; `lock` is held."""
        del grant

    @abstractmethod
    def released(self) -> None:
        """Free what else the exposure holds. It is closed, and its threads have ended."""

    # --- mx.transport.Exposure and Witness

    def grant(self, grant_id: str) -> bytes:
        key = secrets.token_bytes(framing.KEY_BYTES)
        grant = GrantState(grant_id, key, secrets.token_bytes(framing.SECRET_BYTES))
        with self.lock:
            if self.closed:
                raise ClosedError("the exposure is closed; no more grants")
            self.changed(grant)
            self.grants[key] = grant
        return framing.Ticket(key, grant.secret, self.ticket_fields()).encode()

    def bind(self, grant_id: str, principal: str) -> None:
        with self.lock:
            for grant in self.grants.values():
                if grant.grant_id == grant_id:
                    grant.principal = principal

    def revoke(self, grant_id: str) -> None:
        with self.lock:
            for grant in [each for each in self.grants.values() if each.grant_id == grant_id]:
                del self.grants[grant.key]
                self.end(grant)

    def set_generation(self, generation: int) -> None:
        with self.lock:
            self.regenerate(generation)
            self.generation = generation
            for grant in self.grants.values():
                self.changed(grant)

    def used(self) -> dict[str, int]:
        with self.lock:
            standing = self.grants.values()
            return {each.grant_id: each.sent_nbytes for each in standing if each.connected}

    def active_readers(self) -> int:
        with self.lock:
            return sum(1 for grant in self.grants.values() if grant.busy)

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for grant in self.grants.values():
                self.end(grant)
            self.grants.clear()
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:
                waiting = [t for t in (self._acceptor, *self._threads) if t.is_alive()]
            if not waiting:
                return True
            waiting[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline and waiting[0].is_alive():
                return False

    # --- for subclasses

    def end(self, grant: GrantState) -> None:
        """Cut off a grant's connections; `lock` is held."""
        grant.revoked = True
        self.changed(grant)
        for stream in grant.streams:
            stream.abort()

    def count_reads(self, grant: GrantState, change: int) -> None:
        """Add `change` to the number of a grant's running reads."""
        with self.lock:
            grant.busy += change

    def status(self, generation: int) -> int:
        """Return the status of a read that names `generation`, as of now."""
        return framing.OK if generation == self.generation else framing.STALE

    def keep(self, thread: threading.Thread) -> None:
        """Have `join` wait for a thread that was started; `lock` is held."""
        self._threads.add(thread)

    # --- the thread that accepts

    def _run(self) -> None:
        while not self.closed:
            soonest = min((each.deadline for each in self._unproved.values()), default=None)
            wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock in self._unproved:
                    self._receive(self._unproved[sock])
                elif sock in self.listeners.sockets:
                    self._accept(sock)
                elif sock in self.listeners.provers:
                    proof.answer(sock, self._secret_of)
            now = time.monotonic()
            for unproved in [each for each in self._unproved.values() if each.deadline <= now]:
                self._drop(unproved)
        for unproved in list(self._unproved.values()):
            self._drop(unproved)
        self._selector.close()
        self.listeners.close()
        self._wake_read.close()
        self._wake_write.close()
        with self.lock:
            serving = list(self._threads)
        for thread in serving:
            thread.join()
        self.released()

    def _secret_of(self, key: bytes) -> bytes | None:
        with self.lock:
            grant = self.grants.get(key)
            return grant.secret if grant is not None else None

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors: free one, and do not spin on a listener that stays ready.
            self._make_place(1)
            time.sleep(0.02)
            return
        if not self.admits(sock):
            sock.close()
            return
        sock.setblocking(False)
        tls = self.listeners.tls
        if tls is not None:
            from mx_transports.toolkit.tls import tls_context

            try:
                context = tls_context(tls, server=True)
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except (OSError, MxError):
                sock.close()
                return
        forks.own(sock)
        self._make_place(MAX_UNPROVED)
        deadline = time.monotonic() + PREAMBLE_DEADLINE_S
        host = host_of(listener.family, address)
        self._unproved[sock] = UnprovedConnection(sock, host, deadline, tls is not None)
        self._selector.register(sock, selectors.EVENT_READ)

    def _make_place(self, most: int) -> None:
        """Drop a connection if there are `most` already."""
        if len(self._unproved) >= most:
            self._drop(dispensable(self._unproved.values()))

    def _drop(self, unproved: UnprovedConnection) -> None:
        del self._unproved[unproved.sock]
        self._selector.unregister(unproved.sock)
        unproved.sock.close()

    def _receive(self, unproved: UnprovedConnection) -> None:
        """Receive the bytes of a preamble that have arrived."""
        if not unproved.begun:
            unproved.begun = True
            self._unproved[unproved.sock] = self._unproved.pop(unproved.sock)  # its share's newest
        try:
            if unproved.handshaking:
                assert isinstance(unproved.sock, ssl.SSLSocket)
                unproved.sock.do_handshake()
                unproved.handshaking = False
            data = unproved.sock.recv(framing.PREAMBLE.size - len(unproved.received))
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(unproved.sock, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(unproved.sock, selectors.EVENT_WRITE)
            return
        except OSError:
            data = b""
        unproved.received += data
        got = len(unproved.received)
        # Another version of the transport is refused with HELLO, which names this one.
        name = self._magic[:-1]
        if not data or bytes(unproved.received[: len(name)]) != name[:got]:
            self._drop(unproved)
        elif got == framing.PREAMBLE.size:
            self._admit(unproved)

    def _admit(self, unproved: UnprovedConnection) -> None:
        magic, key, secret = framing.PREAMBLE.unpack(unproved.received)
        with self.lock:
            # Threads that have ended are dropped here; `_run` joins the others at the end.
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            grant = self.grants.get(key)
            # An unknown key costs the same comparison as a wrong secret.
            expected = grant.secret if grant else bytes(framing.SECRET_BYTES)
            if magic != self._magic or not hmac.compare_digest(expected, secret) or grant is None:
                status = framing.REFUSED
            elif not _is_of(unproved.sock, grant.principal, self.listeners.tls):
                status = framing.NOT_YOURS
            elif len(grant.streams) >= MAX_CONNECTIONS_PER_GRANT or not self._has_place(grant):
                status = framing.FULL
            elif self._start_serving(unproved, grant):
                return
            else:
                status = framing.FULL
        with contextlib.suppress(OSError):
            unproved.sock.send(framing.HELLO.pack(self._magic, status))
        self._drop(unproved)

    def _has_place(self, grant: GrantState) -> bool:
        """Return True if a grant may have another connection; `lock` is held.

        Where there are as many connections as there may be, one of the grant that has most of them
        is ended, if that has more than this one will have.
        """
        if sum(len(each.streams) for each in self.grants.values()) < self._most_connections:
            return True
        most = max(self.grants.values(), key=lambda each: len(each.streams))
        # Threads of connections that were ended so take a moment to end: not too many at once.
        ending = len(self._threads) - self._most_connections
        if len(most.streams) <= len(grant.streams) + 1 or ending > MAX_UNPROVED:
            return False
        stream = next(iter(most.streams))
        most.streams.discard(stream)
        stream.abort()
        return True

    def _start_serving(self, unproved: UnprovedConnection, grant: GrantState) -> bool:
        """Hand the connection to a thread of its own; `lock` is held. Return False if none can
        start."""
        try:
            stream = SocketStream(unproved.sock, self.stall_timeout_s)
        except OSError:  # Reset in the meantime.
            return False
        thread = threading.Thread(
            target=self._serve, args=(stream, grant), name=self.name, daemon=True
        )
        self._selector.unregister(unproved.sock)
        try:
            thread.start()
        except RuntimeError:  # No more threads to be had.
            self._selector.register(unproved.sock, selectors.EVENT_READ)
            return False
        del self._unproved[unproved.sock]
        grant.streams.add(stream)
        grant.connected = True
        self.keep(thread)
        return True

    def _serve(self, stream: SocketStream, grant: GrantState) -> None:
        if self._background:
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)
        try:
            stream.send_all([framing.HELLO.pack(self._magic, framing.OK)])
            self.serve(stream, grant)
        except OSError:
            pass  # The reader is gone or hostile: either way it has lost its connection.
        finally:
            with self.lock:
                grant.streams.discard(stream)
                # Under the lock, so that `abort` never meets a descriptor that is another's.
                stream.close()


def _is_of(sock: socket.socket, reader: str, tls: TlsFiles | None) -> bool:
    """Return True if a connection is the reader's by its certificate, or is one without TLS."""
    if not reader or not isinstance(sock, ssl.SSLSocket) or tls is None:
        return True
    from mx_transports.toolkit.tls import principal

    return principal(sock, tls) == reader
