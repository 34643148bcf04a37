"""Measures bare TCP: k connections with a slice of the model each, hashed per MiB as it lands.

The server is a process of its own that maps the same kind of memory as a source. There is no
framing, no acknowledgement and no verification beyond the hash: any protocol over sockets is
measured against this.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from xxhash import xxh3_128_digest

_MIB = 1 << 20
_HUGE = 2 << 20


def _server(memfd: int, nbytes: int) -> None:
    data = memoryview(mmap.mmap(memfd, nbytes, prot=mmap.PROT_READ))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_send, args=(connection, data), daemon=True).start()


def _send(connection: socket.socket, data: memoryview) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = connection.recv(16, socket.MSG_WAITALL)
        if len(request) == 16:
            start, end = struct.unpack("<QQ", request)
            connection.sendall(data[start:end])


class RawSockets:
    """A server process over `memfd`; `receive(k)` is one timed transfer over k connections."""

    def __init__(self, memfd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(Path(__file__).resolve()), str(memfd), str(nbytes)],
            pass_fds=[memfd],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def receive(self, connections: int) -> float:
        """Return the seconds to connect, allocate a fresh destination, receive and hash."""
        start_s = time.perf_counter()
        room = mmap.mmap(-1, self.nbytes + _HUGE, flags=mmap.MAP_PRIVATE)
        room.madvise(mmap.MADV_HUGEPAGE)
        target = memoryview(room)[: self.nbytes]
        step = -(-self.nbytes // connections // _MIB) * _MIB
        threads = [
            threading.Thread(
                target=self._receive, args=(target, start, min(start + step, self.nbytes))
            )
            for start in range(0, self.nbytes, step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_s

    def _receive(self, target: memoryview, start: int, end: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(struct.pack("<QQ", start, end))
            at = start
            while at < end:
                stop = min(at + _MIB, end)
                piece = target[at:stop]
                got = 0
                while got < len(piece):
                    count = connection.recv_into(piece[got:], 0, socket.MSG_WAITALL)
                    if not count:
                        raise ConnectionError("the reference server went away")
                    got += count
                xxh3_128_digest(piece)
                at = stop

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


_MAIN = """
import runpy, sys
runpy.run_path(sys.argv[1])["_server"](int(sys.argv[2]), int(sys.argv[3]))
"""


def memfd_of(data: memoryview) -> int:
    """Return a memfd with a copy of `data`; the caller closes it."""
    fd = os.memfd_create("mx-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, len(data))
    with mmap.mmap(fd, len(data)) as mapping:
        mapping[:] = data
    return fd
