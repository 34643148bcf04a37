"""Plays rounds at all sites at once until enough pulls have ended."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hosts import Hosts, unavailable
from tests.chaos.play import Play, Played
from tests.chaos.processes import Violation, marked
from tests.chaos.schedule import MODELS, TARGETS, PullSpec, Round, draw
from tests.chaos.site import Site

PROGRESS_S = 10.0
GONE_S = 15.0
#: Seconds after which everything that the first pulls release is gone.
WARM_S = 2.0


@dataclass
class Tally:
    rounds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    transports: Counter[str] = field(default_factory=Counter)

    @property
    def pulls(self) -> int:
        return self.ends.total()

    def add(self, played: Played) -> None:
        self.rounds += 1
        self.ends.update(played.ends)
        self.retries += played.retries
        self.transports.update(path.split()[0] for path in played.paths)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in self.ends.most_common())
        return f"{self.pulls} pulls in {self.rounds} rounds: {ends}; {self.retries} parts retried"


def places() -> tuple[str, ...]:
    """Return the places where sites can be made on this machine."""
    return ("loopback",) if unavailable() else ("loopback", "hosts")


@contextlib.contextmanager
def site(place: str, *, believe_everything: bool = False) -> Iterator[Site]:
    """Give a site with all its processes started and warm, and check that it leaves nothing."""
    mark = secrets.token_hex(8)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="mx-chaos-")))
        hosts = ends.enter_context(Hosts()) if place == "hosts" else None
        made = Site(place, folder, mark, hosts, believe_everything=believe_everything)
        ends.callback(made.close)
        made.start()
        made.gather()
        warm_up(made)
        yield made
    deadline_s = time.monotonic() + GONE_S
    while left := marked(mark):
        if time.monotonic() > deadline_s:
            raise Violation(f"processes were left behind: {left}")
        time.sleep(0.05)


def warm_up(site: Site) -> None:
    """Let libraries make what they make once and keep, so that it does not count as a leak."""
    site.measure()
    for model, transport in (("one", "tcp"), ("two", "tcp"), ("three", "ucx"), ("mixed", None)):
        if not set(site.sources) >= set(MODELS[model]):
            continue
        pulls = tuple(PullSpec(target, 0.0, transport=transport, hold=True) for target in TARGETS)
        if transport == "ucx":  # loading it once is enough
            pulls = pulls[:1]
        round_ = Round(0, site.place, model, pulls, ())
        try:
            Play(site, round_).run(warming_up=True)
        except Violation as violation:
            raise Violation(f"{violation}\n\nwhile warming up:\n{round_}") from violation
    time.sleep(WARM_S)
    site.measure()


class Runner:
    """Hands out seeds in order; each site takes those for its place."""

    def __init__(
        self, pulls: int, seed: int, places: Sequence[str], first: Sequence[int] = ()
    ) -> None:
        """Play the seeds in `first`, then those from `seed` on."""
        self.tally = Tally()
        self.failure: str | None = None
        self._pulls = pulls
        self._seeds = itertools.chain(first, itertools.count(seed))
        self._places = places
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Round]] = {place: [] for place in places}
        self._drawn = 0
        self.began_s = time.monotonic()

    def take(self, place: str) -> Round | None:
        """Return the next round for this place; None after enough pulls, or a broken rule."""
        with self._lock:
            while self.failure is None:
                if self._waiting[place]:
                    return self._waiting[place].pop(0)
                if self._drawn >= self._pulls:
                    return None
                drawn = draw(next(self._seeds), self._places)
                self._drawn += len(drawn.pulls)
                self._waiting[drawn.place].append(drawn)
            return None

    def add(self, played: Played) -> None:
        with self._lock:
            self.tally.add(played)

    def fail(self, round_: Round | None, violation: Violation) -> None:
        with self._lock:
            round_text = (
                "" if round_ is None else f"\n\n{round_}\n\nmake chaos PULLS=1 SEED={round_.seed}"
            )
            self.failure = self.failure or f"{violation}{round_text}"

    def stop(self) -> None:
        """Start no more rounds."""
        with self._lock:
            self.failure = self.failure or "it was stopped"


def attend(runner: Runner, place: str, *, believe_everything: bool) -> None:
    """Play rounds at one site, on its own thread."""
    round_: Round | None = None
    try:
        with site(place, believe_everything=believe_everything) as here:
            while (round_ := runner.take(place)) is not None:
                runner.add(Play(here, round_).run())
    except Violation as violation:
        runner.fail(round_, violation)


def play(runner: Runner, places: Sequence[str], *, believe_everything: bool = False) -> None:
    """Play until there were enough pulls, with a site for each of `places`; print progress."""
    threads = [
        threading.Thread(
            target=attend, args=(runner, place), kwargs={"believe_everything": believe_everything}
        )
        for place in places
    ]
    for thread in threads:
        thread.start()
    try:
        told_s = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if time.monotonic() - told_s >= PROGRESS_S:
                told_s = time.monotonic()
                _say(runner)
    except BaseException:
        runner.stop()
        raise
    finally:
        for thread in threads:
            thread.join()


def run(pulls: int, seed: int, *, believe_everything: bool = False) -> int:
    """Run the campaign, print progress and results on standard error, return the exit code."""
    can = places()
    if len(can) < 2:
        print(f"only on loopback: {unavailable()}", file=sys.stderr)
    runner = Runner(pulls, seed, can)
    # One round needs one site; several sites of a place play as long as there are pulls to make.
    wanted = [draw(seed, can).place] if pulls == 1 else [*can, "loopback"]
    play(runner, wanted, believe_everything=believe_everything)
    _say(runner)
    wall_s = time.monotonic() - runner.began_s
    if runner.failure is not None:
        print(f"\na rule was broken:\n{runner.failure}", file=sys.stderr)
        return 1
    print(
        f"{runner.tally.pulls} pulls from seed {seed} on: 0 with wrong bytes, "
        f"{wall_s:.0f} s ({runner.tally.pulls / wall_s:.1f} a second)"
    )
    return 0


def _say(runner: Runner) -> None:
    print(
        f"{time.monotonic() - runner.began_s:6.0f} s  {runner.tally}", file=sys.stderr, flush=True
    )
