"""Which paths a pull opens, and which it opens instead of those that it loses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from mx.core.connections import Connections
from mx.core.paths import Medium
from mx.core.planner import Plan, SourcePath, Spare
from mx.core.reasons import Why
from mx.core.types import Layout, SourceRecord
from mx.errors import (
    ChunkElsewhereError,
    ConfigError,
    DigestError,
    LocalError,
    MxError,
    PathError,
    PathSlowError,
    PeerBusyError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.fetching.connections import ConnectionPool
from mx.fetching.connector import Connector
from mx.fetching.events import EventLog
from mx.fetching.reads import Connection, StorePath
from mx.fetching.transfer import Transfer
from mx.swarm.sharing import Sharing
from mx.transport import Session
from mx.wire.client import LocatedModel
from mx.wire.locate import Locator
from tests.support.editions import edition_log
from tests.support.held_sessions import HeldSession, Lease, manifest_of_three_chunks
from tests.support.planned_paths import LATER, OTHER, TCP0, TCP1, UCX0, A

PLAN = Plan((TCP0, TCP1), (Spare(UCX0, Why.WITHIN("a")), Spare(OTHER, Why.AS_NEAR("a"))), ())


class FakeSwarm:
    """Of a pull that nothing joins unless a test says so."""

    begun = False

    def __init__(self) -> None:
        self.coordinated = False
        self.reading_from: dict[str, tuple[object, SourceRecord]] = {}
        self.expects = False
        self.lost_ids: list[str] = []
        self.silent_ids: list[str] = []
        self.none_left: Callable[[], None] = lambda: None

    def shared(self, medium: Medium) -> None:
        self.coordinated = True

    def no_whole_source(self) -> None:
        self.none_left()

    @property
    def waits_until_s(self) -> float:
        return math.inf if self.expects else -math.inf

    def met(self, sources: Sequence[SourceRecord]) -> None: ...

    def lost(self, key: str, *, for_good: bool) -> None:
        self.lost_ids.append(key)

    def gives_no_more(self, key: str) -> None:
        self.silent_ids.append(key)

    def reading_began(self) -> None: ...


class Stage:
    """A pool, and what it opened; `fails` says which paths can't be."""

    def __init__(
        self, fails: dict[SourcePath, MxError] | None = None, *, patience_s: float = 0.0
    ) -> None:
        self.tried: list[SourcePath] = []
        self.added: list[SourcePath | StorePath] = []
        self.given_back: list[SourcePath | StorePath] = []
        self.causes: list[MxError] = []
        self.no_more = self.ticked = 0
        self.due_s = math.inf
        self.hoping = False
        self.fails = fails or {}
        self.unfit: dict[SourcePath, MxError] = {}
        self.swarm = FakeSwarm()
        self.joined: list[SourcePath] = []
        self.patience_s = patience_s
        self.said: list[tuple[str, MxError]] = []
        self.manifest = manifest_of_three_chunks()
        self.arena = memoryview(b"")

    def begin(self) -> None:
        """On the loop."""
        self.outcome = edition_log()
        self.connections = Connections(self.patience_s)
        self.connections.add(PLAN.paths)
        self.pool = ConnectionPool(
            self.connections,
            cast(Connector, self),
            cast(Transfer, FakeTransfer(self)),
            cast(Sharing, self.swarm),
            cast(Locator, None),
            cast(LocatedModel, None),
            lambda sources: Plan(tuple(self.joined), (), ()),
            self.outcome,
            EventLog(0.0),
            self.causes,
            wait_s=60.0 if self.hoping else 0.0,
        )

    # -- the connector's --------------------------------------------------------------------------

    async def open(self, path: SourcePath, layout: Layout) -> Connection:
        self.tried.append(path)
        await asyncio.sleep(0)
        if path in self.fails:
            raise self.fails[path]
        return Connection(path, Lease(), cast(Session, HeldSession()))

    async def give_back(self, connection: Connection, *, lost: bool = False) -> None:
        self.given_back.append(connection.path)

    async def last_words(self) -> list[tuple[str, MxError]]:
        said, self.said = self.said, []
        return said

    # -- steps ------------------------------------------------------------------------------------

    def lose(self, number: int, error: MxError) -> None:
        self.outcome.connection_lost(number, error)

    def find(self, *paths: SourcePath) -> None:
        self.connections.add(paths)
        self.outcome.changed.set()

    def coordinate(self) -> None:
        self.swarm.coordinated = True
        self.outcome.changed.set()

    def read_freely(self) -> None:
        self.swarm.coordinated = False
        self.outcome.changed.set()

    def join(self, path: SourcePath) -> None:
        self.joined = [path]
        self.swarm.reading_from[path.source.key] = (object(), path.source)
        self.outcome.changed.set()

    def end(self) -> None:
        self.outcome.complete()

    def when_added(self) -> None: ...

    def play(self, *steps: Callable[[], None]) -> None:
        """Run the pool; each step is taken once everything before it has settled."""

        async def main() -> None:
            self.begin()
            running = asyncio.create_task(self.pool.run())
            for step in steps:
                for _ in range(12):
                    await asyncio.sleep(0)
                step()
            try:
                await asyncio.wait_for(running, 60)
            finally:
                await self.pool.close()

        asyncio.run(main())


