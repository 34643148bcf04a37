"""The examples of replicas and of a snapshot, as their lines in the documentation run them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.daemon import ROOT


@pytest.mark.timeout(600)
def test_two_replicas_the_second_without_weights() -> None:
    found = subprocess.run(
        [sys.executable, "examples/vllm_replica.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "example-llama: loads {'loaded': 1}, lending" in found.stdout
    assert "both replicas generate" in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_starts_from_a_snapshot() -> None:
    found = subprocess.run(
        [sys.executable, "examples/snapshot.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "frozen: " in found.stdout and "both generate" in found.stdout
    assert "thawed from snapshot from " in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_prefills_and_another_decodes() -> None:
    found = subprocess.run(
        [sys.executable, "examples/prefill_decode.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "blocks were taken; both generate" in found.stdout
