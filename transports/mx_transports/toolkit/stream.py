"""A connected socket, plain or TLS, that fills and sends whole buffers under a stall deadline.

The deadline is about progress, not about totals: `TimeoutError` means that not one byte moved
for `stall_timeout_s`, however long the buffer is.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import cast

from mx import forks

#: How often a blocked call looks at the clock, as a fraction of the stall timeout.
_TICKS = 4
#: Buffers per sendmsg or recvmsg_into; the kernel's limit is 1024.
_MAX_BUFFERS = 256
#: What TLS sends in one call, which returns once all of it is on its way.
_TLS_SLICE = 256 << 10
#: A record of TLS, which is sent as a whole or kept.
_TLS_RECORD = 16 << 10


class StreamClosed(OSError):
    """The other side ended the stream."""


class SocketStream:
    """Owns `sock`. One thread may fill and send; any thread may `abort`.

    Args:
        sock: A connected socket: TCP or unix, or an SSLSocket.
        stall_timeout_s: How long a call waits without progress, in seconds.
    """

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        forks.own(sock)
        self._sock = sock
        self._stall_timeout_s = stall_timeout_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        #: A record that TLS has begun to send: it goes first, with these bytes.
        self._begun = b""
        # Never 0: to the kernel that would mean for ever.
        tick_s = max(stall_timeout_s / _TICKS, 0.001)
        if self._tls:
            sock.settimeout(tick_s)
        else:
            # Kernel timeouts on a blocking socket: one system call then moves a whole MiB,
            # where Python's own timeout would poll and come back for every segment.
            sock.settimeout(None)
            timeval = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Notices a host that vanished while there is nothing to read.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_timeout_s)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def wait(self, view: memoryview) -> int:
        """Receive the first bytes of something, however long they take to come.

        Returns:
            How many bytes were received into the start of `view`: at least one.

        Raises:
            StreamClosed: The stream has ended.
            OSError: The connection is lost.
        """
        while True:
            try:
                got = self._receive_tls(view) if self._tls else self._sock.recv_into(view)
            except (TimeoutError, BlockingIOError):
                continue
            if not got:
                raise StreamClosed("the connection was closed")
            return got

    def poll(self, view: memoryview) -> int:
        """Receive what has arrived, without waiting.

        Returns:
            How many bytes were received into the start of `view`; 0 if none had arrived.

        Raises:
            StreamClosed: The stream has ended.
            OSError: The connection is lost.
        """
        try:
            if self._tls:
                tick_s = self._sock.gettimeout()
                self._sock.settimeout(0)
                try:
                    got = self._sock.recv_into(view)
                finally:
                    self._sock.settimeout(tick_s)
            else:
                got = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except ssl.SSLEOFError:
            got = 0
        if not got:
            raise StreamClosed("the connection was closed")
        return got

    def comes(self, timeout_s: float | None) -> bool:
        """Return True once there is something to receive, or the stream has ended.

        Args:
            timeout_s: How long to wait for it; None for as long as it takes.
        """
        if self._tls and cast("ssl.SSLSocket", self._sock).pending():
            return True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))

    def next_message(self, view: memoryview) -> None:
        """Receive exactly `len(view)` bytes, however long the first of them takes to come.

        Raises:
            StreamClosed: The stream has ended.
            TimeoutError: The rest makes no progress for the stall timeout.
            OSError: The connection is lost.
        """
        self.fill(view[self.wait(view) :])

    def receive(self, nbytes: int) -> bytearray:
        """Return the next `nbytes` bytes. Raises as `fill` does."""
        data = bytearray(nbytes)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Receive exactly `len(view)` bytes.

        Raises:
            StreamClosed: The stream has ended.
            TimeoutError: Not one byte has come for the stall timeout.
            OSError: The connection is lost.
        """
        self.fill_all((view,))

    def fill_all(self, views: Sequence[memoryview]) -> None:
        """Fill several buffers one after the other, with few system calls. Raises as `fill`."""
        for first in range(0, len(views), _MAX_BUFFERS):
            rest, deadline = views[first : first + _MAX_BUFFERS], 0.0
            left = sum(map(len, rest))
            while left:
                try:
                    if self._tls:
                        got = self._receive_tls(rest[0])
                    else:
                        got = self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
                except (TimeoutError, BlockingIOError):
                    deadline = self._check(deadline)
                    continue
                if not got:
                    raise StreamClosed("the connection was closed")
                left, deadline = left - got, 0.0
                if left:
                    rest = _after(rest, got)

    def send_all(
        self,
        buffers: Sequence[memoryview | bytes],
        on_sent: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Send buffers one after the other.

        Args:
            buffers: The buffers.
            on_sent: Called with the number of bytes that were sent since its last call, several
                times a second while any are.

        Raises:
            TimeoutError: Not one byte was taken for the stall timeout.
            OSError: The connection is lost.
        """
        if self._begun:
            begun, self._begun = self._begun, b""
            self.send_all([begun])
        views = [memoryview(view) for view in buffers if len(view)]
        for first in range(0, len(views), _MAX_BUFFERS):
            rest, deadline = views[first : first + _MAX_BUFFERS], 0.0
            while rest:
                try:
                    if self._tls:
                        sent = self._sock.send(rest[0][:_TLS_SLICE])
                    else:
                        sent = self._sock.sendmsg(rest)
                except (TimeoutError, BlockingIOError, ssl.SSLWantWriteError):
                    deadline = self._check(deadline)
                    continue
                rest, deadline = _after(rest, sent), 0.0
                on_sent(sent)

    def wait_to_send(self) -> None:
        """Return once some bytes can be sent, or the connection is lost.

        Raises:
            TimeoutError: Not one byte can be sent for the stall timeout.
        """
        if not self._takes(self._stall_timeout_s):
            raise TimeoutError(f"no progress for {self._stall_timeout_s:g} s")

    def send_while(
        self,
        view: memoryview,
        patience_s: float,
        may_wait: Callable[[], bool],
        on_sent: Callable[[int], None],
    ) -> int:
        """Send bytes from a buffer that others need too.

        Args:
            view: The bytes.
            patience_s: After so many seconds without progress `may_wait` is asked.
            may_wait: Returns True if the buffer may be used further.
            on_sent: As for `send_all`.

        Returns:
            How many bytes were sent: all unless `may_wait` returned False.

        Raises:
            TimeoutError: Not one byte was taken for the stall timeout.
            OSError: The connection is lost.
        """
        done, moved_s = 0, time.monotonic()
        while done < len(view):
            try:
                sent = self._try_to_send(view[done:])
            except (BlockingIOError, ssl.SSLWantWriteError):
                if self._takes(patience_s):
                    moved_s = time.monotonic()
                    continue
                if time.monotonic() - moved_s >= self._stall_timeout_s:
                    raise TimeoutError(f"no progress for {self._stall_timeout_s:g} s") from None
                if not may_wait():
                    break
            else:
                done += sent
                on_sent(sent)
        return done

    def _takes(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        return bool(poll.poll(timeout_s * 1e3))

    def _try_to_send(self, view: memoryview) -> int:
        if not self._tls:
            return self._sock.send(view, socket.MSG_DONTWAIT)
        tick_s = self._sock.gettimeout()
        self._sock.settimeout(0)
        try:
            if self._begun:
                self._sock.send(self._begun)
                self._begun = b""
            record = view[:_TLS_RECORD]
            try:
                return self._sock.send(record)
            except ssl.SSLWantWriteError:
                # The same bytes have to come again, and the buffer may be gone by then.
                self._begun = bytes(record)
                return len(record)
        finally:
            self._sock.settimeout(tick_s)

    def send_descriptors(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Send a few bytes and duplicates of descriptors with them (unix sockets only)."""
        sent = socket.send_fds(self._sock, [data], descriptors) if descriptors else 0
        self.send_all([data[sent:]])

    def fill_descriptors(self, view: memoryview, at_most: int) -> list[int]:
        """Receive `len(view)` bytes and the descriptors that come with them (unix sockets only).

        Args:
            view: Where the bytes go.
            at_most: How many descriptors may come.

        Returns:
            The descriptors, which the caller closes, and which do not survive an exec.

        Raises:
            OSError: As `fill` does; what had come of the descriptors is closed.
        """
        found: list[int] = []
        done, deadline = 0, 0.0
        space = socket.CMSG_SPACE(at_most * 4)
        try:
            while done < len(view):
                try:
                    got, control, flags, _ = self._sock.recvmsg_into(
                        [view[done:]], space, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    deadline = self._check(deadline)
                    continue
                for level, kind, data in control:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        found.extend(array.array("i", data[: len(data) // 4 * 4]))
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "descriptors were lost on the way")
                if not got:
                    raise StreamClosed("the connection was closed")
                done += got
        except BaseException:
            for descriptor in found:
                os.close(descriptor)
            raise
        return found

    def notify(self, byte: bytes) -> None:
        """Send one byte, unless the socket's buffer is full or the peer is gone."""
        with contextlib.suppress(OSError):
            self._sock.send(byte, socket.MSG_DONTWAIT)

    @property
    def local_host(self) -> str:
        """The IP address of this end."""
        host: str = self._sock.getsockname()[0]
        return host

    def fileno(self) -> int:
        return self._sock.fileno()

    def abort(self) -> None:
        """Make a call that blocks on the stream return. The owner still has to `close`."""
        with contextlib.suppress(OSError):
            # On a TLS socket too this is the plain shutdown: no goodbye that could block.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _receive_tls(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except ssl.SSLWantReadError:
            raise TimeoutError from None
        except ssl.SSLEOFError:
            return 0

    def _check(self, deadline: float) -> float:
        """Return the deadline, set at the first tick without progress. Called at each such tick.

        Raises TimeoutError once it has passed.
        """
        now = time.monotonic()
        if not deadline:
            return now + self._stall_timeout_s * (1 - 1 / _TICKS)
        if now >= deadline - 1e-3:
            raise TimeoutError(f"no progress for {self._stall_timeout_s:g} s")
        return deadline


def _after(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return `views` without their first `nbytes` bytes."""
    index = 0
    while index < len(views) and nbytes >= len(views[index]):
        nbytes -= len(views[index])
        index += 1
    rest = list(views[index:])
    if nbytes:
        rest[0] = rest[0][nbytes:]
    return rest
