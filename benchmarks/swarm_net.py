"""Simulates a network: links that transfers share, and events in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

#: A transfer with less than this left, in chunks, counts as done (rounding).
_DONE = 1e-9


class Link:
    """One node's link: its rates out and in, in chunks per second, full duplex."""

    __slots__ = ("down", "downs", "up", "ups")

    def __init__(self, up: float, down: float) -> None:
        self.up = up
        self.down = down
        self.ups: list[Transfer] = []
        self.downs: list[Transfer] = []


class Transfer:
    """The transfer of one chunk from a sender to a receiver."""

    __slots__ = ("_from", "_to", "chunk", "due", "left", "rate", "receiver", "sender", "since")

    def __init__(self, sender: int, receiver: int, chunk: int, way_out: Link, way_in: Link) -> None:
        self.sender = sender
        self.receiver = receiver
        self.chunk = chunk
        self._from = way_out
        self._to = way_in
        self.left = 1.0  # chunks
        self.rate = 0.0
        self.since = 0.0
        self.due = float("inf")  # when its event is scheduled; -1: it has ended

    def begin(self, network: Network) -> None:
        self.since = network.now_s
        self._from.ups.append(self)
        self._to.downs.append(self)
        self._share(network)

    def end(self, network: Network) -> None:
        """Remove the transfer from the links, whether it is done or not."""
        if self.due != -1:
            self.due = -1
            self._from.ups.remove(self)
            self._to.downs.remove(self)
            self._share(network)

    def _share(self, network: Network) -> None:
        for each in self._from.ups:
            each.pace(network)
        for each in self._to.downs:
            each.pace(network)

    def pace(self, network: Network) -> None:
        """Set the rate: the lesser of its equal shares of the sender's and the receiver's link.

        What one of them leaves unused stays unused (TCP would do better).
        """
        rate = self._from.up / len(self._from.ups)
        share = self._to.down / len(self._to.downs)
        if share < rate:
            rate = share
        if rate != self.rate:
            now_s = network.now_s
            self.left -= self.rate * (now_s - self.since)
            self.since = now_s
            self.rate = rate
            due = now_s + self.left / rate
            if due < self.due:  # the earlier event finds out that the transfer ends later
                self.due = due
                network.at(due, self._due, network)

    def _due(self, network: Network) -> None:
        if self.due != network.now_s:
            return  # it has ended, or has another event
        left = self.left - self.rate * (network.now_s - self.since)
        if left > _DONE:
            self.due = network.now_s + left / self.rate
            network.at(self.due, self._due, network)
            return
        self.end(network)
        network.landed(self)


class Network:
    """Runs the events, and calls `landed` with each completed transfer."""

    def __init__(self, landed: Callable[[Transfer], None]) -> None:
        self.now_s = 0.0
        self.events = 0
        self.landed = landed
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        self.events += 1  # also keeps events of equal time in order
        heapq.heappush(self._heap, (time_s, self.events, call, args))

    def run(self, *, limit_s: float) -> None:
        """Run until no event is left, or until `limit_s`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= limit_s:
            self.now_s, _, call, args = pop(heap)
            call(*args)

    def stop(self) -> None:
        """Drop all remaining events."""
        self._heap.clear()
