"""The site of rounds: a coordinator, sources and targets, each a process.

They run on loopback, or each in a network namespace of its own around a switch.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, Link
from mx.wire.server import IDLE_S
from tests.chaos import weights
from tests.chaos.processes import (
    MARK,
    Process,
    Violation,
    beyond,
    command,
    environment,
    python,
)
from tests.chaos.schedule import COORDINATOR, MODELS, TARGETS, Fault, What

#: Sources that run as users run them.
COMMANDS = ("s2",)
START_S = 60.0
LISTED_S = 30.0
#: Seconds for a process to notice a dead connection: a stall timeout or two, a retransmission of
#: TCP's after a link was cut; or, where a muted link lost the reset of a connection, the time after
#: which servers end those without a call.
SETTLE_S = IDLE_S + 10.0
MBIT_PER_S = 400.0


class Site:
    """A site, as a context manager.

    `believe_everything` switches the targets' verification off.
    """

    def __init__(
        self,
        place: str,
        folder: Path,
        mark: str,
        hosts: Hosts | None = None,
        *,
        believe_everything: bool = False,
    ) -> None:
        self.place = place
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir(parents=True)
        self.inbox: queue.Queue[tuple[Process, dict[str, Any]]] = queue.Queue()
        self.processes: dict[str, Process] = {}
        self._hosts = hosts
        self._links: dict[str, Link] = {}
        self._mark = mark
        self._believe_everything = believe_everything
        self._checkpoint = folder / "model.safetensors"
        weights.write(self._checkpoint)
        self.expected = weights.digests(self._checkpoint)
        (folder / "expected.json").write_text(json.dumps(self.expected))
        self._allowed: dict[str, Counter[str]] = {}
        self._ended: list[Process] = []
        if hosts is None:
            self.sources = ["s0", "s1", "s2", "f"]
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self.coordinator = f"127.0.0.1:{port}"
        else:
            self.sources = ["s0", "s1"]
            names = [COORDINATOR, *self.sources, *TARGETS]
            self._links = hosts.star(names, up_mbit_per_s=MBIT_PER_S, down_mbit_per_s=MBIT_PER_S)
            self.coordinator = f"{self._address(COORDINATOR)}:7600"

    def _address(self, name: str) -> str:
        return self._links[name].address(name) if self._links else "127.0.0.1"

    # -- processes --------------------------------------------------------------------------------

    def start(self) -> None:
        for name in (COORDINATOR, *TARGETS, *self.sources):
            self.launch(name)
        for process in self.processes.values():
            process.wait_ready(START_S)

    def models_of(self, source: str) -> list[str]:
        known = [m for m, names in MODELS.items() if set(names) <= set(self.sources)]
        return [model for model in known if source in MODELS[model]]

    def launch(self, name: str) -> None:
        """Start or restart a process; the caller then calls `wait_ready`."""
        if name in self.processes:
            self._ended.append(self.processes[name])
        if name == COORDINATOR:
            made = command("coordinator_main", "--listen", self.coordinator, "--json")
        elif name in TARGETS:
            made = python(
                "tests.chaos.target",
                {
                    "expected": str(self.folder / "expected.json"),
                    "believe_everything": self._believe_everything,
                },
            )
        elif name in COMMANDS:
            made = command(
                "main", "serve", str(self._checkpoint), "--model", "three",
                # It may be restarted while the coordinator is dead.
                "--coordinator", self.coordinator, "--wait", f"{START_S:.0f}", "--json",
            )  # fmt: skip
        else:
            made = python(
                "tests.chaos.origin",
                {
                    "checkpoint": str(self._checkpoint),
                    "models": self.models_of(name),
                    "coordinator": self.coordinator,
                    "fickle": name == "f",
                },
            )
        self.processes[name] = self.spawn(name, name, made)

    def spawn(self, host: str, name: str, made: list[str]) -> Process:
        more = {MARK: self._mark, "TMPDIR": str(self.tmp)}
        if self._hosts is not None:
            made = [*self._hosts.prefix(host), *made]
            more |= {
                "MX_PEER_LISTEN": f"{self._address(host)}:0",
                "MX_PEER_INSECURE": "true",
                "MX_PEER_TRUSTED_FABRIC": "true",
            }
        return Process(name, made, self.inbox, self.folder, environment(**more))

    def endpoints(self) -> dict[str, str]:
        """Return the name of the source at each HOST:PORT."""
        found = {}
        for name in self.sources:
            ready = self.processes[name].ready
            for endpoint in ready.get("endpoints", {"": ready.get("endpoint", "")}).values():
                found[endpoint] = name
        return found

    # -- faults -----------------------------------------------------------------------------------

    def inflict(self, fault: Fault) -> Callable[[], None]:
        """Start a fault and return the function that undoes it."""
        name = fault.who
        process = self.processes[name]
        match fault.what:
            case What.KILL:
                process.kill()
                return lambda: self.revive(name)
            case What.STOP:
                process.signal(signal.SIGSTOP)
                return lambda: process.signal(signal.SIGCONT) if process.alive else None
            case What.CHANGE | What.CORRUPT:
                process.send(do=str(fault.what))
                return lambda: self._renew(name)
            case What.GIVE_UP:
                process.send(do="give up")
                return lambda: None
        assert self._hosts is not None
        hosts, link = self._hosts, self._links[name]
        match fault.what:
            case What.CUT:
                hosts.cut(link)
                return lambda: hosts.heal(link)
            case What.MUTE_UP:
                hosts.mute(link, name)
                return lambda: hosts.heal(link)
            case What.MUTE_DOWN:
                hosts.mute(link, link.b)
                return lambda: hosts.heal(link)
        hosts.throttle(link, fault.value, name)
        hosts.throttle(link, fault.value, link.b)
        return lambda: self._full_speed(link)

    def _full_speed(self, link: Link) -> None:
        assert self._hosts is not None
        for sender in (link.a, link.b):
            self._hosts.throttle(link, MBIT_PER_S, sender)

    def revive(self, name: str) -> None:
        """Restart a process that was killed, unless it was restarted already."""
        if not self.processes[name].alive:
            self.launch(name)

    def _renew(self, name: str) -> None:
        process = self.processes[name]
        if process.alive and process.ready:  # otherwise it is starting or renewing
            process.ready = {}
            process.send(do="renew")

    # -- between rounds ---------------------------------------------------------------------------

    def gather(self) -> None:
        """Restart every process and wait until the coordinator lists exactly the sources."""
        for name in self.processes:
            self.revive(name)
        for process in list(self.processes.values()):
            process.wait_ready(START_S)
        self.let_go()
        wanted = sorted(self.endpoints())
        deadline_s = time.monotonic() + LISTED_S
        lister = self.processes[TARGETS[0]]
        while True:
            lister.send(do="list", coordinator=self.coordinator)
            listed = sorted(self.receive(lister, "listed")["endpoints"])
            if listed == wanted:
                return
            if time.monotonic() > deadline_s:
                raise Violation(f"the coordinator lists {listed}, not {wanted}")
            time.sleep(0.05)

    def receive(self, process: Process, event: str) -> dict[str, Any]:
        """Return the next message of this kind of a process, while the site is idle.

        Other messages of processes that were killed are dropped.
        """
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                sender, message = self.inbox.get(timeout=max(0, deadline_s - time.monotonic()))
            except queue.Empty:
                process.signal(signal.SIGUSR1)
                time.sleep(1)
                raise Violation(
                    f"{process.name} sent no {event!r} in {START_S} s:\n{process.errors()}"
                ) from None
            if sender is process and message.get("event") == event:
                return message
            self.check_end(sender, message)

    def diagnostics(self, process: Process) -> str:
        """Return the stacks and states of a process and of those that it may wait for."""
        signalled = [process]
        for name, other in self.processes.items():
            if other is not process and name not in (COORDINATOR, *COMMANDS) and other.alive:
                signalled.append(other)
        for each in signalled:
            each.signal(signal.SIGUSR1)
        time.sleep(2)
        return "".join(f"--- {each.name}\n{each.errors()}\n" for each in signalled)

    def check_end(self, process: Process, message: dict[str, Any]) -> None:
        if message.get("event") == "end" and not process.killed:
            raise Violation(
                f"{process.name} ended by itself with {message['code']}:\n{process.errors()}"
            )

    def measure(self) -> None:
        """Record what each process holds now as what its kind may hold after a round."""
        for name in self.processes:
            allowed = self._allowed.setdefault(_kind(name), Counter())
            allowed |= self._held(name)
            self._allowed[_kind(name)] = allowed

    def _held(self, name: str) -> Counter[str]:
        process = self.processes[name]
        found = process.holdings()
        if "endpoint" not in process.ready and name != COORDINATOR:
            process.send(do="finish")
            threads = self.receive(process, "held")["threads"]
            plain = (re.sub(r"[-_ ]?\d+", "", thread) for thread in threads)
            found.update(f"thread {name}" for name in plain if name != "asyncio")
        return found

    def let_go(self) -> None:
        """Make every target close its pulls."""
        for name in TARGETS:
            self._held(name)

    def settle(self) -> None:
        """Wait until no process holds more than before."""
        began_s = time.monotonic()
        left = list(self.processes)
        while True:
            over = {name: beyond(self._held(name), self._allowed[_kind(name)]) for name in left}
            left = [name for name in left if over[name]]
            waited_s = time.monotonic() - began_s
            if not left:
                break
            if waited_s > SETTLE_S:
                raise Violation(
                    f"left behind (now, allowed): { {name: over[name] for name in left} }"
                    + "".join(self._explanation(name) for name in left if name in TARGETS)
                )
            time.sleep(0.02 if waited_s < 1 else 0.2)
        self.check_errors()
        if stray := os.listdir(self.tmp):
            raise Violation(f"temporary files were left behind: {stray}")

    def _explanation(self, target: str) -> str:
        process = self.processes[target]
        process.send(do="explain")
        explained = self.receive(process, "explained")
        return "".join(
            f"\n{target} has {what}" for what in (*explained["tasks"], explained["objects"])
        )

    def check_errors(self) -> None:
        for process in (*self._ended, *self.processes.values()):
            if "Traceback" in (said := process.errors()):
                raise Violation(f"{process.name} showed a traceback:\n{said}")
        for process in self._ended:
            process.end()
            process.stderr.unlink()
        self._ended.clear()

    def close(self) -> None:
        """End all processes, whatever has happened."""
        for process in reversed((*self._ended, *self.processes.values())):
            process.end()


def _kind(name: str) -> str:
    return "target" if name in TARGETS else name
