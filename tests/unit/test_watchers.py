"""What a watcher is told: the latest state of each source, whatever came in between."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mx.coordinator.watchers import Watcher
from mx.core.membership import ChangeKind, Membership
from mx.core.types import ModelKey, SourceRecord
from mx.errors import MxError
from tests.records import make_documents, make_record

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


@given(steps, st.sampled_from(["", "x"]), st.integers(0, 30))
def test_a_watcher_ends_up_knowing_what_is_listed(
    events: list[tuple[str, str, int]], name: str, begins: int
) -> None:
    members = Membership()
    watcher = Watcher(name, "", [])
    told: dict[str, SourceRecord] = {}
    for i, (event, source_id, number) in enumerate(events):
        try:
            if event in ("x", "y"):
                members.register(0, RECORDS[source_id, event], SECRET)
            elif event == "layers":
                members.advertise(0, source_id, SECRET, 1, [(0, 1)] if number % 2 else [])
            elif event == "gone":
                members.deregister(0, source_id, SECRET)
        except MxError:
            continue
        changes = members.take_changes()
        if i < begins:
            listed = [s.record for s in members.sources()]
            watcher = Watcher(name, "", listed)
            told = {r.source_id: r for r in listed if watcher.wants(r)}
            continue
        watcher.push(changes)
        if number == 0:
            hear(watcher, told)
    hear(watcher, told)
    listed = [s.record for s in members.sources(name)]
    assert told == {record.source_id: record for record in listed}
    assert list(watcher.drain()) == []


def hear(watcher: Watcher, told: dict[str, SourceRecord]) -> None:
    heard = list(watcher.drain())
    assert len({change.record.source_id for change in heard}) == len(heard)
    for change in heard:
        source_id = change.record.source_id
        assert (source_id in told) is (change.kind is not ChangeKind.UP)
        if change.kind is ChangeKind.GONE:
            del told[source_id]
        else:
            told[source_id] = change.record


def test_a_source_that_moves_to_another_name_is_gone_for_those_that_watch_the_old_one() -> None:
    members = Membership()
    record = make_record(DOCUMENTS)
    members.register(0, record, SECRET)
    watcher = Watcher("llama", "", [record])
    members.take_changes()
    moved = replace(record, model=ModelKey("other"))
    members.register(0, moved, SECRET)
    watcher.push(members.take_changes())
    (change,) = watcher.drain()
    assert (change.kind, change.record, change.reason) == (ChangeKind.GONE, record, "replaced")
