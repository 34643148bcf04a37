"""Plays one start: real processes, what befalls them, and the judgement of what came of it."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mx import errors
from tests.chaos.processes import MARK, Violation, environment, marked
from tests.starts import model as models
from tests.starts.schedule import (
    CHECKPOINT,
    COORDINATOR,
    ENGINE,
    LOADED,
    ORDER,
    ORDINARY,
    PROCESSED,
    Luck,
    Start,
    What,
)
from tests.support import forkserver
from tests.support.commands import Command, commands, start_coordinator

#: The bound of each step: far more than it takes on a busy machine.
BOUND_S = 120.0
_PROGRAM = "from tests.starts.engine import main; main()"
NAME = "small"
_SIGNALS = {
    What.KILL: signal.SIGKILL,
    What.STOP: signal.SIGSTOP,
    What.INTERRUPT: signal.SIGINT,
    What.TERMINATE: signal.SIGTERM,
}
#: The seeds of the weights: the name's, those that supersede them, those of another folder.
_RIGHT, _NEWER, _OTHER = 1, 2, 3


@dataclass(frozen=True)
class Site:
    """What all starts of a campaign have in common: two checkpoints, another one's folder, and the
    digests of the models that engines make of them."""

    root: Path
    right: Path
    newer: Path
    other: Path
    bare: Path
    pin: str
    #: What a digest is of: "right", "newer", "other", or "updated".
    digests: Mapping[str, str]
    #: The beginning of a checkpoint's identity: of which weights.
    identities: Mapping[str, str]
    full: Path | None

    @classmethod
    def make(cls, root: Path, full: Path | None) -> Site:
        """Write what is needed into a folder.

        Args:
            root: The folder.
            full: A folder in which nothing can be written; None if there is none.
        """
        from mx.engines.replica.folder_hash import identity_of

        right, newer, other, bare = (root / each for each in ("right", "newer", "other", "bare"))
        for folder, seed in ((right, _RIGHT), (newer, _NEWER), (other, _OTHER)):
            models.save(folder, seed)
        bare.mkdir()
        (bare / "config.json").write_text(json.dumps(models.CONFIG))
        (root / "file").write_text("no folder")
        identities = {identity_of(right)[0]: "right", identity_of(newer)[0]: "newer"}
        digests = {
            models.processed_digest(models.weights_of(seed)): what
            for seed, what in ((_RIGHT, "right"), (_NEWER, "newer"), (_OTHER, "other"))
        }
        digests[models.processed_digest(models.weights_of(_RIGHT), models.updated)] = "updated"
        pin = next(iter(identities))
        return cls(root, right, newer, other, bare, pin, digests, identities, full)


class Program:
    """An engine's process."""

    def __init__(self, name: str, spec: dict[str, Any], env: Mapping[str, str]) -> None:
        self.name, self.killed, self.stopped = name, False, False
        self.process = forkserver.python(
            _PROGRAM, json.dumps(spec), env=env, imported="engines", errors=True
        )
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errors = ""
        self.left: list[str] | None = None
        self._readers = [
            threading.Thread(target=each, daemon=True) for each in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.inbox.put(json.loads(line))
        self.inbox.put({"event": "end"})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def hear(self, *events: str) -> dict[str, Any]:
        """Return the next of these events; the process must not end before, unless that is one."""
        deadline_s = time.monotonic() + BOUND_S
        while True:
            try:
                found = self.inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise Violation(f"{self.name} hangs:\n{self.stacks()}") from None
            if found["event"] == "left":
                self.left = found["left"]
            if found["event"] in events:
                return found
            if found["event"] in ("failed", "end"):
                raise Violation(f"{self.name}: {found}\n{self.errors}")

    def stacks(self) -> str:
        """Return where the process is, and end it."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        return self.errors

    def tell(self, text: str) -> None:
        """Write a line to the process, unless it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def do(self, what: str) -> dict[str, Any]:
        """Have the engine do something; return what it says then."""
        self.tell(json.dumps({"do": what}))
        return self.hear("done")

    def signal(self, number: int) -> None:
        self.killed |= number == signal.SIGKILL
        self.process.send_signal(number)

    def no_more(self) -> None:
        """Have the process end once it has done what it was asked for."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def finish(self) -> int:
        """Have the process end; return its exit code."""
        self.no_more()
        try:
            code = self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            raise Violation(f"{self.name} does not end:\n{self.stacks()}") from None
        for reader in self._readers:
            reader.join()
        while not self.inbox.empty():
            found = self.inbox.get()
            if found["event"] == "left":
                self.left = found["left"]
        return code

    def close(self) -> None:
        """Leave nothing of the process, whatever has happened."""
        self.process.kill()
        with self.process:
            self.process.wait(BOUND_S)
        for reader in self._readers:
            reader.join(5)


@dataclass
class Played:
    """How a start ended: in which state, or with which error; and what woke up, if it slept."""

    end: str = ""
    choices: tuple[str, ...] = ()
    strokes: list[str] = field(default_factory=list)
    woken: str = ""


class Play:
    """One start."""

    def __init__(self, site: Site, start: Start) -> None:
        self._site, self._start = site, start
        self._folder = site.root / f"{start.seed}-{secrets.token_hex(4)}"
        self._mark = secrets.token_hex(8)
        self._run: Any = None
        self._holders: dict[str, Any] = {}
        self._programs: list[Program] = []
        self._commands: list[Command] = []
        self._hurt: set[str] = set()
        self._dead: set[str] = set()
        self._gone: set[str] = set()  # by more than being stopped
        self._timers: list[threading.Timer] = []
        self.struck: list[str] = []
        self._signalled = 0  # how often the engine was
        self._engine: Program | None = None

    def play(self) -> Played:
        """Play it. Raises Violation if a rule is broken."""
        self._folder.mkdir()
        (self._folder / "tmp").mkdir()
        played = Played(strokes=self.struck)
        with contextlib.ExitStack() as ends:
            self._run = ends.enter_context(commands())
            ends.callback(self._end_all)
            self._set_up()
            self._engine = engine = self._start_engine()
            outcome = self._follow(engine, "loaded", "failed", "left", "end")
            self._judge(outcome, played)
            if outcome["event"] == "loaded" and self._start.then:
                self._sleep(engine, outcome, played)
            self._finish(engine)
        if left := [*(self._folder / "tmp").iterdir()]:
            raise Violation(f"temporary files were left behind: {left}")
        return played

    # -- the processes ----------------------------------------------------------------------------

    def _env(self, memory: str = "usual") -> dict[str, str]:
        site = self._site
        state = {"usual": self._folder / "state", "absent": site.root / "file" / "state"}.get(
            memory, site.full or site.root / "file" / "state"
        )
        return environment(
            XDG_STATE_HOME=str(state),
            MX_PEER_NAME_KEY=str(site.root / "name.key"),
            TMPDIR=str(self._folder / "tmp"),
            **{MARK: self._mark},
        )

    def _set_up(self) -> None:
        """Start the coordinator, a source of the checkpoint, and replicas that have it of that."""
        start = self._start
        self._coordinator, daemon = start_coordinator(self._run)
        self._holders[COORDINATOR] = daemon
        slow = [f"--max-bandwidth={start.mbyte_per_s}MB/s"] if start.mbyte_per_s else []
        full_speed = self._serve(self._site.right)
        if start.checkpoint:
            self._holders[CHECKPOINT] = self._serve(self._site.right, *slow)
        replicas = {state: self._replica(state, state) for state in start.states}
        for state, replica in replicas.items():
            self._until_lent(replica, CHECKPOINT)
            if state == LOADED and start.second_hand:
                first, replicas[state] = replica, self._replica(state, "second hand")
                self._until_lent(replicas[state], LOADED)
                if first.finish():
                    raise Violation(f"{first.name} failed:\n{first.errors}")
        self._holders |= replicas
        full_speed.signal(signal.SIGTERM)
        full_speed.wait()
        self._full_speed = full_speed

    def _serve(self, folder: Path, *more: str) -> Command:
        command: Command = self._run(
            "serve", str(folder), "--model", NAME, "--coordinator", self._coordinator, "--json",
            *more, env=self._env(),
        )  # fmt: skip
        command.json()
        self._commands.append(command)
        return command

    def _program(self, name: str, spec: dict[str, Any], env: Mapping[str, str]) -> Program:
        self._programs.append(Program(name, spec, env))
        return self._programs[-1]

    def _options(self, state: str) -> dict[str, Any]:
        return {"coordinator": self._coordinator, "state": state, "model": NAME}

    def _replica(self, state: str, name: str) -> Program:
        options = self._options(state)
        if self._start.mbyte_per_s:
            options["max_bandwidth"] = f"{self._start.mbyte_per_s}MB/s"
        options |= {"wait_s": 30, "fallback": False}
        spec = {"called": NAME, "folder": str(self._site.bare), "options": options, "stops": []}
        return self._program(f"the {name} replica", spec, self._env())

    def _until_lent(self, replica: Program, state: str) -> None:
        said = replica.hear("loaded")
        if said["choices"] != [state] or said["status"]["lending"] != "lending":
            raise Violation(f"{replica.name} is not as it should be: {said}")

    def _start_engine(self) -> Program:
        start, site = self._start, self._site
        folder = {"whole": site.right, "other": site.other}.get(start.folder, site.bare)
        options: dict[str, Any] = self._options(start.state)
        options |= {"lend": start.lend, "wait_s": 0, "transport": start.transport}
        if start.fallback is not None:
            options["fallback"] = start.fallback
        if start.then == "discard" and start.lend:
            options["wake"] = "peer"
        if start.named == "pin":
            options["model"] = f"{NAME}@{site.pin}"
        elif start.named == "files":
            del options["model"]
        called = str(folder)
        if start.folder == "absent":
            called, folder = NAME, site.root / "absent"
        stops = sorted({each.point for each in start.luck})
        spec = {"called": called, "folder": str(folder), "options": options, "stops": stops}
        return self._program("the engine", spec, self._env(start.memory))

    # -- what befalls them ------------------------------------------------------------------------

    def _follow(self, engine: Program, *events: str) -> dict[str, Any]:
        """Return the event with which a stage of the engine ends, and do meanwhile what is to
        befall its peers and itself."""
        while True:
            said = engine.hear("at", *events)
            if said["event"] != "at":
                return said
            for luck in self._start.luck:
                if luck.point == said["point"]:
                    if luck.after_s:
                        self._later(luck.after_s, functools.partial(self._strike, luck))
                    else:
                        self._strike(luck)
            engine.tell("go")

    def _later(self, after_s: float, what: Callable[[], object]) -> None:
        timer = threading.Timer(after_s, what)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _strike(self, luck: Luck) -> None:
        what, who = luck.what, luck.who
        if who == ENGINE:
            assert self._engine is not None
            self._signalled += 1
            self.struck.append(str(luck))
            self._engine.signal(_SIGNALS[what])
            return
        if what == What.SUPERSEDE:
            if COORDINATOR in self._dead or len(self._commands) > 2:
                return
            self._hurt |= {PROCESSED, LOADED, CHECKPOINT}
            self.struck.append(str(luck))
            self._serve(self._site.newer, "--revision", "newer")
            return
        holder = self._holders.get(who)
        if holder is None or who in self._dead:
            return
        self._hurt.add(who)
        self._gone |= {who} - ({who} if what == What.STOP else set())
        self.struck.append(str(luck))
        if what in _SIGNALS:
            self._dead.add(who)
            holder.signal(_SIGNALS[what])
            if what == What.STOP and luck.for_s:
                self._later(luck.for_s, lambda: holder.signal(signal.SIGCONT))
            elif luck.for_s:
                port = int(self._coordinator.rpartition(":")[2])
                self._later(luck.for_s, lambda: start_coordinator(self._run, port=port))
            return
        if what == What.UPDATE:  # what is newest has no other states
            self._hurt |= {PROCESSED, LOADED, CHECKPOINT}
        self._dead.add(who)
        said = holder.do(what.value)
        if said["error"] and COORDINATOR not in self._dead:
            raise Violation(f"{holder.name} could not {what}: {said['error']['shown']}")
        if what == What.SLEEP and luck.for_s:
            self._later(luck.for_s, lambda: holder.tell(json.dumps({"do": "wake"})))

    # -- the rules --------------------------------------------------------------------------------

    def _allowed(self, choices: list[str]) -> set[str]:
        """Return which weights the engine may have."""
        last = choices[-1]
        if last == ORDINARY:
            return {"other" if self._start.folder == "other" else "right"}
        found = {"right"}
        if self._start.named == "name":
            struck = " ".join(self.struck)
            found |= {"newer"} if What.SUPERSEDE in struck else set()
            found |= {"updated"} if f"{What.UPDATE} {last}" in struck else set()
        return found

    def _best(self) -> str:
        """Return the best that nothing has happened to, "" if there is nothing."""
        start = self._start
        takes = {"auto": ORDER, CHECKPOINT: (CHECKPOINT,)}.get(start.state)
        takes = (start.state, CHECKPOINT) if takes is None else takes
        if start.folder != "other" and COORDINATOR not in self._hurt:
            for state in ORDER[:3]:
                if state == LOADED and start.second_hand:
                    continue  # who has pulled it does not sign for the name's owner, who is gone
                if state in takes and state in self._holders and state not in self._hurt:
                    return state
        return ORDINARY if self._falls_back() and start.folder in ("whole", "other") else ""

    def _falls_back(self) -> bool:
        start = self._start
        return start.named != "pin" if start.fallback is None else start.fallback

    def _judge(self, said: dict[str, Any], played: Played) -> None:
        """Judge how the start ended."""
        if said["event"] in ("left", "end"):
            if not self._signalled:
                assert self._engine is not None
                raise Violation(f"the engine ended by itself: {said}\n{self._engine.errors}")
            played.end = "interrupted"
            return
        choices = said["choices"]
        played.choices = tuple(choices)
        ranks = [ORDER.index(each) for each in choices]
        if ranks != sorted(set(ranks)):
            raise Violation(f"it went back, or tried one twice: {choices}")
        self._check_reasons(said)
        best = self._best()
        if said["event"] == "failed":
            played.end = str(said["error"]["type"])
            if best:
                raise Violation(f"the {best} was there, and yet: {said['error']['shown']}")
            self._check_error(said["error"], at_all=choices[-1:] != [ORDINARY])
            return
        played.end = choices[-1]
        found = self._site.digests.get(said["digest"], "unknown")
        if found not in self._allowed(choices):
            raise Violation(f"wrong weights: they are {found}, by {choices}")
        if best and ranks[-1] > ORDER.index(best):
            raise Violation(f"the {best} was passed over: {choices}\n{_shown(said['lines'])}")
        self._check_lent(said["status"], found)

    def _check_lent(self, status: dict[str, Any], found: str) -> None:
        """Check that what is lent is said to be made of the checkpoint that it is made of."""
        made_of = re.search(r"checkpoint=(\w+)", status["variant"])
        revision = status["revision"]
        if made_of is not None and status["lending"] == "lending":
            of = {
                what for each, what in self._site.identities.items() if each.startswith(made_of[1])
            }
            if of != {found} and not (found == "updated" and ".2" in revision):
                raise Violation(f"weights that are {found} are lent as {of or 'unknown'}: {status}")

    def _check_error(self, error: dict[str, str], *, at_all: bool = True) -> None:
        """Check that an error is one of mx's that says something; the ordinary loader's are its
        own."""
        kind = getattr(errors, error["type"], None)
        ours = isinstance(kind, type) and issubclass(kind, errors.MxError)
        if (at_all and not ours) or not error["text"] or "unexpected " in error["text"]:
            raise Violation(f"an error that is not in the words of the interface: {error['shown']}")

    def _check_reasons(self, said: dict[str, Any]) -> None:
        """Check that there is a line of reason for each choice that failed."""
        lines, failed = said["lines"], said["failed"]
        for state, error in failed.items():
            self._check_error(error)
            if said["event"] == "failed" and said["error"]["text"] == error["text"]:
                continue
            reason = re.compile(rf"(refused|fallback).*\b{state}: \S", re.DOTALL)
            if said["event"] == "loaded" and not any(map(reason.search, lines)):
                raise Violation(f"no line says why {state} failed:\n{_shown(lines)}")
        for line in lines:
            if "Traceback" in line or "unexpected " in line:
                raise Violation(f"a line that is none of the interface's: {line}")

    def _sleep(self, engine: Program, started: dict[str, Any], played: Played) -> None:
        """Have the engine sleep and wake up; what is lost then is taken from a peer, or isn't."""
        said = self._asked(engine, self._start.then)
        if said["event"] == "done":
            said = self._asked(engine, "wake")
        if said["event"] != "done":
            played.woken = "interrupted"
            return
        error = said["error"]
        if error and self._has_a_peer(started):
            said = self._wake_again(engine, said)
            if said["event"] != "done":
                return
        same = said["digest"] == started["digest"]
        if error:
            self._check_error(error)
            played.woken = f"{error['type']}{', then right' if same else ''}"
        elif same:
            played.woken = "right"
        else:
            played.woken = "lost"
        if self._start.then == "sleep" and played.woken != "right":
            raise Violation(f"what sleep keeps is not right: {said}")
        if not same and said["status"]["lending"] == "lending":
            raise Violation(f"discarded weights are lent: {said['status']}")
        if not said["error"] and not same and started["status"]["lending"] == "lending":
            raise Violation(f"it woke up without its weights, and says nothing: {said}")
        if not same and self._start.folder == "whole":
            again = self._asked(engine, "reload")
            if again["event"] != "done":
                return
            found = self._site.digests.get(again["digest"], "unknown")
            if again["error"] or found != "right":
                raise Violation(f"it could not load from its folder again: {found}, {again}")

    def _has_a_peer(self, started: dict[str, Any]) -> bool:
        """Return True if what the engine had lent is at a replica, which was at most stopped."""
        status = started["status"]
        lent = status["lending"] == "lending" and "=processed" in status["variant"]
        right = self._site.digests.get(started["digest"]) == "right"
        gone = {PROCESSED, COORDINATOR} & self._gone
        return lent and right and PROCESSED in self._holders and not gone

    def _wake_again(self, engine: Program, said: dict[str, Any]) -> dict[str, Any]:
        """Have the engine wake up until the peer serves its weights again; return what it says."""
        for holder in self._holders.values():
            holder.signal(signal.SIGCONT)
        deadline_s = time.monotonic() + BOUND_S
        while said["event"] == "done" and said["error"]:
            if time.monotonic() > deadline_s:
                raise Violation(f"a peer is back, and yet: {said['error']['shown']}")
            time.sleep(0.2)
            said = self._asked(engine, "wake")
        return said

    def _asked(self, engine: Program, what: str) -> dict[str, Any]:
        """Have the engine do something; return what it says then, which may have been hit."""
        engine.tell(json.dumps({"do": what}))
        said = self._follow(engine, "done", "left", "end")
        if said["event"] != "done" and not self._signalled:
            raise Violation(f"the engine ended by itself: {said}\n{engine.errors}")
        return said

    def _finish(self, engine: Program) -> None:
        """Heal and end everything, and check that nothing is left."""
        for timer in self._timers:
            timer.join()
        for holder in self._holders.values():
            holder.signal(signal.SIGCONT)
        programs = [engine, *(each for each in self._programs if each is not engine)]
        for program in programs:
            program.no_more()
        for program in programs:
            code = program.finish()
            expected = {0, 3} if program is engine else {0, 128 + signal.SIGTERM}
            if program is engine and self._signalled:
                expected |= {-signal.SIGINT, 128 + signal.SIGTERM, 130}
            if not program.killed and code not in expected:
                raise Violation(f"{program.name} ended with {code}:\n{program.errors}")
            # A second signal ends what the first has begun to close: then the process just ends.
            if program.left and not (program is engine and self._signalled > 1):
                raise Violation(f"{program.name} left behind: {program.left}")
            if "Traceback" in program.errors and not (program is engine and self._signalled):
                raise Violation(f"{program.name} showed a traceback:\n{program.errors}")
        for command in self._commands:
            command.signal(signal.SIGTERM)
            command.wait(BOUND_S)
            if "Traceback" in command.err:
                raise Violation(f"a source showed a traceback:\n{command.err}")
        deadline_s = time.monotonic() + BOUND_S
        while left := marked(self._mark):
            if time.monotonic() > deadline_s:
                raise Violation(f"processes were left behind: {left}")
            time.sleep(0.05)

    def _end_all(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for program in self._programs:
            program.close()


def _shown(lines: list[str]) -> str:
    return "\n".join(lines)
