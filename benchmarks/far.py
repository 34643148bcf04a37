"""Measures pulls over long and wide links next to raw sockets through the same link, as rows.

    python -m benchmarks.far [--mbit 100 1000] [--delay-ms 1 20 100] [--beside TREE] [--rounds N]

A link is `benchmarks.pipe`, in a process of its own: the delay is that of one way, a round trip
takes two. One pull, and four at a time that move as much together, stand against as many raw
connections (two for each pull), whose receiver hashes as well (`benchmarks.references.sockets`).
Time runs from the first connection to the last layer; control is left out. With `--beside` the data
path of another checkout of mx takes turns with this one's.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from mx.transport import ExposedRegion, ExposeOptions
from mx_transports.tcp.exposure import TcpExposure

from . import harness
from .processes import Child
from .references.far import BLOCK, LAYER_BYTES, MIB
from .references.sockets import RawSockets

BAR = 0.9
MBIT_PER_S = (100.0, 1000.0)
DELAYS_MS = (1.0, 20.0, 100.0)
PULLS = (1, 4)
STREAMS = 2  # of a pull
#: About how long a link takes for what is moved.
LINK_S = 8.0
TARGET = Path(__file__).parent / "references" / "far.py"


class _Source:
    """A model's memory, exposed by tcp and by the raw server."""

    def __init__(self, stack: ExitStack, nbytes: int) -> None:
        self.nbytes = nbytes
        memfd = os.memfd_create("far")
        stack.callback(os.close, memfd)
        os.ftruncate(memfd, nbytes)
        room = mmap.mmap(memfd, nbytes)
        for at in range(0, nbytes, MIB):
            room[at : at + MIB] = BLOCK
        self.raw = stack.enter_context(closing(RawSockets(memfd, nbytes)))
        region = ExposedRegion(0, memoryview(room).toreadonly(), 0)
        self._exposure = TcpExposure([region], ExposeOptions(stall_timeout_s=30))
        self._exposure.set_generation(1)
        stack.callback(self._exposure.join)
        stack.callback(self._exposure.close)
        self._grants = 0
        self.port: int = json.loads(self._exposure.grant("first"))["addresses"][0][1]

    def order(self, port: int, pulls: int) -> str:
        """Return what one of so many pulls is told, which is to connect to `port`."""
        self._grants += 1
        grant_id = f"grant-{self._grants}"
        ticket = json.loads(self._exposure.grant(grant_id))
        ticket["addresses"] = [["127.0.0.1", port]]
        order = {
            "ticket": json.dumps(ticket).encode().hex(),
            "grant_id": grant_id,
            "source_nbytes": self.nbytes,
            "layers": self.nbytes // LAYER_BYTES // pulls,
        }
        return json.dumps(order)


def _pull(source: _Source, port: int, targets: list[Child]) -> float:
    orders = [source.order(port, len(targets)) for _ in targets]
    start_s = time.perf_counter()
    for target, order in zip(targets, orders, strict=True):
        target.tell(order)
    for target in targets:
        target.hear()
    return time.perf_counter() - start_s


@contextmanager
def _contestants(
    mbit: float, delay_ms: float, link_s: float, trees: dict[str, str]
) -> Iterator[tuple[int, dict[int, dict[str, Callable[[], float]]]]]:
    """Give how many bytes are moved, and who moves them for each number of pulls."""
    nbytes = int(link_s * mbit * 125_000)
    nbytes -= nbytes % (LAYER_BYTES * max(PULLS))
    with ExitStack() as stack:
        source = _Source(stack, nbytes)
        ports = (str(source.port), str(source.raw.port))
        pipe = stack.enter_context(
            closing(Child("-m", f"{__package__}.pipe", str(mbit), str(delay_ms), *ports))
        )
        port, source.raw.port = json.loads(pipe.hear())
        found: dict[int, dict[str, Callable[[], float]]] = {pulls: {} for pulls in PULLS}
        for name, tree in trees.items():
            env = {"PYTHONPATH": os.pathsep.join((tree, f"{tree}/transports"))}
            targets = [
                stack.enter_context(closing(Child(str(TARGET), env=env))) for _ in range(max(PULLS))
            ]
            for pulls in PULLS:
                found[pulls][name] = partial(_pull, source, port, targets[:pulls])
        for pulls in PULLS:
            found[pulls]["raw"] = partial(source.raw.receive, STREAMS * pulls)
        yield nbytes, found


def rows(
    mbits: Sequence[float],
    delays_ms: Sequence[float],
    rounds: int,
    say: Callable[[str], None],
    *,
    link_s: float = LINK_S,
    beside: str = "",
) -> list[harness.Row]:
    """Return a row for each link, for one pull and for four."""
    trees = {"mx": str(Path(__file__).parents[1])} | ({"beside": beside} if beside else {})
    made = []
    for mbit in mbits:
        for delay_ms in delays_ms:
            with _contestants(mbit, delay_ms, link_s, trees) as (nbytes, contestants):
                for pulls, each in contestants.items():
                    say(f"measuring: {mbit:g} Mbit/s, {delay_ms:g} ms, {pulls} pulls")
                    samples = harness.interleave(each, rounds)
                    work = (
                        f"{mbit:g} Mbit/s, {delay_ms:g} ms each way, pulls: {pulls} / raw sockets"
                    )
                    row = harness.ratio(work, samples, "raw", BAR, nbytes)
                    if beside:
                        before = harness.median(samples, "raw") / harness.median(samples, "beside")
                        row = harness.Row(
                            **{**vars(row), "detail": f"{row.detail}; beside {before:.3f} x"}
                        )
                    made.append(row)
    return made


def main() -> None:
    """Print the rows."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--mbit", type=float, nargs="+", default=MBIT_PER_S)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=DELAYS_MS)
    parser.add_argument("--link-s", type=float, default=LINK_S, help="what a link moves, in time")
    parser.add_argument("--beside", default="", help="the root of another checkout of mx")
    options = parser.parse_args()
    found = rows(
        options.mbit,
        options.delay_ms,
        options.rounds,
        harness.say,
        link_s=options.link_s,
        beside=options.beside,
    )
    harness.show(found, as_json=options.json)


if __name__ == "__main__":
    main()
