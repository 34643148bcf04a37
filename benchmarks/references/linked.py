"""Measures what a bare socket between two hosts costs in CPU time: one connection that carries the
model's bytes, hashed with blake3 by the MiB as they land.

Run as a program: `send HOST PORT NBYTES` serves each connection and prints its CPU seconds after
each; `receive HOST PORT NBYTES` receives once for each line that it reads, and prints the same.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import sys

from blake3 import blake3

_MIB = 1 << 20
_HUGE = 2 << 20


def cpu_seconds() -> float:
    """Return the user and system seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _send(address: tuple[str, int], nbytes: int) -> None:
    data = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE))
    for start in range(0, nbytes, _MIB):  # pages of its own, not the kernel's one page of zeros
        data[start : start + _MIB] = os.urandom(min(_MIB, nbytes - start))
    with socket.create_server(address) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                before_s = cpu_seconds()
                connection.sendall(data)
            print(cpu_seconds() - before_s, flush=True)


def _receive(address: tuple[str, int], nbytes: int) -> None:
    for _ in sys.stdin:
        before_s = cpu_seconds()
        arena = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE)
        arena.madvise(mmap.MADV_HUGEPAGE)
        target = memoryview(arena)[:nbytes]
        with socket.create_connection(address) as connection:
            for start in range(0, nbytes, _MIB):
                piece = target[start : start + _MIB]
                if connection.recv_into(piece, 0, socket.MSG_WAITALL) != len(piece):
                    raise SystemExit("the sender has gone")
                blake3(piece).digest()
        print(cpu_seconds() - before_s, flush=True)


if __name__ == "__main__":
    what, host, port, size = sys.argv[1:]
    {"send": _send, "receive": _receive}[what]((host, int(port)), int(size))
