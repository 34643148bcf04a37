"""A watcher gets the latest state of each source and pull, for any sequence of changes."""

from __future__ import annotations

import contextlib
import sys
import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.coordinator.listings import SourceMessages
from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState
from mx.coordinator.watchers import AnyChange, MeantLog, Watcher, WatchLog
from mx.core.changes import Change, ChangeKind, NameMeaning, PullChange
from mx.core.progress_board import ENDED_S, ProgressBoard
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey, SourceRecord, SourceState
from mx.errors import CapacityError, MxError
from mx.wire.v1 import coordinator_pb2 as pb
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


def sources_of(changes: list[AnyChange]) -> list[Change]:
    """Return the changes, which are of sources."""
    return [each for each in changes if isinstance(each, Change)]


def take_all(watcher: Watcher, seen: dict[str, SourceRecord], limit: int) -> None:
    changes: list[Change] = []
    while watcher.behind:
        news = sources_of(watcher.take(limit))
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
    (change,) = sources_of(watcher.take(9))
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
            found += sources_of(watcher.take(1))
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


# -- pulls -----------------------------------------------------------------------------------------


def status(number: int, **more: Any) -> PullStatus:
    found = PullStatus(
        pull_id=str(uuid.UUID(int=number)),
        model=ModelKey("llama"),
        host="h",
        pid=1,
        phase=PullPhase.RUNNING,
        layers=4,
        ready=0,
        nbytes=1000,
        done_bytes=100,
        seconds=1.0,
        sources=("10.0.0.1:7700",),
    )
    return found._replace(**more)


def everything(name: str) -> bool:
    return True


def logged_board(log: WatchLog) -> ProgressBoard:
    return ProgressBoard(on_change=lambda change: log.push([change]))


def pulls_of(changes: list[AnyChange]) -> list[tuple[ChangeKind, PullStatus]]:
    return [(each.kind, each.record) for each in changes if isinstance(each, PullChange)]


def test_watchers_of_pulls_see_the_last_change_of_each_and_every_end() -> None:
    log = WatchLog()
    board, one, two = logged_board(log), object(), object()
    everyone, of_one, of_other = (
        Watcher(log, name, observes=everything) for name in ("", "llama", "other")
    )
    board.report(0.0, one, status(1))
    board.report(0.1, two, status(2, requests_port=8000, requests_host="h"))
    for watcher in (everyone, of_one):
        found = pulls_of(watcher.take(9))
        assert [each.pull_id for _, each in found] == [status(1).pull_id, status(2).pull_id]
        assert {kind for kind, _ in found} == {ChangeKind.UP}
    board.report(1.0, one, status(1, seconds=2.0))  # only time has passed
    assert not everyone.behind and not of_one.behind
    board.end(1.5, two)
    ((kind, seen),) = pulls_of(of_one.take(9))
    assert kind is ChangeKind.CHANGED and seen.phase is PullPhase.FAILED
    assert seen.requests_port == 0  # no router sends anything there any more
    board.tick(1.5 + ENDED_S + 1)
    ((kind, seen),) = pulls_of(of_one.take(9))
    assert kind is ChangeKind.GONE and seen.pull_id == status(2).pull_id
    assert of_other.take(9) == []
    newcomer = Watcher(log, observes=everything)
    assert [each.pull_id for _, each in pulls_of(newcomer.take(9))] == [status(1).pull_id]


