"""Measures the rows of the design's table that need one machine and no GPU."""

from __future__ import annotations

import mmap
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from mx import api
from mx.plugins import transports
from mx.target.report import PullReport
from mx.transport import Unavailable
from mx.units import MIB

from . import control, coordinator, harness, links, loading, tls
from .checkpoints import two_gigabyte_checkpoint
from .memory import source_overhead_nbytes, target_overhead_nbytes
from .processes import Cluster
from .references import memcpy
from .references.sockets import RawSockets
from .sparse import shapes_of, sparse_source

MODEL = "bench"


def _pull(cluster: Cluster, model: str = MODEL, **options: object) -> PullReport:
    with api.pull(model, coordinator=cluster.coordinator, **options) as pull:  # type: ignore[arg-type]
        return pull.wait(120)


def _filled_memfd(nbytes: int) -> int:
    fd = os.memfd_create("mx-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    with mmap.mmap(fd, nbytes) as mapping:
        block = os.urandom(MIB)
        for offset in range(0, nbytes, MIB):
            mapping[offset : offset + MIB] = block[: min(MIB, nbytes - offset)]
    return fd


def attach_rows(cluster: Cluster, rounds: int) -> list[harness.Row]:
    """Measure attaching, at the checkpoint's size and at 100 GB (a sparse memfd)."""
    rows = []
    small = [_pull(cluster).seconds for _ in range(rounds + 1)][1:]
    rows.append(_milliseconds("attach, 2.6 GB: ready", small, 60))
    with sparse_source(shapes_of(723, 100 * 10**9), cluster.coordinator, "bench-sparse"):
        large = []
        for _ in range(rounds + 1):
            with api.pull("bench-sparse", coordinator=cluster.coordinator) as pull:
                report = pull.wait(60)
                view = pull.buffer()
                # The first, middle and last page must be readable.
                assert not any(view[at] for at in (0, view.nbytes // 2, view.nbytes - 1))
                large.append(report.seconds)
    rows.append(_milliseconds("attach, 100 GB sparse: ready", large[1:], 60))
    return rows


def _milliseconds(work: str, seconds: list[float], bar_ms: float) -> harness.Row:
    value = statistics.median(seconds) * 1e3
    return harness.Row(
        work, round(value, 2), "ms", f"< {bar_ms:g} ms", value < bar_ms, samples={"mx": seconds}
    )


def copy_rows(cluster: Cluster, nbytes: int, rounds: int) -> list[harness.Row]:
    """Measure verified shm copies against one thread's memcpy, which does not hash."""
    fd = _filled_memfd(nbytes)
    reused = memcpy.Reused(fd, nbytes)
    arena_nbytes = _arena_nbytes(cluster)
    into = mmap.mmap(-1, arena_nbytes + (2 << 20), flags=mmap.MAP_PRIVATE)
    into.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(into)[:arena_nbytes]
    try:
        fresh = harness.interleave(
            {
                "mx": lambda: _pull(cluster, attach=False, transport="shm").seconds,
                "memcpy, populated": lambda: memcpy.fresh(fd, nbytes, populate=True),
                "memcpy, faulting": lambda: memcpy.fresh(fd, nbytes, populate=False),
            },
            rounds,
            fresh_nbytes=nbytes,
        )
        again = harness.interleave(
            {
                "mx": lambda: _pull(cluster, attach=False, transport="shm", into=view).seconds,
                "memcpy": reused.copy,
            },
            rounds,
        )
    finally:
        reused.close()
        os.close(fd)
    return [
        harness.ratio("shm copy, verified, fresh / memcpy", fresh, "memcpy", 0.95, nbytes),
        harness.ratio("shm copy, verified, reused / memcpy", again, "memcpy", 0.9, nbytes),
    ]


def _arena_nbytes(cluster: Cluster) -> int:
    with api.pull(MODEL, coordinator=cluster.coordinator) as pull:
        pull.wait(60)
        assert pull.manifest is not None
        return pull.manifest.layout.arena_nbytes


def tcp_row(cluster: Cluster, nbytes: int, rounds: int) -> harness.Row:
    fd = _filled_memfd(nbytes)
    sockets = RawSockets(fd, nbytes)
    try:
        samples = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="tcp").seconds,
                "1 raw socket": lambda: sockets.receive(1),
                "2 raw sockets": lambda: sockets.receive(2),
                "4 raw sockets": lambda: sockets.receive(4),
            },
            rounds,
            fresh_nbytes=nbytes,
        )
    finally:
        sockets.close()
        os.close(fd)
    (renamed,) = [{("raw: " + n if n != "mx" else n): t for n, t in samples.items()}]
    return harness.ratio("tcp, verified / raw sockets that hash", renamed, "raw", 0.95, nbytes)


