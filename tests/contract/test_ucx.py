"""The ucx transport keeps the rules, where NIXL is installed."""

import pytest

from mx.testing import conformance
from mx.transport import Unavailable
from mx_transports.ucx import UcxTransport

_PROBED = UcxTransport().probe()

pytestmark = pytest.mark.skipif(
    isinstance(_PROBED, Unavailable), reason=getattr(_PROBED, "reason", "")
)


@pytest.mark.parametrize("rule", conformance.RULES)
def test_ucx(rule: str) -> None:
    conformance.check(rule, conformance.Harness("mx_transports.ucx:UcxTransport"))
