"""A TCP proxy that does to a connection what networks do, and worse.

    with FaultProxy(("127.0.0.1", port)) as proxy:
        ... connect to proxy.address ...
        proxy.down.stall()          # towards the side that connected; proxy.up is the other

Faults hold for all connections, those to come included. A byte fault names an offset in the
direction's bytes, counted per connection from its start; with `once` it happens to the
first connection that comes so far, and to no other.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

from mx.contexts import OwnContext

_BUFFER_BYTES = 64 * 1024


class _Passage:
    """One connection in one direction."""

    __slots__ = ("at", "noisy")

    def __init__(self) -> None:
        self.at = 0  # bytes that have come
        self.noisy = False


class Direction:
    """One direction's faults. All methods may be called at any time, from any thread."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._stalled = False
        self._ended = False
        self._bytes_per_s: float | None = None
        # Offset -> once?
        self._flips: dict[int, bool] = {}
        self._cuts: dict[int, bool] = {}
        self._noises: dict[int, bool] = {}
        #: Bytes passed on so far, over all connections.
        self.passed_nbytes = 0
        #: What comes is added here; None: it is not kept.
        self.kept: bytearray | None = None

    def stall(self) -> None:
        """Pass nothing on, but keep connections open."""
        with self._change:
            self._stalled = True

    def resume(self) -> None:
        """End `stall` and `throttle`."""
        with self._change:
            self._stalled = False
            self._bytes_per_s = None
            self._change.notify_all()

    def throttle(self, bytes_per_s: float) -> None:
        with self._change:
            self._bytes_per_s = bytes_per_s

    def flip(self, offset: int, *, once: bool = False) -> None:
        """Flip the lowest bit of the byte at `offset`."""
        with self._change:
            self._flips[offset] = once

    def truncate(self, offset: int, *, once: bool = False) -> None:
        """End the connection, in good order, after `offset` bytes."""
        with self._change:
            self._cuts[offset] = once

    def garbage(self, offset: int, *, once: bool = False) -> None:
        """Replace everything from `offset` on by noise (the same at each run)."""
        with self._change:
            self._noises[offset] = once

    def _end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _apply(self, passage: _Passage, data: bytes) -> tuple[bytes, bool]:
        """Return what the next bytes `data` of a connection become, and whether it ends there."""
        at, end = passage.at, passage.at + len(data)
        passage.at = end
        with self._change:
            while self._stalled and not self._ended:
                self._change.wait()
            rate, ended = self._bytes_per_s, self._ended
            if self.kept is not None:
                self.kept += data
            flips = _take_due(self._flips, at, end)
            noises = _take_due(self._noises, at, end)
            cuts = _take_due(self._cuts, at, end)
        changed = bytearray(data)
        for offset in flips:
            changed[offset - at] ^= 1
        if passage.noisy or noises:
            start = 0 if passage.noisy else min(noises) - at
            changed[start:] = random.Random(at).randbytes(len(changed) - start)
            passage.noisy = True
        if cuts:
            return bytes(changed[: min(cuts) - at]), True
        if rate is not None:
            time.sleep(min(len(data) / rate, 1.0))
        return bytes(changed), ended


def _take_due(faults: dict[int, bool], begin: int, end: int) -> list[int]:
    """Return the faults in [begin, end); drop those that apply once."""
    found = [offset for offset in faults if begin <= offset < end]
    for offset in found:
        if faults[offset]:
            del faults[offset]
    return found


class FaultProxy(OwnContext):
    """Listens on loopback and passes everything on to `target`. A context manager."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.up, self.down = Direction(), Direction()
        self._target = target
        self._lock = threading.Lock()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._spawn(self._accept)

    def cut(self) -> None:
        """Break every connection that there is now; new ones are taken."""
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    # With no time to linger, the close that follows sends a reset.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0" + bytes(4))
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.up._end()
        self.down._end()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._sockets |= {near, far}
            done = threading.Barrier(2)
            self._spawn(self._pump, near, far, self.up, done)
            self._spawn(self._pump, far, near, self.down, done)

    def _pump(
        self, source: socket.socket, sink: socket.socket, path: Direction, done: threading.Barrier
    ) -> None:
        passage, ended = _Passage(), False
        with contextlib.suppress(OSError):
            while not ended and (data := source.recv(_BUFFER_BYTES)):
                changed, ended = path._apply(passage, data)
                path.passed_nbytes += len(changed)  # before the other end can answer it
                sink.sendall(changed)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR if ended else socket.SHUT_WR)
        # Both directions must be through with a socket before it is closed.
        done.wait()
        with self._lock:
            self._sockets.discard(source)
            source.close()