class FakeTransfer:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.manifest = stage.manifest
        self.arena = stage.arena

    @property
    def started(self) -> bool:
        return bool(self.stage.added)

    def add_connection(self, connection: Connection) -> int:
        if connection.path in self.stage.unfit:
            raise self.stage.unfit[connection.path]
        self.stage.added.append(connection.path)
        self.stage.when_added()
        return len(self.stage.added) - 1

    def no_more_connections(self) -> None:
        self.stage.no_more += 1
        self.stage.end()

    def expect_connections(self) -> None: ...

    def landed_nbytes(self) -> int:
        return 0

    @property
    def due_s(self) -> float:
        return self.stage.due_s

    def tick(self) -> None:
        self.stage.ticked += 1
        self.stage.due_s = math.inf


def test_paths_that_go_together_are_opened_at_once() -> None:
    stage = Stage()
    stage.play(stage.end)
    assert stage.tried == [TCP0, TCP1]
    assert stage.no_more == 0


@pytest.mark.parametrize("error", [PeerLostError("cut"), PathError("UCX fails")])
def test_a_lost_path_is_replaced_by_another_over_the_same_rail(error: MxError) -> None:
    stage = Stage()
    stage.play(lambda: stage.lose(0, error), stage.end)
    assert stage.tried == [TCP0, TCP1, UCX0]
    assert stage.given_back == [TCP0]


def test_a_path_that_cannot_be_opened_is_replaced_and_reported() -> None:
    refused = LocalError("no memory to register")
    stage = Stage({TCP0: refused})
    stage.play(stage.end)
    assert stage.tried == [TCP0, TCP1, UCX0]
    assert stage.causes == [refused]


def test_a_source_that_stopped_is_left_for_another() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.lose(0, PeerTimeoutError("stopped")),
        lambda: stage.lose(1, PeerTimeoutError("stopped")),
        stage.end,
    )
    assert stage.tried == [TCP0, TCP1, OTHER]


def test_a_slow_path_is_used_again_when_nothing_else_is_left() -> None:
    stage = Stage({UCX0: PeerLostError("no"), OTHER: PeerLostError("no")})
    stage.play(
        lambda: stage.lose(0, PathSlowError("slow")),
        lambda: stage.lose(1, PeerLostError("cut")),
        stage.end,
    )
    assert stage.tried[:3] == [TCP0, TCP1, UCX0]
    assert stage.tried[3:] == [OTHER, TCP0]


