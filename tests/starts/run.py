"""Plays many starts one after the other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mx.wire  # noqa: F401 - it sets what gRPC reads as it starts, and forks need the same
from tests.chaos.processes import Violation, environment
from tests.starts.play import Play, Played, Site
from tests.starts.schedule import Start, draw
from tests.support import forkserver


@dataclass
class Tally:
    """How starts have ended."""

    ends: Counter[str] = field(default_factory=Counter)
    woken: Counter[str] = field(default_factory=Counter)
    strokes: int = 0
    #: The starts that were struck more than once.
    several: int = 0
    #: Of each broken rule the start and the rule.
    broken: list[str] = field(default_factory=list)

    @property
    def starts(self) -> int:
        return self.ends.total() + len(self.broken)

    def add(self, played: Played) -> None:
        self.ends[played.end] += 1
        self.woken.update([played.woken] if played.woken else [])
        self.strokes += len(played.strokes)
        self.several += len(played.strokes) > 1

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in self.ends.most_common())
        woken = ", ".join(f"{count} {name}" for name, count in self.woken.most_common())
        return (
            f"{self.strokes} strokes, {self.several} starts with several; {ends}; "
            f"woken: {woken or 'none'}; "
            f"{len(self.broken)} broke a rule"
        )


def campaign(
    seeds: Iterable[int],
    folder: Path,
    *,
    go_on: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Tally:
    """Play the starts of these seeds.

    Args:
        seeds: The seeds.
        folder: An empty folder for what they need.
        go_on: Whether to go on after a broken rule.
        say: Called with what there is to say.
    """
    tally = Tally()
    with started(folder) as site:
        for seed in seeds:
            start = draw(seed)
            try:
                tally.add(play(site, start))
            except Violation as violation:
                tally.broken.append(f"{start}\n{violation}")
                say(f"a rule was broken:\n{tally.broken[-1]}\nmake starts STARTS=1 SEED={seed}\n")
                if not go_on:
                    break
            if not tally.starts % 10:
                say(f"{tally.starts} starts, up to seed {seed}: {tally}")
    return tally


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Site]:
    """Yield what all starts have in common.

    Args:
        folder: An empty folder for what they need.
    """
    with (
        _full_disk(folder) as full,
        forkserver.running(environment()),
        forkserver.running(environment(), "engines"),
    ):
        yield Site.make(folder, full)


def play(site: Site, start: Start) -> Played:
    """Play one start; say in a Violation what has happened so far."""
    one = Play(site, start)
    try:
        return one.play()
    except Violation as violation:
        raise Violation(f"{violation}\nwhat happened: {one.struck}") from violation


@contextlib.contextmanager
def _full_disk(folder: Path) -> Iterator[Path | None]:
    """Yield a folder of a full disk, which takes root; None for others."""
    if os.geteuid():
        yield None
        return
    full = folder / "full"
    full.mkdir()
    options = "mode=0700,size=4k,nr_inodes=1"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(full)], check=True)
    try:
        yield full
    finally:
        subprocess.run(["umount", str(full)], check=True)
