"""Runs contestants in interleaved rounds, makes rows of ratios of medians, and prints them.

Machines drift: a ratio is meaningful only if both sides were measured in turn, in one run. Every
contestant runs once before the rounds begin, to load code and caches.

Contestants that allocate their destination run on pages that were touched and freed just before:
a hypervisor backs new ones so slowly that it would hide everything else. Where the kernel counts
the pages that it gives back to the hypervisor, a run in which it did is made again, a few times at
most: it does so every two seconds, with pages that the contestant was about to use.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MADV_POPULATE_WRITE = 23
#: KiB of free pages that the kernel has reported to the hypervisor, where it says so.
_GIVEN_BACK = Path("/sys/module/page_reporting/parameters/reported_kib")
_MOST_RUNS = 6


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
            much is touched and freed. The sample is of a run that kept it, or the last one.

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
            samples[name].append(_run(contestants[name], fresh_nbytes))
    return samples


def _run(contestant: Callable[[], float], fresh_nbytes: int) -> float:
    if not fresh_nbytes:
        return contestant()
    for _ in range(_MOST_RUNS):
        touch(fresh_nbytes)
        before = _given_back_kib()
        seconds = contestant()
        if _given_back_kib() == before:
            break
    return seconds


def _given_back_kib() -> int:
    try:
        return int(_GIVEN_BACK.read_text())
    except OSError:
        return 0


def touch(nbytes: int) -> None:
    """Have the hypervisor back free memory of so many bytes."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        room.madvise(_MADV_POPULATE_WRITE)


def median(samples: Mapping[str, list[float]], name: str) -> float:
    """Return the median of a contestant."""
    return statistics.median(samples[name])


def best(samples: Mapping[str, list[float]], prefix: str) -> tuple[str, float]:
    """Return the name and median of the fastest contestant whose name begins with `prefix`."""
    found = {n: statistics.median(t) for n, t in samples.items() if n.startswith(prefix)}
    name = min(found, key=lambda n: found[n])
    return name, found[name]


def at_most(
    work: str,
    value: float,
    unit: str,
    bar: float,
    detail: str = "",
    samples: Mapping[str, list[float]] | None = None,
    *,
    digits: int = 1,
) -> Row:
    """Return the row of a value that meets its bar if it is no larger."""
    return Row(
        work, round(value, digits), unit, f"<= {bar:g} {unit}", value <= bar, detail, samples or {}
    )


def shown(
    work: str, value: float, unit: str, detail: str, samples: Mapping[str, list[float]]
) -> Row:
    """Return the row of a value without a bar."""
    return Row(work, round(value, 3), unit, "none", True, detail, samples)


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


def to_json(rows: Sequence[Row]) -> dict[str, object]:
    """Return the rows, and this machine, as one object."""
    return {"machine": machine(), "rows": [row.to_json() for row in rows]}


def say(text: str) -> None:
    """Report what is measured, or left out, aside from the rows."""
    print(text, file=sys.stderr, flush=True)


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return the options that every benchmark has.

    Args:
        doc: The benchmark's docstring.
        rounds: How many there are by default.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds")
    made.add_argument("--json", action="store_true", help="print one object, with all samples")
    return made


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the rows: a table, or one object."""
    if as_json:
        print(json.dumps(to_json(rows), indent=1))
        return
    print(machine())
    width = max((len(row.work) for row in rows), default=0)
    for row in rows:
        verdict = "" if row.bar == "none" else "met" if row.ok else "missed"
        measured = f"{row.value:10g} {row.unit:7} {row.bar:14} {verdict:7}"
        print(f"{row.work:{width}} {measured} {row.detail}".rstrip())
