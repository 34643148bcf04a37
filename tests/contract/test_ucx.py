"""The ucx transport keeps the rules, where NIXL is installed."""

import pytest

from mx.testing.conformance import Harness, TransportSuite
from mx.transport import Unavailable
from mx_transports.ucx import UcxTransport

_PROBED = UcxTransport().probe()


@pytest.mark.skipif(isinstance(_PROBED, Unavailable), reason=getattr(_PROBED, "reason", ""))
class TestUcx(TransportSuite):
    @pytest.fixture
    def harness(self) -> Harness:
        return Harness("mx_transports.ucx:UcxTransport")
