"""How long a pull would take at some place, from whom, and what that costs the sources. Pure.

The planner says which paths a pull would use and how fast they are by what interfaces declare. What
pulls have measured between the two hosts lately counts more, and what sources serve to others at
the moment is not there for one more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mx.core.planner import Plan, SourcePath
from mx.core.types import ModelKey
from mx.units import format_rate, format_seconds

#: What a pull does before its first byte and after its last one: look-ups, leases, connections.
SETUP_S = 0.05
#: Until memory of the same host is attached and ready.
ATTACH_S = 0.03


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """What a source serves at the moment: to how many readers, and how much."""

    readers: int = 0
    gb_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Size:
    """What a pull moves: of the whole model, and of the layers up to the first that has bytes."""

    nbytes: int
    first_layer_nbytes: int


@dataclass(frozen=True, slots=True)
class SourceCost:
    """What one pull costs a source: the bytes that it serves, at which rate, and how many times
    slower those that read there now would become (1.0: not at all)."""

    endpoint: str
    nbytes: int
    gb_per_s: float
    readers: int
    slowdown: float


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """What a pull would be like at one place.

    The times are None where no path leads there, and `why_none` says why. `measured` is True if
    every path's bandwidth was measured by pulls between these hosts; else some are what the
    interfaces declare. `attaches`: nothing is moved, the memory of this host is shared. `partial`:
    no source is whole, and those that are read from still receive.
    """

    model: ModelKey
    host: str
    size: Size
    plan: Plan
    gb_per_s: float = 0.0
    seconds_to_first_layer: float | None = None
    seconds_to_ready: float | None = None
    costs: tuple[SourceCost, ...] = ()
    measured: bool = False
    attaches: bool = False
    partial: bool = False

    @property
    def paths(self) -> tuple[SourcePath, ...]:
        """The paths that the pull would use at once, the best first."""
        return self.plan.chosen

    @property
    def why_none(self) -> str:
        """Why there is no path; "" if there is one."""
        return "" if self.plan.chosen else self.plan.why_none() or "no source is listed"

    def __str__(self) -> str:
        """Return one line: the place, the time, the sources."""
        if self.seconds_to_ready is None or self.seconds_to_first_layer is None:
            return f"{self.model} at {self.host}: {self.why_none}"
        basis = "measured" if self.measured else "declared"
        ways = ", ".join(f"{path.label} from {path.source.endpoint}" for path in self.paths)
        speed = "attached" if self.attaches else f"{format_rate(self.gb_per_s * 1e9)} {basis}"
        first, ready = map(format_seconds, (self.seconds_to_first_layer, self.seconds_to_ready))
        return (
            f"{self.model} at {self.host}: the first layer after {first}, ready after {ready}, "
            f"{speed}, by {ways}"
        )

    def __repr__(self) -> str:
        return f"<Estimate {self}>"


def estimate(
    model: ModelKey,
    host: str,
    size: Size,
    plan: Plan,
    *,
    measured: Mapping[str, float],
    loads: Mapping[str, SourceLoad],
    arriving_s: float = 0.0,
) -> Estimate:
    """Return the estimate of one pull that begins now.

    Args:
        model: The model.
        host: The name of the target's host.
        size: What is moved.
        plan: The paths from the sources to the target.
        measured: The GB/s that pulls on that host have read lately, by the host of the source.
        loads: What the sources serve now, by source id.
        arriving_s: Of sources that still receive: the seconds until they hold everything.
    """
    if not plan.chosen:
        return Estimate(model, host, size, plan)
    partial = not all(path.source.whole for path in plan.chosen)
    if plan.chosen[0].attach:
        cost = SourceCost(plan.chosen[0].source.endpoint, 0, 0.0, 0, 1.0)
        return Estimate(
            model,
            host,
            size,
            plan,
            seconds_to_first_layer=ATTACH_S,
            seconds_to_ready=ATTACH_S,
            costs=(cost,),
            attaches=True,
        )
    by_source: dict[str, list[SourcePath]] = defaultdict(list)
    for path in plan.chosen:
        by_source[path.source.source_id].append(path)
    rates: list[float] = []
    for source_id, paths in by_source.items():
        capacity = _capacity(paths, measured)
        rates.append(_share(capacity, loads.get(source_id, SourceLoad())))
    total = sum(rates)
    costs = []
    for (source_id, paths), rate in zip(by_source.items(), rates, strict=True):
        load = loads.get(source_id, SourceLoad())
        costs.append(
            SourceCost(
                paths[0].source.endpoint,
                round(size.nbytes * rate / total),
                rate,
                load.readers,
                _slowdown(_capacity(paths, measured), load, rate),
            )
        )
    return Estimate(
        model,
        host,
        size,
        plan,
        total,
        SETUP_S + size.first_layer_nbytes / (total * 1e9),
        max(SETUP_S + size.nbytes / (total * 1e9), arriving_s if partial else 0.0),
        tuple(costs),
        all(_host_of(path) in measured for path in plan.chosen),
        partial=partial,
    )


def _host_of(path: SourcePath) -> str:
    return path.source.endpoint.rpartition(":")[0]


def _capacity(paths: Sequence[SourcePath], measured: Mapping[str, float]) -> float:
    """Return what all paths to one source carry together: what was measured, else declared."""
    declared = sum(path.gb_per_s for path in paths)
    return max(measured.get(_host_of(paths[0]), declared), 1e-6)


def _share(capacity: float, load: SourceLoad) -> float:
    """Return what one more reader gets: what is left, and at least its share among all."""
    if not load.readers:
        return capacity
    return max(capacity - load.gb_per_s, capacity / (load.readers + 1))


def _slowdown(capacity: float, load: SourceLoad, rate: float) -> float:
    """Return how many times slower the readers of now become."""
    left = max(capacity, load.gb_per_s) - rate
    if not load.readers or load.gb_per_s <= left:
        return 1.0
    if load.gb_per_s >= left * (load.readers + 1):
        return load.readers + 1.0
    return load.gb_per_s / left


def in_order_of_readiness(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the estimates, the place that would be ready first at first, then those that no path
    leads to. Equal ones keep their order."""

    def key(each: Estimate) -> tuple[bool, float, float]:
        ready_s, first_s = each.seconds_to_ready, each.seconds_to_first_layer
        return (ready_s is None, ready_s or 0.0, first_s or 0.0)

    return sorted(estimates, key=key)
