"""What `mx bench` measures: the rows of the design's table that need one machine and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from . import control, coordinator, harness, links, loading, local, memory, read_cost
from .checkpoints import two_gigabyte_checkpoint
from .local import MODEL
from .processes import Cluster

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
    """Measure and return rows.

    Args:
        folder: Keeps the checkpoints between runs.
        say: Reports what is measured, or left out.
        only: Names; None: all.
        rounds: Interleaved rounds.
    """
    say(f"writing checkpoints to {folder}")
    checkpoint = two_gigabyte_checkpoint(folder)
    rows: list[harness.Row] = []
    with closing(Cluster()) as cluster:
        say("loading the source")
        cluster.serve(checkpoint, MODEL)
        nbytes = local.payload_nbytes(cluster)
        measures: dict[str, Callable[[], list[harness.Row]]] = {
            "attach": lambda: local.attach_rows(cluster, rounds),
            "copy": lambda: local.copy_rows(cluster, nbytes, rounds),
            "tcp": lambda: local.tcp_rows(cluster, nbytes, rounds),
            "tls": lambda: local.tls_rows(checkpoint, nbytes, rounds),
            "ucx": lambda: local.ucx_rows(cluster, nbytes, rounds, say),
            "load": lambda: loading.rows(checkpoint, rounds, say),
            "links": lambda: links.rows(folder, rounds, say),
            "cpu": lambda: links.cpu_rows(folder, rounds, say),
            "first": lambda: local.first_layer_rows(cluster, rounds),
            "control": lambda: control.rows(rounds, say),
            "read": lambda: read_cost.rows(rounds),
            "memory": lambda: memory.rows(cluster, checkpoint, MODEL),
            "coordinator": coordinator.rows,
        }
        for name in NAMES:
            if only is None or name in only:
                say(f"measuring: {name}")
                rows += measures[name]()
    return rows
