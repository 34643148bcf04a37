"""Staging into a GPU keeps every rule of the transport beneath it."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import pytest

from mx.cuda import driver as cuda
from mx.cuda.device import device_key
from mx.testing.conformance import Harness, TransportSuite
from mx.testing.harness import HERE
from tests.support.fake_cuda import FakeDriver, fake_uuid


class TestStaged(TransportSuite):
    #: What a held sink holds up is its slots: the source has long sent what is in them.
    test_counts_readers = None
    #: For the same reason its connections end while the sink is held. The exposure is tcp's own,
    #: whose suite has this rule.
    test_exposure_joins_truly = None

    @pytest.fixture(params=[False, True], ids=["late", "eager"])
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        fake = FakeDriver(gpus=1, eager=request.param)
        here = dataclasses.replace(HERE, device=device_key(fake_uuid(0)))
        with cuda.installed(fake):
            yield Harness("tests.contract.staged_rig:StagedTcp", here=here)
        gc.collect()  # a sink may be in a cycle with what it looks at
        assert fake.live() == []
