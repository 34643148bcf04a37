"""A few kills of coordinators under load; `make kills` is the long round."""

from __future__ import annotations

import shutil

import pytest

from tests.kills.run import play


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_every_name_outlives_kills(kind: str) -> None:
    if kind == "redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    counts = await play(kind, 4, names=6)
    assert not counts.wrong, counts.wrong
    assert counts.kills == 4
    for what in ("names checked", "updates", "heartbeats", "rivals listed by pin"):
        assert counts.did[what], what
