"""`python -m tests.names.virtual [--rounds N] [--seed S]`: thousands of rounds in virtual time.

The real registrar of sources over the real registry; only the wire between them, the clock and the
hashing are left out. An owner, relays, readers with their notes, a coordinator whose state is lost,
emptied, or put back older, answers that do not arrive. The oracle is that of `tests.names.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import selectors
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mx.coordinator.stores.encoding import copied
from mx.core.memory_store import MemoryStore
from mx.core.ownership import Receipt
from mx.core.registry import Registry
from mx.core.types import ManifestRef, Registration, SourceRecord, SourceRole, SourceState
from mx.errors import (
    BindingError,
    CoordinatorError,
    MxError,
    NotAllowedError,
    UnknownModelError,
    UnknownSourceError,
)
from mx.source import registrar as registrar_module
from mx.source.registrar import Registrar
from mx.wire.client import RegisterAnswer
from tests.support.owners import commitment_of
from tests.support.records import make_documents, make_record

LEASE_S, GRACE_S = 5.0, 60.0
#: A name means what was published last within this, in virtual time.
SOON_S = 90.0
_OWNER = b"owner"


class _Instantly(selectors.DefaultSelector):
    """Waits for nothing: the clock goes to where the next timer is."""

    now_s = 1e6

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(0.01)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instantly = _Instantly()
        super().__init__(self._instantly)

    def time(self) -> float:
        return self._instantly.now_s


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Backup:
    names: Any
    sources: Any
    epoch: str
    latest: int


class Coordinator:
    """A registry, whose state may be lost."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self._noted: set[str] = set()
        self.begin(None)

    def begin(self, backup: _Backup | None) -> None:
        """Begin anew: with nothing, or with a backup of the state."""
        self.store = store = MemoryStore(now)
        store.outlives = self.kept
        if backup is not None:
            for state in copied(backup.names).values():
                store.decide(state)
            for listed in copied(backup.sources).values():
                store.put_source(listed)
                store.renew(listed.record.source_id, now() + LEASE_S, 0, 0.0)
            store.epoch, store._latest = backup.epoch, backup.latest
        self.registry = Registry(
            store, lease_s=LEASE_S, first_lease_s=3 * LEASE_S, binding_grace_s=GRACE_S
        )

    def backup(self) -> _Backup:
        store = self.store
        names, sources = copied(store._names), copied(store._sources)
        return _Backup(names, sources, store.epoch, store.latest)

    def heed(self, mark: tuple[str, int] | None) -> None:
        """As `mx.coordinator.marks`: what shows a loss begins an epoch in doubt."""
        if not self.kept or mark is None:
            return
        epoch, latest = mark
        if latest <= self.store.latest if epoch == self.store.epoch else epoch in self._noted:
            return
        self._noted |= {epoch, self.store.epoch}
        self.store._begin_epoch(uuid.uuid4().hex, now() + LEASE_S, latest)

    @property
    def mark(self) -> tuple[str, int]:
        return self.store.epoch, self.store.latest


@dataclass
class World:
    """What one round has."""

    rng: random.Random
    coordinator: Coordinator
    lossy: float = 0.0
    steps: list[str] = field(default_factory=list)
    refs: dict[ManifestRef, int] = field(default_factory=dict)  # which weights these are
    published: dict[int, int] = field(default_factory=dict)  # by weights, in which order
    last: int = -1

    def record(self, weights: int, role: SourceRole) -> SourceRecord:
        record = make_record(make_documents(f"W{weights}"), name="m", role=role)
        self.refs[record.ref] = weights
        return record

    def publish(self) -> int:
        """Choose what the owner publishes: mostly something new, at times what it has had."""
        fresh = len(self.published)
        weights = self.rng.choice([fresh, fresh, self.rng.randint(0, fresh)])
        self.published[weights] = max(self.published.values(), default=-1) + 1
        self.last = weights
        return weights

    def told(self, receipt: Receipt | None) -> tuple[Receipt, str] | None:
        """Return a receipt as a source keeps it."""
        if receipt is None:
            return None
        return Receipt.decode(receipt.issued(now()).encode()), self.coordinator.store.epoch

    def read(self, kept: tuple[Receipt, str] | None) -> Receipt | None:
        """Return what a receipt says that was kept."""
        if not kept:
            return None
        return kept[0]._replace(this_life=kept[1] == self.coordinator.store.epoch)


