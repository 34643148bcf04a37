"""What each address holds of a server's running calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


def test_an_address_has_a_share_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 4)
    monkeypatch.setattr(calls, "MOST_CALLS_OF_ADDRESS", 2)
    running, made = Calls(), [Call("10.0.0.1", port) for port in (1, 2)]
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
    running, slow = Calls(lambda: now_s), Call("10.0.0.1")
    running.begin(slow).sends(60 * MIB)
    with pytest.raises(CapacityError, match=r"unread answers of 10\.0\.0\.1"):
        running.begin(Call("10.0.0.1")).sends(5 * MIB)
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
    for _ in range(200):
        running.begin(Call("10.0.0.1"))  # many models of one process
    for port in range(3000):
        running.begin(Call("10.0.0.2", port))  # many processes of one address
    assert running.greedy() == frozenset()
    for _ in range(129):
        running.begin(Call("10.0.0.2", 5000))
    assert running.greedy() == {"ipv4:10.0.0.2:5000"}
