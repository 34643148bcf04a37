"""The fake transport keeps the rules; each broken one breaks exactly the rule it is for."""

import pytest

from mx.testing import conformance
from mx.testing.conformance import Harness, TransportSuite
from mx.testing.fake import FakeHarness
from tests.support import broken

pytestmark = pytest.mark.long


class TestFake(TransportSuite):
    @pytest.fixture
    def harness(self) -> Harness:
        return FakeHarness()


class TestPacking(TransportSuite):
    @pytest.fixture
    def harness(self) -> Harness:
        return FakeHarness(broken.paths.PackingFake)


@pytest.mark.parametrize("name", broken.BROKEN)
def test_broken_fake_breaks_its_rule_alone(name: str) -> None:
    made: list[broken.BrokenFake] = []

    def make() -> broken.BrokenFake:
        made.append(broken.BROKEN[name]())
        return made[-1]

    try:
        found = conformance.broken_rules(FakeHarness(make, deadline_s=6.0))
    finally:
        for transport in made:
            transport.clean_up()
    assert list(found) == [broken.BROKEN[name].rule], found


def test_every_rule_has_a_broken_fake() -> None:
    assert {fake.rule for fake in broken.BROKEN.values()} == set(conformance.RULES)


def test_the_suite_has_a_test_for_each_rule_and_names_it() -> None:
    for rule, function in conformance.RULES.items():
        test = getattr(TransportSuite, f"test_{rule}")
        assert test.__doc__ == function.__doc__
        assert test.__name__ == f"test_{rule}"
