"""Coordinators are killed (SIGKILL) under load, and the history of every name is checked.

Each name has one owner, who registers, updates and deregisters it, and a rival with another key and
other weights, who tries to take it. Whatever was answered has to hold after each kill: a name means
what its owner registered last, no rival ever gets it, no update is counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import grpc

from mx import codec
from mx.core.revisions import update_number
from mx.core.types import SourceRecord
from mx.errors import BindingError, ConfigError, MxError, UnknownModelError
from mx.namekey import NameKey
from mx.wire.channel import Remote, Role, dial, translating
from mx.wire.client import CoordinatorClient, RegisterAnswer
from mx.wire.rpc import Stub
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.commands import free_port
from tests.support.records import by_digest, make_documents, make_record, register_at
from tests.support.redis_server import redis_server

_T = TypeVar("_T")

_CLOCK = "import time; now = time.time; time.time = lambda: now() + {}; "
_COORDINATOR = "import sys; from mx.cli import coordinator_main; sys.exit(coordinator_main())"
_LEASE_S = 5.0
_CALL_S = 5.0
#: How long a call is tried again; a coordinator starts in a few seconds on a busy machine.
_PATIENCE_S = 60.0


@dataclass
class Counts:
    """What was done and checked."""

    kills: int = 0
    did: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        did = ", ".join(f"{n} {what}" for what, n in sorted(self.did.items()))
        return f"{self.kills} kills; {did}; {len(self.wrong)} wrong"


class Coordinator:
    """One process, started again at the same port after each kill."""

    def __init__(self, spec: str, folder: Path, *, clock_s: float = 0.0) -> None:
        """
        Args:
            spec: Its state.
            folder: Where its log and its receipt key are.
            clock_s: By how much its machine's clock is wrong.
        """
        self._spec, self._folder, self._clock_s = spec, folder, clock_s
        self.is_split = False  # from the state: it answers with what it knew
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = CoordinatorClient(self.address, timeout_s=_CALL_S)
        self.remote = Remote(Role.COORDINATOR, self.address)
        self._channel = dial(self.address)
        service = pb.DESCRIPTOR.services_by_name["Coordinator"]
        self.stub = Stub(self._channel, service, self.remote)

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-c", _CLOCK.format(self._clock_s) + _COORDINATOR, "--listen",
                    self.address, "--state", self._spec, "--lease-s", str(_LEASE_S),
                    "--receipt-key", str(self._folder / "receipts"), "--log-level", "warning",
                ],
                stderr=log, stdout=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def close(self) -> None:
        self.kill()
        await self.client.close()
        await self._channel.close(None)

    async def answers(self) -> None:
        async def ask() -> None:
            await self.client.list_models()

        try:
            await until_answered(ask)
        except MxError as error:
            ended = None if self.process is None else self.process.poll()
            said = (self._folder / "log").read_text(errors="replace")[-3000:]
            raise AssertionError(f"{self.address} (exit code {ended}) is away: {said}") from error


async def until_answered(work: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat a call while coordinators are away."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await work()
        except (BindingError, ConfigError, UnknownModelError):
            raise
        except MxError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(random.uniform(0.05, 0.3))


class Owner:
    """The owner of one name, and its one source."""

    def __init__(self, name: str, coordinators: list[Coordinator], counts: Counts) -> None:
        self.name = name
        self._coordinators = coordinators
        self._counts = counts
        self._key = NameKey(random.randbytes(32))
        self._secret = random.randbytes(32)
        self._weights = 0
        self._generation = 0
        self._record: SourceRecord | None = None
        self._beating: asyncio.Task[None] | None = None

    def client(self, *, current: bool = False) -> CoordinatorClient:
        return random.choice(
            [each for each in self._coordinators if not (current and each.is_split)]
        ).client

    async def live(self, ended: asyncio.Event) -> None:
        """Register, update and deregister until the end."""
        while not ended.is_set():
            await asyncio.sleep(random.uniform(0.0, 0.5))
            what = random.random()
            if what < 0.15:
                await self.deregister()
                await self.register(update=True)
            elif what < 0.6:
                await self.register(update=True)
            await self.check()

    async def register(self, *, update: bool = False) -> None:
        self._weights += 1
        self._generation += 1
        documents = make_documents(f"{self.name} {self._weights}")
        made = make_record(documents, name=self.name, generation=self._generation)
        before = self._record
        if before is not None:
            made = replace(made, source_id=before.source_id)
        if update:
            assert before is not None
            made = replace(made, model=before.model)
        intent = {"replaces": before.model.revision} if update and before else {}

        async def ask() -> RegisterAnswer:
            return await register_at(
                self.client(), made, by_digest(documents), source_secret=self._secret,
                name_key=self._key, **intent,
            )  # fmt: skip

        try:
            answer = await until_answered(ask)
        except BindingError as error:
            self._counts.wrong.append(f"{self.name} refused its owner: {error}")
            return
        number = update_number(answer.model.revision, "main")
        if answer.pin_only:
            self._counts.wrong.append(f"{self.name} is listed by its pin only for its owner")
        if update and before and number <= update_number(before.model.revision, "main"):
            self._counts.wrong.append(f"{self.name} went back to {answer.model}")
        self._record = replace(made, model=answer.model)
        self._counts.did["updates" if update else "registrations"] += 1
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Send heartbeats, to another coordinator when one fails."""
        while True:
            call = random.choice(self._coordinators).stub.Heartbeat()
            try:
                while True:
                    record = self._record
                    assert record is not None
                    async with asyncio.timeout(_CALL_S):
                        await call.write(
                            pb.HeartbeatRequest(
                                source_id=record.source_id,
                                source_secret=self._secret,
                                state=codec.state_to_wire(record.state),
                            )
                        )
                        answer = await call.read()
                    if not isinstance(answer, pb.HeartbeatResponse):
                        break
                    self._counts.did["heartbeats"] += 1
                    if answer.pin_only:
                        self._counts.wrong.append(f"{self.name} lost its name")
                    await asyncio.sleep(_LEASE_S / 5)
            except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                pass  # a kill
            finally:
                call.cancel()
            await asyncio.sleep(0.1)

    async def deregister(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        record = self._record
        assert record is not None

        async def ask() -> None:
            asked = pb.DeregisterRequest(source_id=record.source_id, source_secret=self._secret)
            coordinator = random.choice(self._coordinators)
            with translating(coordinator.remote):
                await coordinator.stub.Deregister(asked, timeout=_CALL_S)

        await until_answered(ask)
        self._counts.did["deregistrations"] += 1

    async def check(self, client: CoordinatorClient | None = None) -> None:
        """The name means what this owner registered last, within the time to catch up."""
        record = self._record
        assert record is not None
        give_up_s = time.monotonic() + 5.0
        while True:
            try:
                found = await until_answered(
                    lambda: (client or self.client(current=True)).resolve(self.name)
                )
                said = f"{found.model} {found.ref.identity.hex()[:8]}"
                if (found.model, found.ref.identity) == (record.model, record.ref.identity):
                    self._counts.did["names checked"] += 1
                    return
            except UnknownModelError as error:
                said = str(error)
            if time.monotonic() > give_up_s:
                mine = f"{record.model} {record.ref.identity.hex()[:8]}"
                self._counts.wrong.append(f"{self.name} is {said}, not {mine}")
                return
            await asyncio.sleep(0.2)

    async def end(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)


async def rival(owner: Owner, counts: Counts) -> None:
    """Try to take a name, for ever."""
    key, secret = NameKey(random.randbytes(32)), random.randbytes(32)
    documents = make_documents(f"the rival's {owner.name}")
    record = make_record(documents, name=owner.name)
    while True:
        await asyncio.sleep(random.uniform(0.1, 0.6))
        try:
            answer = await register_at(
                owner.client(), record, by_digest(documents), source_secret=secret, name_key=key
            )
        except BindingError:
            counts.did["rivals refused"] += 1
        except MxError:
            pass  # a kill
        else:
            counts.did["rivals listed by pin"] += answer.pin_only
            if not answer.pin_only:
                counts.wrong.append(f"{owner.name} was given to a rival: {answer}")


@contextlib.contextmanager
def _state(kind: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Yield what `--state` is given, and how many coordinators share it."""
    if kind == "sqlite":
        yield f"sqlite:{folder / 'state.db'}", 1
        return
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server.url, 2


async def play(kind: str, kills: int, *, names: int = 12) -> Counts:
    """Kill coordinators over one state, and return what was seen.

    Args:
        kind: "sqlite" or "redis".
        kills: How often.
        names: How many names there are.
    """
    folder = Path(tempfile.mkdtemp(prefix="mx-kills-"))

    async def kill(coordinators: list[Coordinator], counts: Counts) -> None:
        for counts.kills in range(1, kills + 1):
            await asyncio.sleep(random.uniform(0.1, 1.5))
            victim = random.choice(coordinators)
            victim.kill()
            await asyncio.sleep(random.choice((0.0, 0.5)))
            victim.start()
            await victim.answers()
            if counts.kills % 10 == 0:
                print(counts, flush=True)

    try:
        with _state(kind, folder) as (spec, many):
            counts = await play_on([Coordinator(spec, folder) for _ in range(many)], kill, names)
        if counts.wrong:
            print((folder / "log").read_text()[-4000:])
        return counts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def play_on(
    coordinators: list[Coordinator],
    disturb: Callable[[list[Coordinator], Counts], Awaitable[None]],
    names: int,
) -> Counts:
    """Have owners and rivals live on coordinators while something disturbs these, and return what
    was seen."""
    counts = Counts()
    owners = [Owner(f"name{n}", coordinators, counts) for n in range(names)]
    try:
        for each in coordinators:
            each.start()
            await each.answers()
        await asyncio.gather(*(owner.register() for owner in owners))
        async with asyncio.TaskGroup() as tasks:
            ended = asyncio.Event()
            lives = [tasks.create_task(owner.live(ended)) for owner in owners]
            rivals = [tasks.create_task(rival(owner, counts)) for owner in owners]
            await disturb(coordinators, counts)
            await asyncio.sleep(1)
            ended.set()
            await asyncio.wait(lives)
            for task in rivals:
                task.cancel()
        for coordinator in coordinators:
            for owner in owners:
                await owner.check(coordinator.client)
            await _none_doubled(coordinator, counts)
    finally:
        for owner in owners:
            await owner.end()
        for each in coordinators:
            await each.close()
    return counts


async def _none_doubled(coordinator: Coordinator, counts: Counts) -> None:
    models = Counter(str(m.model) for m in await coordinator.client.list_models() if not m.pin_only)
    sources = Counter(s.record.source_id for s in await coordinator.client.list_sources())
    twice = [each for found in (models, sources) for each, n in found.items() if n > 1]
    counts.wrong += [f"{each} is listed twice" for each in twice]
    counts.did["listed once"] += len(models) + len(sources) - len(twice)
