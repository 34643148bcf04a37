"""What tests wait for, and what pulls fail with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mx import api
from mx.errors import MxError


def error_of(pull: api.Pull, timeout_s: float = 30.0) -> MxError:
    """What a pull fails with; it is an error if it does not fail."""
    try:
        pull.wait(timeout_s)
    except MxError as error:
        return error
    raise AssertionError("the pull succeeded")


def until(found: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    """Return what is found once it is true; it is an error if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s} s"
        time.sleep(0.05)
    return value
