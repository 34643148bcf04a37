"""Measures live memory (tensors that are lent or filled where they are) against memory that mx lays
out.

    python -m benchmarks.live_memory [--rounds 5] [--only scattered,place] [--models 0,2]

Needs torch, and 12 GB of memory.

`scattered`: pulls that read from tensors where they are, fill tensors where they are, or both,
against the same pull between contiguous memory. All memory is there before, and is reused: the
contiguous destination is one allocation with pages as small as the tensors have. Where each tensor
is small, pulls into them are measured against a bare program, too, which looks at the same tensors
and fills them (`benchmarks/references/scattered.py`). `place`: a pull into tensors, against a pull
into a new arena and a copy of it into the tensors. Time runs from the call of `mx.pull`, which
looks at every tensor, to the last layer event. `work`: what a lender's own computing takes while
ten readers pull. `lent`: memory beyond the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial

import torch

from mx import api
from mx.units import MIB

from . import harness
from .live_children import MODELS, STACK_BYTES, tensors_of
from .local import filled_memfd
from .memory import Sampler
from .processes import Child, Cluster, pss_nbytes
from .references.scattered import Scattered
from .references.sockets import RawSockets

TRANSPORTS = ("shm", "tcp")
#: What the lender of `work` allows, and what a run of it is measured over.
RATES = ("125MB/s", "500MB/s")
READERS = 10
FORWARDS = 10
NAMES = ("scattered", "place", "work", "lent")


def _child(cluster: Cluster, call: str, *arguments: str) -> Child:
    """Start a process of `live_children`."""
    code = f"import sys; from {__package__} import live_children as c; c.{call}(*sys.argv[1:])"
    return cluster.start("-c", code, *arguments)


def _serve(cluster: Cluster, model: str) -> tuple[Child, Child]:
    """Start the sources `copied` and `lent` of a model."""
    children = tuple(
        _child(cluster, "serve", model, name, cluster.coordinator, how)
        for name, how in (("copied", "copy"), ("lent", "lend"))
    )
    for child in children:
        child.hear()
    return children[0], children[1]


def _timed(cluster: Cluster, name: str, transport: str, **options: object) -> float:
    began_s = time.perf_counter()
    with api.pull(
        name,
        coordinator=cluster.coordinator,
        transport=transport,
        attach=False,
        **options,  # type: ignore[arg-type]
    ) as pull:
        pull.wait(120)
        return time.perf_counter() - began_s


def _copied(cluster: Cluster, transport: str, tensors: Mapping[str, torch.Tensor]) -> float:
    """Pull into a new arena, and copy that into tensors."""
    began_s = time.perf_counter()
    with api.pull(
        "lent", coordinator=cluster.coordinator, transport=transport, attach=False
    ) as pull:
        for name, each in pull.state_dict().items():
            tensors[name].copy_(each)
        return time.perf_counter() - began_s


#: Tensors of no more bytes cost more to look at than to move.
SMALL_BYTES = 1 << 20


@contextmanager
def _bare(
    tensors: Mapping[str, torch.Tensor], transport: str
) -> Iterator[dict[str, Callable[[], float]]]:
    """Give the bare programs that fill the same tensors, by name; none if they are large."""
    every = list(tensors.values())
    if every[0].nbytes > SMALL_BYTES:
        yield {}
        return
    nbytes = sum(each.nbytes for each in every)
    with filled_memfd(nbytes) as memfd, closing(RawSockets(memfd, nbytes)) as sockets:
        bare = Scattered(every, memfd, sockets.port)
        fill = bare.read if transport == "shm" else bare.receive
        yield {f"bare, {threads} threads": partial(fill, threads) for threads in (1, 2)}


def scattered_rows(
    cluster: Cluster, models: Sequence[str], transports: Sequence[str], rounds: int
) -> list[harness.Row]:
    """Measure pulls from and into scattered memory against those between contiguous memory."""
    rows = []
    for model in models:
        sources = _serve(cluster, model)
        tensors = tensors_of(model, seed=1)
        # An aligned tensor takes up to 256 bytes more in an arena.
        room = torch.zeros(
            sum(each.nbytes + 256 for each in tensors.values()) // 4096 * 4096 + 4096,
            dtype=torch.uint8,
        ).numpy()
        try:
            for transport in transports:
                with _bare(tensors, transport) as bare:
                    samples = harness.interleave(
                        {
                            "contiguous": partial(_timed, cluster, "copied", transport, into=room),
                            "source": partial(_timed, cluster, "lent", transport, into=room),
                            "target": partial(_timed, cluster, "copied", transport, into=tensors),
                            "both": partial(_timed, cluster, "lent", transport, into=tensors),
                            **bare,
                        },
                        rounds,
                    )
                nbytes = sum(each.nbytes for each in tensors.values())
                for what in ("source", "target", "both"):
                    work, own = f"{model}, {transport}: scattered {what}", {"mx": samples[what]}
                    for against in ("contiguous", "bare") if bare else ("contiguous",):
                        if (what, against) != ("source", "bare"):
                            rows.append(
                                harness.ratio(
                                    f"{work} / {against}", samples | own, against, 0.9, nbytes
                                )
                            )
        finally:
            for source in sources:
                source.close()
    return rows


def place_rows(
    cluster: Cluster, models: Sequence[str], transports: Sequence[str], rounds: int
) -> list[harness.Row]:
    """Measure a pull into tensors against one into an arena that is copied into them."""
    rows = []
    for model in models:
        sources = _serve(cluster, model)
        tensors = tensors_of(model, seed=1)
        nbytes = sum(each.nbytes for each in tensors.values())

        try:
            for transport in transports:
                samples = harness.interleave(
                    {
                        "mx": partial(_timed, cluster, "lent", transport, into=tensors),
                        "arena and copy": partial(_copied, cluster, transport, tensors),
                    },
                    rounds,
                    fresh_nbytes=nbytes,
                )
                work = f"{model}, {transport}: in place / arena + copy"
                rows.append(harness.ratio(work, samples, "arena", 0.9, nbytes))
        finally:
            for source in sources:
                source.close()
    return rows


def _numbers(line: str) -> list[float]:
    return [float(each) for each in line.split()]


def _split(forwards: Sequence[Sequence[float]]) -> str:
    """Say what the time of a forward pass was."""
    wall_s, cpu_s, waited_s, others_s = map(statistics.median, zip(*forwards, strict=True))
    return (
        f"{wall_s * 1e3:.0f} ms: {cpu_s * 1e3:.0f} CPU, {waited_s * 1e3:.0f} waiting for a core, "
        f"{(wall_s - cpu_s - waited_s) * 1e3:.0f} blocked, other threads {others_s * 1e3:.0f} CPU"
    )


def work_rows(cluster: Cluster, rounds: int) -> list[harness.Row]:
    """Measure what a lender's forward pass takes while ten readers pull, against its time alone."""
    rows = []
    for rate in RATES:
        lender = _child(cluster, "work", "work", cluster.coordinator, rate)
        endpoint = lender.hear()
        readers = _child(cluster, "read", "work", endpoint, str(READERS))
        readers.hear()
        alone: list[list[float]] = []
        beside: list[list[float]] = []
        speeds: list[list[float]] = []
        try:
            for number in range(rounds + 1):
                by_itself = _numbers(lender.ask(str(FORWARDS)))
                readers.ask("go")
                time.sleep(1.5)  # until all of them read
                began_s, before = time.monotonic(), _numbers(readers.ask("count"))
                among_readers = _numbers(lender.ask(str(FORWARDS)))
                came = _numbers(readers.ask("count"))
                seconds = time.monotonic() - began_s
                readers.ask("stop")
                time.sleep(0.5)
                if number:
                    alone.append(by_itself)
                    beside.append(among_readers)
                    speeds.append([(b - a) / seconds for a, b in zip(before, came, strict=True)])
        finally:
            readers.close()
            lender.close()
        alone_s, beside_s = (statistics.median(a[0] for a in each) for each in (alone, beside))
        speed, cores = map(statistics.median, zip(*speeds, strict=True))
        ratios = sorted(b[0] / a[0] for a, b in zip(alone, beside, strict=True))
        value = beside_s / alone_s
        # Readers that are starved of the processor show nothing.
        served = speed >= 0.8e6 * float(rate.removesuffix("MB/s"))
        rows.append(
            harness.Row(
                f"a lender's forward pass, {READERS} readers at {rate} / alone",
                round(value, 3),
                "x",
                "<= 1.15 x",
                served and value <= 1.15,
                ("" if served else "not valid, the readers are too slow: ")
                + f"[{ratios[0]:.2f} to {ratios[-1]:.2f}] alone {_split(alone)}; beside "
                f"{_split(beside)}; the readers took {cores:.2f} cores and got "
                f"{speed / 1e6:.0f} MB/s of {STACK_BYTES / 1e6:.0f} MB",
                {"alone": [a[0] for a in alone], "mx": [b[0] for b in beside]},
            )
        )
    return rows


