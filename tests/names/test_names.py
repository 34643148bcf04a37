"""A few rounds of chance for each kind of state; `make names` is the long run."""

from __future__ import annotations

import io
import logging
import shutil

import pytest

from tests.names import virtual
from tests.names.run import play


@pytest.mark.timeout(600)
def test_a_name_never_goes_back_in_virtual_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "mx")  # coordinators are lost on purpose
    log = io.StringIO()
    assert virtual.rounds(300, 1, log=log) == 0, log.getvalue()


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_a_name_never_goes_back(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mx")
    if kind == "redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    log = io.StringIO()
    assert play(6, 1, kind, log=log) == 0, log.getvalue()
