"""Measures reads of KV blocks between two processes of this machine against raw sockets and NIXL.

    python -m benchmarks.kv [--blocks 256] [--layers 16] [--rounds 5]

Blocks of 2 MiB are read by tcp and by shm into slots of this process, hashed part by part, and
compared with the digests of their maker. The references hash what they receive: sockets with 1, 2
and 4 connections, and NIXL's agents, which compare nothing. Of one block the row has the latency,
in multiples of a request on a socket that is open, which is answered with as many bytes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from mx import config, namekey
from mx.kv import BlockNames, KvKey, KvMemory, KvPool, KvReader, secret_of

from . import harness
from .local import filled_memfd
from .references.sockets import RawSockets

_BLOCK_BYTES = 2 << 20
_NAME, _TOKENS = "measured", 16
_IDENTITY = bytes(32)
#: Requests of one sample of the latency.
_REQUESTS = 50
BAR, LATENCY_BAR = 0.9, 1.5


def _form(layers: int) -> KvKey:
    return KvKey("bench", "1", "u8", "whole", _TOKENS, layers, 1, _BLOCK_BYTES // layers)


def _memory(blocks: int, layers: int) -> tuple[KvMemory, Any]:
    kept = np.ones((blocks, _BLOCK_BYTES), np.uint8)
    return KvMemory.whole(kept, [_BLOCK_BYTES // layers] * layers, 0, 1), kept


def _names(settings: config.Settings, blocks: int, layers: int) -> list[bytes]:
    secret = secret_of(namekey.load(settings), _NAME)
    names = BlockNames(secret, _IDENTITY, _form(layers))
    return names.of(list(range(blocks * _TOKENS)))


def serve(blocks: int, layers: int, key: str) -> None:
    """List blocks until standard input ends; and answer requests on a bare socket."""
    settings = config.given(config.load(), name_key=key)
    memory, kept = _memory(blocks, layers)
    kept[:] = np.random.default_rng(1).integers(0, 255, kept.shape, np.uint8)
    with KvPool.open(_NAME, _form(layers), memory, settings=settings) as pool:
        for name, slot in zip(_names(settings, blocks, layers), pool.take(blocks), strict=True):
            pool.publish(name, slot)
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_answer, args=(listener, kept), daemon=True).start()
        print(json.dumps([pool.endpoint, listener.getsockname()[1]]), flush=True)
        sys.stdin.read()


def _answer(listener: socket.socket, kept: Any) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(8):
        (at,) = struct.unpack("<Q", request)
        connection.sendall(memoryview(kept[at]))


class _Bare:
    """Requests on a bare socket, the answers of which are hashed."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = memoryview(bytearray(_BLOCK_BYTES))

    def run(self) -> float:
        """Return the seconds of `_REQUESTS` requests, one after the other."""
        began_s = time.perf_counter()
        for at in range(_REQUESTS):
            self._socket.sendall(struct.pack("<Q", at))
            got = 0
            while got < _BLOCK_BYTES:
                got += self._socket.recv_into(self._into[got:])
            blake3(self._into).digest()
        return time.perf_counter() - began_s


def _fetched(reader: KvReader, wanted: list[tuple[bytes, int]]) -> float:
    began_s = time.perf_counter()
    fetch = reader.fetch(wanted)
    if not fetch.wait(60) or fetch.failed:
        raise SystemExit(f"blocks did not come: {fetch.errors[:3]}")
    return time.perf_counter() - began_s


def rows(blocks: int, layers: int, rounds: int) -> list[harness.Row]:
    """Return the rows.

    Args:
        blocks: How many blocks are read at once.
        layers: How many layers each has.
        rounds: How many.
    """
    nbytes, found = blocks * _BLOCK_BYTES, []
    with ExitStack() as stack:
        key = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "key"))
        settings = config.given(config.load(), name_key=key)
        names = _names(settings, blocks, layers)
        command = [sys.executable, "-m", f"{__package__}.kv", "--serve", str(blocks), str(layers)]
        server = stack.enter_context(
            subprocess.Popen(
                [*command, key], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        endpoint, port = json.loads(server.stdout.readline())
        memory, kept = _memory(blocks, layers)
        readers = {
            transport: stack.enter_context(
                KvReader.open(
                    _NAME,
                    _form(layers),
                    memory,
                    peers=[endpoint],
                    transport=transport,
                    settings=settings,
                )
            )
            for transport in ("tcp", "shm")
        }
        for transport, reader in readers.items():
            if reader.wait_for(names, 30) != blocks:
                raise SystemExit(f"{transport}: {reader.peers()}")
        memfd = stack.enter_context(filled_memfd(nbytes))
        raw = stack.enter_context(closing(RawSockets(memfd, nbytes)))
        wanted = [(name, slot) for slot, name in enumerate(names)]
        into = memoryview(kept.reshape(-1))
        contestants = {f"sockets {count}": partial(raw.receive, count, into) for count in (1, 2, 4)}
        try:
            from .references.nixl import BareNixl

            bare = stack.enter_context(closing(BareNixl(memfd, nbytes)))
            contestants["nixl"] = partial(bare.receive, 1 << 20, 8, into=into)
        except (ImportError, OSError, RuntimeError) as error:
            harness.say(f"NIXL is not measured: {error}")
        for transport, reader in readers.items():
            contestants[f"mx {transport}"] = partial(_fetched, reader, wanted)
        samples = harness.interleave(contestants, rounds)
        for transport in readers:
            own = {n.replace(f"mx {transport}", "mx"): t for n, t in samples.items()}
            for reference in ("sockets", "nixl"):
                if any(name.startswith(reference) for name in own):
                    work = f"KV blocks by {transport} / {reference} that hash"
                    found.append(harness.ratio(work, own, reference, BAR, nbytes))
        bare_requests = _Bare(port)

        def one_by_one(reader: KvReader) -> float:
            return sum(_fetched(reader, [wanted[at]]) for at in range(_REQUESTS))

        latencies = harness.interleave(
            {"bare": bare_requests.run} | {n: partial(one_by_one, r) for n, r in readers.items()},
            rounds,
        )
        for transport in readers:
            own_s, bare_s = harness.median(latencies, transport), harness.median(latencies, "bare")
            detail = f"{own_s / _REQUESTS * 1e3:.2f} ms against {bare_s / _REQUESTS * 1e3:.2f}"
            work = f"one KV block by {transport} / a bare request"
            found.append(
                harness.at_most(work, own_s / bare_s, "x", LATENCY_BAR, detail, latencies, digits=2)
            )
    return found


def main() -> None:
    """Print the table."""
    if "--serve" in sys.argv:
        blocks, layers, key = sys.argv[2:]
        serve(int(blocks), int(layers), key)
        os._exit(0)
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=256, help="of 2 MiB each")
    parser.add_argument("--layers", type=int, default=16, help="of each block")
    options = parser.parse_args()
    found = rows(options.blocks, options.layers, options.rounds)
    harness.show(found, as_json=options.json)


if __name__ == "__main__":
    main()
