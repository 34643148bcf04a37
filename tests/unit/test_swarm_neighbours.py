"""Neighbours in a swarm: within their bound, and every peer finds some."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core.swarm.neighbours import MOST, PICKS, REFUSALS, Neighbours

NAMES = [f"peer-{number}" for number in range(12)]


class Simulation:
    """Peers that greet listed peers. Messages between two peers arrive in order, at any time."""

    def __init__(self, rng: random.Random, *, most: int = MOST, picks: int = PICKS) -> None:
        self.rng = rng
        self.most = most
        self.picks = picks
        self.peers: dict[str, Neighbours] = {}
        self.streams: dict[tuple[str, str], list[str]] = {}  # (from, to) -> messages
        self.order: list[tuple[str, str]] = []  # the streams
        self.sent: Counter[str] = Counter()

    def add(self, name: str) -> None:
        self.peers[name] = Neighbours(name, most=self.most, picks=self.picks)

    def send(self, sender: str, to: str, message: str) -> None:
        self.sent[message] += 1
        if (sender, to) not in self.streams:
            self.streams[sender, to] = []
            self.order.append((sender, to))
        self.streams[sender, to].append(message)

    def listed(self, name: str) -> None:
        self.greet(name, self.peers[name].listed(self.peers))

    def greet(self, name: str, others: list[str]) -> None:
        for other in others:
            assert other != name
            self.send(name, other, "hello")
        self.check(name)

    def check(self, name: str) -> None:
        linked = self.peers[name].linked
        assert len(linked) <= self.most
        assert len(set(linked)) == len(linked)
        assert name not in linked

    def step(self) -> bool:
        """Let one message arrive."""
        if not self.streams:
            return False
        at = self.rng.randrange(len(self.order))
        sender, name = self.order[at]
        queue = self.streams[sender, name]
        message = queue.pop(0)
        if not queue:
            del self.streams[sender, name]
            self.order[at] = self.order[-1]
            self.order.pop()
        if name not in self.peers:
            if message == "hello":
                self.send(name, sender, "gone")
            return True
        peer = self.peers[name]
        if message == "hello":
            answer = peer.greeting(sender)
            if answer.drop is not None:
                assert answer.welcome
                self.send(name, answer.drop, "gone")
            self.send(name, sender, "welcome" if answer.welcome else "no")
        elif message == "gone":
            self.greet(name, peer.gone(sender))
        else:
            self.greet(name, peer.answered(sender, message == "welcome"))
        self.check(name)
        return True

    def settle(self) -> None:
        for _ in range(400 * max(1, len(self.peers))):
            if not self.step():
                return
        pytest.fail("they never stop greeting")

    def dies(self, name: str) -> None:
        del self.peers[name]
        for other in self.peers:
            self.send(name, other, "gone")

    def together(self) -> bool:
        """Return True if a path leads from each peer to every other."""
        names = set(self.peers)
        found = {min(names)}
        edge = set(found)
        while edge:
            edge = {
                other
                for name in names
                for other in self.peers[name].linked
                if other in names and (name in edge) != (other in edge)
            } - found
            found |= edge
        return found == names


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_any_events_in_any_order(data: st.DataObject, most: int, picks: int) -> None:
    """One peer greets only listed peers, not itself, each once at a time, and has no more
    neighbours than places, open greetings included."""
    own = Neighbours("self", most=most, picks=picks)
    greeted: set[str] = set()

    def greets(names: list[str]) -> None:
        assert not greeted & set(names)
        assert not set(names) & set(own.linked)
        assert "self" not in names
        greeted.update(names)

    for _ in range(data.draw(st.integers(0, 60))):
        peer = data.draw(st.sampled_from(NAMES))
        match data.draw(st.integers(0, 4)):
            case 0:
                listed = data.draw(st.lists(st.sampled_from([*NAMES, "self"])))
                greets(own.listed(listed))
            case 1:
                answer = own.greeting(peer)
                if answer.welcome:
                    greeted.discard(peer)
                    assert peer in own.linked
                assert answer.drop is None or answer.drop not in own.linked
            case 2:
                welcome = data.draw(st.booleans())
                expected = peer in greeted and welcome
                greeted.discard(peer)
                greets(own.answered(peer, welcome))
                assert not expected or peer in own.linked
            case _:
                greeted.discard(peer)
                greets(own.gone(peer))
                assert peer not in own.linked
        assert len(own.linked) + len(greeted) <= most
        if not picks:
            assert not greeted


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 39), st.integers(0, 1000))
def test_every_peer_finds_neighbours(count: int, joins_late: int, seed: int) -> None:
    """For any number of peers that join together and any number that join one by one."""
    swarm = Simulation(random.Random(seed))
    for number in range(count):
        swarm.add(f"peer-{number}")
        swarm.listed(f"peer-{number}")
        if number < joins_late:
            swarm.settle()
    swarm.settle()
    for _ in range(3):  # later lists: refused peers greet again
        for name in swarm.peers:
            swarm.listed(name)
        swarm.settle()
    for name, peer in swarm.peers.items():
        assert len(peer.linked) >= min(count - 1, PICKS - 1)
        for other in peer.linked:
            assert name in swarm.peers[other].linked, "only one has the other as a neighbour"
    assert swarm.together()


@pytest.mark.parametrize("seed", range(3))
def test_a_swarm_stays_connected_when_a_fifth_of_its_peers_fail(seed: int) -> None:
    rng = random.Random(seed)
    swarm = Simulation(rng)
    for number in range(200):
        swarm.add(f"peer-{number}")
    for name in list(swarm.peers):
        swarm.listed(name)
    swarm.settle()
    for name in rng.sample(sorted(swarm.peers), 40):
        swarm.dies(name)
    swarm.settle()
    for name in list(swarm.peers):
        swarm.listed(name)
    swarm.settle()
    assert swarm.together()
    assert min(len(peer.linked) for peer in swarm.peers.values()) >= PICKS - 1


def test_peers_that_all_know_the_same_few_do_not_greet_on_and_on() -> None:
    """While a fleet starts, lists have its first peers only."""
    count, first = 200, 60
    swarm = Simulation(random.Random(0))
    for number in range(count):
        swarm.add(f"peer-{number}")
    for _ in range(4):
        for name, peer in swarm.peers.items():
            swarm.greet(name, peer.listed(list(swarm.peers)[:first]))
        while swarm.step():
            pass
    hellos = swarm.sent["hello"]
    assert hellos <= 4 * count * REFUSALS
    for name in swarm.peers:
        swarm.listed(name)
    swarm.settle()
    assert min(len(peer.linked) for peer in swarm.peers.values()) >= PICKS - 1
    assert swarm.together()


def test_who_refused_is_greeted_again_after_all_others() -> None:
    own = Neighbours("self", most=2, picks=1)
    names = [f"peer-{number}" for number in range(2 * REFUSALS)]
    for _ in range(2):
        asked: list[str] = []
        for _ in range(2):  # lists
            greeted = own.listed(names)
            while greeted:
                asked += greeted
                greeted = own.answered(greeted[0], welcome=False)
        assert sorted(asked) == sorted(names)


def test_few_peers_are_all_neighbours() -> None:
    swarm = Simulation(random.Random(0))
    for number in range(MOST + 1):
        swarm.add(f"peer-{number}")
        swarm.listed(f"peer-{number}")
        swarm.settle()
    for name in list(swarm.peers):
        swarm.listed(name)
    swarm.settle()
    assert min(len(peer.linked) for peer in swarm.peers.values()) >= PICKS
    assert swarm.together()


def test_a_peer_without_picks_accepts_greetings() -> None:
    origin = Neighbours("origin", most=2, picks=0)
    assert origin.listed(["a", "b", "c"]) == []
    assert [origin.greeting(name).welcome for name in ("a", "b", "c")] == [True, True, False]
    assert origin.gone("a") == []
    assert origin.greeting("c").welcome


def test_a_new_peer_replaces_a_neighbour_that_was_chosen_beyond_the_share() -> None:
    own = Neighbours("self", most=3, picks=1)
    for name in own.listed(["a", "b", "c"]):
        own.answered(name, welcome=True)
    assert sorted(own.linked) == ["a", "b", "c"]
    dropped = {own.greeting(name).drop for name in ("x", "y")}
    assert dropped < {"a", "b", "c"}
    assert len(dropped) == 2
    assert own.greeting("z") == (False, None)
    assert len(own.linked) == 3


def test_two_peers_whose_greetings_cross_are_neighbours_once() -> None:
    here, there = Neighbours("a"), Neighbours("b")
    assert here.listed(["b"]) == ["b"]
    assert there.listed(["a"]) == ["a"]
    assert here.greeting("b").welcome
    assert there.greeting("a").welcome
    assert here.answered("b", welcome=True) == there.answered("a", welcome=True) == []
    assert here.linked == ("b",)
    assert there.linked == ("a",)
