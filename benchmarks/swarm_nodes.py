"""Simulates the nodes of a swarm: mx's own state machines, with simulated messages."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from mx.core.swarm.commands import Cancel, Command, Decline, Interested, ReadFreely, Request
from mx.core.swarm.neighbours import Neighbours
from mx.core.swarm.origin import Seeder, Suggest
from mx.core.swarm.receiver import Receiver
from mx.core.swarm.slots import Allow, Answer, Reject, Slots, Unchoke

from .swarm_net import Link, Network, Transfer
from .swarm_setting import Outcome, RarestFirst, Setting, SimulatedReceiver

ORIGIN = 0
TICK_S = 0.2
LIST_S = 1.0


@dataclass
class Node:
    number: int
    speed: float
    link: Link
    receiver: Receiver
    slots: Slots
    neighbours: Neighbours
    joined_s: float
    readers: set[int] = field(default_factory=set)
    flights: dict[tuple[int, int], Transfer] = field(default_factory=dict)  # (reader, chunk)
    alive: bool = True
    finish_s: float | None = None
    quarter_s: float | None = None


class Swarm:
    """One run of the simulation."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.network = Network(self._landed)
        self._mesh = setting.policy in ("ours", "naive", "rarest")
        self.seeder: Seeder | None = None
        self._all = (1 << setting.k) - 1
        self._quarter = (1 << max(1, setting.k // 4)) - 1
        self._opened = False
        self._requests = self._most = 0
        self.sent = [0] * (setting.n + 1)
        self.nodes = [self._node(number) for number in range(setting.n + 1)]
        self._unfinished = setting.n
        if setting.policy == "ours":
            self.seeder = Seeder(setting.k, suggestions=self._width(setting.origin_speed) + 1)
            self.network.at(TICK_S, self._tick_origin)
        for node in self.nodes[1:]:
            self.network.at(node.joined_s, self._join, node)
        doomed = round(setting.n * setting.deaths + 0.5) if setting.deaths else 0
        mortal = [node.number for node in self.nodes[1:] if not self._slow(node)]
        for number in self.rng.sample(mortal, min(doomed, len(mortal) - 1)):
            at_s = self.rng.uniform(0.1, 0.9) * setting.ideal_s
            self.network.at(at_s, self._die, self.nodes[number])

    def _node(self, number: int) -> Node:
        setting = self.setting
        speed = setting.origin_speed if number == ORIGIN else 1.0
        if number != ORIGIN:
            speed = setting.uneven ** self.rng.uniform(-1, 1)
            if number == setting.n:
                speed *= setting.slow
        rate = setting.chunks_per_s * speed
        receiver = SimulatedReceiver(setting.k, width=self._width(speed))
        if setting.policy == "rarest":
            receiver = RarestFirst(setting.k, width=self._width(speed))
            receiver.rng = random.Random(setting.seed * 1000 + number)
        width = setting.n if setting.policy in ("star", "tree") else self._width(speed)
        neighbours = Neighbours(str(number), seed=setting.seed)
        if number == ORIGIN:
            neighbours = Neighbours("0", most=setting.origin_readers, picks=0)
        joined_s = self.rng.uniform(0, setting.join_s) if number > 1 else 0.0
        return Node(
            number, speed, Link(rate, rate), receiver, Slots(width=width), neighbours, joined_s
        )

    def _width(self, speed: float) -> int:
        return max(self.setting.width, round(self.setting.width * speed))

    def run(self) -> Outcome:
        setting = self.setting
        self.network.run(limit_s=setting.ideal_s * setting.n * 8 + setting.join_s)
        healthy = [n for n in self.nodes[1:] if n.alive and not self._slow(n)]
        finishes = [self._over_ideal(n, n.finish_s) for n in healthy]
        return Outcome(
            max(finishes),
            statistics.fmean(finishes),
            statistics.fmean(self._over_ideal(n, n.quarter_s) for n in healthy),
            self.sent[ORIGIN] / setting.k,
            self._requests / max(1, sum(self.sent)),
            sum(n.receiver.hedges for n in self.nodes),
            self._most,
            self.network.events,
        )

    def _over_ideal(self, node: Node, seconds: float | None) -> float:
        if seconds is None:
            return float("inf")
        return seconds / self.setting.ideal_s * min(node.speed, self.setting.origin_speed)

    def _slow(self, node: Node) -> bool:
        return self.setting.slow < 1 and node.number == self.setting.n

    # -- neighbours -----------------------------------------------------------------------------

    def _join(self, node: Node) -> None:
        number = node.number
        if not self._mesh:
            parents = {"star": 0, "chain": number - 1, "tree": number & (number - 1)}
            self._link(node, self.nodes[parents[self.setting.policy]])
        else:
            self._discover(node)
        self.network.at(self.network.now_s + TICK_S * self.rng.uniform(1, 2), self._tick, node)

    def _discover(self, node: Node) -> None:
        """Connect to peers from the coordinator's list."""
        if not node.alive or node.finish_s is not None:
            return
        now_s = self.network.now_s
        there = (str(n.number) for n in self.nodes[1:] if n.alive and n.joined_s <= now_s)
        self._greet(node, node.neighbours.listed(there))
        self._discover_origin(node)
        self.network.at(now_s + LIST_S, self._discover_more, node)

    def _discover_more(self, node: Node) -> None:
        if len(node.neighbours.linked) < min(6, self.setting.n - 1):
            self._discover(node)
        elif node.finish_s is None:
            self._discover_origin(node)
            self.network.at(self.network.now_s + LIST_S, self._discover_more, node)

    def _discover_origin(self, node: Node) -> None:
        if ORIGIN not in node.receiver.peers:
            at_s = self.network.now_s + self._latency
            self.network.at(at_s, self._greeted, self.nodes[ORIGIN], node)

    def _greet(self, node: Node, names: Iterable[str]) -> None:
        for name in names:
            at_s = self.network.now_s + self._latency
            self.network.at(at_s, self._greeted, self.nodes[int(name)], node)

    def _greeted(self, node: Node, by: Node) -> None:
        welcome = False
        if node.alive and by.alive:
            welcome, drop = node.neighbours.greeting(str(by.number))
            if drop is not None:
                self._part(node, self.nodes[int(drop)])
        self.network.at(self.network.now_s + self._latency, self._answered, by, node, welcome)

    def _part(self, node: Node, other: Node) -> None:
        """End all transfers between two nodes, one of which closed its streams to the other."""
        for here, there in ((node, other), (other, node)):
            for key in [key for key in here.flights if key[0] == there.number]:
                here.flights.pop(key).end(self.network)
            at_s = self.network.now_s + self._latency
            self.network.at(at_s, self._lost, here, there.number)

    def _answered(self, by: Node, node: Node, welcome: bool) -> None:
        if node.number != ORIGIN:
            self._greet(by, by.neighbours.answered(str(node.number), welcome))
        if welcome and by.alive and node.alive:
            self._link(by, node)

    def _link(self, node: Node, other: Node) -> None:
        """Make two nodes neighbours; one may be the origin."""
        now_s = self.network.now_s
        if other.number in node.receiver.peers:
            return
        there = other.receiver.held
        if other.number == ORIGIN:
            there = self._all if self.seeder is None or self._opened else 0
        held = node.receiver.joined(other.number, there)
        node.readers.add(other.number)
        other.readers.add(node.number)
        for each in (node, other)[: 2 if other.number else 1]:
            self._most = max(self._most, len(each.neighbours.linked))
        if other.number != ORIGIN:
            other.receiver.joined(node.number, held)
            self._do(other, other.receiver.plan(now_s))
        elif self.seeder is not None:
            self._suggest(self.seeder.joined(node.number, held, now_s))
        self._do(node, node.receiver.plan(now_s))

    def _die(self, node: Node) -> None:
        if node.finish_s is None:
            self._finished()
        node.alive = False
        for other in self.nodes:
            for transfer in [*other.link.ups]:
                if node.number in (transfer.sender, transfer.receiver):
                    transfer.end(self.network)
                    other.flights.pop((transfer.receiver, transfer.chunk), None)
        for number in node.readers:
            at_s = self.network.now_s + self.setting.detect_s
            self.network.at(at_s, self._lost, self.nodes[number], node.number)

    def _lost(self, node: Node, dead: int) -> None:
        if not node.alive:
            return
        now_s = self.network.now_s
        node.readers.discard(dead)
        self._greet(node, node.neighbours.gone(str(dead)))
        self._answers(node, node.slots.gone(dead))
        if node.number != ORIGIN:
            self._do(node, node.receiver.gone(dead, now_s))
        elif self.seeder is not None:
            self._suggest(self.seeder.gone(dead, now_s))

    # -- messages -------------------------------------------------------------------------------

    @property
    def _latency(self) -> float:
        return self.setting.latency_s

    def _do(self, node: Node, commands: Iterable[Command]) -> None:
        if not node.alive:
            return
        at, now_s, latency_s = self.network.at, self.network.now_s, self.setting.latency_s
        for each in commands:
            if type(each) is Request:
                # Request and answer in one event: an answer takes as long as the first byte.
                at(now_s + 2 * latency_s, self._requested, node, self.nodes[each.peer], each.chunk)
            elif type(each) is Cancel:
                peer = self.nodes[each.peer]
                at(now_s + latency_s, self._cancelled, node.number, peer, each.chunk)
            elif type(each) is Decline:
                at(now_s + latency_s, self._declined, node.number, each.chunk)
            elif type(each) is ReadFreely:
                at(now_s + 2 * latency_s, self._taken, node, self.nodes[each.peer], each.chunk)
            elif type(each) is Interested:
                at(now_s + latency_s, self._interested, node.number, self.nodes[each.peer])
            else:
                at(now_s + latency_s, self._not_interested, node.number, self.nodes[each.peer])

    def _requested(self, node: Node, source: Node, chunk: int) -> None:
        if not node.alive or not source.alive:
            return
        if source.number not in node.receiver.requested(chunk):
            return  # the reader has given it up meanwhile
        self._requests += 1
        number = node.number
        answer = Answer.REJECT
        if source.number != ORIGIN or self.seeder is None:
            answer = source.slots.request(number, chunk)
        elif self.seeder.may_request(number, chunk):
            suggested = self.seeder.suggested(number, chunk)
            answer = source.slots.request(number, chunk, suggested=suggested)
        if answer is Answer.ALLOW:
            self._begin(source, node, chunk)
        elif answer is Answer.REJECT:
            self._do(node, node.receiver.rejected(source.number, chunk, self.network.now_s))

    def _taken(self, node: Node, source: Node, chunk: int) -> None:
        if node.alive and source.alive:
            self._begin(source, node, chunk)

    def _begin(self, source: Node, node: Node, chunk: int) -> None:
        if (node.number, chunk) in source.flights:
            return  # it is read already, without a request
        transfer = Transfer(source.number, node.number, chunk, source.link, node.link)
        source.flights[node.number, chunk] = transfer
        transfer.begin(self.network)

    def _landed(self, transfer: Transfer) -> None:
        now_s = self.network.now_s
        source, node = self.nodes[transfer.sender], self.nodes[transfer.receiver]
        del source.flights[transfer.receiver, transfer.chunk]
        self.sent[transfer.sender] += 1
        # `finished` is sent before the next request, and arrives before it.
        at_s = now_s + 2 * self.setting.latency_s
        self.network.at(at_s, self._done, source, transfer.receiver, transfer.chunk)
        receiver = node.receiver
        announced_s = receiver.announce_at_s
        self._do(node, receiver.landed(transfer.sender, transfer.chunk, now_s))
        if announced_s is None and receiver.announce_at_s is not None:
            self.network.at(receiver.announce_at_s, self._announce, node)
        if node.quarter_s is None and not ~receiver.held & self._quarter:
            node.quarter_s = now_s - node.joined_s
        if not receiver.left and node.finish_s is None:
            node.finish_s = now_s - node.joined_s
            self._finished()

    def _finished(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self.network.stop()

    def _done(self, source: Node, reader: int, chunk: int) -> None:
        if source.alive:
            if source.number == ORIGIN and self.seeder is not None:
                self._suggest(self.seeder.done(reader, chunk, self.network.now_s))
            self._answers(source, source.slots.done(reader, chunk))

    def _cancelled(self, reader: int, source: Node, chunk: int) -> None:
        transfer = source.flights.pop((reader, chunk), None)
        if transfer is not None:
            transfer.end(self.network)
        self._answers(source, source.slots.done(reader, chunk))
        if source.number == ORIGIN and self.seeder is not None:
            self._suggest(self.seeder.failed(reader, chunk, self.network.now_s))

    def _interested(self, reader: int, source: Node) -> None:
        later = source.number == ORIGIN and self.seeder is not None and not self.seeder.all_out
        self._answers(source, source.slots.interested(reader, later=later))

    def _not_interested(self, reader: int, source: Node) -> None:
        self._answers(source, source.slots.not_interested(reader))

    def _answers(self, source: Node, answers: Iterable[Allow | Unchoke | Reject]) -> None:
        for each in answers:
            node = self.nodes[each.reader]
            if type(each) is Allow:
                if node.alive:
                    self._begin(source, node, each.chunk)
            elif type(each) is Reject:
                at_s = self.network.now_s + self._latency
                self.network.at(at_s, self._refused, node, source, each.chunk)
            else:
                self.network.at(self.network.now_s + self._latency, self._unchoked, node, source)

    def _refused(self, node: Node, source: Node, chunk: int) -> None:
        self._do(node, node.receiver.rejected(source.number, chunk, self.network.now_s))

    def _unchoked(self, node: Node, source: Node) -> None:
        self._do(node, node.receiver.unchoked(source.number, self.network.now_s))

    def _announce(self, node: Node) -> None:
        at_s = self.network.now_s + self.setting.latency_s
        self.network.at(at_s, self._hear, node, node.receiver.announcements())

    def _hear(self, node: Node, announced: list[tuple[int, int]]) -> None:
        now_s, nodes = self.network.now_s, self.nodes
        for number, chunks in announced:
            if number == ORIGIN:
                if self.seeder is not None:
                    self.seeder.announced(node.number, chunks)
                continue
            other = nodes[number]
            commands = other.receiver.announced(node.number, chunks, now_s)
            if commands:
                self._do(other, commands)

    # -- the origin's suggestions ---------------------------------------------------------------

    def _suggest(self, suggestions: Iterable[Suggest]) -> None:
        at_s = self.network.now_s + self.setting.latency_s
        for each in suggestions:
            self.network.at(at_s, self._suggested, self.nodes[each.reader], each.chunk)
        if self.seeder is not None and self.seeder.all_out and not self._opened:
            self._opened = True
            for number in self.nodes[ORIGIN].readers:
                self.network.at(at_s, self._open_to, self.nodes[number])

    def _open_to(self, node: Node) -> None:
        self._do(node, node.receiver.announced(ORIGIN, self._all, self.network.now_s))

    def _suggested(self, node: Node, chunk: int) -> None:
        self._do(node, node.receiver.suggested(ORIGIN, chunk, self.network.now_s))

    def _declined(self, reader: int, chunk: int) -> None:
        if self.seeder is not None:
            self._suggest(self.seeder.declined(reader, chunk, self.network.now_s))

    def _tick(self, node: Node) -> None:
        if not node.alive or node.finish_s is not None:
            return
        self._answers(node, node.slots.tick(self.network.now_s))
        self._do(node, node.receiver.tick(self.network.now_s))
        self.network.at(self.network.now_s + TICK_S, self._tick, node)

    def _tick_origin(self) -> None:
        if self.seeder is not None and self._unfinished:
            origin = self.nodes[ORIGIN]
            self._answers(origin, origin.slots.tick(self.network.now_s))
            self._suggest(self.seeder.tick(self.network.now_s))
            self.network.at(self.network.now_s + TICK_S, self._tick_origin)
