"""What a transport must do: a suite of rules, to be subclassed in a test module.

    from mx.testing.conformance import Harness, TransportSuite

    class TestMine(TransportSuite):
        @pytest.fixture
        def harness(self) -> Harness:
            return Harness("my_package.mine:MyTransport")

That is a test for each rule. The fixture may have parameters, for several kinds of memory, and may
set up what the transport needs; a subclass may override a test. This module itself needs no pytest:
`check` runs one rule, `broken_rules` all of them.

Each rule works on a bench of its own with a new transport, raises RuleBroken where the transport
does not keep it, and returns otherwise. Rules about what a transport does not have (paths that
attach, a network, an exposure that sends) hold for it as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from mx.testing import (
    rules_bytes,
    rules_content,
    rules_faults,
    rules_life,
    rules_paths,
    rules_places,
    rules_secrecy,
)
from mx.testing.bench import Bench, RuleBroken
from mx.testing.harness import Harness, RemoteSource
from mx.testing.memory import Kind

RULES: dict[str, Callable[[Bench], None]] = {
    rule.__name__: rule
    for rule in (
        rules_bytes.right_bytes,
        rules_bytes.nothing_outside,
        rules_bytes.completes_once,
        rules_bytes.reports_progress,
        rules_bytes.starts_in_order,
        rules_bytes.refuses_out_of_range,
        rules_bytes.checks_generation,
        rules_bytes.adopts,
        rules_bytes.completes_empty_reads,
        rules_bytes.several_sessions,
        rules_bytes.two_exposures,
        rules_places.gathers,
        rules_places.refuses_holes,
        rules_places.scatters,
        rules_faults.peer_dies,
        rules_faults.peer_stops,
        rules_faults.peer_resumes,
        rules_faults.short_read,
        rules_faults.fences,
        rules_faults.clogged_reader,
        rules_faults.revoked,
        rules_faults.wrong_tickets,
        rules_content.refuses_other_weights,
        rules_content.vouches,
        rules_life.probes,
        rules_life.reaches_both_ways,
        rules_life.close_cancels,
        rules_life.hands_off,
        rules_life.closed_is_closed,
        rules_life.refills,
        rules_life.grows,
        rules_life.outlives_raising_sinks,
        rules_life.counts_readers,
        rules_life.attaches,
        rules_life.leaves_nothing,
        rules_life.session_joins_truly,
        rules_life.exposure_joins_truly,
        rules_paths.uses_rails,
        rules_paths.asks_for_trust,
        rules_paths.keeps_to_limits,
        rules_secrecy.encrypts,
    )
}


def check(rule: str, harness: Harness) -> None:
    """Run one rule.

    Args:
        rule: Its name, one of RULES.
        harness: How to get at the transport.

    Raises:
        RuleBroken: The transport does not keep the rule.
        Exception: What the transport raised where it must not.
    """
    with Bench(harness) as bench:
        RULES[rule](bench)


def broken_rules(harness: Harness) -> dict[str, str]:
    """Run all rules, and return those that are broken with what was seen."""
    broken = {}
    for rule in RULES:
        try:
            check(rule, harness)
        except RuleBroken as error:
            broken[rule] = str(error)
    return broken


class TransportSuite:
    """A test for each rule, `test_` and its name. See the module's text for how to use it."""


def _test(rule: str) -> Callable[[TransportSuite, Harness], None]:
    def test(self: TransportSuite, harness: Harness) -> None:
        check(rule, harness)

    test.__name__ = f"test_{rule}"
    test.__qualname__ = f"{TransportSuite.__name__}.{test.__name__}"
    test.__doc__ = RULES[rule].__doc__
    return test


for _rule in RULES:
    setattr(TransportSuite, f"test_{_rule}", _test(_rule))


__all__ = [
    "RULES",
    "Bench",
    "Harness",
    "Kind",
    "RemoteSource",
    "RuleBroken",
    "TransportSuite",
    "broken_rules",
    "check",
]
