"""Minutes of load and faults: everything is killed, stopped or given new certificates in turn.

Targets pull all the time, in processes that live as long as the run and in commands of their own.
Every byte is compared, each pull has to come through, and what lives as long as the run has to have
no more memory and descriptors at the end than after its first minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mx.units import MIB
from tests.chaos.processes import Process, Violation, command, environment
from tests.endurance.site import (
    COORDINATORS,
    MODEL,
    SOURCES,
    SPARED,
    START_S,
    TARGETS,
    WATCHER,
    Site,
    descriptors,
    resident_bytes,
)

#: How long each fault lasts at most, and the time between two.
_FAULT_S, _PAUSE_S = 4.0, 3.0
#: A target whose pulls do not end for this long hangs.
_SILENT_S = 150.0
_PULL_S = 120.0
_SAMPLE_S = 1.0
#: The first part of the run, in which memory and descriptors may still grow.
_WARM = 0.4
_MORE_BYTES, _MORE_DESCRIPTORS = 24 * MIB, 24


@dataclass
class Counts:
    """What has happened. `pulls` and `commands` are those that came through."""

    faults: Counter[str] = field(default_factory=Counter)
    pulls: int = 0
    retries: int = 0
    commands: int = 0
    changes: int = 0


class Endurance:
    """One run over a site."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._random = random.Random(seed)
        self.counts = Counts()
        self._heard_s: dict[str, float] = {}
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._sampled_s = 0.0
        self._pulling: subprocess.Popen[bytes] | None = None
        self._pull_began_s = 0.0
        self._digest = hashlib.blake2b(site.checkpoint.read_bytes()).digest()

    def run(self, seconds: float) -> None:
        """Inflict faults one after the other, for so long. Raises Violation."""
        end_s = time.monotonic() + seconds
        self._heard_s = dict.fromkeys(TARGETS, time.monotonic())
        while time.monotonic() < end_s:
            self._watch_for(_PAUSE_S)
            undo = self._inflict()
            self._watch_for(self._random.uniform(0.5, _FAULT_S))
            undo()
        before = self.counts.pulls  # without faults all goes on
        self._watch_for(10.0)
        if self.counts.pulls < before + 2:
            raise Violation("no pull came through after the last fault")
        self._site.check_errors()
        self._check_growth()

    # -- faults -----------------------------------------------------------------------------------

    def _inflict(self) -> Callable[[], None]:
        """Begin a fault, and return what ends it."""
        site, choose = self._site, self._random.choice
        kill = [name for name in (*COORDINATORS, *SOURCES, *TARGETS) if name not in SPARED]
        kind = choose(("kill", "kill", "stop", "rotate", "redis", "kill a pull"))
        if kind == "kill":
            name = choose(kill)
            self.counts.faults[f"{_kind(name)} killed"] += 1
            site.processes[name].kill()
            return lambda: self._revive(name)
        if kind == "stop":
            name = choose((*COORDINATORS, *SOURCES))
            self.counts.faults[f"{_kind(name)} stopped"] += 1
            process = site.processes[name]
            process.signal(signal.SIGSTOP)
            return lambda: process.signal(signal.SIGCONT)
        if kind == "redis":
            self.counts.faults["redis killed"] += 1
            site.kill_redis()
            return site.start_redis
        if kind == "rotate":
            self.counts.faults["certificates replaced"] += 1
            site.rotate()
            return lambda: None
        self.counts.faults["pull killed"] += 1
        self._command()
        assert self._pulling is not None
        self._pulling.kill()
        self._pulling.wait()
        self._pulling = None
        return lambda: None

    def _revive(self, name: str) -> None:
        self._site.launch(name)
        self._site.processes[name].wait_ready(START_S)
        self._heard_s[name] = time.monotonic()

    # -- what has to hold -------------------------------------------------------------------------

    def _watch_for(self, seconds: float) -> None:
        """Hear what the processes say, for so long. Raises Violation."""
        until_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < until_s:
            self._command()
            with contextlib.suppress(queue.Empty):
                self._hear(*self._site.inbox.get(timeout=0.05))
            for name in TARGETS:
                if now_s - self._heard_s[name] > _SILENT_S:
                    raise Violation(f"{name} has ended no pull for {_SILENT_S:g} s")
            if now_s - self._sampled_s > _SAMPLE_S:
                self._sampled_s = now_s
                for name in SPARED:
                    pid = self._site.processes[name].pid
                    self._samples[name].append((resident_bytes(pid), descriptors(pid)))

    def _hear(self, process: Process, message: dict[str, object]) -> None:
        match message.get("event"):
            case "pulled":
                if message["wrong"]:
                    raise Violation(f"{process.name} got wrong bytes: {message['wrong']}")
                self.counts.pulls += 1
                self.counts.retries += int(str(message["retries"]))
                self._heard_s[process.name] = time.monotonic()
            case "failed":
                raise Violation(f"a pull of {process.name} failed: {message['error']}")
            case "watched":
                self.counts.changes += 1
            case "end" if not process.killed:
                raise Violation(
                    f"{process.name} ended with {message['code']}:\n{process.errors()[-4000:]}"
                )

    def _command(self) -> None:
        """Keep one `mx pull` running, and check what the last one wrote."""
        out = self._site.folder / "out"
        if self._pulling is not None:
            code = self._pulling.poll()
            if code is None:
                if time.monotonic() - self._pull_began_s > _PULL_S:
                    raise Violation(f"`mx pull` has not ended for {_PULL_S:g} s")
                return
            errors = (self._site.folder / "pull.err").read_text()
            if code:
                raise Violation(f"`mx pull` ended with {code}:\n{errors[-4000:]}")
            written = hashlib.blake2b((out / self._site.checkpoint.name).read_bytes()).digest()
            if written != self._digest:
                raise Violation("`mx pull --out` wrote other bytes")
            self.counts.commands += 1
        shutil.rmtree(out, ignore_errors=True)
        self._pull_began_s = time.monotonic()
        with (self._site.folder / "pull.err").open("wb") as errors_to:
            self._pulling = subprocess.Popen(
                command("main", "pull", MODEL, "--out", str(out), "--json"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors_to,
                env=environment(**self._site.settings("client")),
            )

    def _check_growth(self) -> None:
        """Raise Violation if what lives as long as the run holds more than after it was warm."""
        for name, samples in self._samples.items():
            warm = samples[: max(1, int(len(samples) * _WARM))]
            late = samples[-max(1, len(samples) // 10) :]
            for what, index, more in (
                ("bytes", 0, _MORE_BYTES),
                ("descriptors", 1, _MORE_DESCRIPTORS),
            ):
                most = max(each[index] for each in warm)
                now = statistics.median(each[index] for each in late)
                print(f"{name:8} {what:11} warm <= {most:12,} at the end {now:12,.0f}")
                if now > most + more:
                    held = dict(self._site.processes[name].holdings())
                    raise Violation(
                        f"{name} holds {now:,.0f} {what} in the end, {most:,} before: {held}"
                    )

    def close(self) -> None:
        """End the running command."""
        if self._pulling is not None:
            self._pulling.kill()
            self._pulling.wait()


def _kind(name: str) -> str:
    if name in COORDINATORS:
        return "coordinator"
    return "source" if name in SOURCES else "watcher" if name == WATCHER else "target"


def run(minutes: float, seed: int) -> int:
    """Run it, and print what has happened. Returns an exit code."""
    folder = Path(tempfile.mkdtemp(prefix="mx-endurance-"))
    site = Site(folder, f"endurance-{os.getpid()}")
    endurance = Endurance(site, seed)
    began_s = time.monotonic()
    try:
        site.start()
        endurance.run(minutes * 60)
    except Violation as violation:
        print(f"seed {seed}: {violation}", file=sys.stderr)
        return 1
    finally:
        endurance.close()
        site.close()
        counts = endurance.counts
        print(
            json.dumps(
                {
                    "seconds": round(time.monotonic() - began_s),
                    "seed": seed,
                    "pulls": counts.pulls,
                    "commands": counts.commands,
                    "retries": counts.retries,
                    "changes_watched": counts.changes,
                    "faults": dict(counts.faults),
                }
            )
        )
    shutil.rmtree(folder)
    return 0
