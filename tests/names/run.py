"""A name never goes back: random rounds of owners, updates, relays, strangers, readers, and states
that are lost.

Each round has a coordinator (two over Redis), the owner of the name `m`, and readers that pull it
by name all the time. Every byte of the weights is the number of their publication. One oracle
judges:

- No reader gets a publication that is older than one that was read before it began, nor bytes of
  two, nor those of a stranger.
- What the owner has published last is what the name means within a minute.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mx import api, config
from mx.errors import MxError
from tests.support import forkserver
from tests.support.commands import environment, free_port
from tests.support.redis_server import RedisServer, patience, redis_server

KINDS = ("memory", "sqlite", "redis")
_LEASE_S = 1.0
_LAYERS, _LAYER_BYTES = 8, 64 << 10
_NBYTES = _LAYERS * _LAYER_BYTES
#: The bytes of strangers; publications count from 1.
_STRANGE = 255
#: What a name means follows a publication within this.
_SOON_S = 60.0

_COORDINATOR = f"""
import sys
from mx.coordinator.daemon import CoordinatorOptions, run
listen, state, key = sys.argv[1:]
options = CoordinatorOptions(
    listen=listen, state=state, lease_s={_LEASE_S}, receipt_key=key, receipt_key_named="receipt_key"
)
sys.exit(run(options, lambda address: print(address, flush=True)))
"""


class Violation(AssertionError):
    """What the oracle refuses."""


@dataclass
class Oracle:
    """What was published and read. Thread-safe."""

    published: int = 0
    least: int = 0  # that may be read from now on
    did: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publishing(self) -> int:
        with self._lock:
            self.published += 1
            return self.published

    def read(self, floor: int, values: set[int], how: str) -> None:
        with self._lock:
            self.did["reads"] += 1
            if len(values) != 1 or not values <= set(range(1, self.published + 1)):
                self.wrong.append(f"{how} got bytes of {sorted(values)}")
            elif min(values) < floor:
                self.wrong.append(f"{how} got {min(values)} after {floor} was read")
            else:
                self.least = max(self.least, *values)

    def count(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1


class Coordinators:
    """The coordinators of a round, and what loses their state."""

    def __init__(self, kind: str, folder: Path, redis: RedisServer | None) -> None:
        self.kind, self._folder, self._redis = kind, folder, redis
        self._state = kind if kind == "memory" else f"sqlite:{folder / 'state.db'}"
        if redis is not None:
            self._state = redis.fresh_url()
        self._ports = [free_port() for _ in range(2 if kind == "redis" else 1)]
        self._running: dict[int, Any] = {}
        self._backup: Path | None = None
        self._readers: list[threading.Thread] = []
        for port in self._ports:
            self.start(port)

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def start(self, port: int) -> None:
        given = f"127.0.0.1:{port}", self._state, str(self._folder / "receipts")
        child = forkserver.python(_COORDINATOR, *given, env=environment(), errors=True)
        assert child.stdout is not None
        if not child.stdout.readline():
            assert child.stderr is not None
            raise RuntimeError(f"no coordinator: {child.stderr.read()}")
        # It may say more than a pipe holds.
        for pipe in (child.stdout, child.stderr):
            reader = threading.Thread(target=_drain, args=(pipe,), daemon=True)
            reader.start()
            self._readers.append(reader)
        self._running[port] = child

    def kill(self, port: int) -> None:
        child = self._running.pop(port)
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()

    def back_up(self) -> None:
        """Keep a copy of the state, to be restored by `lose`."""
        if self.kind != "sqlite":
            return
        (port,) = self._ports
        self.kill(port)  # it has the file alone
        self._backup = self._folder / "backup"
        shutil.rmtree(self._backup, ignore_errors=True)
        self._backup.mkdir()
        for file in self._folder.glob("state.db*"):
            shutil.copy2(file, self._backup)
        self.start(port)

    def lose(self, rng: random.Random) -> str:
        """Kill a coordinator and start it again, mostly with less than it had."""
        port = rng.choice(self._ports)
        if self.kind == "redis" and rng.random() < 0.6:
            assert self._redis is not None
            self._redis.ask("FLUSHALL")
            return "emptied"
        self.kill(port)
        what = "restarted"
        if self.kind == "sqlite" and rng.random() < 0.7:
            for left in self._folder.glob("state.db*"):
                left.unlink()
            what = "emptied"
            if self._backup is not None and rng.random() < 0.6:
                for file in self._backup.iterdir():
                    shutil.copy2(file, self._folder)
                what = "restored"
        self.start(port)
        return what

    def close(self) -> None:
        for port in list(self._running):
            self.kill(port)
        for reader in self._readers:
            reader.join(60)


def _drain(pipe: Any) -> None:
    with contextlib.suppress(OSError, ValueError), pipe:
        for _ in pipe:
            pass


def tensors(version: int) -> dict[str, Any]:
    """Weights of which every byte is `version`."""
    return {
        f"model.layers.{layer}.w": np.full(_LAYER_BYTES, version, np.uint8)
        for layer in range(_LAYERS)
    }


class Round:
    """One round: what runs, and the steps that chance takes."""

    def __init__(self, kind: str, seed: int, stack: ExitStack, redis: RedisServer | None) -> None:
        self.rng = random.Random(seed)
        self.oracle = Oracle()
        folder = Path(tempfile.mkdtemp(prefix="mx-names-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._stack, self._folder = stack, folder
        self.coordinators = Coordinators(kind, folder, redis)
        stack.callback(self.coordinators.close)
        self.settings = replace(
            config.load({}),
            coordinator=self.coordinators.address,
            connect_timeout_s=2.0,
            stall_timeout_s=2.0,
            reader_lease_s=2.0,
            streams=1,
        )
        self.lent = tensors(self.oracle.publishing())
        self.source = stack.enter_context(self._serve(update=False))
        self.steps: list[str] = []
        self.over = threading.Event()
        self.refused = ""

    def _serve(self, *, update: bool) -> api.Source:
        settings = replace(self.settings, name_key=str(self._key("owner")))
        return api.serve(self.lent, model="m", copy=False, update=update, settings=settings)

    def _key(self, who: str) -> Path:
        path = self._folder / f"{who}.key"
        if not path.exists():
            from mx.keyfile import make

            make(path)
        return path

    # -- readers ----------------------------------------------------------------------------------

    def read(self, how: str, wait_s: float = 0.0) -> None:
        """Pull the name once, into memory of the reader's."""
        floor, into = self.oracle.least, memoryview(bytearray(_NBYTES + (1 << 20)))
        try:
            with api.pull(
                "m", into=into, transport="tcp", wait_s=wait_s, settings=self.settings
            ) as pull:
                pull.wait(120)
                layout = pull.wait_manifest().layout
                parts = [into[b : b + n] for b, n in _extents(layout)]
                values = {value for part in parts for value in np.unique(np.frombuffer(part, "u1"))}
        except MxError as error:
            self.oracle.count(f"reads refused: {type(error).__name__}")
            self.refused = str(error)
            return
        self.oracle.read(floor, {int(each) for each in values}, how)

    def keep_reading(self) -> None:
        rng = random.Random(self.rng.random())
        try:
            while not self.over.is_set():
                self.read("a reader", rng.choice([0.0, 0.0, 2.0]))
                time.sleep(rng.random() / 20)
        except Exception:  # noqa: BLE001 - any is a finding
            self.oracle.wrong.append(traceback.format_exc())

    # -- steps ------------------------------------------------------------------------------------

    def change(self) -> None:
        """The owner publishes by writing in place."""
        version = self.oracle.publishing()
        with self.source.changing():
            if self.rng.random() < 0.5:
                time.sleep(self.rng.random() / 2)
            for tensor in self.lent.values():
                tensor[:] = version

    def restart(self) -> None:
        """The owner ends, and starts again with new weights."""
        self.source.close()
        if self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 2)
        self.lent = tensors(self.oracle.publishing())
        self.source = self._stack.enter_context(self._serve(update=True))

    def relay(self) -> None:
        """A reader keeps what it has, and gives it to others."""
        floor = self.oracle.least
        try:
            pull = self._stack.enter_context(
                api.pull("m", hold=True, transport="tcp", settings=self.settings)
            )
            pull.wait(120)
            self._stack.enter_context(pull.hold())
        except MxError as error:
            self.oracle.count(f"relays refused: {type(error).__name__}")
            return
        version = int(pull.state_dict()["model.layers.0.w"][0])
        self.oracle.read(floor, {version}, "a relay")

    def half_relay(self) -> None:
        """A reader stops in the middle, with some layers that others may take from it."""
        going = threading.Event()
        self._stack.callback(going.set)
        count = self.rng.randint(1, _LAYERS - 1)

        def stop(event: api.LayerEvent) -> None:
            if event.index >= count:
                going.wait(60)

        with contextlib.suppress(MxError):
            pull = api.pull("m", transport="tcp", settings=self.settings)
            self._stack.enter_context(pull)
            pull.on_layer(stop)

    def stranger(self) -> None:
        """Somebody else serves other weights under the name."""
        settings = replace(self.settings, name_key=str(self._key("stranger")))
        try:
            self._stack.enter_context(api.serve(tensors(_STRANGE), model="m", settings=settings))
        except MxError as error:
            self.oracle.count(f"strangers refused: {type(error).__name__}")

    def lose(self) -> None:
        self.oracle.count(f"states {self.coordinators.lose(self.rng)}")

    def pause(self) -> None:
        time.sleep(self.rng.random() * 2)

    def play(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (5, self.change),
            (2, self.restart),
            (3, self.relay),
            (3, self.half_relay),
            (1, self.stranger),
            (3, self.lose),
            (2, self.pause),
            (1, self.coordinators.back_up),
        ]
        weights = [weight for weight, _ in steps]
        reader = threading.Thread(target=self.keep_reading, daemon=True)
        reader.start()
        try:
            # A coordinator that has forgotten all, and of which no reader knows better, believes
            # who comes first (docs/binding.md): what it meant before was read then.
            while not self.oracle.least:
                self.read("the first reader", 1.0)
            for _ in range(self.rng.randint(4, 9)):
                (step,) = self.rng.choices([step for _, step in steps], weights)
                self.steps.append(step.__name__)
                self.oracle.count(step.__name__)
                began_s = time.monotonic()
                step()
                if os.environ.get("MX_NAMES_TRACE"):
                    print(f"{step.__name__} {time.monotonic() - began_s:.1f} s", flush=True)
            self.converge()
        finally:
            self.over.set()
            reader.join(180)
        if reader.is_alive():
            self.oracle.wrong.append("a reader hangs")

    def converge(self) -> None:
        """What was published last is what the name means within a minute."""
        until_s = time.monotonic() + _SOON_S
        while self.oracle.least < self.oracle.published:
            if time.monotonic() > until_s:
                self.oracle.wrong.append(
                    f"{self.oracle.published} was published, and the name means "
                    f"{self.oracle.least} after a minute: {self.refused or 'it was read'}"
                )
                return
            self.read("the last reader", 1.0)


