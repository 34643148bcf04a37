"""What a transport must do: a set of rules, each of which can be run by itself.

    @pytest.mark.parametrize("rule", conformance.RULES)
    def test_mine(rule):
        conformance.check(rule, conformance.Harness("my_package.mine:MyTransport"))

Each rule works on a bench of its own with a new transport, raises RuleBroken where the transport
does not keep it, and returns otherwise. `mx.testing.broken` holds, for each, a fake that breaks
that rule and no other.
"""

from __future__ import annotations

from collections.abc import Callable

from mx.testing import rules_bytes, rules_faults, rules_life
from mx.testing.bench import Bench, Harness, RemoteSource, RuleBroken
from mx.testing.memory import Kind

RULES: dict[str, Callable[[Bench], None]] = {
    rule.__name__: rule
    for rule in (
        rules_bytes.right_bytes,
        rules_bytes.nothing_outside,
        rules_bytes.completes_once,
        rules_bytes.tells_progress,
        rules_bytes.starts_in_order,
        rules_bytes.refuses_out_of_range,
        rules_bytes.checks_generation,
        rules_bytes.several_sessions,
        rules_bytes.two_exposures,
        rules_faults.peer_dies,
        rules_faults.peer_stops,
        rules_faults.peer_resumes,
        rules_faults.short_read,
        rules_faults.clogged_reader,
        rules_faults.revoked,
        rules_faults.wrong_tickets,
        rules_life.probes,
        rules_life.reaches_both_ways,
        rules_life.close_cancels,
        rules_life.hands_off,
        rules_life.closed_is_closed,
        rules_life.refills,
        rules_life.counts_readers,
        rules_life.attaches,
        rules_life.leaves_nothing,
    )
}


def check(rule: str, harness: Harness) -> None:
    """Run one rule. Raises RuleBroken, or what the transport raised where it must not."""
    with Bench(harness) as bench:
        RULES[rule](bench)


def broken_rules(harness: Harness) -> dict[str, str]:
    """Run all rules; those that are broken, with what was seen."""
    broken = {}
    for rule in RULES:
        try:
            check(rule, harness)
        except RuleBroken as error:
            broken[rule] = str(error)
    return broken


__all__ = [
    "RULES",
    "Bench",
    "Harness",
    "Kind",
    "RemoteSource",
    "RuleBroken",
    "broken_rules",
    "check",
]
