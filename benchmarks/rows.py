"""What `mx bench` measures: the rows that need one machine and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

from . import (
    cold,
    cold_ucx,
    control,
    coordinator,
    disk,
    far,
    harness,
    links,
    loading,
    local,
    memory,
    read_cost,
    swarm,
)
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
    "disk",
    "links",
    "cpu",
    "first",
    "control",
    "read",
    "memory",
    "coordinator",
    "cold",
    "ucx-start",
    "scattered",
    "swarm",
    "far",
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
    rows: list[harness.Row] = []
    with ExitStack() as stack:

        @cache
        def checkpoint() -> Path:
            say(f"writing checkpoints to {folder}")
            return two_gigabyte_checkpoint(folder)

        @cache
        def cluster() -> Cluster:
            """Return a cluster that serves the checkpoint, for all rows that pull from one."""
            path = checkpoint()
            say("loading the source")
            made = stack.enter_context(closing(Cluster()))
            made.serve(path, MODEL)
            return made

        @cache
        def nbytes() -> int:
            return local.payload_nbytes(cluster())

        measures: dict[str, Callable[[], list[harness.Row]]] = {
            "attach": lambda: local.attach_rows(cluster(), rounds),
            "copy": lambda: local.copy_rows(cluster(), nbytes(), rounds),
            "tcp": lambda: local.tcp_rows(cluster(), nbytes(), rounds),
            "tls": lambda: local.tls_rows(checkpoint(), nbytes(), rounds),
            "ucx": lambda: local.ucx_rows(cluster(), nbytes(), rounds, say),
            "load": lambda: loading.rows(checkpoint(), rounds, say),
            "disk": lambda: disk.rows(checkpoint(), rounds, say),
            "links": lambda: links.rows(folder, rounds, say),
            "cpu": lambda: links.cpu_rows(folder, rounds, say),
            "first": lambda: local.first_layer_rows(cluster(), rounds),
            "control": lambda: control.rows(rounds, say),
            "read": lambda: read_cost.rows(rounds),
            "memory": lambda: memory.rows(cluster(), checkpoint(), MODEL),
            "coordinator": coordinator.rows,
            "cold": lambda: cold.rows(rounds),
            "ucx-start": lambda: cold_ucx.rows(rounds, say),
            "scattered": lambda: _scattered(rounds, say),
            "swarm": lambda: swarm.measured(folder, rounds, say),
            "far": lambda: far.rows(far.MBIT_PER_S, far.DELAYS_MS, rounds, say),
        }
        for name in NAMES:
            if only is None or name in only:
                say(f"measuring: {name}")
                rows += measures[name]()
    return rows


def _scattered(rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    try:
        from . import live_memory
    except ModuleNotFoundError as error:
        say(f"scattered: skipped, {error}")
        return []
    return live_memory.run(["scattered"], rounds=rounds)
