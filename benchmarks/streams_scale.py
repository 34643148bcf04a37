"""Measures what mx itself serialises in a pull over many connections, as a row of the table.

Receiving and hashing are asleep: each MiB of a connection takes as long as `RECEIVES_GB_PER_S`
says, each MiB that is hashed as `HASHES_GB_PER_S` says, of no processor and without the
interpreter. What mx does for them is all there, so that two cores show what sixteen connections
would be held up by. The number of connections is auto, on a machine that says it has `CORES`.

The reference are as many threads that sleep as long and do nothing else: what the sleeps
themselves take too long. Both are measured with all connections open: mx from then on until little
is left to be given out.

    python -m benchmarks.streams_scale [--rounds N] [--gib N] [--json]
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from functools import cache, partial
from typing import Any, cast

import mx
from mx.core import digest, growth
from mx.core.digest import BlockHasher, block_digest
from mx.units import GIB, MIB
from mx_transports.tcp import session as tcp
from mx_transports.toolkit import framing
from mx_transports.toolkit.stream import SocketStream

from . import harness
from .processes import Cluster

MODEL, MODEL_GIB, LAYERS = "asleep", 96, 64
RECEIVES_GB_PER_S, HASHES_GB_PER_S = 3.0, 6.0
CORES = 64
STREAMS = growth.MOST_STREAMS
#: For so long the reference sleeps.
REFERENCE_S = 2.0
#: The rate with all connections counts up to this part of the model.
UNTIL = 0.95
BAR = 0.9
_LOOK_S = 0.05


def _sleep(nbytes: int, gb_per_s: float) -> None:
    time.sleep(nbytes / gb_per_s / 1e9)


@cache
def _zeros_digest(nbytes: int) -> bytes:
    return block_digest(bytes(nbytes))


def _asleep(blocks: Iterable[memoryview]) -> list[bytes]:
    """Hash blocks of zeros in one's sleep."""
    found = []
    for block in blocks:
        _sleep(len(block), HASHES_GB_PER_S)
        found.append(_zeros_digest(len(block)))
    return found


class _SleepingStream:
    """In place of a connection: requests go nowhere, and what is filled stays as it is."""

    def send_all(self, buffers: object) -> None: ...

    def fill_all(self, views: Iterable[memoryview]) -> None:
        _sleep(sum(map(len, views)), RECEIVES_GB_PER_S)


class _SleepingSession(tcp.TcpSession):
    """Connects, and lets more connections in, as ever."""

    def stream(self, worker: int) -> SocketStream:
        super().stream(worker)
        return cast("SocketStream", _SleepingStream())

    def _response(self, stream: SocketStream, request_id: int, read: object) -> int:
        return framing.OK


def serve(coordinator: str, gib: int) -> None:
    """Lend memory full of zeros, unread, until the input ends."""
    import torch

    digest.block_digest = _zeros_of  # what is lent is hashed
    for module in list(sys.modules.values()):
        if getattr(module, "block_digest", None) is block_digest and module.__name__ != __name__:
            cast("Any", module).block_digest = _zeros_of
    room = torch.frombuffer(_room(gib), dtype=torch.uint8)
    layers = room.reshape(LAYERS, -1)
    state = {f"model.layers.{number}.weight": layers[number] for number in range(LAYERS)}
    with closing(mx.serve(state, model=MODEL, coordinator=coordinator, copy=False)):
        print("ready", flush=True)
        sys.stdin.read()


def _zeros_of(block: bytes | memoryview) -> bytes:
    return _zeros_digest(len(block))


def _room(gib: int) -> memoryview:
    """Return memory of which nothing is there until it is touched."""
    no_reserve = 0x4000
    return memoryview(
        mmap.mmap(-1, gib * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    )


def pull_s(coordinator: str, gib: int) -> float:
    """Return the seconds that a GiB takes once all connections are open."""
    room, ended = _room(gib), threading.Event()
    samples: list[tuple[float, int]] = []
    with mx.pull(
        MODEL,
        coordinator=coordinator,
        transport="tcp",
        into=room,
        attach=False,
        streams="auto",
    ) as pull:
        pull.on_end(ended.set)
        while not ended.wait(_LOOK_S):
            threads = sum(each.name.startswith("mx-tcp-") for each in threading.enumerate())
            landed = pull.progress().bytes_done
            if threads >= STREAMS and landed <= UNTIL * gib * GIB:
                samples.append((time.monotonic(), landed))
        pull.wait(60)
    if len(samples) < 2:
        raise RuntimeError(f"the pull never had {STREAMS} connections")
    (began_s, before), (ended_s, after) = samples[0], samples[-1]
    return (ended_s - began_s) / (after - before) * GIB


def sleeps_s() -> float:
    """Return the seconds that a GiB of as many threads' sleeps takes."""
    steps = [0] * STREAMS
    until_s = time.monotonic() + REFERENCE_S

    def sleep(number: int) -> None:
        while time.monotonic() < until_s:
            _sleep(tcp.STEP_BYTES, RECEIVES_GB_PER_S)
            for _ in range(tcp.STEP_BYTES // MIB):
                _sleep(MIB, HASHES_GB_PER_S)
            steps[number] += 1

    threads = [threading.Thread(target=sleep, args=(number,)) for number in range(STREAMS)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.monotonic() - began_s) / (sum(steps) * tcp.STEP_BYTES) * GIB


def measure(coordinator: str, gib: int) -> None:
    """Measure what each line of the input names, until the input ends."""
    os.sched_getaffinity = lambda _: set(range(CORES))
    BlockHasher.__init__.__defaults__ = (_asleep,)
    cast("Any", tcp).TcpSession = _SleepingSession
    print("ready", flush=True)
    for line in sys.stdin:
        print(pull_s(coordinator, gib) if line.strip() == "mx" else sleeps_s(), flush=True)


def rows(rounds: int, gib: int = MODEL_GIB) -> list[harness.Row]:
    """Return the row."""
    module = f"{__package__}.streams_scale"
    with closing(Cluster()) as cluster:
        source = cluster.start("-m", module, "--serve", cluster.coordinator, "--gib", str(gib))
        source.hear()
        target = cluster.start("-m", module, "--pull", cluster.coordinator, "--gib", str(gib))
        target.hear()

        def seconds(name: str) -> float:
            return float(target.ask(name))

        contestants = {name: partial(seconds, name) for name in ("mx", "sleeps")}
        samples = harness.interleave(contestants, rounds)
    work = f"tcp, auto, with {STREAMS} connections asleep / as many sleeping threads"
    return [harness.ratio(work, samples, "sleeps", BAR, GIB)]


def main() -> None:
    """Print the row."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--gib", type=int, default=MODEL_GIB, help="the size of the model")
    parser.add_argument("--serve", default="", help="be the source of this coordinator")
    parser.add_argument("--pull", default="", help="be the target")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.gib)
    elif options.pull:
        measure(options.pull, options.gib)
    else:
        harness.show(rows(options.rounds, options.gib), as_json=options.json)


if __name__ == "__main__":
    main()
