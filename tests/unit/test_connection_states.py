"""The states of a pull's paths: every event in every state, and what is opened when."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.connections import (
    TRANSITIONS,
    ConnectionEvent,
    Connections,
    ConnectionState,
    PathEntry,
    Rest,
)
from mx.core.planner import SourcePath, why_not
from mx.core.types import SourceRole
from mx.errors import (
    DigestError,
    MxError,
    PathError,
    PathSlowError,
    PeerBusyError,
    PeerLostError,
    PeerTimeoutError,
    PeerVersionError,
    SourceChangedError,
    StaleGenerationError,
)
from tests.support.planned_paths import LATER, OTHER, TCP0, TCP1, UCX0, path, source

ERRORS: tuple[MxError, ...] = (
    PathSlowError("slow"),
    PeerBusyError("busy", peer="a", retry_after_s=1.0),
    PeerLostError("cut"),
    PathError("fails"),
    PeerTimeoutError("stopped"),
    PeerVersionError("of another version"),
    DigestError("wrong"),
    StaleGenerationError("changed"),
)


def test_nothing_leads_out_of_excluded_and_live_comes_from_opening_alone() -> None:
    assert all(
        after is ConnectionState.EXCLUDED
        for (before, _), after in TRANSITIONS.items()
        if before is ConnectionState.EXCLUDED
    )
    assert [
        before for (before, _), after in TRANSITIONS.items() if after is ConnectionState.LIVE
    ] == [ConnectionState.OPENING]
    entry = PathEntry(TCP0)
    with pytest.raises(KeyError):
        entry.step(ConnectionEvent.OPENED)


def live(connections: Connections, *paths: SourcePath) -> list[PathEntry]:
    """Open whatever is to be opened; it has to be these."""
    entries = connections.assign(0.0)
    assert [entry.path for entry in entries] == list(paths)
    for entry in entries:
        connections.opened(entry)
    return entries


def test_paths_of_other_bottlenecks_are_opened_together_and_spare_ones_when_those_are_lost() -> (
    None
):
    connections = Connections()
    connections.add([TCP0, TCP1, UCX0, OTHER])
    first, second = live(connections, TCP0, TCP1)
    assert connections.assign(0.0) == []
    connections.lost(first, PeerLostError("cut"), 0.0, lease_runs=True)
    (third,) = live(connections, UCX0)
    connections.lost(second, PeerTimeoutError("stopped"), 0.0, lease_runs=True)
    assert connections.assign(0.0) == []  # the third is still read through
    connections.lost(third, PeerLostError("cut"), 0.0, lease_runs=False)
    live(connections, OTHER)


def test_slow_paths_and_busy_sources_come_back_when_nothing_else_is_left() -> None:
    connections = Connections(patience_s=60.0)
    connections.add([TCP0, OTHER])
    (slow,) = live(connections, TCP0)
    connections.lost(slow, PathSlowError("slow"), 0.0, lease_runs=True)
    (other,) = live(connections, OTHER)
    slow_rests = connections.idle
    busy = PeerBusyError("busy", peer="b", retry_after_s=5.0)
    connections.lost(other, busy, 0.0, lease_runs=True)
    (slow,) = live(connections, TCP0)
    connections.lost(slow, PeerTimeoutError("stopped"), 0.0, lease_runs=True)
    assert (slow_rests, connections.idle, connections.waits(0.0)) == (False, True, True)
    assert connections.due_s == 5.0
    assert connections.assign(4.0) == []
    assert [entry.path for entry in connections.assign(5.0)] == [OTHER]
    assert connections.due_s == 60.0


def test_patience_with_busy_sources_ends_and_begins_anew_with_a_connection() -> None:
    connections = Connections(patience_s=10.0)
    connections.add([OTHER])
    (entry,) = connections.assign(0.0)
    busy = PeerBusyError("busy", peer="b", retry_after_s=1.0)
    connections.failed(entry, busy, 0.0)
    assert [connections.waits(now_s) for now_s in (0.0, 9.0, 10.0)] == [True, True, False]
    assert not Connections(patience_s=10.0).waits(0.0)  # for nothing


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "error",
    [DigestError("wrong"), StaleGenerationError("updated"), SourceChangedError("written to")],
)
def test_an_excluded_source_never_comes_back(error: MxError, opens: bool) -> None:
    connections = Connections()
    connections.add([TCP0, TCP1, UCX0])
    first, second = live(connections, TCP0, TCP1) if opens else connections.assign(0.0)
    if opens:
        connections.lost(first, error, 0.0, lease_runs=True)
    else:
        connections.failed(first, error, 0.0)
        connections.opened(second)
    assert connections.excluded(first.key) and connections.has_no_path(first.key)
    assert connections.changed(first.key) is isinstance(error, StaleGenerationError)
    connections.add([TCP0, UCX0])
    connections.join(first.key, [UCX0])
    assert connections.assign(0.0) == []
    connections.lost(second, PeerLostError("cut"), 0.0, lease_runs=True)
    assert second.state is ConnectionState.EXCLUDED


def test_all_paths_to_a_source_of_another_version_rest_until_it_is_found_again() -> None:
    connections = Connections()
    connections.add([TCP0, TCP1, UCX0, OTHER])
    first, second = connections.assign(0.0)
    connections.failed(first, PeerVersionError("speaks wire 3"), 0.0)
    connections.failed(second, PeerVersionError("speaks wire 3"), 0.0)
    (other,) = live(connections, OTHER)
    assert not connections.wants(first.key)
    connections.lost(other, PeerLostError("gone"), 0.0, lease_runs=False)
    assert connections.assign(0.0) == [] and connections.idle
    assert connections.wants(first.key)  # it may be another process by now


def test_in_coordinated_reading_neighbours_alone_are_used_and_their_paths_compared_alone() -> None:
    connections = Connections()
    connections.add([TCP0, OTHER])
    live(connections, TCP0)
    connections.coordinate()
    connections.add([LATER])
    assert connections.assign(0.0) == []
    connections.join(LATER.source.key, [LATER])
    live(connections, LATER)  # beside the first, on whose host it is
    (left,) = connections.leave(LATER.source.key)
    connections.lost(left, PeerLostError("left"), 0.0, lease_runs=True)
    assert connections.has_no_path(LATER.source.key)
    connections.read_freely()
    assert connections.assign(0.0) == []  # OTHER is as near as the first


#: Whole sources on the host of the pull, as sources are that serve from a file.
HERE, HERE_TOO = (
    SourcePath(replace(source(name), role=SourceRole.ORIGIN), "tcp", 2.0, False, "loopback")
    for name in "hi"
)


def test_a_whole_source_on_this_host_is_read_from_beside_neighbours_and_when_it_is_free() -> None:
    connections = Connections()
    connections.add([TCP0])
    live(connections, TCP0)
    connections.add([HERE, HERE_TOO])
    (here,) = live(connections, HERE)  # beside another host's: it takes nothing from its link
    connections.coordinate()
    busy = PeerBusyError("busy", peer="h", retry_after_s=5.0)
    connections.lost(here, busy, 0.0, lease_runs=True)
    live(connections, HERE_TOO)
    connections.lost(connections.in_use[1], PeerLostError("gone"), 0.0, lease_runs=False)
    assert connections.due_s == 5.0 and connections.assign(4.0) == []
    assert [entry.path for entry in connections.assign(5.0)] == [HERE]
    forced = Connections(local_exempt=False)
    forced.add([TCP0])
    live(forced, TCP0)
    forced.coordinate()
    forced.add([HERE])
    assert forced.assign(0.0) == []


def test_other_hosts_are_read_from_beside_this_one_only_if_it_is_slow() -> None:
    connections = Connections()
    connections.add([HERE, TCP0, TCP1])
    live(connections, HERE)
    assert connections.assign(0.0) == []
    connections.supplied = False
    live(connections, TCP0, TCP1)


@given(st.integers(0, 1 << 32))
def test_whatever_happens_what_is_in_use_goes_together(seed: int) -> None:
    rng = random.Random(seed)
    paths = [
        path(source(name), kind, rail)
        for name in "abc"
        for kind in ("tcp", "ucx")
        for rail in (0, 1)
    ]
    connections, now_s = Connections(patience_s=5.0), 0.0
    opening: list[PathEntry] = []
    open_: list[PathEntry] = []
    for _ in range(150):
        now_s += rng.random()
        name = source(rng.choice("abc")).key
        match rng.randrange(7):
            case 0:
                connections.add(rng.sample(paths, 3))
            case 1 if opening:
                entry = opening.pop(rng.randrange(len(opening)))
                connections.opened(entry)
                open_.append(entry)
            case 2 if opening:
                entry = opening.pop(rng.randrange(len(opening)))
                connections.failed(entry, rng.choice((None, *ERRORS)), now_s)
            case 3 if open_:
                entry = open_.pop(rng.randrange(len(open_)))
                lease_runs = rng.random() < 0.5
                connections.lost(entry, rng.choice(ERRORS), now_s, lease_runs=lease_runs)
            case 4:
                (connections.coordinate if rng.random() < 0.5 else connections.read_freely)()
            case 5:
                connections.join(name, [each for each in paths if each.source.key == name])
            case 6:
                connections.leave(name)
        before = [entry.path for entry in connections.in_use]
        for entry in connections.assign(now_s):
            assert entry.state is ConnectionState.OPENING and not connections.excluded(entry.key)
            mine = [each for each in before if each.source.key == entry.key]
            assert all(each.bottleneck != entry.path.bottleneck for each in mine)
            before.append(entry.path)
            opening.append(entry)
        assert {*opening, *open_} == set(connections.in_use)
        assert connections.assign(now_s) == []
        for entry in connections._entries:
            assert (entry.rest is not None) == (entry.state is ConnectionState.RESTING)
            assert entry.rest is not Rest.BUSY or entry.retry_at_s > 0
    assert why_not(paths[0], []) is None
