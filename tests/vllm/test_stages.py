"""Pipeline stages, each of which lends its own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoints import bare
from tests.vllm.hosts import host, lending, start

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.mark.slow
def test_each_stage_starts_from_the_same_stage_of_another_replica(
    coordinator: str, place: Path, checkpoint: Path
) -> None:
    # vLLM 0.32 for CPUs makes what a stage receives into only while it warms up, which it leaves
    # out in CI and for eager engines.
    options: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }
    made = []
    with (
        host(coordinator, place / "a.log", VLLM_CPU_CI_ENV="0") as a,
        host(coordinator, place / "b.log", VLLM_CPU_CI_ENV="0") as b,
    ):
        for each, folder, state in ((a, checkpoint, "ordinary"), (b, bare(checkpoint), "loaded")):
            made.append(start(each, folder, "staged", **options)["generated"])
            lending(each)
            status = each.do("call", "mx_peer_status")
            assert [each["loads"] for each in status] == [{state: 1}] * 2
            assert [",stages=2-1," in each["variant"] for each in status] == [True] * 2
    assert made[0] == made[1]