def test_the_transfer_fails_when_no_path_is_left() -> None:
    gone = PeerLostError("gone")
    stage = Stage({UCX0: gone, OTHER: gone})
    stage.play(
        lambda: stage.lose(0, gone),
        lambda: stage.lose(1, gone),
    )
    assert stage.no_more == 1
    assert sorted(map(str, stage.causes)) == ["gone", "gone"]


def test_a_session_that_cannot_be_used_is_replaced() -> None:
    stage = Stage()
    refused = LocalError("no memory to register")
    stage.unfit = {TCP0: refused}
    stage.play(stage.end)
    assert stage.tried == [TCP0, TCP1, UCX0]
    assert stage.given_back == [TCP0]
    assert stage.causes == [refused]


def test_without_a_source_the_pool_ends() -> None:
    gone = PeerLostError("gone")
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0, OTHER), gone))
    stage.play()
    assert stage.added == []
    assert len(stage.causes) == 4


def test_an_error_that_every_path_would_have_is_raised() -> None:
    stage = Stage({TCP0: ConfigError("bad certificate")})
    try:
        stage.play()
    except ConfigError as error:
        assert "certificate" in str(error)
    else:
        raise AssertionError("it was swallowed")


# -- sources that are found later -----------------------------------------------------------------


def test_a_source_that_comes_later_is_there_when_the_first_is_lost() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.find(LATER),
        lambda: stage.lose(0, PeerTimeoutError("stopped")),
        lambda: stage.lose(1, PeerTimeoutError("stopped")),
        lambda: stage.lose(2, PeerTimeoutError("stopped")),
        stage.end,
    )
    assert stage.tried == [TCP0, TCP1, OTHER, LATER]
    assert stage.no_more == 0


def test_the_transfer_does_not_fail_while_a_source_may_come() -> None:
    stage = Stage()
    stage.hoping = True
    lost = [lambda n=n: stage.lose(n, PeerTimeoutError("stopped")) for n in range(3)]
    stage.play(
        *lost,
        lambda: stage.find(LATER),
        lambda: setattr(stage.pool, "_until_s", 0.0),  # the wait is over
        lambda: stage.lose(3, PeerTimeoutError("stopped")),
    )
    assert stage.tried == [TCP0, TCP1, OTHER, LATER]
    assert stage.no_more == 1


@pytest.mark.parametrize("from_the_start", [True, False])
def test_when_no_whole_source_is_left_the_swarm_is_used_before_giving_up(
    from_the_start: bool,
) -> None:
    paths = (TCP0, TCP1, UCX0, OTHER)
    stage = Stage(dict.fromkeys(paths, PeerLostError("cut")) if from_the_start else None)
    turned: list[int] = []

    def turn_to_peers() -> None:
        turned.append(len(stage.tried))
        stage.coordinate()
        stage.swarm.expects = True
        stage.join(LATER)

    def lose(connection: int) -> None:
        if not from_the_start:
            stage.lose(connection, PeerTimeoutError("stopped"))

    stage.swarm.none_left = turn_to_peers
    stage.play(lambda: lose(0), lambda: lose(1), lambda: lose(2), stage.end)
    assert turned == [len(stage.tried) - 1]  # once, after all others
    assert stage.tried[-1] == LATER
    assert stage.no_more == 0


def test_in_a_swarm_a_source_that_is_found_repeatedly_is_tried_once() -> None:
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0, OTHER), PeerLostError("cut")))
    stage.swarm.none_left = stage.coordinate
    stage.swarm.expects = True
    settled = [lambda: None] * 3
    stage.play(
        *settled,
        lambda: stage.find(OTHER),
        lambda: stage.find(OTHER),
        lambda: setattr(stage.swarm, "none_left", lambda: None),
        stage.read_freely,
        *settled,
        stage.end,
    )
    assert stage.tried.count(OTHER) == 2


