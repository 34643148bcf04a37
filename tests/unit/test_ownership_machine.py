"""Owners, strangers and relays that come, go and restart in any order: what may never happen.

The registry is driven with receipts as a coordinator gives them; a restart makes a new one. Its
state may come back older, or empty.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mx.core.memory_store import MemoryStore
from mx.core.ownership import Receipt
from mx.core.types import ModelKey, SourceRecord, SourceRole
from mx.errors import BindingError, MxError
from tests.support.owners import commitment_of, owned
from tests.support.records import make_documents, make_record, register_source
from tests.support.redis_server import needs_redis
from tests.support.stores import FollowedRegistry, OverStores

LEASE_S, GRACE_S = 5.0, 20.0
ALICE, BOB, RELAY = b"alice", b"bob", b""


@dataclass
class Process:
    """A source's process. `listed` is its record as it was listed last."""

    owner: bytes
    listed: SourceRecord
    secret: bytes
    receipts: dict[ModelKey, Receipt] = field(default_factory=dict)


who = st.sampled_from([ALICE, ALICE, BOB])
weights = st.sampled_from("ABCD")
which = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.processes: list[Process] = []
        self.registry = self.anew()
        self.backup: dict[str, Any] = {}
        # What the registry said, for as long as it says it.
        self.bound: dict[ModelKey, bytes] = {}
        self.owners: dict[str, bytes] = {}
        self.began_s = 0.0
        self.brought: Receipt | None = None  # at the last registration
        self.left: dict[str, tuple[bytes, float]] = {}  # who owned a name last, and until when

    def anew(self) -> FollowedRegistry:
        return FollowedRegistry(lease_s=LEASE_S, binding_grace_s=GRACE_S)

    def register(self, process: Process, record: SourceRecord, **flags: object) -> bool:
        replaces = str(flags.get("replaces", ""))
        before = record.model._replace(revision=replaces or record.model.revision)
        made = owned(record, process.owner) if process.owner else record
        self.brought = process.receipts.get(before)
        try:
            answer = register_source(
                self.registry,
                self.now,
                made,
                process.secret,
                receipt=self.brought,
                **flags,  # type: ignore[arg-type]
            )
        except MxError:
            return False
        assert answer.record is not None
        process.listed = answer.record
        if answer.receipt is not None:
            self.number += 1
            issued = answer.receipt._replace(issued_s=float(self.number), this_life=True)
            process.receipts[answer.record.model] = issued
        return True

    def pick(self, index: int) -> Process | None:
        return self.processes[index % len(self.processes)] if self.processes else None

    # -- what processes do ------------------------------------------------------------------------

    @rule(owner=who, text=weights, revision=st.sampled_from(["main", "main", "main.2", "x"]))
    def start(self, owner: bytes, text: str, revision: str) -> None:
        self.number += 1
        record = make_record(make_documents(text), revision=revision)
        process = Process(owner, record, self.number.to_bytes(16, "big"))
        if len(self.processes) < 8 and self.register(process, record):
            self.processes.append(process)

    @rule(index=which)
    def pull(self, index: int) -> None:
        """A relay of what a process has, which brings the receipts that it gets."""
        source = self.pick(index)
        if source is None or len(self.processes) >= 8:
            return
        self.number += 1
        made = make_record(make_documents(""))
        table = replace(made.table, layout_digest=source.listed.ref.layout)
        record = replace(
            made, model=source.listed.model, ref=source.listed.ref, table=table,
            role=SourceRole.RELAY,
        )  # fmt: skip
        process = Process(RELAY, record, self.number.to_bytes(16, "big"))
        if self.register(process, record, keeps_pin=True):
            self.processes.append(process)

    @rule(index=which, text=weights)
    def update(self, index: int, text: str) -> None:
        process = self.pick(index)
        if process is None:
            return
        old = process.listed
        newest = self.newest(old.model)
        record = replace(
            make_record(make_documents(text)), model=old.model, source_id=old.source_id,
            generation=old.generation + 1,
        )  # fmt: skip
        owner = self.owners.get(old.model.name)
        done = self.register(process, record, replaces=old.model.revision)
        if not done:
            return
        assert process.owner, "a relay updates nothing"
        if process.listed.pin_only:
            return
        mine = commitment_of(process.owner)
        if owner is not None and mine != owner:
            receipt = process.receipts.get(old.model)
            assert receipt is not None and self.may_restore(old.model), "only a receipt is stronger"
        elif newest not in ("", old.model.revision) and owner == mine:
            same = self.bound.get(old.model._replace(revision=newest)) == record.ref.identity
            held = [p for p in self.processes if p is not process]
            ids = {p.listed.source_id for p in held}
            used = any(
                s.record.model.revision == newest and not s.record.pin_only
                for s in self.registry.sources()
                if s.record.source_id in ids
            )
            assert same or not used, "another holder has updated it"

    def newest(self, key: ModelKey) -> str:
        numbers = [
            (int(each.revision.partition(".")[2] or 1), each.revision)
            for each in self.bound
            if each.revision.partition(".")[0] == key.revision.partition(".")[0]
        ]
        return max(numbers, default=(0, ""))[1]

    @rule(index=which)
    def renew(self, index: int) -> None:
        """Register what is listed again, with a receipt of this life, after another's restored
        its owner, too."""
        process = self.pick(index)
        if process is not None:
            self.again(process)

    @rule(index=which, willingly=st.booleans())
    def end(self, index: int, willingly: bool) -> None:
        process = self.pick(index)
        if process is not None:
            self.processes.remove(process)
            if willingly:
                self.registry.deregister(self.now, process.listed.source_id, process.secret)

    @rule(seconds=st.sampled_from([1.0, 3.0, 25.0]), silent=st.sampled_from([False, False, True]))
    def time_passes(self, seconds: float, silent: bool) -> None:
        """Those that are not cut off send heartbeats, and register again where they were lost."""
        until_s = self.now + seconds
        while self.now < until_s:
            self.now = min(until_s, self.now + 2.0)
            self.see()
            for process in () if silent else self.processes:
                try:
                    self.registry.heartbeat(
                        self.now, process.listed.source_id, process.secret, process.listed.state
                    )
                except MxError:
                    self.again(process)
                self.see()

    @rule(order=st.permutations(range(8)))
    def coordinator_restarts(self, order: list[int]) -> None:
        self.registry = self.anew()
        self.backup = {}
        self.now += 1.0
        self.began_s = self.now
        self.left.clear()
        for process in self.processes:
            earlier = {k: r._replace(this_life=False) for k, r in process.receipts.items()}
            process.receipts = earlier
        for index in order:
            if index < len(self.processes):
                self.again(self.processes[index])
                self.see()

    @rule()
    def back_up(self) -> None:
        if type(self.registry.store) is MemoryStore:
            self.backup = copy.deepcopy(self.registry.store.__dict__)

    @rule(order=st.permutations(range(8)), empty=st.booleans(), early=st.integers(0, 8))
    def state_is_lost(self, order: list[int], empty: bool, early: int) -> None:
        """The state comes back older, or empty, and that is noticed. Some register again at once,
        in the doubt, and the others send heartbeats later."""
        store = self.registry.store
        if type(store) is not MemoryStore:
            return
        kept = MemoryStore(store.clock).__dict__ if empty else copy.deepcopy(self.backup)
        store.__dict__ |= kept or MemoryStore(store.clock).__dict__
        asyncio.run(store.begin_epoch(store.epoch, self.now + LEASE_S))
        self.registry.take_all_again()
        self.began_s = self.now + LEASE_S
        self.left.clear()
        self.brought = None
        self.bound = self.stands_for()
        self.see()
        for process in self.processes:
            earlier = {k: r._replace(this_life=False) for k, r in process.receipts.items()}
            process.receipts = earlier
        for index in order[:early]:
            if index < len(self.processes):
                self.again(self.processes[index])
                self.see()

    def again(self, process: Process) -> None:
        record = replace(process.listed, pin_only=False, by_owner=False, commitment=b"")
        assert self.register(process, record, keeps_pin=True), "what was listed stays listed"

    def may_restore(self, key: ModelKey) -> bool:
        """True if the receipt that was brought may win against what is bound."""
        receipt, early = self.brought, self.now < self.began_s + GRACE_S
        return (
            receipt is not None and not receipt.this_life and early and receipt.key.name == key.name
        )

    # -- what may never happen --------------------------------------------------------------------

    def stands_for(self) -> dict[ModelKey, bytes]:
        return {m.model: m.ref.identity for m in self.registry.models() if not m.pin_only}

    @invariant()
    def see(self) -> None:
        self.registry.tick(self.now)
        self.registry.take_changes()
        found = self.stands_for()
        if self.now < self.registry.store.doubt_until_s:
            told = None if self.brought is None else self.brought.key.name
            news = [key for key in found if key not in self.bound and key.name != told]
            assert not news, "bound without a receipt while the state is in doubt"
        sources = [s.record for s in self.registry.sources()]
        names = {key.name for key in found}
        owners = {
            name: {r.commitment for r in sources if r.by_owner and r.model.name == name}
            for name in names
        }
        for commitments in owners.values():
            assert len(commitments) <= 1, "two owners"
        for key, identity in found.items():
            was = self.bound.get(key)
            if was is None or was == identity:
                continue
            # It was free, and went to what contested it; or it was bound without a receipt, which
            # gives way to one.
            free = not any((r.model, r.ref.identity) == (key, was) for r in sources)
            assert free or self.may_restore(key), f"{key} has changed its meaning"
        self.bound = found
        self.owners = {name: c for name, found in owners.items() for c in found}
        for name, owner in self.owners.items():
            was, until_s = self.left.get(name, (owner, 0.0))
            if owner != was and not self.may_restore(ModelKey(name)):
                assert self.now >= until_s + GRACE_S, f"{name} has changed its owner"
            self.left[name] = owner, self.now
        for record in sources:
            if record.by_owner:
                assert not record.pin_only and record.role is SourceRole.ORIGIN


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class SqliteMachine(OverStores, Machine):
    kind = "sqlite"


class RedisMachine(OverStores, Machine):
    kind = "redis"


TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRedisMachine = needs_redis(RedisMachine.TestCase)
TestRedisMachine.settings = settings(max_examples=5, stateful_step_count=30, deadline=None)


def test_a_stranger_can_not_update_by_any_revision() -> None:
    registry = FollowedRegistry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    register_source(registry, 0, owned(make_record(make_documents("A")), ALICE), ALICE)
    for revision in ("main", "main.2", "main.9", "x"):
        try:
            answer = register_source(
                registry, 0, owned(make_record(make_documents("B")), BOB), BOB, replaces=revision
            )
        except BindingError:
            continue
        raise AssertionError(answer)
