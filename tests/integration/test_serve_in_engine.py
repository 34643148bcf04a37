"""The example of an engine that lends what it computes with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.daemon import ROOT, daemon


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_another_process_starts_from_an_engines_memory() -> None:
    with daemon() as (_, coordinator):
        found = subprocess.run(
            [sys.executable, "examples/serve_in_engine.py"],
            cwd=ROOT,
            env={**os.environ, "MX_PEER_COORDINATOR": coordinator},
            capture_output=True,
            text=True,
            timeout=230,
            check=False,
        )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "both generated the same, before the adapter and with it (main.2)" in found.stdout
    assert max(map(len, found.stdout.splitlines())) < 80, found.stdout
