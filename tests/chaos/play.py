"""Plays a round at a site and checks the rules.

Every pull ends with right bytes or a typed error, in bounded time, and no process keeps resources;
a pull with a source without a fault ends with right bytes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import queue
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mx import errors
from tests.chaos import weights
from tests.chaos.processes import Process, Violation, command
from tests.chaos.schedule import Fault, PullSpec, Round, What
from tests.chaos.site import Site

#: A schedule stops nothing for longer than 4 s, and a wait takes one or two deadlines.
BOUND_S = 30.0
FULL_DISK = "size=6m"
ROOMY_DISK = "size=64m"


@dataclass
class Played:
    """How the pulls of a round ended: "whole", the name of the error, or "killed"."""

    ends: list[str] = field(default_factory=list)
    retries: int = 0
    paths: list[str] = field(default_factory=list)


class _Pull:
    """One pull under way."""

    def __init__(self, spec: PullSpec, process: Process, out: Path | None) -> None:
        self.spec = spec
        self.process = process
        self.out = out
        self.deadline_s = time.monotonic() + BOUND_S
        self.reading = False
        self.said: dict[str, Any] = {}  # what a command printed on standard output
        self.outcome: dict[str, Any] | None = None


class Play:
    """One round at a site whose processes are all ready."""

    def __init__(self, site: Site, round_: Round) -> None:
        self._site = site
        self._round = round_
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._undo: dict[int, Callable[[], None]] = {}
        self._pulls: dict[str, _Pull] = {}
        self._mounts: list[Path] = []
        self._reading = False

    def run(self, *, warming_up: bool = False) -> Played:
        played = Played()
        try:
            self._play()
            for pull in self._pulls.values():
                played.ends.append(self._judge(pull, must=self._round.must_succeed(pull.spec)))
                played.retries += (pull.outcome or {}).get("retries", 0)
                if not pull.spec.command:
                    played.paths += (pull.outcome or {}).get("paths", ())
            self._heal()
            played.ends += self._again()
            if warming_up:
                return played
            self._site.settle()
            self._check_outputs()
        finally:
            for mount in self._mounts:
                subprocess.run(["umount", str(mount)], check=True)
        shutil.rmtree(self._site.folder / "out", ignore_errors=True)
        return played

    # -- the round --------------------------------------------------------------------------------

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._serial), action))

    def _play(self) -> None:
        began_s = time.monotonic()
        for spec in self._round.pulls:
            self._at(began_s + spec.start_s, functools.partial(self._start, spec))
        for fault in self._round.faults:
            if not fault.reading:
                self._at(began_s + fault.at_s, functools.partial(self._inflict, fault))
        while not self._over():
            now_s = time.monotonic()
            while self._agenda and self._agenda[0][0] <= now_s:
                heapq.heappop(self._agenda)[2]()
            if self._over():
                return
            self._listen(now_s)

    def _over(self) -> bool:
        return len(self._pulls) == len(self._round.pulls) and all(
            pull.outcome is not None for pull in self._pulls.values()
        )

    def _listen(self, now_s: float) -> None:
        waits = [pull.deadline_s for pull in self._pulls.values() if pull.outcome is None]
        waits += [self._agenda[0][0]] if self._agenda else []
        try:
            process, message = self._site.inbox.get(timeout=max(0.0, min(waits) - now_s))
        except queue.Empty:
            self._check_time()
            return
        pull = next((p for p in self._pulls.values() if p.process is process), None)
        event = message.get("event")
        if event == "foreign":
            raise Violation(f"{process.name} raised what is not mx's:\n{message['trace']}")
        if pull is None or pull.outcome is not None:
            self._site.check_end(process, message)
        elif event == "layer":
            pull.reading = True
        elif event == "outcome":
            pull.outcome = message
        elif event == "end":
            pull.outcome = self._ended(pull, message)
        elif event is None:
            pull.said = message
        self._check_reading()

    def _ended(self, pull: _Pull, message: dict[str, Any]) -> dict[str, Any]:
        if pull.process.killed:
            return {"killed": True}
        error = pull.said.get("error", {"exit_code": 0})
        if pull.said and message["code"] == error["exit_code"]:
            if "error" not in pull.said:
                return {"wrong": [], **pull.said}
            return {**error, "error": error["type"]}
        raise Violation(
            f"{pull.process.name} ended by itself with {message['code']}:\n{pull.process.errors()}"
        )

    def _check_time(self) -> None:
        for pull in self._pulls.values():
            if pull.outcome is None and time.monotonic() > pull.deadline_s:
                raise Violation(
                    f"the pull of {pull.spec.target} has not ended after {BOUND_S} s:\n"
                    + self._site.diagnostics(pull.process)
                )

    def _check_reading(self) -> None:
        """Schedule the faults that wait until every pull has a layer or has ended."""
        if self._reading or len(self._pulls) < len(self._round.pulls):
            return
        if all(pull.reading or pull.outcome is not None for pull in self._pulls.values()):
            self._reading = True
            now_s = time.monotonic()
            for fault in self._round.faults:
                if fault.reading:
                    self._at(now_s + fault.at_s, functools.partial(self._inflict, fault))

    # -- pulls and faults -------------------------------------------------------------------------

    def _start(self, spec: PullSpec) -> None:
        site, out = self._site, None
        if spec.out:
            out = site.folder / "out" / spec.target / "model"
            out.parent.mkdir(parents=True, exist_ok=True)
            if spec.full_disk and out.parent not in self._mounts:
                _mount(out.parent, FULL_DISK)
                self._mounts.append(out.parent)
        if spec.command:
            process = site.spawn(spec.target, f"pull-{spec.target}", self._command(spec, out))
        else:
            process = site.processes[spec.target]
            process.send(
                do="pull",
                model=self._round.model,
                coordinator=site.coordinator,
                names=site.endpoints(),
                proxied=site.place == "loopback",
                **{
                    **asdict(spec),
                    "out": None if out is None else str(out),
                    "transport": self._transport(spec),
                },
            )
        self._pulls[spec.target] = pull = _Pull(spec, process, out)
        if process.killed:  # before the pull began
            pull.outcome = {"killed": True}

    def _transport(self, spec: PullSpec) -> str | None:
        """Return the schedule's transport, or None if it does not work here."""
        works = self._site.processes[spec.target].ready["transports"]
        return spec.transport if spec.transport in works else None

    def _command(self, spec: PullSpec, out: Path | None) -> list[str]:
        options = ["--coordinator", self._site.coordinator, "--json"]
        if (transport := self._transport(spec)) is not None:
            options += ["--transport", transport]
        if not spec.attach:
            options.append("--no-attach")
        if spec.strong:
            options += ["--verify", "strong"]
        if out is not None:
            options += ["--out", str(out)]
        return command("main", "pull", self._round.model, *options)

    def _inflict(self, fault: Fault) -> None:
        pull = self._pulls.get(fault.who)
        if pull is not None and pull.spec.command and fault.what in (What.KILL, What.STOP):
            return  # the pull is a process of its own
        if not self._site.processes[fault.who].alive:
            return  # it was killed already
        undo = self._site.inflict(fault)
        number = next(self._serial)
        self._undo[number] = undo
        if fault.for_s:
            self._at(time.monotonic() + fault.for_s, functools.partial(self._undone, number))

    def _undone(self, number: int) -> None:
        self._undo.pop(number, _nothing)()

    def _heal(self) -> None:
        while self._undo:
            self._undo.popitem()[1]()
        self._site.gather()

    # -- checks -----------------------------------------------------------------------------------

    def _judge(self, pull: _Pull, *, must: bool) -> str:
        outcome, who = pull.outcome or {}, pull.spec.target
        if "killed" in outcome:
            return "killed"
        if pull.spec.command:
            pull.process.end()
            if "Traceback" in (said := pull.process.errors()):
                raise Violation(f"mx pull showed a traceback:\n{said}")
        if "error" not in outcome:
            wrong = outcome["wrong"]
            if pull.out is not None:
                found = weights.digests(pull.out / "model.safetensors")
                wrong = wrong + weights.wrong(found, self._site.expected)
            if wrong:
                raise Violation(f"wrong bytes: {who} accepted {', '.join(wrong)}")
            return "whole"
        name = str(outcome["error"])
        text = f"{who}: {name}: {outcome['message']}\n{outcome.get('cause', '')}"
        kind = getattr(errors, name, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.MxError)):
            raise Violation(f"not one of mx.errors: {text}")
        if outcome["exit_code"] != kind.exit_code or issubclass(kind, errors.ConfigError):
            raise Violation(f"an error that can't be meant: {text}")
        if "unexpected " in outcome["message"]:
            raise Violation(f"a defect, by its own account: {text}")
        if must:
            raise Violation(f"nothing happened to one of its sources, and yet: {text}")
        return name

    def _again(self) -> list[str]:
        """Pull every incomplete output again without faults, and return what is wrong.

        What a failed pull left must help the next one, or at least not hinder it.
        """
        ends = []
        for pull in list(self._pulls.values()):
            if pull.out is None or "wrong" in (pull.outcome or {}):
                continue
            if pull.spec.full_disk:
                _mount(pull.out.parent, f"remount,{ROOMY_DISK}")
            spec = PullSpec(pull.spec.target, 0.0, out=True)
            self._start(spec)
            again = self._pulls[spec.target]
            again.outcome = self._site.receive(again.process, "outcome")
            ends.append(self._judge(again, must=True))
        return ends

    def _check_outputs(self) -> None:
        for pull in self._pulls.values():
            if pull.out is not None and (left := [p.name for p in pull.out.parent.iterdir()]) != [
                pull.out.name
            ]:
                raise Violation(f"left beside the output of {pull.spec.target}: {left}")


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def _nothing() -> None:
    pass
