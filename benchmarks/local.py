"""Measures pulls between processes of one machine, as rows of the table: attached memory, copies
over shm, tcp, TLS and ucx against bare references, and the first layer."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from mx import api, config
from mx.fetching.report import PullReport
from mx.plugins import transports
from mx.testing.certificates import certificates
from mx.transport import Unavailable
from mx.units import MIB

from . import harness
from .processes import Child, Cluster
from .references import memcpy
from .references.bare_grpc import BareCalls
from .references.beside import CONTROL_S, FIRST_LAYER_S, beside_control
from .references.sockets import RawSockets
from .sparse import shapes_of, sparse_source

MODEL = "bench"


def _pull(cluster: Cluster, model: str = MODEL, **options: object) -> PullReport:
    with api.pull(model, coordinator=cluster.coordinator, **options) as pull:  # type: ignore[arg-type]
        return pull.wait(120)


def payload_nbytes(cluster: Cluster) -> int:
    """Return the model's bytes."""
    return _pull(cluster).bytes


@contextmanager
def filled_memfd(nbytes: int) -> Iterator[int]:
    """Yield the descriptor of a memfd of random bytes."""
    fd = os.memfd_create("mx-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as mapping:
            block = os.urandom(MIB)
            for offset in range(0, nbytes, MIB):
                mapping[offset : offset + MIB] = block[: min(MIB, nbytes - offset)]
        yield fd
    finally:
        os.close(fd)


def attach_rows(cluster: Cluster, rounds: int) -> list[harness.Row]:
    """Measure attaching, at the checkpoint's size and at 100 GB (a sparse memfd)."""

    def large() -> float:
        with api.pull("bench-sparse", coordinator=cluster.coordinator) as pull:
            report = pull.wait(60)
            view = pull.buffer()
            # The first, middle and last page must be readable.
            assert not any(view[at] for at in (0, view.nbytes // 2, view.nbytes - 1))
            return report.seconds

    with sparse_source(shapes_of(723, 100 * 10**9), cluster.coordinator, "bench-sparse"):
        contestants = {"2.6 GB": lambda: _pull(cluster).seconds, "100 GB sparse": large}
        samples = harness.interleave(contestants, rounds)
    return [
        harness.at_most(
            f"attach, {what}: ready", harness.median(samples, what) * 1e3, "ms", 60, "",
            {"mx": seconds}, digits=2,
        )
        for what, seconds in samples.items()
    ]  # fmt: skip


def copy_rows(cluster: Cluster, nbytes: int, rounds: int) -> list[harness.Row]:
    """Measure verified shm copies against one thread's memcpy, which does not hash, and against
    threads that copy and hash."""
    into = _room(cluster)
    with filled_memfd(nbytes) as fd, closing(memcpy.Reused(fd, nbytes)) as reused:
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
                "mx": lambda: _pull(cluster, attach=False, transport="shm", into=into).seconds,
                "memcpy": reused.copy,
                "hashing memcpy, 1 thread": lambda: reused.hashing(1),
                "hashing memcpy, 2 threads": lambda: reused.hashing(2),
            },
            rounds,
        )
    return [
        harness.ratio("shm copy, verified, fresh / memcpy", fresh, "memcpy", 0.95, nbytes),
        harness.ratio("shm copy, verified, reused / memcpy", again, "memcpy", 0.95, nbytes),
        harness.ratio(
            "shm copy, verified, reused / memcpy that hashes", again, "hashing", 0.95, nbytes
        ),
    ]


def _room(cluster: Cluster) -> memoryview:
    """Return memory for the model that is there already, in huge pages."""
    with api.pull(MODEL, coordinator=cluster.coordinator) as pull:
        pull.wait(60)
        assert pull.manifest is not None
        nbytes = pull.manifest.layout.arena_nbytes
    room = mmap.mmap(-1, nbytes + (2 << 20), flags=mmap.MAP_PRIVATE)
    room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)[:nbytes]


def tcp_rows(cluster: Cluster, nbytes: int, rounds: int) -> list[harness.Row]:
    """Measure a verified pull by tcp against raw sockets that hash, into fresh memory and into
    memory that is there."""
    into = _room(cluster)
    with filled_memfd(nbytes) as fd, closing(RawSockets(fd, nbytes)) as sockets:
        fresh = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="tcp").seconds,
                **_receives(sockets, "raw"),
            },
            rounds,
            fresh_nbytes=nbytes,
        )
        again = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="tcp", into=into).seconds,
                **_receives(sockets, "raw", into),
                "control": lambda: beside_control(lambda: sockets.receive(2, into)),
            },
            rounds,
        )
    return [
        harness.ratio("tcp, verified / raw sockets that hash", fresh, "raw", 0.95, nbytes),
        harness.ratio("tcp, verified, reused / raw sockets that hash", again, "raw", 0.95, nbytes),
        _beside_row("raw sockets", again, "raw"),
    ]


