"""Pulls that wait for a revision, and begin as soon as it is listed."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mx
from mx.engines.replica.ahead import AheadPull
from mx.errors import CoordinatorError
from tests.support.daemon import daemon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

OLD, NEW = ({"w": np.full(300_000, value, np.float32)} for value in (1, 2))


def test_a_revision_is_pulled_once_it_is_listed(coordinator: str) -> None:
    with mx.serve(OLD, model="ahead", coordinator=coordinator) as source:
        there = AheadPull("ahead", "main", coordinator=coordinator)
        later = AheadPull("ahead", "main.2", coordinator=coordinator)
        never = AheadPull("ahead", "main.3", coordinator=coordinator)
        assert there.pull(30).wait(30).bytes == OLD["w"].nbytes
        with pytest.raises(TimeoutError):
            later.pull(0.2)
        source.update(NEW)
        with later.pull(30) as pull:
            pull.wait(30)
            assert str(pull.model) == "ahead:main.2"
        for each in (there, later, never, never):
            each.close()


def test_a_trainers_part_is_no_model(coordinator: str) -> None:
    """Its name and revision are listed some time before the whole is."""
    variant = mx.ProcessingKey(part=(1, 2))
    waiting = AheadPull("parted", "main", coordinator=coordinator)
    with mx.serve(OLD, model="parted", variant=variant, coordinator=coordinator):
        with pytest.raises(TimeoutError):
            waiting.pull(0.5)
        with mx.serve(NEW, model="parted", coordinator=coordinator) as whole:
            assert waiting.pull(30).wait(30).identity == whole.identity_hex
    waiting.close()


def test_a_coordinator_that_is_gone_ends_the_wait() -> None:
    with daemon() as (process, address):
        waiting = AheadPull("lost", "main.7", coordinator=address)
        time.sleep(0.3)
        process.kill()
        with pytest.raises(CoordinatorError):
            waiting.pull(60)
    waiting.close()
