"""tcp from GPU memory keeps the rules that it keeps from host memory. Where there is no driver,
`tests/integration/test_driver_beyond.py` runs this over the stand-in."""

from __future__ import annotations

import dataclasses

import pytest

from mx.cuda import driver as cuda
from mx.testing.conformance import Harness, Kind, TransportSuite
from mx.testing.harness import HERE
from mx.transport import Unavailable


class TestTcpFromGpu(TransportSuite):
    @pytest.fixture(params=[Kind.GPU, Kind.SCATTERED], ids=["gpu", "scattered"])
    def harness(self, request: pytest.FixtureRequest) -> Harness:
        found = cuda.probe()
        if isinstance(found, Unavailable):
            pytest.skip(found.reason)
        there = dataclasses.replace(HERE, device=f"cuda:{cuda.load().device_uuid(0)}")
        target = "mx_transports.tcp:TcpTransport"
        return Harness(target, kind=request.param, there=there)
