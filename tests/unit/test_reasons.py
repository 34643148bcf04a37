"""Each reason why a path is not used: what the plan says, and what a pull with these paths does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mx.core.connections import Connections
from mx.core.paths import Medium, Path, Rail
from mx.core.planner import MOST_SOURCES, SourcePath, plan, why_not
from mx.core.reasons import Why, reason_of
from mx.core.topology import Place
from mx.core.types import SourceRecord, SourceRole, SourceState
from mx.errors import (
    DigestError,
    LocalError,
    MxError,
    PathSlowError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    SourceChangedError,
)
from tests.support.planned_paths import source

HERE = Place(hostname="here")


def whole(name: str, *transports: str) -> SourceRecord:
    return replace(source(name, transports or ("tcp",)), role=SourceRole.ORIGIN)


def reach(transport: str, there: Place) -> Path | str:
    """Hosts that are called far are reached over the network."""
    if transport == "rdma":
        return Path(transport, 0.5, not_beside="it takes a context")
    if transport == "none":
        return "there is no driver"
    local = not there.hostname.startswith("far")
    rates = {"shm": 10.0, "bus": 0.01}
    medium = Medium.MEMORY if local else Medium.NETWORK
    if transport == "bus":
        medium = Medium.PCIE
    return Path(transport, rates.get(transport, 1.0), attach=transport == "map", medium=medium)


def neighbour(name: str) -> SourceRecord:
    """Another source on the host of the pull."""
    return replace(whole(name), place=HERE)


FAR = [whole(f"far{n}") for n in range(MOST_SOURCES + 1)]
DRAINING = replace(whole("far9"), state=SourceState.DRAINING)

#: What there is, and the reason for that which is not chosen.
CASES = [
    ([whole("here", "tcp", "shm")], "tcp", "shm", Why.UNASKED, "you asked for tcp"),
    ([whole("here")], None, "shm", Why.UNSERVED, "the source does not serve over it"),
    ([whole("here", "tcp", "none")], None, "none", Why.TRANSPORT, "there is no driver"),
    ([whole("here", "tcp", "rdma")], None, "rdma", Why.TRANSPORT, "it takes a context"),
    ([whole("here", "shm"), FAR[0]], None, "tcp", Why.NEARER, "here:1 is nearer"),
    ([whole("a"), neighbour("b")], None, "tcp", Why.AS_NEAR, "a:1 is as near"),
    (FAR, None, "tcp", Why.ENOUGH, f"{MOST_SOURCES} sources are enough"),
    ([FAR[0], DRAINING], None, "tcp", Why.DRAINING, "far9:1 is draining"),
    ([whole("here", "tcp", "map")], None, "tcp", Why.ATTACHES,
     "map attaches: there is nothing to move"),
    ([whole("here", "tcp", "shm")], None, "tcp", Why.FASTER, "shm is faster over the same memory"),
    ([whole("here", "tcp", "udp")], None, "udp", Why.AS_FAST,
     "tcp is as fast over the same memory"),
    ([whole("here", "tcp", "bus")], None, "bus", Why.LITTLE, "it would add less than 5% to tcp"),
]  # fmt: skip
OF_PLANS = {why for *_, why, _ in CASES} | {Why.WITHIN}


@pytest.mark.parametrize(("sources", "forced", "transport", "why", "said"), CASES)
def test_what_a_plan_leaves_out_for_a_reason_a_pull_does_not_open(
    sources: Sequence[SourceRecord], forced: str | None, transport: str, why: Why, said: str
) -> None:
    names = ["bus", "map", "none", "rdma", "shm", "tcp", "udp"]
    found = plan(HERE, sources, names, reach, forced=forced)
    spare = [(each.path.transport, each.reason) for each in found.spare]
    rejected = [(each.transport, each.reason) for each in found.rejected]
    reasons = [reason for name, reason in spare + rejected if name == transport]
    assert why in {reason.why for reason in reasons}
    assert said in reasons
    assert next(r for r in reasons if r == said).code == why.name.lower()
    connections = Connections()
    connections.add(found.paths)
    assert tuple(entry.path for entry in connections.assign(0.0)) == found.chosen


def test_a_path_within_the_machine_keeps_one_over_the_network_to_the_same_source_out() -> None:
    record = whole("here", "shm", "tcp")
    rail = Rail("eth0", "10.0.0.2", "eth0", "10.0.0.1", 1.0)
    inner = SourcePath(record, "shm", 10.0, False, "")
    outer = SourcePath(record, "tcp", 1.0, False, "", Medium.NETWORK, rail)
    connections = Connections()
    connections.add([inner, outer])
    assert [entry.path for entry in connections.assign(0.0)] == [inner]
    for path, beside in ((outer, inner), (inner, outer)):
        reason = why_not(path, [beside])
        assert reason is not None and reason.why is Why.WITHIN
        assert reason == "shm does not leave the machine"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (DigestError("sent it wrong", peer="p"), Why.WRONG),
        (SourceChangedError("wrote to it"), Why.CHANGED),
        (PathSlowError(Why.SLOWER()), Why.SLOWER),
        (PeerTimeoutError("does not answer"), Why.STOPPED),
        (PeerLostError("is gone"), Why.GONE),
        (PeerLostError(Why.LEFT("p")), Why.LEFT),
        (PeerRefusedError("refused"), Why.REFUSED),
        (LocalError("no memory"), Why.FAILED),
    ],
)
def test_an_error_says_which_reason_it_is(error: MxError, why: Why) -> None:
    reason = reason_of(error)
    assert (reason, reason.why) == (error.message, why)


def test_every_reason_is_provoked() -> None:
    """Those of pulls with processes, in tests/integration/test_reasons.py."""
    of_pulls = {Why.FULL, Why.IDLE, Why.WRONG, Why.CHANGED, Why.SLOWER, Why.STOPPED, Why.GONE}
    assert OF_PLANS | of_pulls | {Why.LEFT, Why.REFUSED, Why.FAILED} == set(Why)
