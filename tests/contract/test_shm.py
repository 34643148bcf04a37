"""The shm transport keeps the rules, for memory that can be attached and for other memory."""

import pytest

from mx.testing import conformance
from mx.testing.conformance import Kind


@pytest.mark.parametrize("kind", [Kind.SEALED, Kind.ANONYMOUS])
@pytest.mark.parametrize("rule", conformance.RULES)
def test_shm(rule: str, kind: Kind) -> None:
    conformance.check(rule, conformance.Harness("mx_transports.shm:ShmTransport", kind=kind))
