"""What each address holds of a server's running calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mx.core.budget import REQUEST_BYTES, Limits
from mx.errors import CapacityError
from mx.units import MIB
from mx.wire import calls
from mx.wire.calls import Calls


class Call:
    """A call's context, as gRPC makes it."""

    def __init__(self, host: str, port: int = 1) -> None:
        self._peer = f"ipv4:{host}:{port}"
        self._callbacks: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, Any]:
        return {}

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


def test_an_address_has_a_share_of_the_calls() -> None:
    running, made = Calls(Limits(calls=4)), [Call("10.0.0.1", port) for port in (1, 2)]
    for call in made:
        running.begin(call)
    with pytest.raises(CapacityError, match=r"2 running calls of 10\.0\.0\.1"):
        running.begin(Call("10.0.0.1", 3))
    for host in ("10.0.0.2", "10.0.0.3"):
        running.begin(Call(host))
    with pytest.raises(CapacityError, match="4 running calls, its limit"):
        running.begin(Call("10.0.0.4"))
    made[0].end()
    assert running.peers == {"ipv4:10.0.0.1:2", "ipv4:10.0.0.2:1", "ipv4:10.0.0.3:1"}
    running.begin(Call("10.0.0.1", 3))


def test_answers_that_are_not_taken_are_counted() -> None:
    now_s = 0.0
    running, slow = Calls(clock=lambda: now_s), Call("10.0.0.1")
    running.begin(slow).sends(60 * MIB)
    with pytest.raises(CapacityError, match=r"unread answers of 10\.0\.0\.1"):
        running.begin(Call("10.0.0.1")).sends(7 * MIB)
    now_s = calls.UNREAD_S - 1
    other = running.begin(Call("10.0.0.2"))
    other.sends(5 * MIB)
    assert running.stuck() == frozenset()
    now_s = calls.UNREAD_S
    assert running.stuck() == {slow.peer()}
    other.sent()
    other.sends(1)  # anew
    slow.end()
    assert running.stuck() == frozenset()
    running.begin(Call("10.0.0.1")).sends(64 * MIB)


def test_a_connection_is_greedy_only_where_its_address_is() -> None:
    running = Calls()
    for _ in range(100):
        running.begin(Call("10.0.0.1")).completed()  # many models of one process
    for port in range(3000):
        running.begin(Call("10.0.0.2", port)).completed()  # many processes of one address
    assert running.greedy() == frozenset()
    for _ in range(65):
        running.begin(Call("10.0.0.2", 5000)).completed()
    assert running.greedy() == {"ipv4:10.0.0.2:5000"}


def test_the_oldest_incomplete_requests_give_way_and_fresh_ones_are_refused() -> None:
    now_s = 0.0
    limits = Limits(requests_nbytes=4 * REQUEST_BYTES)
    running = Calls(limits, lambda: now_s)
    ended: list[int] = []
    running.on_faulty = lambda: ended.append(1)
    slow = [running.begin(Call("10.0.0.1", 1)) for _ in range(2)]
    with pytest.raises(CapacityError, match=r"2 incomplete requests of 10\.0\.0\.1"):
        running.begin(Call("10.0.0.1", 2))
    for _ in range(2):
        running.begin(Call("10.0.0.2"))
    with pytest.raises(CapacityError, match="4 incomplete requests, its limit"):
        running.begin(Call("10.0.0.3"))
    now_s = 1.0
    other = Call("10.0.0.3")
    running.begin(other)  # the address with the most gives way
    assert [each.gives_way for each in slow] == [True, False]
    other.end()
    running.begin(Call("10.0.0.3")).completed()
    running.begin(Call("10.0.0.3")).completed()
    assert running.incomplete.total == 3
    assert not ended


def test_a_connection_that_goes_on_with_what_is_refused_is_ended() -> None:
    running, peer = Calls(), Call("10.0.0.1")
    running.begin(Call("10.0.0.1")).completed()
    calls_ = [running.begin(peer) for _ in range(16)]
    for call in calls_[:15]:
        call.refused()
    assert running.faulty() == frozenset()
    calls_[15].refused()
    assert running.faulty() == {peer.peer()} and running.faulty() == frozenset()


def test_a_flood_of_incomplete_requests_ends_the_connections_that_have_many_of_them() -> None:
    running = Calls(Limits(requests_nbytes=60 * REQUEST_BYTES))
    honest = Call("10.0.0.2", 7)
    running.begin(honest).completed()
    with pytest.raises(CapacityError):
        for number in range(60):
            running.begin(Call("10.0.0.1", 0 if number > 5 else 1))
    assert running.faulty() == {"ipv4:10.0.0.1:0"}
    assert running.flooding() == (frozenset({"10.0.0.1"}), frozenset({honest.peer()}))


def test_faults_are_remembered_from_call_to_call() -> None:
    running = Calls()
    for _ in range(16):
        assert running.faulty() == frozenset()
        one = Call("10.0.0.1")
        running.begin(one).refused()
        one.end()
    assert running.faulty() == {one.peer()}
