"""A real transport that ignores TLS files keeps every rule but the one about encryption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mx.testing.conformance import Harness, broken_rules
from mx.transport import ExposedRegion, ExposeOptions, Exposure, Grant, Session
from mx_transports.tcp import TcpTransport

pytestmark = pytest.mark.long


class PlainTcp(TcpTransport):
    """tcp, in the clear whatever files there are."""

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return super().expose(regions, replace(options, tls=None))

    def open(self, grant: Grant) -> Session:
        return super().open(replace(grant, tls=None))


def test_it_breaks_the_rule_about_encryption_alone() -> None:
    broken = broken_rules(Harness(f"{__name__}:PlainTcp"))
    assert list(broken) == ["encrypts"], broken
    assert "in the clear" in broken["encrypts"]
