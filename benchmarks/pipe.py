"""A long link, as a TCP proxy in a process of its own: each direction has a bandwidth, which all
connections share, a queue before it, and a delay behind it.

    python -m benchmarks.pipe MBIT_PER_S DELAY_MS PORT...

It listens once for each of these ports of loopback, and passes on to them what connects there. It
prints its own ports as a list in JSON, and ends when its input does.

A packet takes its turn in the queue, then its time on the link, then the delay. Nothing is lost: a
sender waits while the queue is full, as the kernel's buffers on loopback do not. A connection has
no more under way than the link and the queue hold twice: windows are as large as the way needs.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import select
import socket
import sys
import threading
import time

_SLICE_BYTES = 64 * 1024
#: How much the queue holds, in time on the link.
_QUEUE_S = 0.02
#: How soon a receiver that takes nothing is tried again.
_AGAIN_S = 0.001
#: How often a direction looks for new connections while nothing moves.
_LOOK_S = 0.05


class _Passage:
    """One connection in one direction: `packets` are (when they arrive, bytes), none of them empty
    but the last, which ends it."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.packets: collections.deque[tuple[float, memoryview]] = collections.deque()
        self.nbytes = 0
        self.full = False  # not read from for now
        self.ended = False


class Direction:
    """One direction of the link. Its thread owns its passages."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._most_nbytes = 2 * int(bytes_per_s * (2 * delay_s + _QUEUE_S)) + 4 * _SLICE_BYTES
        self._free_s = 0.0  # when the link has sent all that it took
        self._passages: dict[int, _Passage] = {}
        self._epoll = select.epoll()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass on what `source` receives; from any thread."""
        self._passages[source.fileno()] = _Passage(source, sink)
        self._epoll.register(source.fileno(), select.EPOLLIN)

    def _run(self) -> None:
        while True:
            next_s = min(map(self._deliver, list(self._passages.values())), default=math.inf)
            now_s = time.monotonic()
            wait_s = min(max(0.0, next_s - now_s), _LOOK_S)
            room_s = self._free_s - now_s - _QUEUE_S  # until there is some
            if room_s > 0:
                time.sleep(min(room_s, wait_s))
            elif select.select([self._epoll], [], [], wait_s)[0]:
                for descriptor, _ in self._epoll.poll(0):
                    self._take(self._passages[descriptor])

    def _take(self, passage: _Passage) -> None:
        """Put what has come for a passage on the link."""
        try:
            data = passage.source.recv(_SLICE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._free_s = max(self._free_s, time.monotonic()) + len(data) / self._bytes_per_s
        passage.packets.append((self._free_s + self._delay_s, memoryview(data)))
        passage.nbytes += len(data)
        passage.ended = not data
        passage.full = passage.nbytes >= self._most_nbytes
        if passage.full or passage.ended:
            self._epoll.unregister(passage.source.fileno())

    def _deliver(self, passage: _Passage) -> float:
        """Hand over what has arrived. Returns when the next is to be."""
        while passage.packets:
            at_s, data = passage.packets[0]
            if at_s > time.monotonic():
                return at_s
            if not data:
                with contextlib.suppress(OSError):
                    passage.sink.shutdown(socket.SHUT_WR)
                # The sockets close once the other direction has dropped them, too.
                del self._passages[passage.source.fileno()]
                break
            try:
                sent = passage.sink.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return time.monotonic() + _AGAIN_S
            except OSError:  # the receiver is gone: its end comes as the next packet
                with contextlib.suppress(OSError):
                    passage.source.shutdown(socket.SHUT_RDWR)
                sent = len(data)
            passage.nbytes -= sent
            if sent < len(data):
                passage.packets[0] = (at_s, data[sent:])
            else:
                passage.packets.popleft()
            if passage.full and not passage.ended and passage.nbytes < self._most_nbytes:
                passage.full = False
                self._epoll.register(passage.source.fileno(), select.EPOLLIN)
        return math.inf


def _accept(listener: socket.socket, port: int, up: Direction, down: Direction) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up.add(near, far)
        down.add(far, near)


def main() -> None:
    """Be the link that the arguments say, until the input ends."""
    rate, delay_ms, *ports = map(float, sys.argv[1:])
    up, down = (Direction(rate * 1e6 / 8, delay_ms / 1e3) for _ in range(2))
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in ports]
    for listener, port in zip(listeners, ports, strict=True):
        threading.Thread(target=_accept, args=(listener, int(port), up, down), daemon=True).start()
    print(json.dumps([each.getsockname()[1] for each in listeners]), flush=True)
    sys.stdin.read()
    os._exit(0)  # does not wait for its threads


if __name__ == "__main__":
    main()