def tls_rows(checkpoint: Path, nbytes: int, rounds: int) -> list[harness.Row]:
    """Measure a verified pull over TLS against bare `ssl` sockets that hash."""
    with tempfile.TemporaryDirectory() as folder:
        ours, _ = certificates(Path(folder))
        files = {"tls_cert": ours.certificate, "tls_key": ours.key, "tls_ca": ours.authority}
        settings = config.load(files)
        source = Child(
            "-m", "mx", "serve", str(checkpoint), "--model", "tls", "--json",
            "--listen", "127.0.0.1:0",
            env={f"MX_PEER_{name.upper()}": file for name, file in files.items()},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            endpoint = json.loads(source.hear())["endpoint"]

            def pull() -> float:
                with api.pull("tls", peer=endpoint, transport="tcp", settings=settings) as pulling:
                    return pulling.wait(120).seconds

            with (
                filled_memfd(nbytes) as fd,
                closing(RawSockets(fd, nbytes, tuple(files.values()))) as sockets,
            ):
                contestants = {"mx": pull, **_receives(sockets, "ssl")}
                samples = harness.interleave(contestants, rounds, fresh_nbytes=nbytes)
        finally:
            source.close(terminate=True)
    work = "tcp over TLS, verified / ssl sockets that hash"
    return [harness.ratio(work, samples, "ssl", 0.8, nbytes)]


def _receives(
    sockets: RawSockets, kind: str, into: memoryview | None = None
) -> dict[str, Callable[[], float]]:
    """Return the references by 1, 2 and 4 sockets, into fresh memory where none is given."""
    return {
        f"{kind}: {count} sockets": partial(sockets.receive, count, into) for count in (1, 2, 4)
    }


def ucx_rows(
    cluster: Cluster, nbytes: int, rounds: int, say: Callable[[str], None]
) -> list[harness.Row]:
    """Measure a verified pull by ucx against bare NIXL with the same settings, which hashes too,
    into fresh memory and into memory that is there.

    Returns no row if NIXL is not installed.
    """
    viable = transports()["ucx"].probe()
    if isinstance(viable, Unavailable):
        say(f"ucx is left out: {viable.reason}")
        return []
    from .references.nixl import BareNixl

    into = _room(cluster)
    with filled_memfd(nbytes) as fd, closing(BareNixl(fd, nbytes)) as bare:
        fresh = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="ucx").seconds,
                "NIXL, 16 MiB x 4": lambda: bare.receive(16 * MIB, 4, populate=True),
                "NIXL, 4 MiB x 8": lambda: bare.receive(4 * MIB, 8, populate=True),
                "NIXL, 4 MiB x 8, faulting": lambda: bare.receive(4 * MIB, 8, populate=False),
            },
            rounds,
            fresh_nbytes=nbytes,
        )
        again = harness.interleave(
            {
                "mx": lambda: _pull(cluster, transport="ucx", into=into).seconds,
                "NIXL, 16 MiB x 4": lambda: bare.receive(16 * MIB, 4, into=into),
                "NIXL, 4 MiB x 8": lambda: bare.receive(4 * MIB, 8, into=into),
                "control": lambda: beside_control(lambda: bare.receive(4 * MIB, 8, into=into)),
            },
            rounds,
        )
    return [
        harness.ratio("ucx, verified / bare NIXL that hashes", fresh, "NIXL", 0.95, nbytes),
        harness.ratio("ucx, verified, reused / bare NIXL that hashes", again, "NIXL", 0.95, nbytes),
        _beside_row("bare NIXL", again, "NIXL"),
    ]


def _beside_row(what: str, samples: dict[str, list[float]], reference: str) -> harness.Row:
    """Return the row of a reference beside as much Python as mx's control work takes."""
    _, alone_s = harness.best(samples, reference)
    beside_s = harness.median(samples, "control")
    work = f"{what} beside {CONTROL_S:g} s of Python / alone"
    detail = f"{beside_s:.2f} s against {alone_s:.2f}"
    return harness.shown(work, alone_s / beside_s, "x", detail, samples)


def first_layer_rows(cluster: Cluster, rounds: int) -> list[harness.Row]:
    """Measure when layer 0 is ready, against its share of the transfer and two connections and a
    call of grpc alone; and what grpc and raw sockets take that do the same, beside as much Python.
    """
    shares: list[float] = []

    def first() -> float:
        with api.pull(MODEL, coordinator=cluster.coordinator, transport="tcp") as pull:
            report = pull.wait(120)
            assert pull.manifest is not None
            share = pull.manifest.layout.layers[0].nbytes / report.bytes
        shares.append(share * report.seconds)
        return report.first_layer_s

    with api.pull(MODEL, coordinator=cluster.coordinator) as pull:
        fresh_nbytes = pull.wait(60).bytes
        assert pull.manifest is not None
        layer_nbytes = pull.manifest.layout.layers[0].nbytes
    with (
        closing(BareCalls()) as bare,
        filled_memfd(layer_nbytes) as fd,
        closing(RawSockets(fd, layer_nbytes)) as sockets,
    ):

        def same() -> float:
            began_s = time.perf_counter()
            bare.connect_and_call(both=True)
            beside_control(lambda: sockets.receive(2), FIRST_LAYER_S)
            return time.perf_counter() - began_s

        contestants = {"mx": first, "grpc": bare.connect_and_call, "same": same}
        samples = harness.interleave(contestants, rounds, fresh_nbytes=fresh_nbytes)
        samples["share"] = shares[1:]
    mx_ms, grpc_ms, same_ms, share_ms = (
        1e3 * harness.median(samples, name) for name in (*contestants, "share")
    )
    bar_ms = round(1.2 * share_ms + grpc_ms, 2)
    detail = (
        f"{mx_ms / bar_ms:.2f} x the bar: 1.2 x its share, {share_ms:.1f} ms, and two connections "
        f"and a call of grpc alone, {grpc_ms:.1f} ms"
    )
    work = "first layer ready (tcp)"
    python = f"{1e3 * FIRST_LAYER_S:g} ms of Python"
    return [
        harness.at_most(work, mx_ms, "ms", bar_ms, detail, samples, digits=2),
        harness.shown(
            f"the same by grpc and raw sockets beside {python}",
            same_ms,
            "ms",
            f"{same_ms / bar_ms:.2f} x the bar; mx takes {mx_ms / same_ms:.2f} x as long",
            {},
        ),
    ]
