"""The shm transport keeps the rules, for memory that can be attached and for other memory."""

import pytest

from mx.testing.conformance import Harness, Kind, TransportSuite


class TestShm(TransportSuite):
    @pytest.fixture(params=[Kind.SEALED, Kind.ANONYMOUS, Kind.SCATTERED])
    def harness(self, request: pytest.FixtureRequest) -> Harness:
        return Harness("mx_transports.shm:ShmTransport", kind=request.param)
