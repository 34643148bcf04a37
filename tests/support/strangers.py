"""Connections from other addresses of this machine: 127.0.0.2 is another host to a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def seen_from(host: str, address: str) -> Iterator[str]:
    """Yield an address that leads to `address`, whose server sees the connections come from
    `host`, a loopback address."""
    to_host, _, to_port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                sockets.append(near)
                far = socket.create_connection((to_host, int(to_port)), source_address=(host, 0))
                sockets.append(far)
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=_pump, args=pair, daemon=True))
                    threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for each in [listener, *sockets]:
            each.close()
