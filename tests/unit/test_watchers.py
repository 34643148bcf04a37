"""A watcher gets the latest state of each source, for any sequence of changes."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.coordinator.watchers import MeantLog, Watcher, WatchLog
from mx.core.changes import Change, ChangeKind, NameMeaning
from mx.core.types import ModelKey, SourceRecord, SourceState
from mx.errors import CapacityError, MxError
from tests.support.records import make_documents, make_record, register_source
from tests.support.stores import FollowedRegistry

DOCUMENTS = make_documents("A")
SECRET = b"s" * 16
IDS = [f"00000000-0000-4000-8000-00000000000{i}" for i in range(3)]
RECORDS = {
    (source_id, name): make_record(DOCUMENTS, source_id=source_id, name=name, held=())
    for source_id in IDS
    for name in ("x", "y")
}

steps = st.lists(
    st.tuples(
        st.sampled_from(["x", "y", "layers", "gone", "drain"]),
        st.sampled_from(IDS),
        st.integers(0, 4),
    ),
    max_size=30,
)


@given(steps, st.sampled_from(["", "x"]), st.integers(0, 30), st.integers(1, 4))
def test_a_watcher_ends_with_what_is_listed(
    events: list[tuple[str, str, int]], name: str, begins: int, slice_limit: int
) -> None:
    members, log = FollowedRegistry(), WatchLog()
    watcher: Watcher | None = None
    seen: dict[str, SourceRecord] = {}
    for i, (event, source_id, number) in enumerate(events):
        if i == begins:
            watcher = Watcher(log, name)
        with contextlib.suppress(MxError):
            if event in ("x", "y"):
                register_source(members, 0, RECORDS[source_id, event], SECRET)
            elif event == "layers":
                members.advertise(0, source_id, SECRET, 1, [(0, 1)] if number % 2 else [])
            elif event == "drain":
                state = SourceState.DRAINING if number % 2 else SourceState.SERVING
                members.heartbeat(0, source_id, SECRET, state)
            elif event == "gone":
                members.deregister(0, source_id, SECRET)
        log.push(members.take_changes())
        if watcher is not None and number == 0:
            take_all(watcher, seen, slice_limit)
    watcher = watcher or Watcher(log, name)
    take_all(watcher, seen, slice_limit)
    listed = [s.record for s in members.sources(name)]
    assert seen == {record.source_id: record for record in listed}
    assert not watcher.behind and not watcher.take(4)


def take_all(watcher: Watcher, seen: dict[str, SourceRecord], limit: int) -> None:
    changes = []
    while watcher.behind:
        news = watcher.take(limit)
        assert len(news) <= limit
        changes += news
    assert len({change.record.source_id for change in changes}) == len(changes)
    for change in changes:
        source_id = change.record.source_id
        assert (source_id in seen) is (change.kind is not ChangeKind.UP)
        if change.kind is ChangeKind.GONE:
            del seen[source_id]
            continue
        if change.kind is ChangeKind.LAYERS:
            before = seen[source_id]
            assert replace(change.record, table=before.table) == before
        seen[source_id] = change.record


def test_a_source_that_moves_to_another_name_is_gone_for_watchers_of_the_old_one() -> None:
    members, log = FollowedRegistry(), WatchLog()
    record = make_record(DOCUMENTS)
    register_source(members, 0, record, SECRET)
    log.push(members.take_changes())
    watcher = Watcher(log, "llama")
    assert [change.kind for change in watcher.take(9)] == [ChangeKind.UP]
    register_source(members, 0, replace(record, model=ModelKey("other")), SECRET)
    log.push(members.take_changes())
    (change,) = watcher.take(9)
    assert (change.kind, change.reason) == (ChangeKind.GONE, "replaced")
    assert (change.record.source_id, change.record.model) == (record.source_id, record.model)


def test_the_number_of_ended_sources_that_are_kept_is_bounded() -> None:
    members, log = FollowedRegistry(), WatchLog(max_gone=8)
    early, reader = Watcher(log), Watcher(log)
    record = make_record(DOCUMENTS)
    register_source(members, 0, record, SECRET)
    log.push(members.take_changes())
    assert len(early.take(9)) == len(reader.take(9)) == 1
    for _ in range(100):
        fleeting = make_record(DOCUMENTS)
        register_source(members, 0, fleeting, SECRET)
        log.push(members.take_changes())
        members.deregister(0, fleeting.source_id, SECRET)
        log.push(members.take_changes())
        assert reader.take(99) == []  # it came and went unseen
    assert len(log.after(0, 1000)) == 1 + 8
    # A change that `early` has not seen may be missing by now.
    with pytest.raises(CapacityError, match="watch again"):
        early.take(9)
    newcomer = Watcher(log)
    assert [change.record for change in newcomer.take(99)] == [record]


def test_a_watcher_that_does_not_read_holds_nothing() -> None:
    log = WatchLog()
    watcher = Watcher(log)
    before = _size(watcher)
    for _ in range(200):
        log.push([Change(ChangeKind.UP, make_record(DOCUMENTS))])
    assert watcher.behind and _size(watcher) == before


def _size(watcher: Watcher) -> int:
    own = {name: value for name, value in vars(watcher).items() if name != "_log"}
    return sum(map(sys.getsizeof, own.values()))


def test_a_watcher_gets_what_names_mean_first_as_it_is_and_then_each_change_once() -> None:
    log, names = WatchLog(), MeantLog()
    early, other, one = Watcher(log), Watcher(log, "b"), Watcher(log, "a", "main")
    assert early.take_meant(names) == []
    names.push([NameMeaning("a", "tp=*/2", "main"), NameMeaning("b", "tp=*/2", "main")])
    names.push([NameMeaning("a", "tp=*/2", "main.2"), NameMeaning("c", "tp=*/2", "main")])
    names.push([NameMeaning("c", "tp=*/2", "")])
    # Of several changes the last one; an end is news only to those who saw the beginning.
    assert early.take_meant(names) == [
        NameMeaning("b", "tp=*/2", "main"),
        NameMeaning("a", "tp=*/2", "main.2"),
    ]
    assert early.take_meant(names) == []
    assert other.take_meant(names) == [NameMeaning("b", "tp=*/2", "main")]
    assert one.take_meant(names) == []  # it watches one revision, whatever the name means
    names.push([NameMeaning("b", "tp=*/2", "")])
    assert early.take_meant(names) == other.take_meant(names) == [NameMeaning("b", "tp=*/2", "")]


def test_a_watcher_that_looks_again_is_told_what_differs_alone() -> None:
    members, log, hidden = FollowedRegistry(), WatchLog(), set[str]()
    watcher = Watcher(log, sees=lambda name: name not in hidden)
    first, second = IDS[0], IDS[1]
    for source_id, name in ((first, "x"), (second, "y")):
        register_source(members, 0, RECORDS[source_id, name], SECRET)
    log.push(members.take_changes())

    def told() -> list[tuple[ChangeKind, str, str]]:
        found = []
        while watcher.behind:
            found += watcher.take(1)
        return [(each.kind, each.record.source_id, each.reason) for each in found]

    assert [source_id for _, source_id, _ in told()] == [first, second]
    hidden.add("x")
    watcher.look_again()
    assert told() == [(ChangeKind.GONE, first, "the policy hides it")]
    hidden.clear()
    members.advertise(0, second, SECRET, 1, [(0, 1)])
    log.push(members.take_changes())
    watcher.look_again()
    assert told() == [(ChangeKind.UP, first, ""), (ChangeKind.LAYERS, second, "")]
