"""Moves a model to N hosts at once without mx, in the schedule that is ideal where all links are
alike: the origin sends each piece once, to the hosts in turn, and the host that gets it sends it to
all others. Each host imports what mx has to (grpc.aio and numpy), and hashes each piece.

Run as a program: `origin ADDRESS PORT PIECES` serves round after round, once it has printed a line;
`host PIECES NUMBER ORIGIN PORT ADDRESS...` gets the model once, as the host with this number of
those with these addresses, and ends when it and those that it sends to have everything.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence

_PIECE_NBYTES = 1 << 20
#: A buffer holds little, so that pieces leave in the order in which they were sent.
_BUFFER_NBYTES = 1 << 18
_PORT = 7100


def _origin(address: str, port: int, pieces: int) -> None:
    data = memoryview(mmap.mmap(-1, pieces * _PIECE_NBYTES, flags=mmap.MAP_PRIVATE))
    for piece in range(pieces):
        _of(data, piece)[:] = os.urandom(_PIECE_NBYTES)
    with socket.create_server((address, port), backlog=64) as listener:
        print("ready", flush=True)
        while True:
            readers: dict[int, socket.socket] = {}
            count = 1
            while len(readers) < count:
                connection, _ = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
                number, count = connection.recv(2, socket.MSG_WAITALL)
                readers[number] = connection
            for piece in range(pieces):
                readers[piece % count].sendall(_of(data, piece))
            for connection in readers.values():
                connection.close()


def _of(data: memoryview, piece: int) -> memoryview:
    return data[piece * _PIECE_NBYTES : (piece + 1) * _PIECE_NBYTES]


class _Host:
    def __init__(self, pieces: int, number: int, addresses: Sequence[str]) -> None:
        self._number, self._addresses, self._pieces = number, addresses, pieces
        arena = mmap.mmap(-1, pieces * _PIECE_NBYTES, flags=mmap.MAP_PRIVATE)
        arena.madvise(mmap.MADV_HUGEPAGE)
        self._data = memoryview(arena)
        self._came = threading.Condition()
        self._own = 0  # how many pieces the origin has sent

    def _pieces_of(self, number: int) -> range:
        return range(number, self._pieces, len(self._addresses))

    def _receive(self, connection: socket.socket, pieces: Iterable[int]) -> None:
        from blake3 import blake3

        for piece in pieces:
            target = _of(self._data, piece)
            if connection.recv_into(target, 0, socket.MSG_WAITALL) != len(target):
                raise SystemExit("the sender has gone")
            blake3(target).digest()
            if pieces == self._pieces_of(self._number):
                with self._came:
                    self._own += 1
                    self._came.notify_all()

    def _send(self) -> None:
        # The hosts after this one come first, so that no two send to the same one.
        turn = [*self._addresses[self._number + 1 :], *self._addresses[: self._number]]
        readers = [_connected(address, _PORT) for address in turn]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
            reader.sendall(bytes((self._number,)))
        for sent, piece in enumerate(self._pieces_of(self._number)):
            with self._came:
                while self._own <= sent:
                    self._came.wait()
            for reader in readers:
                reader.sendall(_of(self._data, piece))
        for reader in readers:
            reader.close()

    def run(self, origin: str, port: int) -> None:
        """Get the model, and send on what is this host's to send."""
        own, others = self._addresses[self._number], len(self._addresses) - 1
        with socket.create_server((own, _PORT), backlog=64) as listener:
            work = [threading.Thread(target=self._send)]
            with _connected(origin, port) as connection:
                connection.sendall(bytes((self._number, others + 1)))
                pieces = self._pieces_of(self._number)
                work.append(threading.Thread(target=self._receive, args=(connection, pieces)))
                for each in work:
                    each.start()
                for _ in range(others):
                    peer, _ = listener.accept()
                    pieces = self._pieces_of(peer.recv(1, socket.MSG_WAITALL)[0])
                    work.append(threading.Thread(target=self._receive, args=(peer, pieces)))
                    work[-1].start()
                for each in work:
                    each.join()


def _connected(address: str, port: int) -> socket.socket:
    """Connect as soon as the other end listens."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1] == "origin":
        _origin(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    import grpc.aio
    import numpy

    assert grpc.aio
    assert numpy
    count, own_number, origin_address, origin_port = sys.argv[2:6]
    host = _Host(int(count), int(own_number), sys.argv[6:])
    host.run(origin_address, int(origin_port))
