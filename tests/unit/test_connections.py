"""Which ways a pull opens, and what it opens instead of those that it loses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from mx.core.paths import Medium, Rail
from mx.core.planner import Plan, SourcePath, Spare
from mx.core.types import SourceRecord
from mx.errors import (
    ConfigError,
    DigestError,
    LocalError,
    MxError,
    PathError,
    PathSlowError,
    PeerBusyError,
    PeerLostError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.target.connections import ConnectionPool
from mx.target.connector import Connector, OpenPath
from mx.target.lease import Lease
from mx.target.transfer import Transfer
from mx.transport import Session
from tests.unit.test_planner import source


def on_one_host(name: str) -> SourceRecord:
    """A source on the host that all of them are on: they are not read from beside one another."""
    return replace(source(name), endpoint=f"host:{ord(name[0])}")


A, B = on_one_host("a"), on_one_host("b")


def path(record: Any, transport: str, rail: int = 0) -> SourcePath:
    pair = Rail(f"l{rail}", f"10.0.{rail}.2", f"r{rail}", f"10.0.{rail}.1", 1.0)
    return SourcePath(record, transport, 1.0, False, "", Medium.NETWORK, pair)


TCP0, TCP1, UCX0, OTHER = path(A, "tcp", 0), path(A, "tcp", 1), path(A, "ucx", 0), path(B, "tcp", 0)
PLAN = Plan((TCP0, TCP1), (Spare(UCX0, ""), Spare(OTHER, "")), ())


class GoodLease:
    error: MxError | None = None

    def check(self) -> MxError | None:
        return self.error


class Stage:
    """A crew, and what it opened; `fails` says which ways can't be."""

    def __init__(
        self, fails: dict[SourcePath, MxError] | None = None, *, patience_s: float = 0.0
    ) -> None:
        self.opened: list[SourcePath] = []
        self.added: list[SourcePath] = []
        self.given_back: list[SourcePath] = []
        self.causes: list[MxError] = []
        self.ended = False
        self.no_more = 0
        self.fails = fails or {}
        self.unfit: dict[SourcePath, MxError] = {}
        self.pool = ConnectionPool(
            PLAN, cast(Connector, self), self.open, self.add, self.causes, patience_s
        )

    async def open(self, path: SourcePath) -> OpenPath:
        self.opened.append(path)
        await asyncio.sleep(0)
        if path in self.fails:
            raise self.fails[path]
        return OpenPath(path, cast(Lease, GoodLease()), cast(Session, None))

    def add(self, opened: OpenPath) -> int:
        if opened.path in self.unfit:
            raise self.unfit[opened.path]
        self.added.append(opened.path)
        return len(self.added) - 1

    async def give_back(self, opened: OpenPath) -> None:
        self.given_back.append(opened.path)

    def no_more_connections(self) -> None:
        self.no_more += 1
        self.end()

    def tick(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True
        self.pool.wake()

    def play(self, *steps: Callable[[], None]) -> None:
        """Run the crew; each step is taken once everything before it has settled."""

        async def main() -> None:
            running = asyncio.create_task(
                self.pool.run(
                    lambda: self.ended, lambda: cast(Transfer, self) if self.added else None
                )
            )
            for step in steps:
                for _ in range(10):
                    await asyncio.sleep(0)
                step()
            try:
                await asyncio.wait_for(running, 5)
            finally:
                await self.pool.close()

        asyncio.run(main())


def test_the_ways_that_go_together_are_opened_at_once() -> None:
    stage = Stage()
    stage.play(stage.end)
    assert stage.opened == [TCP0, TCP1]
    assert stage.no_more == 0


@pytest.mark.parametrize("error", [PeerLostError("cut"), PathError("UCX fails")])
def test_a_way_that_is_lost_is_replaced_by_another_over_the_same_rail(error: MxError) -> None:
    stage = Stage()
    stage.play(lambda: stage.pool.connection_lost(0, error), stage.end)
    assert stage.opened == [TCP0, TCP1, UCX0]
    assert stage.given_back == [TCP0]


def test_a_way_that_cannot_be_opened_is_replaced_and_said_why() -> None:
    refused = LocalError("no memory to register")
    stage = Stage({TCP0: refused})
    stage.play(stage.end)
    assert stage.opened == [TCP0, TCP1, UCX0]
    assert stage.causes == [refused]


def test_a_source_that_stopped_is_left_for_another() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.pool.connection_lost(0, PeerTimeoutError("stopped")),
        lambda: stage.pool.connection_lost(1, PeerTimeoutError("stopped")),
        stage.end,
    )
    assert stage.opened == [TCP0, TCP1, OTHER]


def test_a_slow_way_is_taken_again_when_nothing_else_is_left() -> None:
    stage = Stage({UCX0: PeerLostError("no"), OTHER: PeerLostError("no")})
    stage.play(
        lambda: stage.pool.connection_lost(0, PathSlowError("slow")),
        lambda: stage.pool.connection_lost(1, PeerLostError("cut")),
        stage.end,
    )
    assert stage.opened[:3] == [TCP0, TCP1, UCX0]
    assert stage.opened[3:] == [OTHER, TCP0]