def lent_rows(cluster: Cluster, models: Sequence[str]) -> list[harness.Row]:
    """Measure the memory of a lender and of a filled process beyond the model."""
    rows = []
    for model in models:
        count, each = MODELS[model]
        lender = _child(cluster, "idle_then_lend", model, "memory", cluster.coordinator)
        try:
            lender.hear()
            idle = pss_nbytes(lender.pid)
            lender.ask()
            made = pss_nbytes(lender.pid)
            sampler = Sampler(lender.pid)
            lender.ask()
            for transport in TRANSPORTS:
                rows.append(_filled_row(cluster, model, transport))
            over = (sampler.stop() - idle - count * each) / MIB
            own = (made - idle - count * each) / MIB
        finally:
            lender.close()
        rows.append(_memory_row(model, "lending source", over, own))
    return rows


def _filled_row(cluster: Cluster, model: str, transport: str) -> harness.Row:
    child = _child(cluster, "idle_then_fill", model, "memory", cluster.coordinator, transport)
    try:
        child.hear()
        idle = pss_nbytes(child.pid)
        child.ask()
        made = pss_nbytes(child.pid)
        sampler = Sampler(child.pid)
        nbytes = int(child.ask())
        over = (sampler.stop() - idle - nbytes) / MIB
        return _memory_row(model, f"target, {transport}", over, (made - idle - nbytes) / MIB)
    finally:
        child.close()


