"""Holds many HTTP/2 connections to a gRPC server, as a process of its own, from loopback addresses.

Each connection answers the server's pings, and with `--every` calls Health.Check so often; nothing
else. The frames are made by hand: a connection costs a socket and no thread. Prints a JSON object
once all are made, then one for each line on standard input, and ends with that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import sys
import time
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_HEAD_BYTES = 9


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one HTTP/2 frame."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def header_block(path: str) -> bytes:
    """Return the headers of a gRPC call, as literals that no table keeps (HPACK)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b""
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call(stream: int, path: str = "/grpc.health.v1.Health/Check") -> bytes:
    """Return the frames of a call with an empty message."""
    message = bytes(5)  # not compressed, no bytes
    return frame(HEADERS, _END_HEADERS, stream, header_block(path)) + frame(
        DATA, _END_STREAM, stream, message
    )


class Connection:
    """One connection. `feed` takes what the server sends, and returns the answer to that."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answers = 0
        self.next_call_s = 0.0
        self._stream = 1
        self._received = b""

    def call(self) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        return call(stream)

    def feed(self, data: bytes) -> bytes:
        self._received += data
        answer = b""
        while len(self._received) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._received[:3], "big")
            if len(self._received) < end:
                break
            kind, flags = self._received[3], self._received[4]
            payload, self._received = self._received[_HEAD_BYTES:end], self._received[end:]
            if kind == SETTINGS and not flags & _ACK:
                answer += frame(SETTINGS, _ACK, 0)
            elif kind == PING and not flags & _ACK:
                answer += frame(PING, _ACK, 0, payload)
            elif kind == HEADERS and flags & _END_STREAM:
                self.answers += 1
        return answer


class Crowd:
    """All connections, in one thread."""

    def __init__(
        self, target: tuple[str, int], hosts: list[str], every_s: float, *, reads: bool
    ) -> None:
        self._target = target
        # A window without a byte (setting 4) keeps all answers at the server.
        self._settings = frame(SETTINGS, 0, 0, b"" if reads else bytes([0, 4, 0, 0, 0, 0]))
        self._hosts = hosts
        self._every_s = every_s
        self._ready = selectors.DefaultSelector()
        self._open: set[Connection] = set()
        self.refused = self.ended = self.answers = 0

    def connect(self, number: int) -> None:
        """Open the connection of this number. Its calls are spread over the interval."""
        host = self._hosts[number % len(self._hosts)]
        try:
            sock = socket.create_connection(self._target, timeout=5, source_address=(host, 0))
            sock.sendall(PREFACE + self._settings)
        except OSError:
            self.refused += 1
            return
        sock.setblocking(False)
        made = Connection(sock)
        made.next_call_s = time.monotonic() + self._every_s * (number % 997) / 997
        self._open.add(made)
        self._ready.register(sock, selectors.EVENT_READ, made)

    def step(self, timeout_s: float) -> None:
        """Take what has come, and send the calls that are due."""
        for key, _ in self._ready.select(timeout_s):
            if isinstance(key.data, Connection):
                self._read(key.data)
        if self._every_s:
            now_s = time.monotonic()
            for connection in [c for c in self._open if c.next_call_s <= now_s]:
                connection.next_call_s += self._every_s
                self._send(connection, connection.call())

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        before = connection.answers
        answer = connection.feed(data) if data else b""
        self.answers += connection.answers - before
        if not data:
            self._end(connection)
        elif answer:
            self._send(connection, answer)

    def _send(self, connection: Connection, data: bytes) -> None:
        try:
            connection.sock.sendall(data)
        except OSError:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._ready.unregister(connection.sock)
            connection.sock.close()
            self.ended += 1

    def found(self) -> dict[str, Any]:
        return {
            "open": len(self._open),
            "ended": self.ended,
            "refused": self.refused,
            "answers": self.answers,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--hosts", type=int, default=8, help="from how many addresses")
    parser.add_argument(
        "--every", type=float, default=0, help="seconds between a connection's calls"
    )
    parser.add_argument("--unread", action="store_true", help="take no byte of any answer")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = given.target.rpartition(":")
    hosts = [f"127.0.1.{number + 1}" for number in range(given.hosts)]
    crowd = Crowd((host, int(port)), hosts, given.every, reads=not given.unread)
    for number in range(given.connections):
        crowd.connect(number)
        if not number % 50:
            crowd.step(0)
    print(json.dumps(crowd.found()), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        crowd.step(0.01)
        line = sys.stdin.buffer.read()
        if line == b"":
            return
        for _ in range((line or b"").count(b"\n")):
            print(json.dumps(crowd.found()), flush=True)


if __name__ == "__main__":
    main()
