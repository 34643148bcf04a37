"""The tcp transport keeps the rules."""

import pytest

from mx.testing import conformance


@pytest.mark.parametrize("rule", conformance.RULES)
def test_tcp(rule: str) -> None:
    conformance.check(rule, conformance.Harness("mx_transports.tcp:TcpTransport"))
