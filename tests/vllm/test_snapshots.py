"""Real vLLM engines on a CPU: what one holds is frozen, and another starts from that."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import mx
from mx.snapshots.container import SNAPSHOT, WEIGHTS, read
from tests.vllm.checkpoints import bare
from tests.vllm.hosts import EngineError, host, lending, same, start, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


def frozen(coordinator: str, variant: str, out: Path) -> mx.FreezeReport:
    """Freeze all ranks of what an engine lends."""
    bundle = mx.ProcessingKey.parse(variant).bundle
    return mx.freeze("m", out, variant=bundle, coordinator=coordinator)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_starts_from_what_another_one_held(
    coordinator: str, place: Path, checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    out = tmp_path / "snapshot"
    signalled = tmp_path / "signalled"
    extra: dict[str, Any] = {"freeze_on": "SIGUSR1", "freeze_to": str(signalled)}
    with host(coordinator, place / "a.log") as a:
        one = start(a, checkpoint, "m", extra=extra, **options)
        report = frozen(coordinator, lending(a)["variant"], out)
        # What the ranks' own processes write is the same.
        apart = a.do("call", "mx_peer_freeze", str(tmp_path / "apart"))
        if ranks == 1:  # else the ranks are processes of their own
            os.kill(a.process.pid, signal.SIGUSR1)
            wait_for((signalled / SNAPSHOT).exists)
            assert a.do("generate") == one["generated"]
            assert read(signalled).ranks == read(out).ranks
    assert {each["ranks"] for each in apart} == {ranks} and any(e["complete"] for e in apart)
    assert read(tmp_path / "apart").ranks == read(out).ranks
    assert report.complete and report.signed and report.ranks == ranks
    extra = {"snapshot": str(out), "fallback": False}
    with host(coordinator, place / "b.log") as b:
        # The name alone: the files are the snapshot's, and no source is left.
        two = start(b, "m", "m", extra=extra, **options)
        assert two["generated"] == one["generated"]
        status = b.do("call", "mx_peer_status")
        assert [each["loads"] for each in status] == [{"loaded": 1}] * ranks
        lending(b)  # under its name: others start from it
        for source in mx.list_sources("m", coordinator=coordinator):
            assert source.record.by_owner and not source.record.pin_only
            # What it was before vLLM has processed it, which changes it on some processors.
            assert source.record.ref.identity in {each.identity for each in read(out).ranks}
        for number, each in enumerate(status):
            assert each["source"] == f"snapshot from {out / f'rank{number}'}"
        # Another number of ranks is another state, and that is said.
        other = {"tensor_parallel_size": 3 - ranks} if ranks == 1 else {}
        with pytest.raises(EngineError):
            start(b, bare(checkpoint), "m", extra=extra, **other)
        here = 3 - ranks
        assert f"tp: 0/{ranks} in the snapshot, 0/{here} here" in b.said()


def test_a_snapshot_of_a_checkpoint_and_what_is_spoilt(
    coordinator: str, place: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "snapshot"
    with mx.serve(checkpoint, model="m", coordinator=coordinator):
        mx.freeze("m", out, coordinator=coordinator)
    with host(coordinator, place / "c.log") as a:
        reference = a.do("start", str(checkpoint), load_format="auto")
        extra = {"snapshot": str(out), "lend": False}
        assert same(start(a, bare(checkpoint), "m", extra=extra), reference)
        assert a.status()["loads"] == {"checkpoint": 1}
        data = bytearray((out / "rank0" / WEIGHTS).read_bytes())
        data[-5000] ^= 1
        (out / "rank0" / WEIGHTS).write_bytes(data)
        # A wrong byte is never computed with: what is next takes over.
        assert same(start(a, checkpoint, "m", extra=extra), reference)
        assert a.status()["loads"] == {"ordinary": 1}
        assert "do not match the model's identity" in a.said()
