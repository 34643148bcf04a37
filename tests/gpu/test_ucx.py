"""The ucx transport keeps the rules from GPU memory that it keeps from host memory."""

import dataclasses
import importlib.util

import pytest

from mx.cuda.bindings import Driver
from mx.testing.conformance import Harness, Kind, TransportSuite
from mx.testing.harness import HERE
from mx_transports.ucx.nixl import PACKAGES


@pytest.mark.skipif(not any(map(importlib.util.find_spec, PACKAGES)), reason="there is no NIXL")
class TestUcxFromGpu(TransportSuite):
    @pytest.fixture(params=[Kind.GPU, Kind.SCATTERED], ids=["gpu", "scattered"])
    def harness(self, driver: Driver, request: pytest.FixtureRequest) -> Harness:
        there = dataclasses.replace(HERE, device=f"cuda:{driver.device_uuid(0)}")
        target = "mx_transports.ucx:UcxTransport"
        return Harness(target, kind=request.param, there=there)