def _extents(layout: Any) -> Iterator[tuple[int, int]]:
    for tensor in layout.tensors:
        yield layout.layers[tensor.layer].arena_offset + tensor.offset, tensor.nbytes


def play(rounds: int, seed: int, state: str = "", *, log: Any = sys.stdout) -> int:
    """Play rounds, print what is wrong in them, and return 1 if anything was, else 0.

    Args:
        rounds: How many.
        seed: Of the first one; each of the others has the next number.
        state: The state of all; "" for each kind in turn.
        log: Gets a line every ten rounds, and what is wrong.
    """
    did: Counter[str] = Counter()
    bad = 0
    with ExitStack() as outer:
        redis = None
        if shutil.which("redis-server") and state in ("", "redis"):
            redis = outer.enter_context(redis_server())
            outer.enter_context(patience())
        kinds = [state] if state else [kind for kind in KINDS if redis or kind != "redis"]
        for number in range(seed, seed + rounds):
            kind, began_s = kinds[number % len(kinds)], time.monotonic()
            steps: list[str] = []
            try:
                with ExitStack() as stack:
                    played = Round(kind, number, stack, redis if kind == "redis" else None)
                    steps = played.steps
                    played.play()
                did += played.oracle.did
                wrong = played.oracle.wrong
            except Exception:  # noqa: BLE001 - any is a finding, with its round
                wrong = [traceback.format_exc()]
            if wrong:
                wrong.append(f"did {', '.join(f'{n} {w}' for w, n in played.oracle.did.items())}")
            did["seconds"] += round(time.monotonic() - began_s)
            if wrong:
                bad += 1
                print(f"round {number} ({kind}): {' '.join(steps)}", file=log)
                for each in dict.fromkeys(wrong):
                    print(f"  {each}", file=log)
            if (number - seed) % 10 == 9:
                print(f"{number - seed + 1} rounds, {bad} wrong", file=log, flush=True)
    said = ", ".join(f"{n} {what}" for what, n in sorted(did.items()))
    print(f"{rounds} rounds by {os.getpid()}: {bad} wrong; {said}", file=log, flush=True)
    return int(bad > 0)
