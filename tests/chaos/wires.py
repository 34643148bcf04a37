"""Fault proxies between a target and the addresses that it dials, in the target's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mx.core.topology import Place
from mx.testing.faultproxy import Direction, FaultProxy
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Session,
    Transport,
    Unavailable,
    Viable,
)
from mx_transports.toolkit import framing
from tests.chaos.schedule import COORDINATOR, Damage, Wire


class Wires:
    """The proxies of one pull, one for each address, made when it is first dialled.

    Close it after the pull. `names` has the schedule's source at each endpoint.
    """

    def __init__(
        self, wires: Sequence[Wire], mbyte_per_s: float | None, names: Mapping[str, str]
    ) -> None:
        self._wires = wires
        self._mbyte_per_s = mbyte_per_s
        self._names = names
        self._lock = threading.Lock()
        self._proxies: dict[tuple[str, int], tuple[str, FaultProxy]] = {}
        self._stalled: set[Wire] = set()
        self._closed = False
        self._timers: list[threading.Timer] = []
        for wire in wires:
            if wire.damage is Damage.STALL:
                self._later(wire.after_s, self._stall, wire)
                self._later(wire.after_s + wire.for_s, self._resume, wire)
            elif wire.damage is Damage.RESET:
                self._later(wire.after_s, self._reset, wire)

    def by_path(self, peer: str, address: tuple[str, int]) -> tuple[str, int]:
        """Return the address to dial instead. `peer` is the source's endpoint, or COORDINATOR."""
        name = self._names.get(peer, peer)
        with self._lock:
            if self._closed:
                return address
            if address not in self._proxies:
                proxy = FaultProxy(address)
                self._proxies[address] = name, proxy
                for wire in self._wires:
                    if wire.peer == name:
                        self._damage(proxy, wire)
                if name != COORDINATOR:
                    self._throttle(proxy)
            return self._proxies[address][1].address

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        for _, proxy in self._proxies.values():
            proxy.close()

    def _later(self, delay_s: float, action: Callable[[Wire], None], wire: Wire) -> None:
        timer = threading.Timer(delay_s, action, (wire,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _throttle(self, proxy: FaultProxy) -> None:
        if self._mbyte_per_s is not None:
            proxy.down.throttle(self._mbyte_per_s * 1e6)

    def _damage(self, proxy: FaultProxy, wire: Wire) -> None:
        path = _way(proxy, wire)
        match wire.damage:
            case Damage.FLIP:
                path.flip(wire.offset, once=wire.once)
            case Damage.TRUNCATE:
                path.truncate(wire.offset, once=wire.once)
            case Damage.GARBAGE:
                path.garbage(wire.offset, once=wire.once)
            case Damage.STALL if wire in self._stalled:
                path.stall()
            case _:
                pass

    def _at(self, wire: Wire) -> list[FaultProxy]:
        return [proxy for name, proxy in self._proxies.values() if name == wire.peer]

    def _stall(self, wire: Wire) -> None:
        with self._lock:
            self._stalled.add(wire)
            for proxy in self._at(wire):
                _way(proxy, wire).stall()

    def _resume(self, wire: Wire) -> None:
        with self._lock:
            self._stalled.discard(wire)
            for proxy in self._at(wire):
                _way(proxy, wire).resume()
                self._throttle(proxy)

    def _reset(self, wire: Wire) -> None:
        with self._lock:
            for proxy in self._at(wire):
                proxy.cut()


def _way(proxy: FaultProxy, wire: Wire) -> Direction:
    return proxy.down if wire.towards_target else proxy.up


class Through:
    """The `tcp` transport, with its connections through `wires` while there are any."""

    name = "tcp"

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.wires: Wires | None = None

    def probe(self) -> Viable | Unavailable:
        return self._inner.probe()

    def reach(self, here: Place, there: Place) -> Path | None:
        return self._inner.reach(here, there)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return self._inner.expose(regions, options)

    def open(self, grant: Grant) -> Session:
        wires = self.wires
        if wires is not None:
            ticket = framing.decode_ticket(grant.ticket, grant.peer)
            listed = ticket.fields["addresses"]
            assert isinstance(listed, list)
            by_path = [list(wires.by_path(grant.peer, (host, port))) for host, port in listed]
            ticket = ticket._replace(fields={**ticket.fields, "addresses": by_path})
            grant = replace(grant, ticket=ticket.encode())
        return self._inner.open(grant)