def test_a_lost_source_is_tried_again_only_if_there_is_no_other() -> None:
    stage = Stage()
    stage.hoping = True
    stage.play(
        lambda: stage.lose(0, PeerTimeoutError("stopped")),
        lambda: stage.lose(1, PeerTimeoutError("stopped")),
        lambda: stage.find(TCP0, TCP1),  # the other is being read from
        lambda: stage.lose(2, PeerTimeoutError("stopped")),
        lambda: stage.find(TCP0, TCP1),
        stage.end,
    )
    assert stage.tried == [TCP0, TCP1, OTHER, TCP0, TCP1]


@pytest.mark.parametrize("error", [DigestError("wrong"), StaleGenerationError("changed")])
def test_a_source_that_lied_or_changed_never_comes_back(error: MxError) -> None:
    stage = Stage()
    stage.hoping = True
    stage.play(
        lambda: stage.lose(0, error),
        lambda: stage.lose(1, error),
        lambda: stage.lose(2, PeerTimeoutError("stopped")),
        lambda: stage.find(TCP0, TCP1),
        lambda: stage.find(LATER),
        stage.end,
    )
    assert stage.tried == [TCP0, TCP1, OTHER, LATER]


def test_in_a_swarm_later_ones_wait_until_there_is_none() -> None:
    stage = Stage()
    stage.swarm.expects = True
    stage.play(
        stage.coordinate,
        lambda: stage.find(LATER),
        lambda: stage.lose(0, PeerTimeoutError("stopped")),
        lambda: stage.lose(1, PeerTimeoutError("stopped")),
        stage.read_freely,
        stage.end,
    )
    assert stage.tried[:2] == [TCP0, TCP1]
    assert stage.tried[2:] == [OTHER]  # LATER is as good, and behind it
    assert stage.no_more == 0


# -- busy sources ---------------------------------------------------------------------------------


def busy(peer: str = "b", retry_after_s: float = 0.0) -> PeerBusyError:
    return PeerBusyError(f"{peer} is busy", peer=peer, retry_after_s=retry_after_s)


class BusyStage(Stage):
    """Sources that are busy the first `times`."""

    def __init__(self, times: int, *, patience_s: float = 60.0) -> None:
        super().__init__(patience_s=patience_s)
        self.times = times

    async def open(self, path: SourcePath, layout: Layout) -> Connection:
        if self.tried.count(path) < self.times:
            self.tried.append(path)
            raise busy()
        return await super().open(path, layout)

    def when_added(self) -> None:
        self.end()


def test_another_source_is_read_from_while_one_is_busy() -> None:
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0), busy()), patience_s=60.0)
    stage.play(stage.end)
    assert stage.tried == [TCP0, TCP1, UCX0, OTHER] and stage.added == [OTHER]
    assert [left.source for left in stage.pool.left()] == [A.endpoint]


def test_when_all_sources_are_busy_they_are_tried_again() -> None:
    stage = BusyStage(3)
    stage.play()
    assert stage.tried.count(TCP0) == 4
    assert stage.added
    assert len(stage.causes) <= 4  # each path adds its error once


def test_patience_with_busy_sources_has_an_end() -> None:
    stage = BusyStage(1000, patience_s=0.3)
    stage.play()
    assert not stage.added
    assert stage.causes and all(isinstance(cause, PeerBusyError) for cause in stage.causes)


def test_a_busy_source_is_not_tried_before_its_retry_time() -> None:
    paths = (TCP0, TCP1, UCX0, OTHER)
    stage = Stage(dict.fromkeys(paths, busy(retry_after_s=30.0)), patience_s=0.6)
    stage.play()
    assert sorted(map(stage.tried.count, (TCP0, TCP1, UCX0, OTHER))) == [1, 1, 1, 1]
    assert not stage.connections.wants(A.key)