def ucx_rows(
    cluster: Cluster, nbytes: int, rounds: int, say: Callable[[str], None]
) -> list[harness.Row]:
    """Measure a verified pull by ucx against bare NIXL with the same settings, which hashes too.

    Returns no row if NIXL is not installed.
    """
    viable = transports()["ucx"].probe()
    if isinstance(viable, Unavailable):
        say(f"ucx is left out: {viable.reason}")
        return []
    from .references.nixl import BareNixl

    fd = _filled_memfd(nbytes)
    bare = BareNixl(fd, nbytes)
    try:
        samples = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="ucx").seconds,
                "NIXL, 16 MiB x 4": lambda: bare.receive(16 * MIB, 4, populate=True),
                "NIXL, 4 MiB x 8": lambda: bare.receive(4 * MIB, 8, populate=True),
                "NIXL, 4 MiB x 8, faulting": lambda: bare.receive(4 * MIB, 8, populate=False),
            },
            rounds,
            fresh_nbytes=nbytes,
        )
    finally:
        bare.close()
        os.close(fd)
    return [harness.ratio("ucx, verified / bare NIXL that hashes", samples, "NIXL", 0.95, nbytes)]


def first_layer_row(cluster: Cluster, rounds: int) -> harness.Row:
    """Measure when layer 0 is ready, against its share of the transfer."""
    over, allowed = [], []
    for _ in range(rounds + 1):
        with api.pull(MODEL, coordinator=cluster.coordinator, transport="tcp") as pull:
            report = pull.wait(120)
            assert pull.manifest is not None
            share = pull.manifest.layout.layers[0].nbytes / report.bytes
        over.append(report.first_layer_s)
        allowed.append(1.2 * share * report.seconds + 0.010)
    value, bar = statistics.median(over[1:]), statistics.median(allowed[1:])
    return harness.Row(
        "first layer ready (tcp)",
        round(value * 1e3, 2),
        "ms",
        f"<= {bar * 1e3:.2f} ms (1.2 x its share + 10 ms)",
        value <= bar,
        samples={"mx": over[1:], "allowed": allowed[1:]},
    )


def read_cost_row(rounds: int) -> harness.Row:
    from .read_cost import microseconds_per_read

    values = [microseconds_per_read() for _ in range(rounds + 1)][1:]
    value = statistics.median(values)
    return harness.Row(
        "control cost in the target, per read",
        round(value, 1),
        "us",
        "<= 50 us",
        value <= 50,
        samples={"mx": values},
    )


def memory_rows(cluster: Cluster, checkpoint: Path) -> list[harness.Row]:
    rows = []
    measures: list[tuple[str, Callable[[], int], int]] = [
        ("target, shm copy", lambda: target_overhead_nbytes(cluster, MODEL, "shm"), 64),
        ("target, tcp", lambda: target_overhead_nbytes(cluster, MODEL, "tcp"), 64),
        ("source", lambda: source_overhead_nbytes(cluster, checkpoint), 32),
    ]
    for what, measure, bar_mib in measures:
        value = measure() / MIB
        rows.append(
            harness.Row(
                f"memory beyond the model, {what}",
                round(value, 1),
                "MiB",
                f"<= {bar_mib} MiB",
                value <= bar_mib,
            )
        )
    return rows


#: The rows that `run` can measure, in its order.
NAMES = (
    "attach",
    "copy",
    "tcp",
    "tls",
    "ucx",
    "load",
    "links",
    "cpu",
    "first",
    "control",
    "read",
    "memory",
    "coordinator",
)


def run(
    folder: Path, say: Callable[[str], None], only: Sequence[str] | None, rounds: int
) -> list[harness.Row]:
    """Measure and return rows: those named in `only`, or all if it is None.

    `folder` keeps the checkpoints between runs.
    """
    say(f"writing checkpoints to {folder}")
    checkpoint = two_gigabyte_checkpoint(folder)
    cluster = Cluster()
    rows: list[harness.Row] = []
    try:
        say("loading the source")
        cluster.serve(checkpoint, MODEL)
        nbytes = _pull(cluster).bytes
        measures: dict[str, Callable[[], list[harness.Row]]] = {
            "attach": lambda: attach_rows(cluster, rounds),
            "copy": lambda: copy_rows(cluster, nbytes, rounds),
            "tcp": lambda: [tcp_row(cluster, nbytes, rounds)],
            "tls": lambda: tls.rows(checkpoint, _filled_memfd, nbytes, rounds),
            "ucx": lambda: ucx_rows(cluster, nbytes, rounds, say),
            "load": lambda: loading.rows(checkpoint, rounds, say),
            "links": lambda: links.rows(folder, rounds, say),
            "cpu": lambda: links.cpu_rows(folder, rounds, say),
            "first": lambda: [first_layer_row(cluster, rounds)],
            "control": lambda: control.rows(rounds, say),
            "read": lambda: [read_cost_row(rounds)],
            "memory": lambda: memory_rows(cluster, checkpoint),
            "coordinator": coordinator.rows,
        }
        for name in NAMES:
            if only is None or name in only:
                say(f"measuring: {name}")
                rows += measures[name]()
    finally:
        cluster.close()
    return rows