def test_the_engine_hears_when_nothing_is_left() -> None:
    gone = PeerLostError("gone")
    stage = Stage({UCX0: gone, OTHER: gone})
    stage.play(
        lambda: stage.pool.connection_lost(0, gone),
        lambda: stage.pool.connection_lost(1, gone),
    )
    assert stage.no_more == 1
    assert sorted(map(str, stage.causes)) == ["gone", "gone"]


def test_a_way_that_cannot_be_made_a_lane_is_replaced() -> None:
    stage = Stage()
    refused = LocalError("no memory to register")
    stage.unfit = {TCP0: refused}
    stage.play(stage.end)
    assert stage.opened == [TCP0, TCP1, UCX0]
    assert stage.given_back == [TCP0]
    assert stage.causes == [refused]


def test_nobody_there_ends_it() -> None:
    gone = PeerLostError("gone")
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0, OTHER), gone))
    stage.play()
    assert stage.added == []
    assert len(stage.causes) == 4


def test_what_no_other_way_would_mend_is_raised() -> None:
    stage = Stage({TCP0: ConfigError("bad certificate")})
    try:
        stage.play()
    except ConfigError as error:
        assert "certificate" in str(error)
    else:
        raise AssertionError("it was swallowed")


# -- those that are found later -------------------------------------------------------------------

LATER = path(on_one_host("later"), "tcp", 0)


def test_a_source_that_comes_later_is_there_when_the_first_is_lost() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.pool.add_candidates([LATER]),
        lambda: stage.pool.connection_lost(0, PeerTimeoutError("stopped")),
        lambda: stage.pool.connection_lost(1, PeerTimeoutError("stopped")),
        lambda: stage.pool.connection_lost(2, PeerTimeoutError("stopped")),
        stage.end,
    )
    assert stage.opened == [TCP0, TCP1, OTHER, LATER]
    assert stage.no_more == 0


def test_who_hopes_is_not_told_that_no_more_come() -> None:
    stage = Stage()
    hoping = [True]
    stage.pool.hoping = lambda: hoping[0]
    lost = [
        lambda n=n: stage.pool.connection_lost(n, PeerTimeoutError("stopped")) for n in range(3)
    ]
    stage.play(
        *lost,
        lambda: stage.pool.add_candidates([LATER]),
        lambda: hoping.__setitem__(0, False),
        lambda: stage.pool.connection_lost(3, PeerTimeoutError("stopped")),
    )
    assert stage.opened == [TCP0, TCP1, OTHER, LATER]
    assert stage.no_more == 1


@pytest.mark.parametrize("from_the_start", [True, False])
def test_when_no_whole_source_is_left_others_are_asked_before_it_is_given_up(
    from_the_start: bool,
) -> None:
    paths = (TCP0, TCP1, UCX0, OTHER)
    stage = Stage(dict.fromkeys(paths, PeerLostError("cut")) if from_the_start else None)
    asked: list[int] = []

    def ask() -> None:
        asked.append(len(stage.opened))
        stage.pool.coordinate()
        stage.pool.expecting = lambda: True
        stage.pool.join("later", [LATER])

    def lose(connection: int) -> None:
        if not from_the_start:
            stage.pool.connection_lost(connection, PeerTimeoutError("stopped"))

    stage.pool.none_left = ask
    stage.play(lambda: lose(0), lambda: lose(1), lambda: lose(2), stage.end)
    assert asked == [len(stage.opened) - 1]  # once, after all others
    assert stage.opened[-1] == LATER
    assert stage.no_more == 0


def test_in_a_swarm_one_that_is_found_again_and_again_is_tried_once() -> None:
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0, OTHER), PeerLostError("cut")))
    stage.pool.none_left = stage.pool.coordinate
    stage.pool.expecting = lambda: True
    settled = [lambda: None] * 3
    stage.play(
        *settled,
        lambda: stage.pool.add_candidates([OTHER]),
        lambda: stage.pool.add_candidates([OTHER]),
        lambda: setattr(stage.pool, "none_left", lambda: None),
        stage.pool.read_freely,
        *settled,
        stage.end,
    )
    assert stage.opened.count(OTHER) == 2


def test_a_source_that_was_lost_is_tried_again_only_if_there_is_nobody_else() -> None:
    stage = Stage()
    stage.pool.hoping = lambda: True
    again = [stage.pool.add_candidates] * 2
    stage.play(
        lambda: stage.pool.connection_lost(0, PeerTimeoutError("stopped")),
        lambda: stage.pool.connection_lost(1, PeerTimeoutError("stopped")),
        lambda: again[0]([TCP0, TCP1]),  # the other is being read from
        lambda: stage.pool.connection_lost(2, PeerTimeoutError("stopped")),
        lambda: again[1]([TCP0, TCP1]),
        stage.end,
    )
    assert stage.opened == [TCP0, TCP1, OTHER, TCP0, TCP1]