@pytest.mark.parametrize("first", ["lease", "transport"])
def test_what_a_source_says_counts_whether_its_transport_notices_before_or_after(
    first: str,
) -> None:
    gone = PeerLostError("gone")
    stage = Stage(dict.fromkeys((TCP1, UCX0, OTHER), gone), patience_s=60.0)

    def lose() -> None:
        if first == "transport":
            stage.said = [(A.key, busy("a"))]
        stage.lose(0, busy("a") if first == "lease" else PeerRefusedError("the grant has ended"))

    stage.play(lose, lambda: None, stage.end)
    assert stage.tried.count(TCP0) == 2 and stage.no_more == 0


def test_what_a_source_says_last_is_among_the_causes() -> None:
    noticed, said = StaleGenerationError("changed", peer="a"), StaleGenerationError("a was updated")
    stage = Stage(dict.fromkeys((TCP1, UCX0, OTHER), PeerLostError("gone")), patience_s=60.0)
    stage.said = [(A.key, said)]
    stage.play(lambda: stage.lose(0, noticed))
    assert said in stage.causes and stage.no_more == 1


def test_a_source_that_gave_the_place_to_another_reader_is_tried_again() -> None:
    stage = Stage(dict.fromkeys((OTHER,), busy(retry_after_s=30.0)), patience_s=60.0)

    def lose() -> None:
        for number in range(len(stage.added)):
            stage.lose(number, busy())

    def end_when_back() -> None:
        assert stage.tried.count(TCP0) == 2, stage.tried
        stage.end()

    stage.play(lose, lambda: None, end_when_back)
    assert TCP0 in stage.added[2:]


# -- time -------------------------------------------------------------------------------------


def test_the_pool_sleeps_until_a_machine_is_due() -> None:
    """Not a moment before, and for ever if none is."""
    stage = Stage()
    looks: list[float] = []

    def note() -> None:
        looks.append(stage.pool._due_s(0.0))
        stage.due_s = time.monotonic() + 0.05
        stage.outcome.changed.set()

    async def main() -> None:
        stage.begin()
        running = asyncio.create_task(stage.pool.run())
        for _ in range(12):
            await asyncio.sleep(0)
        note()
        while not stage.ticked:
            await asyncio.sleep(0.001)
        looks.append(stage.pool._due_s(0.0))
        stage.end()
        await running
        await stage.pool.close()

    asyncio.run(main())
    assert looks == [math.inf, math.inf] and stage.ticked == 1


# -- sources that were given up ---------------------------------------------------------------


def test_a_source_that_was_given_up_is_reported_with_the_reason() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.lose(0, PeerTimeoutError("it stopped")),
        lambda: stage.lose(1, PeerTimeoutError("it stopped")),
        stage.end,
    )
    assert [(left.source, left.reason) for left in stage.pool.left()] == [
        (A.endpoint, "it stopped")
    ]


def test_a_source_whose_chunk_another_gave_is_not_reported() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.lose(0, ChunkElsewhereError("the chunk was requested elsewhere")),
        lambda: stage.lose(1, ChunkElsewhereError("the chunk was requested elsewhere")),
        stage.end,
    )
    assert stage.pool.left() == []


def test_a_source_that_lost_one_path_of_two_is_not_reported() -> None:
    stage = Stage()
    stage.play(lambda: stage.lose(0, PeerLostError("cut")), stage.end)
    assert stage.pool.left() == []


class HangingStage(Stage):
    """LATER never answers."""

    async def open(self, path: SourcePath, layout: Layout) -> Connection:
        if path == LATER:
            self.tried.append(path)
            await asyncio.Event().wait()
        return await super().open(path, layout)


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_of_a_pull_is_no_reason_to_leave_a_neighbour(ends: bool) -> None:
    """Its path is still being opened when the pull ends; without that end, it fails."""
    stage = HangingStage() if ends else Stage({LATER: PeerLostError("cut")})
    stage.swarm.expects = True
    stage.play(stage.coordinate, lambda: stage.join(LATER), lambda: None, stage.end)
    assert LATER in stage.tried
    assert (LATER.source.key in stage.swarm.lost_ids) is not ends
