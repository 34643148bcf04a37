"""Runs contestants in interleaved rounds, from which rows take ratios of medians.

Machines drift: a ratio is meaningful only if both sides were measured in turn, in one run. Every
contestant runs once before the rounds begin, to load code and caches.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` and `bar` are in `unit`; `ok`: the bar is met."""

    work: str
    value: float
    unit: str
    bar: str
    ok: bool
    detail: str = ""
    samples: Mapping[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "work": self.work,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "ok": self.ok,
            "detail": self.detail,
            "samples": {name: list(times) for name, times in self.samples.items()},
        }


def interleave(
    contestants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run each contestant once per round, in turn, and return the seconds that each returned."""
    for run in contestants.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        # Another one begins each round, so that none always follows the same one.
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            samples[name].append(contestants[name]())
    return samples


def median(samples: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(samples[name])


def best(samples: Mapping[str, list[float]], prefix: str) -> tuple[str, float]:
    """Return the name and median of the fastest contestant whose name begins with `prefix`."""
    found = {n: statistics.median(t) for n, t in samples.items() if n.startswith(prefix)}
    name = min(found, key=lambda n: found[n])
    return name, found[name]


def machine() -> str:
    """Describe this machine in one line."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores of {model}, {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
