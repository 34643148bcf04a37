"""Simulates how long N pulls from one origin take, with mx's own swarm machines.

    python -m benchmarks.swarm_sim [--n 31 ...] [--k 128 ...] [--policy ours ...] [--seeds 10]
    python -m benchmarks.swarm_sim --all [--jobs 2] [--json FILE] [--svg FILE]
    python -m benchmarks.swarm_sim --read FILE --svg FILE

Times are multiples of S/B, the model's time over one link: `finish` is that of the last receiver,
`quarter` the mean time until a receiver holds the first quarter of all chunks, in order. Each row
has the medians over the seeds. Links are shared equally, full duplex. Messages take `--latency`;
neighbours know what a receiver holds only when its announcement arrives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .swarm_nodes import Swarm
from .swarm_picture import picture
from .swarm_setting import POLICIES, Row, Setting, label, median


@dataclass(frozen=True)
class Bar:
    """A bar that the project sets."""

    setting: Setting
    finish: float
    quarter: float = float("inf")

    def met(self, row: Row) -> bool:
        return row.outcome.finish <= self.finish and row.outcome.quarter <= self.quarter


USUAL = Setting()
SLOW = replace(USUAL, slow=0.25)
DEATH = replace(USUAL, deaths=0.01)
REAL = replace(USUAL, n=8, k=64)
LARGE = replace(USUAL, n=1000, k=4096)
BARS = (
    Bar(USUAL, 1.20, 0.36),
    Bar(SLOW, 1.35),
    Bar(replace(SLOW, n=15, k=64), 1.35),
    Bar(DEATH, 1.25),
    Bar(REAL, 1.35),
    Bar(LARGE, 1.20, 0.33),
)


def experiments() -> dict[str, list[tuple[Setting, int]]]:
    """Return the experiments of docs/swarm.md: title -> (setting, seeds)."""
    small = [1, 2, 3, 5, 7, 15, 31]
    policies = [(replace(USUAL, n=n, policy=p), 10) for p in POLICIES for n in small]
    sizes = [(replace(USUAL, n=n), 1 if n > 300 else 3) for n in (63, 127, 255, 511, 1000)]
    chunks = [(replace(USUAL, k=k), 10 if k < 512 else 3) for k in (32, 64, 256, 512, 1024)]
    troubles = [
        SLOW,
        replace(SLOW, n=15, k=64),
        DEATH,
        replace(USUAL, deaths=0.1),
        replace(USUAL, deaths=0.01, detect_s=3.0),
        replace(USUAL, uneven=2.0),
        replace(USUAL, join_s=USUAL.ideal_s / 2),
        replace(USUAL, join_s=USUAL.ideal_s * 2),
        replace(USUAL, origin_speed=4.0),
        REAL,
        replace(REAL, latency_s=0.002),
        replace(REAL, slow=0.25),
        replace(REAL, deaths=0.01),
    ]
    large = [replace(LARGE, n=300, k=1024, deaths=0.01), LARGE]
    links = [
        (replace(USUAL, k=1024, gbit_per_s=rate, latency_s=latency_s, width=width), 1)
        for rate, widths in ((1.0, (1, 2, 3)), (10.0, (2, 3, 4, 6)), (100.0, (4, 8, 12)))
        for latency_s in (0.001, 0.002)
        for width in widths
    ]
    return {
        "Policies": policies,
        "More receivers": sizes,
        "More and fewer chunks": chunks,
        "Trouble": [(setting, 10) for setting in troubles],
        "Links and widths": links,
        "Many": [(setting, 1) for setting in large],
    }


def measure(task: tuple[Setting, int]) -> Row:
    """Run one setting with seeds 0, 1, ... and return its row."""
    setting, seeds = task
    outcomes = [Swarm(replace(setting, seed=seed)).run() for seed in range(seeds)]
    return Row(setting, seeds, median(outcomes), max(each.finish for each in outcomes))


def show(row: Row) -> str:
    out = row.outcome
    text = (
        f"{row.setting.policy:7} {label(row.setting):44} {row.seeds:3} {out.finish:7.3f} "
        f"{row.worst:7.3f} {out.finish_mean:7.3f} {out.quarter:7.3f} {out.origin_sent:7.2f} "
        f"{out.requests_per_chunk:5.1f} {out.neighbours:4.0f}"
    )
    for bar in BARS:
        if bar.setting == row.setting:
            text += "  ok" if bar.met(row) else f"  MISSED: {bar.finish} and {bar.quarter}"
    return text


HEAD = (
    f"{'policy':7} {'setting':44} {'of':>3} {'finish':>7} {'worst':>7} {'mean':>7} {'quarter':>7} "
    f"{'origin':>7} {'reqs':>5} {'nbrs':>4}"
)


def run(tasks: Iterable[tuple[Setting, int]], jobs: int) -> list[Row]:
    """Run settings and print their rows in order, each as soon as possible."""
    rows: list[Row] = []
    if jobs < 2:
        for row in map(measure, tasks):
            rows.append(row)
            print(show(row), flush=True)
        return rows
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(measure, tasks):
            rows.append(row)
            print(show(row), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows: list[Row] = []
    if options.read is not None:
        rows = [Row.from_json(each) for each in json.loads(options.read.read_text())]
    elif options.all:
        for title, tasks in experiments().items():
            print(f"\n{title}\n{HEAD}", flush=True)
            rows += run(tasks, options.jobs)
    else:
        names = {field.name for field in fields(Setting)} - {"n", "k", "policy", "seed"}
        base = Setting(**{name: getattr(options, name) for name in names})
        tasks = [
            (replace(base, n=n, k=k, policy=policy), options.seeds)
            for policy, n, k in itertools.product(options.policy, options.n, options.k)
        ]
        print(HEAD)
        rows += run(tasks, options.jobs)
    if options.json is not None:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(picture(rows))
    missed = [
        row for row in rows for bar in BARS if bar.setting == row.setting and not bar.met(row)
    ]
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swarm_sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--n", type=_positive(int), nargs="+", default=[31], help="receivers")
    add("--k", type=_positive(int), nargs="+", default=[128], help="chunks")
    add("--policy", choices=POLICIES, nargs="+", default=["ours"])
    add("--seeds", type=_positive(int), default=10)
    add("--jobs", type=_positive(int), default=1, help="processes")
    add(
        "--all",
        action="store_true",
        help="all experiments of docs/swarm.md; takes a quarter of an hour",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows to this file")
    add("--read", type=Path, metavar="FILE", help="read rows written earlier, instead of a run")
    add("--svg", type=Path, metavar="FILE", help="draw the rows")
    add("--gbit", dest="gbit_per_s", type=_positive(float), default=USUAL.gbit_per_s)
    add("--chunk-nbytes", type=_positive(int), default=USUAL.chunk_nbytes)
    add("--latency", dest="latency_s", type=float, default=USUAL.latency_s, help="one way, seconds")
    add(
        "--width",
        type=_positive(int),
        default=USUAL.width,
        help="requests of a receiver, slots of a source",
    )
    add("--origin-readers", type=_positive(int), default=USUAL.origin_readers)
    add("--origin-speed", type=_positive(float), default=USUAL.origin_speed, help="x the link's")
    add("--join", dest="join_s", type=float, default=0.0, help="seconds until all have joined")
    add("--deaths", type=float, default=0.0, help="part of the nodes that die")
    add("--detect", dest="detect_s", type=float, default=USUAL.detect_s, help="seconds until known")
    add("--slow", type=_positive(float), default=1.0, help="speed of one node, x the link's")
    add("--uneven", type=_positive(float), default=1.0, help="links differ by up to this factor")
    return parser


def _positive(kind: Callable[[str], int | float]) -> Callable[[str], int | float]:
    def number(text: str) -> int | float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
