"""The processes and objects of a run: a coordinator that restarts, and what each round makes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mx import api, config
from mx.errors import CoordinatorError, MxError
from tests.differential.weights import Tensors, Truth, make, print_of, shapes, write
from tests.support.commands import Command, environment, free_port

#: How long anything may take before a round fails: far longer than it ever takes.
LIMIT_S = 60.0
#: Leases that no process loses only because the machine is busy.
LEASE_S = "10"


class Coordinator:
    """`mx-coordinator` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._env = environment(XDG_STATE_HOME=str(folder), MX_PEER_LEASE_S=LEASE_S)
        self._command = self._start()

    def _start(self) -> Command:
        command = Command("--listen", self.address, daemon=True, env=self._env)
        command.until(self._answers, "coordinator")
        return command

    def _answers(self) -> bool:
        try:
            api.list_models(coordinator=self.address)
        except CoordinatorError:
            return False
        return True

    def restart(self) -> None:
        """Kill it, and start one that knows nothing."""
        self._command.end()
        self._command = self._start()

    def close(self) -> None:
        self._command.end()


@dataclass
class Lender:
    """A source of a name, and the way in which it gets new weights."""

    kind: str  # "folder", "memory" or "lent"
    source: api.Source
    tensors: Tensors  # of "lent": the memory itself


@dataclass
class Name:
    """A model's name, its folder, and what is known of it."""

    name: str
    folder: Path
    sizes: dict[str, int]
    salt: int  # names of one salt have the same weights
    truth: Truth = field(default_factory=Truth)
    lender: Lender | None = None
    #: Replicas that are held: each with the number of its version.
    held: list[tuple[api.Pull, api.Source]] = field(default_factory=list)
    versions: int = 0
    #: False from the coordinator's restart until the lender is seen to be listed again.
    settled: bool = True

    def fresh(self) -> tuple[Tensors, int]:
        """Return weights that were never there."""
        self.versions += 1
        return make(self.sizes, self.salt, self.versions), self.versions


def _settings(**more: str) -> config.Settings:
    leases = {"lease_s": LEASE_S, "reader_lease_s": "5"}
    return config.load({"cache_socket": "off", **leases, **more}, environ=dict(os.environ))


class World:
    """What one round works with. Names are the round's own."""

    def __init__(
        self, coordinator: Coordinator, folder: Path, seed: int, tally: Counter[str]
    ) -> None:
        self.rng = random.Random(seed)
        self.coordinator = coordinator
        self.tally = tally  # what was done, and how it ended
        self.log: list[str] = []
        self.changes = 0  # what was changed, ended or restarted so far: a pull may end by it
        self._began_s = time.monotonic()
        self.settings = _settings()
        last = f"final-{seed}"  # both folders end in it
        sizes = shapes(self.rng)
        alike, twins = self.rng.random() < 0.7, self.rng.random() < 0.2
        others = sizes if alike else shapes(self.rng)
        self.names = [
            Name(f"x-{seed}", folder / "x" / last, sizes, 0),
            Name(f"y-{seed}", folder / "y" / last, others, 0 if twins else 1),
        ]

    def note(self, what: str) -> None:
        """Remember a step, for the report of a round that fails."""
        self.log.append(f"{time.monotonic() - self._began_s:6.2f} {what}")

    def serve(self, name: Name, kind: str, *, speed: str, update: bool = False) -> None:
        """Serve weights that the name has not had; with `update` in place of those that it has."""
        tensors, version = name.fresh()
        files: dict[str, bytes] = {}
        if kind == "folder":
            files = write(name.folder, tensors, version)
        key = name.truth.may_mean(tensors, files)
        what: object = name.folder if kind == "folder" else tensors
        replaces: dict[str, Any] = {"update": True} if update else {}
        source = api.serve(
            what,
            model=name.name,
            coordinator=self.coordinator.address,
            copy=kind != "lent",
            **replaces,
            settings=_settings(max_bandwidth=speed) if speed else self.settings,
        )
        name.lender = Lender(kind, source, tensors)
        name.truth.means(key, str(source.model), source.identity_hex)

    def update(self, name: Name, *, grace_s: float, restarts: bool = False) -> None:
        """Publish new weights; the coordinator may restart in the middle of it."""
        self.changes += 1
        lender = name.lender
        assert lender is not None
        tensors, version = name.fresh()
        if lender.kind == "lent":
            with lender.source.changing(grace_s=grace_s):
                for each, tensor in lender.tensors.items():
                    tensor.copy_(tensors[each])
                key = name.truth.may_mean(lender.tensors, {})
                if restarts:
                    self.restart_coordinator()
        else:
            files = write(name.folder, tensors, version) if lender.kind == "folder" else {}
            key = name.truth.may_mean(tensors, files)
            what: object = name.folder if lender.kind == "folder" else tensors
            lender.source.update(what, grace_s=grace_s)
            lender.tensors = tensors
        name.truth.means(key, str(lender.source.model), lender.source.identity_hex)

    def restart_coordinator(self) -> None:
        """Restart it; what names mean has to settle then."""
        self.changes += 1
        self.tally["coordinator restarts"] += 1
        self.coordinator.restart()
        for name in self.names:
            name.settled = False

    def settle(self, name: Name) -> None:
        """Wait until the name means what was published last, if its lender lives. Raises
        AssertionError if it never does."""
        lender = name.lender
        if lender is None or lender.source.withdrawn:
            return
        until_s = time.monotonic() + LIMIT_S
        seen = ""
        while time.monotonic() < until_s:
            try:
                with api.pull(
                    name.name, coordinator=self.coordinator.address, settings=self.settings
                ) as pull:
                    pull.wait(LIMIT_S)
                    version = name.truth.versions.get(print_of(pull.state_dict()))
            except MxError as error:
                seen = str(error)
            else:
                assert version is not None, f"{name.name}: bytes that no lender has published"
                if version.number >= name.truth.newest:
                    name.settled = True
                    return
                seen = f"version {version.number}"
            time.sleep(0.1)
        raise AssertionError(
            f"{name.name} does not come to mean version {name.truth.newest} again: {seen}"
        )

    def close(self) -> None:
        """Close everything, the last first."""
        for name in self.names:
            for pull, source in name.held:
                source.close()
                pull.close()
            name.held.clear()
            if name.lender is not None:
                name.lender.source.close()
                name.lender = None

    def listed(self) -> int:
        """Return how many sources are listed under the round's names."""
        found = api.list_sources(coordinator=self.coordinator.address, settings=self.settings)
        ours = [name.name for name in self.names] + [name.folder.name for name in self.names]
        return sum(each.record.model.name in ours for each in found)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles(count: Callable[[], int], most: int) -> int:
    """Return what is counted, once it is at most `most`, or at the end of the time for that."""
    until_s = time.monotonic() + LIMIT_S / 4
    while (found := count()) > most and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def expecting(world: World, what: str, *errors: type[BaseException]) -> Iterator[None]:
    """Take these errors for an answer."""
    world.note(what)
    try:
        yield
    except errors as error:
        world.tally[type(error).__name__] += 1
        world.note(f"  {type(error).__name__}: {error}")