def test_the_ends_of_pulls_are_kept_for_watchers_up_to_a_bound() -> None:
    log = WatchLog(max_gone=4)
    log.push([PullChange(ChangeKind.UP, status(0))])
    watcher = Watcher(log, observes=everything)
    assert watcher.take(9)
    for number in range(1, 7):
        log.push([PullChange(ChangeKind.UP, status(number))])
        log.push([PullChange(ChangeKind.GONE, status(number))])
    with pytest.raises(CapacityError, match="too slowly"):
        watcher.take(99)
    newcomer = Watcher(log, observes=everything)
    assert [each.pull_id for _, each in pulls_of(newcomer.take(99))] == [status(0).pull_id]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.sampled_from(["push", "move", "drop", "read"]), st.integers(0, 9)
        )
    )
)
def test_a_watcher_of_pulls_knows_what_is_there(steps: list[tuple[int, str, int]]) -> None:
    there: dict[str, PullStatus] = {}
    known: dict[str, PullStatus] = {}
    log = WatchLog(max_gone=8)
    watcher = Watcher(log, "llama", observes=everything)
    for number, step, ready in [*steps, (0, "read", 0)]:
        now = status(number, ready=ready, model=ModelKey("llama" if step != "move" else "other"))
        before = there.get(now.pull_id)
        if step in ("push", "move"):
            kind = ChangeKind.UP if before is None else ChangeKind.CHANGED
            log.push([PullChange(kind, now, before)])
            there[now.pull_id] = now
        elif step == "drop" and before is not None:
            log.push([PullChange(ChangeKind.GONE, before, before)])
            del there[now.pull_id]
        elif step == "read":
            try:
                found = pulls_of(watcher.take(99))
            except CapacityError:
                watcher, known = Watcher(log, "llama", observes=everything), {}
                found = pulls_of(watcher.take(99))
            for kind, each in found:
                assert (each.pull_id in known) is (kind is not ChangeKind.UP)
                if kind is ChangeKind.GONE:
                    del known[each.pull_id]
                else:
                    known[each.pull_id] = each
    assert known == {i: each for i, each in there.items() if each.model.name == "llama"}


def test_sources_and_pulls_are_seen_by_rights_of_their_own() -> None:
    """A pull has the id of the source that it is as well; they are two rows."""
    members, log = FollowedRegistry(), WatchLog()
    record = RECORDS[IDS[0], "x"]
    seen_by: dict[str, Watcher] = {
        "sources": Watcher(log),
        "pulls": Watcher(log, sees=lambda name: False, observes=lambda name: name == "x"),
        "other pulls": Watcher(log, observes=lambda name: name == "y"),
    }

    def told() -> dict[str, list[tuple[type, ChangeKind]]]:
        return {who: [(type(each), each.kind) for each in w.take(9)] for who, w in seen_by.items()}

    register_source(members, 0, record, SECRET)
    log.push(members.take_changes())
    pull = status(0, pull_id=record.source_id, model=record.model)
    log.push([PullChange(ChangeKind.UP, pull)])
    up = ChangeKind.UP
    source_up, pull_up = [(Change, up)], [(PullChange, up)]
    assert told() == {"sources": source_up, "pulls": pull_up, "other pulls": source_up}
    log.push([PullChange(ChangeKind.GONE, pull, pull)])
    assert told() == {"sources": [], "pulls": [(PullChange, ChangeKind.GONE)], "other pulls": []}
    # A stream of sources that begins again says nothing of pulls.
    log.push([PullChange(ChangeKind.UP, pull)])
    log.push([], begins_again=True)
    gone = [(Change, ChangeKind.GONE)]
    assert told() == {"sources": gone, "pulls": pull_up, "other pulls": gone}


def test_the_end_of_a_pull_tells_its_id_alone() -> None:
    messages = SourceMessages()
    message = messages.event(PullChange(ChangeKind.GONE, status(1, ready=3), reason="replaced"))
    gone = pb.PullProgress(pull_id=status(1).pull_id)
    kind = pb.WatchEvent.KIND_PULL_GONE
    assert message == pb.WatchEvent(kind=kind, pull=gone, reason="replaced")


class Context:
    def peer(self) -> str:
        return "ipv4:10.0.0.1:5000"

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}


async def test_a_snapshot_ends_although_pulls_report_all_the_time() -> None:
    servicer = CoordinatorServicer(CoordinatorState())
    stream = servicer.Watch(pb.WatchRequest(pulls=True), Context())
    for number in range(20):
        servicer._board.report(servicer._now(), object(), status(number))
    kinds = []
    async for event in stream:
        kinds.append(event.kind)
        if event.kind == pb.WatchEvent.KIND_SNAPSHOT_END:
            break
        servicer._board.report(servicer._now(), object(), status(100 + len(kinds)))
    assert len(kinds) <= 22
    await stream.aclose()  # type: ignore[attr-defined]
