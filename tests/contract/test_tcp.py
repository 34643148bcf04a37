"""The tcp transport keeps the rules."""

import pytest

from mx.testing.conformance import Harness, TransportSuite


class TestTcp(TransportSuite):
    @pytest.fixture
    def harness(self) -> Harness:
        return Harness("mx_transports.tcp:TcpTransport")
