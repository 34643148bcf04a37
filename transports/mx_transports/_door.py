"""The listening half of an exposure: lets in those that present a granted secret, nobody else.

One thread holds all connections that have not proved themselves, without blocking on any: each
has a short deadline, and there is a cap beyond which the oldest is dropped for the newest. What
is let in gets a thread of its own, as it moves bytes; grants have a cap on those too.
"""

from __future__ import annotations

import contextlib
import hmac
import resource
import secrets
import selectors
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from mx import forks
from mx.errors import ClosedError
from mx_transports import _frames as frames
from mx_transports import _proof as proof
from mx_transports._listeners import Listener
from mx_transports._stream import Stream

PREAMBLE_DEADLINE_S = 2.0
MAX_UNPROVED = 64
MAX_CONNECTIONS_PER_GRANT = 32
#: All grants of an exposure together have connections for this part of the process's descriptors.
_DESCRIPTORS_PART = 4
_MOST_CONNECTIONS = 4096


def _most_connections() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(max(descriptors // _DESCRIPTORS_PART, 1), _MOST_CONNECTIONS)


@dataclass
class Granted:
    """One grant as its source sees it. `busy` counts its running reads, `sent_nbytes` what was
    sent on it; `connected` is True once a connection has shown its secret."""

    grant_id: str
    key: bytes
    secret: bytes
    streams: set[Stream] = field(default_factory=set)
    busy: int = 0
    revoked: bool = False
    connected: bool = False
    sent_nbytes: int = 0


@dataclass
class _Visitor:
    """A connection that has not proved itself yet."""

    sock: socket.socket
    deadline: float
    handshaking: bool
    received: bytearray = field(default_factory=bytearray)


class DoorExposure(ABC):
    """An exposure behind a door. Subclasses say what a ticket holds and serve who came in."""

    def __init__(
        self,
        *,
        name: str,
        magic: bytes,
        listeners: Sequence[Listener],
        stall_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._magic = magic
        self._listeners = [each.sock for each in listeners]
        self._provers = [each.prover for each in listeners if each.prover is not None]
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._granted: dict[bytes, Granted] = {}
        self._generation = 0
        self._closed = False
        self._name = name
        self._threads: set[threading.Thread] = set()
        self._most_connections = _most_connections()
        self._wake_read, self._wake_write = socket.socketpair()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._selector = selectors.DefaultSelector()
        self._door = threading.Thread(target=self._keep, name=f"{name}-door", daemon=True)

    def _start(self) -> None:
        """Called last by the subclass's constructor."""
        forks.own(*self._listeners, *self._provers, self._wake_read, self._wake_write)
        for sock in (*self._listeners, *self._provers, self._wake_read):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._door.start()

    # --- what subclasses fill in

    @abstractmethod
    def _ticket_fields(self) -> dict[str, object]:
        """What a reader needs beyond key and secret."""

    @abstractmethod
    def _serve(self, stream: Stream, granted: Granted) -> None:
        """Serve one connection until it ends; runs on its thread, may raise OSError."""

    def _allowed(self, sock: socket.socket) -> bool:
        """May this connection knock at all?"""
        return True

    @abstractmethod
    def _changed(self, granted: Granted) -> None:
        """The generation or the grant's state has changed; the lock is held."""

    @abstractmethod
    def _released(self) -> None:
        """The exposure is closed and its threads are gone: free what else it holds."""

    # --- mx.transport.Exposure

    def grant(self, grant_id: str) -> bytes:
        key, secret = (
            secrets.token_bytes(frames.KEY_BYTES),
            secrets.token_bytes(frames.SECRET_BYTES),
        )
        granted = Granted(grant_id, key, secret)
        with self._lock:
            if self._closed:
                raise ClosedError("the exposure is closed; no more grants")
            self._changed(granted)
            self._granted[key] = granted
        return frames.Ticket(key, secret, self._ticket_fields()).encode()

    def revoke(self, grant_id: str) -> None:
        with self._lock:
            for granted in [g for g in self._granted.values() if g.grant_id == grant_id]:
                del self._granted[granted.key]
                self._end(granted)

    def set_generation(self, generation: int) -> None:
        with self._lock:
            self._generation = generation
            for granted in self._granted.values():
                self._changed(granted)

    def used(self) -> dict[str, int]:
        """See `mx.transport.Witness`."""
        with self._lock:
            standing = self._granted.values()
            return {each.grant_id: each.sent_nbytes for each in standing if each.connected}

    def active_readers(self) -> int:
        with self._lock:
            return sum(1 for granted in self._granted.values() if granted.busy)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for granted in self._granted.values():
                self._end(granted)
            self._granted.clear()
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                waiting = [t for t in (self._door, *self._threads) if t.is_alive()]
            if not waiting:
                return True
            waiting[0].join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline and waiting[0].is_alive():
                return False

    # --- the door

    def _end(self, granted: Granted) -> None:
        granted.revoked = True
        self._changed(granted)
        for stream in granted.streams:
            stream.abort()

    def _keep(self) -> None:
        while not self._closed:
            soonest = min((v.deadline for v in self._visitors.values()), default=None)
            wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock in self._visitors:
                    self._attend(self._visitors[sock])
                elif sock in self._listeners:
                    self._answer(sock)
                elif sock in self._provers:
                    proof.answer(sock, self._secret_of)
            now = time.monotonic()
            for visitor in [v for v in self._visitors.values() if v.deadline <= now]:
                self._turn_away(visitor)
        for visitor in list(self._visitors.values()):
            self._turn_away(visitor)
        self._selector.close()
        for sock in (*self._listeners, *self._provers, self._wake_read, self._wake_write):
            sock.close()
        with self._lock:
            serving = list(self._threads)
        for thread in serving:
            thread.join()
        self._released()

    def _secret_of(self, key: bytes) -> bytes | None:
        with self._lock:
            granted = self._granted.get(key)
            return granted.secret if granted is not None else None

    def _answer(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors: make room, and do not spin on a listener that stays ready.
            if self._visitors:
                self._turn_away(next(iter(self._visitors.values())))
            time.sleep(0.02)
            return
        if not self._allowed(sock):
            sock.close()
            return
        sock.setblocking(False)
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:
                sock.close()
                return
        forks.own(sock)
        if len(self._visitors) >= MAX_UNPROVED:
            self._turn_away(next(iter(self._visitors.values())))
        visitor = _Visitor(sock, time.monotonic() + PREAMBLE_DEADLINE_S, self._tls is not None)
        self._visitors[sock] = visitor
        self._selector.register(sock, selectors.EVENT_READ)

    def _turn_away(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.sock]
        self._selector.unregister(visitor.sock)
        visitor.sock.close()

    def _attend(self, visitor: _Visitor) -> None:
        try:
            if visitor.handshaking:
                assert isinstance(visitor.sock, ssl.SSLSocket)
                visitor.sock.do_handshake()
                visitor.handshaking = False
            data = visitor.sock.recv(frames.PREAMBLE.size - len(visitor.received))
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(visitor.sock, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(visitor.sock, selectors.EVENT_WRITE)
            return
        except OSError:
            data = b""
        visitor.received += data
        if not data or not bytes(visitor.received).startswith(self._magic[: len(visitor.received)]):
            self._turn_away(visitor)
        elif len(visitor.received) == frames.PREAMBLE.size:
            self._admit(visitor)

    def _admit(self, visitor: _Visitor) -> None:
        magic, key, secret = frames.PREAMBLE.unpack(visitor.received)
        with self._lock:
            # Threads that have ended are dropped here and joined by the door at the end.
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            granted = self._granted.get(key)
            # An unknown key costs the same comparison as a wrong secret.
            expected = granted.secret if granted else bytes(frames.SECRET_BYTES)
            if not hmac.compare_digest(expected, secret) or granted is None:
                status = frames.REFUSED
            elif len(granted.streams) >= MAX_CONNECTIONS_PER_GRANT or not self._make_room(granted):
                status = frames.FULL
            elif self._start_serving(visitor, granted):
                return
            else:
                status = frames.FULL
        with contextlib.suppress(OSError):
            visitor.sock.send(frames.HELLO.pack(magic, status))
        self._turn_away(visitor)

    def _make_room(self, granted: Granted) -> bool:
        """Where there are as many connections as there may be, end one of the grant that has most
        of them, if it has more than this one will have. The lock is held."""
        if sum(len(each.streams) for each in self._granted.values()) < self._most_connections:
            return True
        most = max(self._granted.values(), key=lambda each: len(each.streams))
        # Those that were ended so are let go by their threads in a moment: not too many at once.
        ending = len(self._threads) - self._most_connections
        if len(most.streams) <= len(granted.streams) + 1 or ending > MAX_UNPROVED:
            return False
        stream = next(iter(most.streams))
        most.streams.discard(stream)
        stream.abort()
        return True

    def _start_serving(self, visitor: _Visitor, granted: Granted) -> bool:
        """Hand the connection to a thread of its own; the lock is held. False if it can't be."""
        try:
            stream = Stream(visitor.sock, self._stall_timeout_s)
        except OSError:  # Reset in the meantime.
            return False
        thread = threading.Thread(
            target=self._run, args=(stream, granted), name=self._name, daemon=True
        )
        self._selector.unregister(visitor.sock)
        try:
            thread.start()
        except RuntimeError:  # No more threads to be had.
            self._selector.register(visitor.sock, selectors.EVENT_READ)
            return False
        del self._visitors[visitor.sock]
        granted.streams.add(stream)
        granted.connected = True
        self._threads.add(thread)
        return True

    def _run(self, stream: Stream, granted: Granted) -> None:
        try:
            stream.send_all([frames.HELLO.pack(self._magic, frames.OK)])
            self._serve(stream, granted)
        except OSError:
            pass  # The reader is gone or hostile: either way it has lost its connection.
        finally:
            with self._lock:
                granted.streams.discard(stream)
                # Under the lock, so that `abort` never meets a descriptor that is another's.
                stream.close()