def _memory_row(model: str, who: str, over_mib: float, own_mib: float) -> harness.Row:
    work = f"memory beyond the model, {model}, {who}"
    detail = f"{own_mib:.1f} of them before mx does anything"
    return harness.at_most(work, over_mib, "MiB", 64, detail)


def run(
    only: Sequence[str],
    models: Sequence[str] = tuple(MODELS),
    transports: Sequence[str] = TRANSPORTS,
    rounds: int = 5,
) -> list[harness.Row]:
    """Measure and return rows.

    Args:
        only: Which of `NAMES`.
        models: Which of `MODELS`.
        transports: Over which transports.
        rounds: Interleaved rounds.
    """
    measures: dict[str, Callable[[Cluster], list[harness.Row]]] = {
        "scattered": lambda cluster: scattered_rows(cluster, models, transports, rounds),
        "place": lambda cluster: place_rows(cluster, models, transports, rounds),
        "work": lambda cluster: work_rows(cluster, rounds),
        "lent": lambda cluster: lent_rows(cluster, models),
    }
    rows = []
    for name in NAMES:
        if name in only:
            harness.say(f"measuring: {name}")
            with closing(Cluster()) as cluster:
                rows += measures[name](cluster)
    return rows


def main() -> None:
    names, models = ",".join(NAMES), list(MODELS)
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--only", default=names, help=f"some of {names}")
    parser.add_argument("--models", default="0,1,2", help="; ".join(models))
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    given = parser.parse_args()
    found = run(
        given.only.split(","),
        [models[int(index)] for index in given.models.split(",")],
        given.transports.split(","),
        given.rounds,
    )
    harness.show(found, as_json=given.json)


if __name__ == "__main__":
    main()
