"""Runs contestants in interleaved rounds, from which rows take ratios of medians.

Machines drift: a ratio is meaningful only if both sides were measured in turn, in one run. Every
contestant runs once before the rounds begin, to load code and caches.

Contestants that allocate their destination run on pages that were touched and freed just before:
a hypervisor backs new ones so slowly that it would hide everything else.
"""

from __future__ import annotations

import mmap
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MADV_POPULATE_WRITE = 23


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
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, fresh_nbytes: int = 0
) -> dict[str, list[float]]:
    """Run each contestant once per round, in turn.

    Args:
        contestants: Functions by name; each returns the seconds that it took.
        rounds: How many.
        fresh_nbytes: How much memory a contestant allocates while it is timed. Before each run as
            much is touched and freed.

    Returns:
        The seconds of each contestant, one per round.
    """
    for run in contestants.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        # Another one begins each round, so that none always follows the same one.
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            if fresh_nbytes:
                _touch(fresh_nbytes)
            samples[name].append(contestants[name]())
    return samples


def _touch(nbytes: int) -> None:
    """Have the hypervisor back free memory of so many bytes."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        room.madvise(_MADV_POPULATE_WRITE)


def median(samples: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(samples[name])


def best(samples: Mapping[str, list[float]], prefix: str) -> tuple[str, float]:
    """Return the name and median of the fastest contestant whose name begins with `prefix`."""
    found = {n: statistics.median(t) for n, t in samples.items() if n.startswith(prefix)}
    name = min(found, key=lambda n: found[n])
    return name, found[name]


def ratio(
    work: str, samples: Mapping[str, list[float]], reference: str, bar: float, nbytes: int
) -> Row:
    """Return the row of how fast "mx" is, in multiples of its best reference.

    Args:
        work: The row's name.
        samples: The seconds of "mx" and of its references.
        reference: What the names of the references begin with.
        bar: The least ratio that meets the bar.
        nbytes: The bytes that each of them moves.
    """
    name, reference_s = best(samples, reference)
    own_s = median(samples, "mx")
    value = reference_s / own_s
    detail = f"{nbytes / own_s / 1e9:.2f} GB/s against {nbytes / reference_s / 1e9:.2f} ({name})"
    return Row(work, round(value, 3), "x", f">= {bar:g} x", value >= bar, detail, samples)


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
