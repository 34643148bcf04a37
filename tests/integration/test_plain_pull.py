"""A plain pull is plain: how much it makes and enters is bounded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from benchmarks.cold import cold
from benchmarks.plain_pull import MOST_CLASSES, count_in_a_process
from benchmarks.processes import Cluster

#: What was reached; the benchmark says what is reached for.
MOST_VALUES, MOST_FUNCTIONS = 54, 745


def test_a_plain_pull_makes_and_enters_no_more_than_it_needs() -> None:
    found = count_in_a_process()
    assert found["classes"] <= MOST_CLASSES, found["names"]["classes"]
    assert found["values"] <= MOST_VALUES, found["names"]["values"]
    assert found["functions"] <= MOST_FUNCTIONS, found["names"]["functions"]


#: What a plain command of either kind does without.
HEAVY = {"numpy", "pydantic", "rich", "torch", "tomllib", "mx.api", "mx.core.selection"}
#: What attaching does without.
UNUSED = {
    "mx.cuda",
    "mx.memory.live",
    "mx.source.server",
    "mx.storage.safetensors",
    "mx.swarm.node",
    "mx.fetching.transfer",
    "mx_transports.tcp.session",
    "mx_transports.ucx.session",
}
MOST_MODULES_VERSION, MOST_MODULES_PULL = 13, 153


def test_commands_load_no_more_than_they_need(tmp_path: Path) -> None:
    with closing(Cluster()) as cluster:
        found = cold(cluster, tmp_path)
        version, pull = (set(found.modules(name, tmp_path)) for name in ("mx --version", "mx pull"))
    assert "mx_transports.shm.session" in pull  # it has attached
    assert not version & (HEAVY | UNUSED | {"asyncio", "grpc"})
    assert not pull & (HEAVY - {"mx.api", "mx.core.selection"} | UNUSED)
    for loaded, most in ((version, MOST_MODULES_VERSION), (pull, MOST_MODULES_PULL)):
        ours = sorted(name for name in loaded if name.partition(".")[0] in ("mx", "mx_transports"))
        assert len(ours) <= most, ours
