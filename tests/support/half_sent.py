"""A client that begins many messages and withholds the last byte of each.

Run as a script, it keeps to HTTP/2's flow control, since a server ends a connection that does not:
so it shows what a server is ready to hold. It prints "sent NBYTES" each half second.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Sequence

from tests.support.http2 import PREFACE, frame

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_LARGEST_FRAME = 16384
_FIRST_WINDOW = 65535
VERSIONS = b"wire=7,layout=2,digest=2"


def _text(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def headers(path: str) -> bytes:
    """Return the header block of a call, without compression."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"mx-versions", VERSIONS),
    ]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


class _Connection:
    """One connection, which begins `streams` calls, and another one for each that is ended."""

    def __init__(
        self,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        path: str,
        streams: int,
        nbytes: int,
    ) -> None:
        self.sock = socket.create_connection(address, timeout=10)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname=address[0])
        self.sock.setblocking(False)
        self._path, self._wanted, self._nbytes = path, streams, nbytes
        self._unsent, self._unread = bytearray(PREFACE), bytearray()
        self._window, self._first_window = _FIRST_WINDOW, _FIRST_WINDOW
        self._streams: dict[int, list[int]] = {}  # their windows, and what is left to send
        self._next = 1
        self._most = streams
        self.sent = 0
        self.ended: list[int] = []
        self.calls = 0

    def pump(self) -> bool:
        """Read and write what is possible. Return False once the connection has ended."""
        try:
            while data := self.sock.recv(1 << 16):
                self._unread += data
            return False
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            return False
        self._take()
        self._begin()
        self._fill()
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            try:
                while self._unsent:
                    del self._unsent[: self.sock.send(self._unsent[: 1 << 18])]
                    self._fill()
            except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return False
        return True

    def _take(self) -> None:
        while len(self._unread) >= 9:
            length, kind, flags = int.from_bytes(self._unread[:3], "big"), *self._unread[3:5]
            if len(self._unread) < 9 + length:
                return
            stream = int.from_bytes(self._unread[5:9], "big")
            body = bytes(self._unread[9 : 9 + length])
            del self._unread[: 9 + length]
            if kind == _SETTINGS and not flags & _ACK:
                for at in range(0, length, 6):
                    self._set(int.from_bytes(body[at : at + 2]), int.from_bytes(body[at + 2 :][:4]))
                self._unsent += frame(_SETTINGS, _ACK, 0, b"")
            elif kind == _PING and not flags & _ACK:
                self._unsent += frame(_PING, _ACK, 0, body)
            elif kind == _WINDOW:
                more = int.from_bytes(body, "big")
                if not stream:
                    self._window += more
                elif stream in self._streams:
                    self._streams[stream][0] += more
            elif (kind == _RESET or (kind == _HEADERS and flags & 1)) and stream in self._streams:
                del self._streams[stream]
                self.ended.append(stream)
                if kind == _HEADERS:
                    self._unsent += frame(_RESET, 0, stream, bytes(4))

    def _set(self, name: int, value: int) -> None:
        if name == 3:
            self._most = min(self._wanted, value)
        if name == 4:
            for each in self._streams.values():
                each[0] += value - self._first_window
            self._first_window = value

    def _begin(self) -> None:
        while len(self._streams) < self._most and len(self._unsent) < 1 << 16:
            stream, self._next = self._next, self._next + 2
            self.calls += 1
            self._unsent += frame(_HEADERS, _END_HEADERS, stream, headers(self._path))
            # What begins a message: uncompressed, and its length.
            begin = b"\0" + self._nbytes.to_bytes(4, "big")
            self._unsent += frame(_DATA, 0, stream, begin)
            self._window -= 5
            self._streams[stream] = [self._first_window - 5, self._nbytes - 1]

    def _fill(self) -> None:
        for stream, each in self._streams.items():
            while len(self._unsent) < 1 << 18:
                now = min(self._window, *each, _LARGEST_FRAME)
                if now <= 0:
                    break
                self._unsent += frame(_DATA, 0, stream, bytes(now))
                self._window -= now
                each[0] -= now
                each[1] -= now
                self.sent += now


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--path", default="/mx.wire.v1.Coordinator/Register")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--streams", type=int, default=250)
    parser.add_argument("--nbytes", type=int, default=4 << 20)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"))
    parser.add_argument("--again", action="store_true", help="connect again when cut off")
    given = parser.parse_args(arguments)
    host, _, port = given.address.rpartition(":")
    tls = None
    if given.tls:
        cert, key, ca = given.tls
        tls = ssl.create_default_context(cafile=ca)
        tls.load_cert_chain(cert, key)
        tls.set_alpn_protocols(["h2"])
    selector = selectors.DefaultSelector()

    def dial() -> None:
        with contextlib.suppress(OSError):
            one = _Connection((host, int(port)), tls, given.path, given.streams, given.nbytes)
            selector.register(one.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, one)

    for _ in range(given.connections):
        dial()
    until, said, gone = time.monotonic() + given.seconds, 0.0, 0
    while time.monotonic() < until:
        for key, _ in selector.select(0.05):
            one: _Connection = key.data
            if not one.pump():
                selector.unregister(one.sock)
                one.sock.close()
                gone += 1
                if given.again:
                    dial()
        time.sleep(0.001)
        if time.monotonic() >= said + 0.5:
            said = time.monotonic()
            there = [key.data for key in selector.get_map().values()]
            sent, ended = sum(x.sent for x in there), sum(len(x.ended) for x in there)
            calls = sum(x.calls for x in there)
            print(f"sent {sent} calls {calls} ended {ended} gone {gone}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