class Client:
    """The calls that a registrar makes, without a wire."""

    remote = SimpleNamespace(address="c")

    def __init__(self, world: World) -> None:
        self._world = world
        self._mark: tuple[str, int] | None = None
        self._epochs: dict[str, str] = {}
        self.secret = b""

    async def register(
        self, asked: Registration, documents: Any, *, name_key: Any = None
    ) -> RegisterAnswer:
        await asyncio.sleep(0.01)
        world, intent, record = self._world, asked.intent, asked.record
        if name_key is not None:
            record = replace(record, commitment=name_key.commitment(record.model.name))
        world.coordinator.heed(self._mark)
        kept: Any = intent.receipt
        asked = replace(asked, record=record, intent=intent._replace(receipt=b""))
        answer = world.coordinator.registry.register(
            now(), asked, receipt=world.read(kept), address="a", wall_s=now()
        )
        if world.rng.random() < world.lossy:
            raise CoordinatorError("the answer was lost")
        self._epochs[record.source_id] = world.coordinator.store.epoch
        self._mark = world.coordinator.mark
        receipt: Any = world.told(answer.receipt)
        return RegisterAnswer(
            LEASE_S, world.coordinator.store.epoch, answer.record.model, answer.record.pin_only,
            receipt, answer.owner, published_s=answer.published_s,
        )  # fmt: skip

    async def list_models(self) -> Any:
        await asyncio.sleep(0.005)
        self._world.coordinator.registry.tick(now())
        return self._world.coordinator.registry.models()

    async def deregister(self, source_id: str, *, keeps_name: bool = False) -> None:
        await asyncio.sleep(0.005)
        registry = self._world.coordinator.registry
        registry.deregister(now(), source_id, self.secret, keeps_name=keeps_name)

    async def close(self) -> None: ...

    async def keep_alive(
        self,
        current: Callable[[], SourceRecord],
        register: Callable[[], Any],
        *,
        on_pin_only: Callable[[bool], None],
        on_receipt: Callable[[Any], None],
        on_outdated: Callable[[str], None],
        **_: Any,
    ) -> None:
        told: Receipt | None = None
        while True:
            try:
                if current().source_id not in self._epochs:
                    await register()
                source_id = current().source_id
                coordinator = self._world.coordinator
                coordinator.heed(self._mark)
                beaten = coordinator.registry.heartbeat(
                    now(), source_id, self.secret, SourceState.SERVING
                )
                self._mark = coordinator.mark
                if self._epochs[source_id] != coordinator.store.epoch:
                    raise UnknownSourceError("restarted")
                on_pin_only(beaten.pin_only)
                listed = coordinator.registry.source(source_id)
                said = coordinator.registry.receipt_of(listed)
                if said != told:
                    told = said
                    on_receipt(self._world.told(said))
                if replaces := coordinator.registry.outdated_by(listed):
                    on_outdated(replaces)
                await asyncio.sleep(LEASE_S / 3)
            except MxError:
                self._epochs.pop(current().source_id, None)
                await asyncio.sleep(0.3)


class Process:
    """A process that serves: the owner's, or a relay."""

    def __init__(self, world: World, role: SourceRole = SourceRole.ORIGIN) -> None:
        self._world, self._role = world, role
        self._client = Client(world)
        self._models: dict[str, Any] = {}
        client: Any = self._client
        key: Any = SimpleNamespace(commitment=lambda name: commitment_of(_OWNER))
        self._registrar = Registrar(
            client, self._models, self._record, self._rename, lambda _: 0, lambda _: 0.0,
            key if role is SourceRole.ORIGIN else None,
        )  # fmt: skip
        self._client.secret = self._registrar._secret
        self.held: Any = None

    def _record(self, served: Any) -> SourceRecord:
        held: _Held = served.held
        return replace(held.record, model=held.key, source_id=held.source_id)

    async def _rename(self, held: Any) -> None:
        self._models.pop(held.source_id)
        held.source_id = str(uuid.uuid4())
        self._models[held.source_id] = SimpleNamespace(held=held, pin_only=False)

    def hold(self, weights: int, revision: str = "main") -> Any:
        record = self._world.record(weights, self._role)
        self.held = _Held(record, record.model._replace(revision=revision))
        self._models[record.source_id] = SimpleNamespace(held=self.held, pin_only=False)
        return self.held

    async def serve(self, weights: int, *, update: bool, revision: str = "main") -> bool:
        held = self.hold(weights, revision)
        listing = self._registrar.list_as_newest if update else self._registrar.list
        while True:
            try:
                held.key = await listing(held)
            except (BindingError, NotAllowedError):
                self._models.clear()
                return False
            except CoordinatorError:
                await asyncio.sleep(1)
            else:
                self._registrar.keep_listed(held)
                return True

    async def change(self, weights: int, after_s: float) -> bool:
        old = self.held
        await self._registrar.unlist(old, keeps_name=True)
        self._models.pop(old.source_id, None)
        await asyncio.sleep(after_s)
        held = self.hold(weights, old.key.revision)
        same = old.record.ref.identity == held.record.ref.identity
        until_s = now() + 10
        while now() < until_s:
            try:
                replaces = "" if same else held.key.revision
                held.key = await self._registrar.list(held, again=same, replaces=replaces)
            except (BindingError, NotAllowedError):
                return False
            except CoordinatorError:
                await asyncio.sleep(0.5)
            else:
                self._registrar.keep_listed(held)
                return True
        return False

    async def crash(self) -> None:
        names = self._registrar
        for task in [*names._keeping.values(), *names._settling.values()]:
            task.cancel()
        await asyncio.sleep(0)

    async def close(self) -> None:
        with contextlib.suppress(CoordinatorError):
            await self._registrar.close()


