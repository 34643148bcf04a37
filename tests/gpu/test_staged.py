"""Staging into a GPU keeps every rule of the transport beneath it."""

from __future__ import annotations

import dataclasses

import pytest

from mx.cuda.bindings import Driver
from mx.cuda.device import device_key
from mx.testing.conformance import Harness, TransportSuite
from mx.testing.harness import HERE


class TestStaged(TransportSuite):
    #: What a held sink holds up is its slots: the source has long sent what is in them.
    test_counts_readers = None
    #: For the same reason its connections end while the sink is held. The exposure is tcp's own,
    #: whose suite has this rule.
    test_exposure_joins_truly = None

    @pytest.fixture
    def harness(self, driver: Driver) -> Harness:
        here = dataclasses.replace(HERE, device=device_key(driver.device_uuid(0)))
        return Harness("tests.gpu.staged_rig:StagedTcp", here=here)
