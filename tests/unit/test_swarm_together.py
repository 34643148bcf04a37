"""A few receivers and an origin, over a network that is slow, loses reads and loses peers: each
living node gets everything, as long as a living node holds each chunk, though some peers take
slots and suggestions and read nothing."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.swarm_nodes import Swarm
from benchmarks.swarm_setting import Setting
from mx.core.swarm.commands import Cancel, Command, Decline, Interested, ReadFreely, Request
from mx.core.swarm.origin import Seeder, Suggest
from mx.core.swarm.receiver import END_CHUNKS
from mx.core.swarm.slots import Allow, Answer, Reject, Slots, Unchoke
from mx.core.swarm.standing import Reader, Standing
from tests.support.receivers import LoneReceiver

ORIGIN = 0
TICK_S = 0.2
LIMIT_S = 600.0


class Node:
    def __init__(
        self, number: int, chunks: int, rng: random.Random, address: str, *, hog: bool = False
    ) -> None:
        self.number = number
        self.hog = hog  # requests slots, accepts suggestions, and reads nothing
        self.address = address
        self.receiver = LoneReceiver(chunks, width=rng.randint(1, 3))
        self.width = rng.randint(1, 3)
        self.sent: Counter[str] = Counter()  # chunks sent, by reader
        sees = rng.random() < 0.7  # else its readers fetch for themselves
        self.standing = Standing(1, lambda reader: self.sent[reader.name] if sees else None)
        self.slots = Slots(width=self.width, standing=self.standing)
        self.reads: set[tuple[int, int]] = set()  # (source, chunk) under way
        self.knows: set[int] = set()
        self.pace_s = rng.choice([0.05, 0.1, 0.2, 3.0])  # for giving a chunk
        self.alive = True


class World:
    """Messages between two arrive in their order, each after a time of its own."""

    def __init__(
        self, nodes: int, chunks: int, seed: int, losses: int, hogs: int = 0, nat: bool = False
    ) -> None:
        """`hogs` share an address; `nat`: all the others share it too."""
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.everything = (1 << chunks) - 1
        self.losses = losses  # reads that will fail
        self.opened = False
        self.chunks = chunks
        self.nodes = [
            Node(n, chunks, self.rng, "nat" if nat else f"host{n}") for n in range(nodes + 1)
        ]
        self.honest = self.nodes[1:]
        self.hogs = [
            Node(n, chunks, self.rng, "nat", hog=True) for n in range(nodes + 1, nodes + 1 + hogs)
        ]
        self.nodes += self.hogs
        standing = self.nodes[ORIGIN].standing
        self.seeder = Seeder(chunks, suggestions=self.rng.randint(1, 4), standing=standing)
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = itertools.count()
        self.latest: dict[tuple[int, int], float] = {}
        for node in self.honest:
            self.after(self.rng.uniform(0, 2), self.join, node)
            self.after(TICK_S, self.tick, node)
        for hog in self.hogs:
            self.after(self.rng.uniform(0, 2), self.join, hog)
            self.after(TICK_S, self.request_all, hog)
        self.after(TICK_S, self.tick_origin)

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (self.now_s + seconds, next(self.count), call, args))

    def send(self, sender: Node, to: Node, call: Callable[..., None], *args: Any) -> None:
        """Lost if either is dead, or has lost the other, when it arrives."""
        pair = sender.number, to.number
        at_s = max(self.latest.get(pair, 0.0), self.now_s + self.rng.uniform(0, 0.05))
        self.latest[pair] = at_s
        self.after(at_s - self.now_s, self.arrives, sender, to, call, args)

    def arrives(
        self, sender: Node, to: Node, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if to.alive and sender.number in to.knows:
            call(to, sender, *args)

    # -- nodes that come and go -----------------------------------------------------------------

    def join(self, node: Node) -> None:
        if not node.alive:
            return
        for other in self.nodes:
            if other is node or not other.alive or (other.number and not other.knows):
                continue
            if node.hog and other.hog:
                continue
            node.knows.add(other.number)
            other.knows.add(node.number)
            for here, there in ((node, other), (other, node)):
                here.standing.joined(there.number, Reader(there.address, str(there.number)))
            if node.hog or other.hog:
                if other.number == ORIGIN:
                    self.suggestion(self.seeder.joined(node.number, 0, self.now_s))
                continue
            if other.number == ORIGIN:
                holds = self.everything if self.opened else 0
                have = node.receiver.joined(ORIGIN, holds, whole=True)
                self.suggestion(self.seeder.joined(node.number, have, self.now_s))
                continue
            held = node.receiver.joined(other.number, other.receiver.held)
            other.receiver.joined(node.number, held)
            self.do(other, other.receiver.plan(self.now_s))
        if not node.hog:
            self.do(node, node.receiver.plan(self.now_s))

    def request_all(self, hog: Node) -> None:
        """Request a random chunk from each source that it knows."""
        for number in hog.knows:
            self.send(hog, self.nodes[number], self.requested, self.rng.randrange(self.chunks))
            self.send(hog, self.nodes[number], self.interested)
        self.after(TICK_S, self.request_all, hog)

    def die(self, node: Node, notice_s: float) -> None:
        """End the node, unless it is the last to hold some chunk."""
        held = self.everything if node.number and self.nodes[ORIGIN].alive else 0
        for other in self.honest:
            if other.alive and other is not node:
                held |= other.receiver.held
        if held != self.everything or not node.alive:
            return
        node.alive = False
        for number in node.knows:
            self.after(notice_s, self.forget, self.nodes[number], node)

    def forget(self, node: Node, dead: Node) -> None:
        if not node.alive or dead.number not in node.knows:
            return
        node.knows.discard(dead.number)
        if node.hog:
            return
        node.reads = {read for read in node.reads if read[0] != dead.number}
        self.answer(node, node.slots.gone(dead.number))
        node.standing.gone(dead.number)
        if node.number:
            self.do(node, node.receiver.gone(dead.number, self.now_s))
        else:
            self.suggestion(self.seeder.gone(dead.number, self.now_s))

    # -- requests -------------------------------------------------------------------------------

    def do(self, node: Node, commands: Iterable[Command]) -> None:
        for command in commands:
            peer = self.nodes[command.peer]
            match command:
                case Request(_, chunk):
                    assert not node.receiver.held >> chunk & 1
                    requesters = node.receiver.requested(chunk)
                    assert len(requesters) < 2 or node.receiver.left <= END_CHUNKS
                    self.send(node, peer, self.requested, chunk)
                case Cancel(_, chunk):
                    node.reads.discard((peer.number, chunk))
                    self.send(node, peer, self.dropped, chunk)
                case Decline(_, chunk):
                    self.send(node, peer, self.declined, chunk)
                case ReadFreely(_, chunk):
                    self.send(node, peer, self.taken_freely, chunk)
                case Interested():
                    self.send(node, peer, self.interested)
                case _:
                    self.send(node, peer, self.not_interested)
        if node.receiver.announce_at_s is not None:
            for number, chunks in node.receiver.announcements():
                self.send(node, self.nodes[number], self.announced, chunks)

    def requested(self, source: Node, reader: Node, chunk: int) -> None:
        number = reader.number
        answer = Answer.REJECT
        if source.number != ORIGIN:
            answer = source.slots.request(number, chunk)
        elif self.seeder.may_request(number, chunk):
            suggested = self.seeder.suggested(number, chunk)
            answer = source.slots.request(number, chunk, suggested=suggested)
        if answer is Answer.ALLOW:
            self.send(source, reader, self.go, chunk)
        elif answer is Answer.REJECT:
            self.send(source, reader, self.busy, chunk)
        assert source.slots.reading < 2 * source.width + len(self.hogs) + 1

    def taken_freely(self, source: Node, reader: Node, chunk: int) -> None:
        """The node reads, whether it is allowed or not."""
        if chunk in (c for s, c in reader.reads if s == source.number):
            return
        reader.reads.add((source.number, chunk))
        self.after(source.pace_s * self.rng.uniform(0.5, 2), self.read, reader, source, chunk)

    def interested(self, source: Node, reader: Node) -> None:
        later = source.number == ORIGIN and not self.seeder.all_out
        self.answer(source, source.slots.interested(reader.number, later=later))

    def go(self, node: Node, source: Node, chunk: int) -> None:
        if node.hog:
            return
        if source.number not in node.receiver.requested(chunk):
            self.send(node, source, self.dropped, chunk)  # the answer to an earlier request
            return
        node.reads.add((source.number, chunk))
        self.after(source.pace_s * self.rng.uniform(0.5, 2), self.read, node, source, chunk)

    def read(self, node: Node, source: Node, chunk: int) -> None:
        if not (node.alive and source.alive) or (source.number, chunk) not in node.reads:
            return
        node.reads.remove((source.number, chunk))
        source.sent[str(node.number)] += 1
        if self.losses:
            self.losses -= 1
            self.send(node, source, self.dropped, chunk)
            self.do(node, node.receiver.failed(source.number, chunk, self.now_s))
            return
        self.send(node, source, self.taken, chunk)
        self.do(node, node.receiver.landed(source.number, chunk, self.now_s))

    def busy(self, node: Node, source: Node, chunk: int) -> None:
        if node.hog:
            return
        self.do(node, node.receiver.rejected(source.number, chunk, self.now_s))

    def unchoked(self, node: Node, source: Node) -> None:
        if node.hog:
            return
        self.do(node, node.receiver.unchoked(source.number, self.now_s))

    def announced(self, node: Node, peer: Node, chunks: int) -> None:
        if node.number == ORIGIN:
            self.seeder.announced(peer.number, chunks)
        elif not node.hog:
            self.do(node, node.receiver.announced(peer.number, chunks, self.now_s))

    # -- answers --------------------------------------------------------------------------------

    def answer(self, source: Node, answers: Iterable[Allow | Unchoke | Reject]) -> None:
        for each in answers:
            reader = self.nodes[each.reader]
            if isinstance(each, Allow):
                self.send(source, reader, self.go, each.chunk)
            elif isinstance(each, Reject):
                self.send(source, reader, self.busy, each.chunk)
            else:
                self.send(source, reader, self.unchoked)

    def not_interested(self, source: Node, reader: Node) -> None:
        self.answer(source, source.slots.not_interested(reader.number))

    def taken(self, source: Node, reader: Node, chunk: int) -> None:
        if source.number == ORIGIN:
            self.suggestion(self.seeder.done(reader.number, chunk, self.now_s))
        self.answer(source, source.slots.done(reader.number, chunk))

    def dropped(self, source: Node, reader: Node, chunk: int) -> None:
        if source.number == ORIGIN:
            self.suggestion(self.seeder.failed(reader.number, chunk, self.now_s))
        self.answer(source, source.slots.done(reader.number, chunk, read=False))

    def declined(self, source: Node, reader: Node, chunk: int) -> None:
        self.suggestion(self.seeder.declined(reader.number, chunk, self.now_s))

    def suggestion(self, suggestions: Iterable[Suggest]) -> None:
        origin = self.nodes[ORIGIN]
        for each in suggestions:
            self.send(origin, self.nodes[each.reader], self.suggested, each.chunk)
        if origin.knows and self.seeder.all_out and not self.opened:
            self.opened = True
            for number in origin.knows:
                self.send(origin, self.nodes[number], self.announced, self.everything)

    def suggested(self, node: Node, origin: Node, chunk: int) -> None:
        if node.hog:
            self.send(node, origin, self.requested, chunk)
            return
        self.do(node, node.receiver.suggested(ORIGIN, chunk, self.now_s))

    # -- time -----------------------------------------------------------------------------------

    def tick(self, node: Node) -> None:
        if node.alive:
            self.answer(node, node.slots.tick(self.now_s))
            self.do(node, node.receiver.tick(self.now_s))
            self.after(TICK_S, self.tick, node)

    def tick_origin(self) -> None:
        if self.nodes[ORIGIN].alive:
            self.answer(self.nodes[ORIGIN], self.nodes[ORIGIN].slots.tick(self.now_s))
            self.suggestion(self.seeder.tick(self.now_s))
            self.after(TICK_S, self.tick_origin)

    def run(self) -> None:
        while self.queue and self.now_s < LIMIT_S:
            if not any(node.alive and node.receiver.left for node in self.honest):
                return
            self.now_s, _, call, args = heapq.heappop(self.queue)
            call(*args)


@settings(max_examples=200)
@given(
    nodes=st.integers(1, 6),
    chunks=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
    losses=st.integers(0, 8),
    deaths=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 8), st.floats(0, 20)), max_size=5),
)
def test_every_living_node_gets_everything(
    nodes: int, chunks: int, seed: int, losses: int, deaths: list[tuple[int, float, float]]
) -> None:
    """Deaths are (node, when, how long until others notice)."""
    world = World(nodes, chunks, seed, losses)
    for number, at_s, notice_s in deaths:
        if number <= nodes:
            world.after(at_s, world.die, world.nodes[number], notice_s)
    world.run()
    left = {node.number: node.receiver.left for node in world.honest if node.alive}
    assert not any(left.values()), f"chunks missing at {world.now_s:.1f} s: {left}"


@settings(max_examples=60)
@given(
    nodes=st.integers(1, 4),
    chunks=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
    hogs=st.integers(1, 6),
    nat=st.booleans(),
)
def test_readers_that_take_slots_and_do_not_read_can_only_delay_the_others(
    nodes: int, chunks: int, seed: int, hogs: int, nat: bool
) -> None:
    world = World(nodes, chunks, seed, losses=0, hogs=hogs, nat=nat)
    world.run()
    left = {node.number: node.receiver.left for node in world.honest}
    assert not any(left.values()), f"chunks missing at {world.now_s:.1f} s: {left}"


@settings(max_examples=40)
@given(
    n=st.integers(1, 10),
    k=st.integers(4, 24),
    seed=st.integers(0, 1000),
    width=st.integers(1, 3),
    deaths=st.sampled_from([0.0, 0.01, 0.3]),
    slow=st.sampled_from([0.1, 1.0]),
)
def test_the_simulator_finishes(
    n: int, k: int, seed: int, width: int, deaths: float, slow: float
) -> None:
    setting = Setting(n=n + 1, k=k, seed=seed, width=width, deaths=deaths, slow=slow)
    outcome = Swarm(setting).run()
    assert 0.25 / k < outcome.quarter < outcome.finish < float("inf")


def test_the_bar_at_31_receivers() -> None:
    """The project's bar, for one of the seeds; `python -m benchmarks.swarm_sim` has them all."""
    outcome = Swarm(Setting()).run()
    assert outcome.finish <= 1.20
    assert outcome.origin_sent <= 1.20
    assert outcome.neighbours <= 16