class _Held:
    """As much of a held model as the registrar asks of."""

    scattered, documents, vouch = False, dict[bytes, bytes](), b""

    def __init__(self, record: SourceRecord, key: Any) -> None:
        self.record, self.key, self.role = record, key, record.role
        self.source_id, self.manifest = record.source_id, SimpleNamespace(ref=record.ref)
        self.takes_name = record.role is not SourceRole.RELAY
        self.is_companion = False


async def play(seed: int) -> list[str]:
    """Play one round, and return what is wrong."""
    rng = random.Random(seed)
    world = World(rng, Coordinator(kept=seed % 2 == 1), rng.choice([0.0, 0.0, 0.15]))
    owner, relays = Process(world), list[Process]()
    assert await owner.serve(world.publish(), update=False)
    seen: tuple[Any, ...] | None = None
    backup: _Backup | None = None
    floor, alive, wrong = 0, True, list[str]()

    def observe() -> int | None:
        """Pull by name, as a reader that brings what it has seen."""
        nonlocal floor, seen
        coordinator = world.coordinator
        try:
            if seen is not None:
                if seen[1] != coordinator.store.epoch or seen[2] > coordinator.store.latest:
                    coordinator.heed((seen[1], seen[2]))
                note = world.read((seen[0], seen[1]))
                if note is not None and not note.this_life:
                    coordinator.registry.recall(now(), note)
            coordinator.registry.tick(now())
            found = coordinator.registry.resolve("m")
        except UnknownModelError:
            return None
        if found.seen is not None:
            seen = (*(world.told(found.seen) or ()), coordinator.store.latest)
        if not found.sources or found.newest != found.model:
            return None
        weights = world.refs[found.ref]
        if world.published[weights] < floor:
            wrong.append(f"a reader got {weights} after a later one")
        floor = max(floor, world.published[weights])
        return weights

    for _ in range(rng.randint(4, 10)):
        steps = ["change", "restart", "crash", "relay", "drop", "lose", "backup", "look", "sleep"]
        (step,) = rng.choices(steps, [4, 3, 2, 3, 1, 4, 1, 4, 2])
        world.steps.append(f"{step}@{now() % 1000:.0f}")
        if step == "change" and alive:
            alive = await owner.change(world.publish(), rng.choice([0.1, 1, 3, 70]))
        elif step in ("restart", "crash") or not alive:
            await (owner.crash() if step == "crash" else owner.close())
            await asyncio.sleep(rng.choice([0, 0, 1, 5, 61, 130]))
            if rng.random() < 0.2 and not world.coordinator.kept:
                world.coordinator.begin(None)
            owner = Process(world)
            alive = await owner.serve(world.publish(), update=True)
        elif step == "relay":
            with contextlib.suppress(MxError):
                world.coordinator.registry.tick(now())
                found = world.coordinator.registry.resolve("m")
                relay = Process(world, SourceRole.RELAY)
                weights = world.refs[found.ref]
                if found.sources and await relay.serve(
                    weights, update=False, revision=found.model.revision
                ):
                    relays.append(relay)
        elif step == "drop" and relays:
            relay = relays.pop(rng.randrange(len(relays)))
            await (relay.close() if rng.random() < 0.5 else relay.crash())
        elif step == "lose":
            kept = world.coordinator.kept
            world.coordinator.begin(rng.choice([None, backup]) if kept else None)
        elif step == "backup":
            backup = world.coordinator.backup()
        elif step == "sleep":
            await asyncio.sleep(rng.choice([0.5, 3, 20, 65]))
        if step == "look" or rng.random() < 0.5:
            observe()
        await asyncio.sleep(rng.random() * 2)
    world.lossy, until_s, found_last = 0.0, now() + SOON_S, None
    while alive and found_last != world.last:
        if now() > until_s:
            wrong.append(f"{world.last} was published, and the name means {found_last}")
            break
        found_last = observe()
        await asyncio.sleep(1)
    for process in (owner, *relays):
        await process.crash()
    return [f"{each}: {' '.join(world.steps)}" for each in dict.fromkeys(wrong)]


def rounds(count: int, seed: int, *, log: Any = sys.stdout) -> int:
    """Play rounds, print what is wrong in them, and return how many that is in."""
    bad = 0
    clock = SimpleNamespace(monotonic=now)
    with patch.object(registrar_module, "time", clock):
        for number in range(seed, seed + count):
            with asyncio.Runner(loop_factory=_Loop) as runner:
                wrong = runner.run(play(number))
            bad += bool(wrong)
            for each in wrong:
                print(f"round {number}: {each}", file=log, flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.names.virtual", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    asked = parser.parse_args()
    logging.getLogger("mx").setLevel(logging.CRITICAL)
    began_s = time.monotonic()
    bad = rounds(asked.rounds, asked.seed)
    print(f"{asked.rounds} rounds, {bad} wrong, in {time.monotonic() - began_s:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