@pytest.mark.parametrize("error", [DigestError("wrong"), StaleGenerationError("changed")])
def test_a_source_that_lied_or_changed_never_comes_back(error: MxError) -> None:
    stage = Stage()
    stage.pool.hoping = lambda: True
    stage.play(
        lambda: stage.pool.connection_lost(0, error),
        lambda: stage.pool.connection_lost(1, error),
        lambda: stage.pool.connection_lost(2, PeerTimeoutError("stopped")),
        lambda: stage.pool.add_candidates([TCP0, TCP1]),
        lambda: stage.pool.add_candidates([LATER]),
        stage.end,
    )
    assert stage.opened == [TCP0, TCP1, OTHER, LATER]


def test_in_a_swarm_later_ones_wait_until_there_is_none() -> None:
    stage = Stage()
    stage.pool.expecting = lambda: True
    stage.play(
        stage.pool.coordinate,
        lambda: stage.pool.add_candidates([LATER]),
        lambda: stage.pool.connection_lost(0, PeerTimeoutError("stopped")),
        lambda: stage.pool.connection_lost(1, PeerTimeoutError("stopped")),
        stage.pool.read_freely,
        stage.end,
    )
    assert stage.opened[:2] == [TCP0, TCP1]
    assert stage.opened[2:] == [OTHER]  # LATER is as good, and behind it
    assert stage.no_more == 0


# -- those that are busy --------------------------------------------------------------------------


def busy(peer: str = "b", retry_after_s: float = 0.0) -> PeerBusyError:
    return PeerBusyError(f"{peer} is busy", peer=peer, retry_after_s=retry_after_s)


class BusyStage(Stage):
    """Sources that are busy the first `times`."""

    def __init__(self, times: int, *, patience_s: float = 60.0) -> None:
        super().__init__(patience_s=patience_s)
        self.times = times

    async def open(self, path: SourcePath) -> OpenPath:
        if self.opened.count(path) < self.times:
            self.opened.append(path)
            raise busy()
        return await super().open(path)

    def add(self, opened: OpenPath) -> int:
        number = super().add(opened)
        self.end()
        return number


def test_another_source_is_read_from_while_one_is_busy() -> None:
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0), busy()), patience_s=60.0)
    stage.play(stage.end)
    assert stage.opened == [TCP0, TCP1, UCX0, OTHER] and stage.added == [OTHER]
    assert [left.source for left in stage.pool.left()] == [A.endpoint]


def test_where_all_are_busy_they_are_asked_again() -> None:
    stage = BusyStage(3)
    stage.play()
    assert stage.opened.count(TCP0) == 4
    assert stage.added
    assert len(stage.causes) <= 4  # each way complains once


def test_patience_with_busy_sources_has_an_end() -> None:
    stage = BusyStage(1000, patience_s=0.3)
    stage.play()
    assert not stage.added
    assert stage.causes and all(isinstance(cause, PeerBusyError) for cause in stage.causes)


def test_who_is_busy_is_not_asked_sooner_than_it_says() -> None:
    stage = Stage(dict.fromkeys((TCP0, TCP1, UCX0, OTHER), busy(retry_after_s=30.0)))
    stage.pool = ConnectionPool(
        PLAN, cast(Connector, stage), stage.open, stage.add, stage.causes, 0.6
    )
    stage.play()
    assert sorted(map(stage.opened.count, (TCP0, TCP1, UCX0, OTHER))) == [1, 1, 1, 1]
    assert not stage.pool.wants(A.source_id)


def test_a_place_that_was_given_to_another_is_asked_for_again() -> None:
    stage = Stage(dict.fromkeys((OTHER,), busy(retry_after_s=30.0)), patience_s=60.0)

    def lose() -> None:
        for number in range(len(stage.added)):
            stage.pool.connection_lost(number, busy())

    def end_when_back() -> None:
        assert stage.opened.count(TCP0) == 2, stage.opened
        stage.end()

    stage.play(lose, lambda: None, end_when_back)
    assert TCP0 in stage.added[2:]


# -- what is told of those that were left -----------------------------------------------------


def test_who_was_left_is_named_with_the_reason() -> None:
    stage = Stage()
    stage.play(
        lambda: stage.pool.connection_lost(0, PeerTimeoutError("it stopped")),
        lambda: stage.pool.connection_lost(1, PeerTimeoutError("it stopped")),
        stage.end,
    )
    assert [(left.source, left.reason) for left in stage.pool.left()] == [
        (A.endpoint, "it stopped")
    ]


def test_who_lost_a_way_but_is_still_read_from_was_not_left() -> None:
    stage = Stage()
    stage.play(lambda: stage.pool.connection_lost(0, PeerLostError("cut")), stage.end)
    assert stage.pool.left() == []
