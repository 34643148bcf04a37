"""The tcp transport keeps the rules from GPU memory that it keeps from host memory."""

import dataclasses

import pytest

from mx.cuda.bindings import Driver
from mx.testing.conformance import Harness, Kind, TransportSuite
from mx.testing.harness import HERE


class TestTcpFromGpu(TransportSuite):
    @pytest.fixture(params=[Kind.GPU, Kind.SCATTERED], ids=["gpu", "scattered"])
    def harness(self, driver: Driver, request: pytest.FixtureRequest) -> Harness:
        there = dataclasses.replace(HERE, device=f"cuda:{driver.device_uuid(0)}")
        target = "mx_transports.tcp:TcpTransport"
        return Harness(target, kind=request.param, there=there)
