"""A transport that compresses keeps the rules; one that lies about it breaks one."""

import pytest

from mx.testing.conformance import Harness, Kind, RuleBroken, TransportSuite, check

PLACE = "tests.support.compressing"


class TestPacked(TransportSuite):
    @pytest.fixture(params=[Kind.SEALED, Kind.SCATTERED])
    def harness(self, request: pytest.FixtureRequest) -> Harness:
        return Harness(f"{PLACE}:PackedTransport", kind=request.param)


@pytest.mark.parametrize(
    ("transport", "seen"),
    [
        ("LyingTransport", "1048576 bytes were sent, 5243.. taken from the limiter"),
        ("StoringTransport", "bytes are counted, and 10..... sent"),
    ],
)
def test_one_that_sends_more_than_it_counts_is_found(transport: str, seen: str) -> None:
    harness = Harness(f"{PLACE}:{transport}")
    check("right_bytes", harness)
    check("counts_readers", harness)
    with pytest.raises(RuleBroken, match=seen):
        check("keeps_to_limits", harness)
