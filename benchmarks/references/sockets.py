"""Measures bare TCP: k connections with a slice of the model each.

Each MiB is hashed with blake3 as soon as it has landed, by the thread that received it. The server
is a process of its own that maps the same kind of memory as a source. With certificates each
connection is wrapped by `ssl`, which must prove both ends. There is no framing, no acknowledgement
and no verification beyond the hash: any protocol over sockets is measured against this.
"""

from __future__ import annotations

import mmap
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

_MIB = 1 << 20
_HUGE = 2 << 20


def tls_context(files: Sequence[str], *, server: bool) -> ssl.SSLContext:
    """Return a context of mutual TLS 1.3 from PEM files: certificate, key, CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate, key, authority = files
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _server(memfd: int, nbytes: int, *tls: str) -> None:
    context = tls_context(tls, server=True) if tls else None
    data = memoryview(mmap.mmap(memfd, nbytes, prot=mmap.PROT_READ))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_send, args=(connection, data, context), daemon=True).start()


def _send(connection: socket.socket, data: memoryview, context: ssl.SSLContext | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        connection = context.wrap_socket(connection, server_side=True)
    with connection:
        request = connection.recv(16)  # sent at once
        if len(request) == 16:
            start, end = struct.unpack("<QQ", request)
            connection.sendall(data[start:end])


class RawSockets:
    """A server process over `memfd`; `receive(k)` is one timed transfer over k connections."""

    def __init__(self, memfd: int, nbytes: int, tls: Sequence[str] = ()) -> None:
        """`tls`: the PEM files of both ends: certificate, key, CA; none for plain sockets."""
        self.nbytes = nbytes
        self._context = tls_context(tls, server=False) if tls else None
        here = str(Path(__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, here, str(memfd), str(nbytes), *tls],
            pass_fds=[memfd],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def receive(self, connections: int, into: memoryview | None = None) -> float:
        """Return the seconds to connect, allocate a fresh destination unless it is given, receive
        and hash."""
        start_s = time.perf_counter()
        if into is None:
            room = mmap.mmap(-1, self.nbytes + _HUGE, flags=mmap.MAP_PRIVATE)
            room.madvise(mmap.MADV_HUGEPAGE)
            into = memoryview(room)
        target = into[: self.nbytes]
        step = -(-self.nbytes // connections // _MIB) * _MIB
        with ThreadPoolExecutor(connections) as pool:
            slices = [
                pool.submit(self._receive, target, start, min(start + step, self.nbytes))
                for start in range(0, self.nbytes, step)
            ]
            for part in slices:
                part.result()
        return time.perf_counter() - start_s

    def _receive(self, target: memoryview, start: int, end: int) -> None:
        connection = socket.create_connection(("127.0.0.1", self.port))
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_hostname="127.0.0.1")
        flags = 0 if self._context is not None else socket.MSG_WAITALL
        with connection:
            connection.sendall(struct.pack("<QQ", start, end))
            at = start
            while at < end:
                stop = min(at + _MIB, end)
                piece = target[at:stop]
                got = 0
                while got < len(piece):
                    count = connection.recv_into(piece[got:], 0, flags)
                    if not count:
                        raise ConnectionError("the reference server went away")
                    got += count
                blake3(piece).digest()
                at = stop

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


_MAIN = """
import runpy, sys
memfd, nbytes, *tls = sys.argv[2:]
runpy.run_path(sys.argv[1])["_server"](int(memfd), int(nbytes), *tls)
"""
