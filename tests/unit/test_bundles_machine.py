"""Ranks that register, update and die in any order: NAME means one revision for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mx.core.changes import ChangeKind
from mx.core.ownership import Receipt
from mx.core.revisions import update_number
from mx.core.types import ModelKey, SourceRecord
from mx.errors import MxError, UnknownModelError, UnknownSourceError
from tests.support.owners import owned
from tests.support.records import make_documents, make_record, register_source
from tests.support.redis_server import needs_redis
from tests.support.stores import FollowedRegistry, OverStores

LEASE_S, GRACE_S = 5.0, 20.0
SIZE = 3
RANKS = [f"tp={i}/{SIZE}" for i in range(SIZE)]
BUNDLE = f"tp=*/{SIZE}"


@dataclass
class Process:
    """One rank's process: its secret, what it serves, oldest first, and its receipts. All ranks
    share the name key."""

    secret: bytes
    serves: list[SourceRecord]
    updates: int = 0
    receipts: dict[ModelKey, Receipt] = field(default_factory=dict)


ranks = st.sampled_from(range(SIZE))


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.restart()
        self.processes: list[Process | None] = [None] * SIZE
        self.started = 0

    def restart(self) -> None:
        self.registry = FollowedRegistry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
        self.completed: set[str] = set()  # revisions that have been complete, by the rules
        self.meant = ""  # what a watcher has been told
        self.seen: dict[str, ModelKey] = {}  # the sources that a watcher knows

    # -- what ranks do ----------------------------------------------------------------------------

    @rule(i=ranks, weights=st.sampled_from("AB"))
    def start(self, i: int, weights: str) -> None:
        if self.processes[i] is None:
            self.started += 1
            record = make_record(make_documents(f"{i} {weights}"), variant=RANKS[i])
            process = Process(self.started.to_bytes(16, "big"), [])
            listed = self.register(process, record)
            if listed is None:  # the rank that died is still bound to other weights
                return
            process.serves.append(listed)
            self.processes[i] = process

    def register(
        self, process: Process, record: SourceRecord, replaces: str = "", **flags: Any
    ) -> SourceRecord | None:
        """Register, and keep the receipt. Returns None if it is refused."""
        before = record.model._replace(revision=replaces or record.model.revision)
        try:
            answer = register_source(
                self.registry,
                self.now,
                owned(record, b"owner"),
                process.secret,
                replaces=replaces,
                receipt=process.receipts.get(before),
                **flags,
            )
        except MxError:
            return None
        assert answer.record is not None
        if answer.receipt is not None:
            issued = answer.receipt._replace(issued_s=self.now + 1)
            process.receipts[answer.record.model] = issued
        return answer.record

    @rule(i=ranks, changes=st.booleans(), keeps=st.booleans())
    def update(self, i: int, changes: bool, keeps: bool) -> None:
        process = self.processes[i]
        if process is None:
            return
        process.updates += 1
        old = process.serves[-1]
        weights = f"{i} {process.updates} {process.secret!r}" if changes else ""
        ref = make_record(make_documents(weights)).ref if weights else old.ref
        table = replace(old.table, layout_digest=ref.layout)
        new = replace(make_record(make_documents("")), model=old.model, ref=ref, table=table)
        listed = self.register(process, new, old.model.revision)
        if listed is None:  # the rank before it in this place went further
            return
        number, was = update_number(listed.model.revision), update_number(old.model.revision)
        assert number > was, "each update has a number of its own"
        process.serves.append(listed)
        if not keeps:
            self.end(process, process.serves.pop(0))

    @rule(i=ranks)
    def retire_the_oldest(self, i: int) -> None:
        process = self.processes[i]
        if process is not None and len(process.serves) > 1:
            self.end(process, process.serves.pop(0))

    def end(self, process: Process, record: SourceRecord) -> None:
        self.registry.deregister(self.now, record.source_id, process.secret)

    @rule(i=ranks, willingly=st.booleans())
    def die(self, i: int, willingly: bool) -> None:
        process, self.processes[i] = self.processes[i], None
        if process is not None and willingly:
            for record in process.serves:
                self.end(process, record)

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        """Those that live send heartbeats meanwhile."""
        until_s = self.now + seconds
        while self.now < until_s:
            self.now = min(until_s, self.now + 2.0)
            for process in self.processes:
                for record in process.serves if process else ():
                    assert process is not None
                    self.registry.heartbeat(
                        self.now, record.source_id, process.secret, record.state
                    )
            self.follow()

    @rule(order=st.permutations(range(SIZE)))
    def coordinator_restarts(self, order: list[int]) -> None:
        self.restart()
        for i in order:
            process = self.processes[i]
            for record in list(process.serves) if process else ():
                assert process is not None
                again = self.register(process, record, keeps_pin=True)
                assert again is not None and not again.pin_only
                self.follow()

    # -- what readers and watchers see ------------------------------------------------------------

    def follow(self) -> None:
        for change in self.registry.take_changes():
            if change.kind is ChangeKind.GONE:
                del self.seen[change.record.source_id]
            else:
                self.seen[change.record.source_id] = change.record.model
        for meant in self.registry.take_meant():
            assert (meant.name, meant.bundle) == ("llama", BUNDLE)
            assert meant.revision != self.meant
            self.meant = meant.revision

    @invariant()
    def all_ranks_mean_one_revision(self) -> None:
        self.registry.tick(self.now)
        self.follow()
        bound = self.registry.models()
        bound = [each for each in bound if not each.pin_only]
        revisions = {each.model.revision for each in bound}
        # "Complete" by the definition: a whole source of each rank is listed.
        listed = {
            (s.record.model.revision, s.record.model.variant) for s in self.registry.sources()
        }
        complete = {r for r in revisions if all((r, variant) in listed for variant in RANKS)}
        self.completed = (self.completed | complete) & revisions
        expected = max(self.completed, key=update_number, default="")
        expected = expected or min(revisions, key=update_number, default="")
        assert self.meant == expected, "a watcher"
        for variant in RANKS:
            is_bound = any(
                (m.model.revision, m.model.variant) == (expected, variant) for m in bound
            )
            try:
                found = self.registry.resolve("llama", variant=variant)
            except UnknownModelError:
                assert not is_bound
                continue
            assert is_bound
            assert found.model == ModelKey("llama", expected, variant)
            for source in found.sources:
                assert self.seen[source.record.source_id].variant == variant
        for bundle in self.registry.bundles("llama"):
            assert bundle.named is (bundle.revision == expected)
            assert (not bundle.missing) is (bundle.revision in complete)
            assert bundle.missing_count == len(bundle.missing)
        for process in self.processes:
            for record in process.serves if process else ():
                try:
                    self.registry.source(record.source_id)
                except UnknownSourceError:
                    raise AssertionError("a rank that lives is not listed") from None


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class SqliteMachine(OverStores, Machine):
    kind = "sqlite"


class RedisMachine(OverStores, Machine):
    kind = "redis"


TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRedisMachine = needs_redis(RedisMachine.TestCase)
TestRedisMachine.settings = settings(max_examples=5, stateful_step_count=30, deadline=None)


def test_the_updates_of_ranks_that_make_as_many_have_the_same_numbers() -> None:
    machine = Machine()
    for i in range(SIZE):
        machine.start(i, "A")
    for turn in range(4):
        for i in (*range(turn % SIZE, SIZE), *range(turn % SIZE)):
            machine.update(i, changes=i != turn, keeps=True)
            machine.all_ranks_mean_one_revision()
        assert machine.meant == f"main.{turn + 2}"
