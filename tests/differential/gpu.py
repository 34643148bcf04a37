"""python -m tests.differential.gpu [--rounds N] [--seed S]: pulls in which a call of CUDA fails.

Over the stand-in driver. A round draws from its seed which process has the failure (a target or a
source), which call fails, the how many-th, and with which error. A pull then ends whole, with the
checkpoint's bytes, or with a typed error and nothing written; no process prints a traceback, dies
of a signal or hangs. Other readers go on, the next pull into the same folder is whole, and a source
keeps nothing of a reader that has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

import mx
from benchmarks.processes import Cluster
from mx import errors
from tests.support.driver.build import environment, why_not
from tests.support.driver.logs import calls

#: After the first three, of sources in host memory, their own and the driver's, and of no source.
TARGETS = (
    *("cuda:0", "cuda:1", "cpu", "host to cuda:0", "pinned to cuda:0"),
    *("disk to cuda:0", "cufile to cuda:0"),
)
FROM_DISK = TARGETS[-2:]
#: One of each class: an argument, memory, a context that is broken or a GPU that is lost, what this
#: driver can't do, and the unknown.
CODES = [
    *("INVALID_VALUE", "OUT_OF_MEMORY", "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE"),
    *("NOT_SUPPORTED", "NOT_PERMITTED", "OPERATING_SYSTEM", "UNKNOWN"),
]
TYPED = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
#: So long no pull of this size takes.
_HANG_S = 60
MODEL = "m"
#: The same weights in host memory, by what the names of targets begin with.
HOST_MODELS = {"host to": "h", "pinned to": "p"}


class Broken(AssertionError):
    """A round breaks a rule."""


def check(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


class World:
    """A coordinator and a source on GPU 0 that never fails, and the calls that each process makes.

    Args:
        folder: Where checkpoint, logs and outputs are.
        major: The major version of CUDA.
    """

    def __init__(self, folder: Path, major: int) -> None:
        self.folder, self.major = folder, major
        self._count = 0
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        rng = np.random.default_rng(1)
        tensors = {
            f"model.layers.{n}.weight": rng.standard_normal((1001, 350), dtype=np.float32)
            for n in range(3)
        }
        save_file(tensors, self.checkpoint / "model.safetensors")
        #: The same with digests beside its weights.
        self.described = folder / "described"
        with mx.pull(MODEL, path=self.checkpoint, out=self.described) as pull:
            self.pin = pull.wait().pin
        self._errors = (folder / "stderr").open("w+b")
        self.cluster = Cluster(stderr=self._errors.fileno())
        self.serve(HOST_MODELS["host to"], "cpu")
        self.serve(HOST_MODELS["pinned to"], "cpu", "--pinned")
        self.source = self.serve(MODEL, "cuda:0")
        self.made: dict[str, Counter[str]] = {}
        for target in TARGETS:
            check(self.pull(MODEL, target, "") == errors.EXIT_OK, f"the pull to {target} fails")
            self.made[target] = self._calls()
        self.made["source"] = Counter(
            name for name, _ in calls(self.folder / "log", self.source_pid)
        )
        self._held = self._holds()

    def environment(self, fail: str, log: str, **more: object) -> dict[str, str]:
        """Return the environment of a process of which a call fails, with settings of the
        stand-in."""
        where = self.folder / log
        where.mkdir(exist_ok=True)
        settings = {"KERNELS": True, "LOG": where, "FAIL": fail, **more}
        return environment(self.major, settings) | {"MX_PEER_LOG_LEVEL": "warning"}

    def serve(self, model: str, device: str, *more: str) -> dict[str, object]:
        child, found = self.cluster.serve(
            self.checkpoint, model, "--device", device, *more, env=self.environment("", "log")
        )
        self.source_pid = child.pid
        return found

    def _calls(self) -> Counter[str]:
        return Counter(name for name, _ in calls(self.folder / "last"))

    def pull(self, model: str, target: str, fail: str) -> int:
        """Pull, hold the end against the rules, and return the exit code."""
        return self.finish(self.start(model, target, fail))

    def start(self, model: str, target: str, fail: str, out: Path | None = None) -> Pull:
        """Start a pull of which a call fails, into a new folder unless one is given."""
        self._count += 1
        for log in (self.folder / "last").glob("*.log"):
            log.unlink()
        return Pull(self, model, target, fail, out or self.folder / f"out{self._count}")

    def finish(self, pull: Pull) -> int:
        code = pull.finish()
        text = pull.stderr
        check(code in TYPED, f"it ends with {code}:\n{text}")
        check("Traceback" not in text, f"a traceback:\n{text}")
        out = pull.out / "model.safetensors"
        if code == errors.EXIT_OK:
            wanted = (self.checkpoint / "model.safetensors").read_bytes()
            check(out.read_bytes() == wanted, "it wrote other bytes")
        else:
            check("error" in text, f"it ends with {code} and says nothing:\n{text}")
            check(not out.exists(), f"it ends with {code} and has written:\n{text}")
        return code

    def _holds(self) -> Counter[str]:
        """Return what the source has: its descriptors and its maps of memfds.

        An agent of ucx outlives its readers, for the next one; its socket does not count.
        """
        source = psutil.Process(self.source_pid)
        folder = Path(f"/proc/{source.pid}/fd")
        held: Counter[str] = Counter()
        for number in os.listdir(folder):
            with suppress(FileNotFoundError):
                held[os.readlink(folder / number).partition(":[")[0]] += 1
        held["socket"] -= len(source.children())
        held["maps"] = Path(f"/proc/{source.pid}/maps").read_text().count("/memfd:")
        return held

    def source_is_as_before(self) -> None:
        """Check that the source keeps nothing of the readers that have ended."""
        until = time.monotonic() + 15
        while kept := self._holds() - self._held:
            check(time.monotonic() < until, f"the source keeps {dict(kept)}")
            time.sleep(0.05)
        check("Traceback" not in self.said(), f"a traceback at the source:\n{self.said()}")

    def said(self) -> str:
        """Return what coordinator and sources have printed since the last round."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._errors.truncate(0)
        self._errors.seek(0)
        return text

    def close(self) -> None:
        self.cluster.close()
        self._errors.close()


class Pull:
    """A running `mx pull`."""

    def __init__(self, world: World, model: str, target: str, fail: str, out: Path) -> None:
        self.out = out
        self.stderr = ""
        host, _, device = target.rpartition(" ")
        where = ["--coordinator", world.cluster.coordinator]
        if target in FROM_DISK:
            model, where = f"{model}@{world.pin}", ["--from", f"disk={world.described}"]
        elif host and model == MODEL:
            model = HOST_MODELS[host]
        more = {"CUFILE": "direct"} if target == FROM_DISK[1] else {}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mx", "pull", model, "--device", device, "--json"),
                *("--out", str(out), *where),
            ],
            env=world.environment(fail, "last", **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> int:
        """Wait for its end and return the exit code."""
        try:
            stdout, self.stderr = self._process.communicate(timeout=_HANG_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            _, self.stderr = self._process.communicate()
            raise Broken(f"it hangs:\n{self.stderr}") from None
        if self._process.returncode == errors.EXIT_OK:
            self.paths = [path["transport"] for path in json.loads(stdout)["paths"]]
        return self._process.returncode


def failure(rng: random.Random, made: Counter[str]) -> str:
    """Draw a call of those that a process makes, and how it fails; now and then two of them."""
    if rng.random() < 0.1:  # a GPU that is lost
        return f"*:-{rng.randint(1, made.total())}:CUDA_ERROR_{rng.choice(CODES)}"
    name = rng.choice([*sorted(made), "work"])
    often = made[name] or sum(made[each] for each in made if "Async" in each or "Launch" in each)
    drawn = f"{name}:{rng.randint(1, max(often, 1))}:CUDA_ERROR_{rng.choice(CODES)}"
    return drawn if rng.random() < 0.8 else f"{drawn},{failure(rng, made)}"


def play(world: World, seed: int, tally: Counter[str]) -> str:
    """Play a round and return what it was. Raises Broken."""
    rng = random.Random(seed)
    target = rng.choice(TARGETS)
    if rng.random() < 0.25 and target not in FROM_DISK:
        fail = failure(rng, world.made["source"])
        what = f"the source of a pull to {target}: {fail}"
        try:
            code = source_round(world, f"m{seed}", target, fail, tally)
        except Broken as error:
            raise Broken(f"{what}: {error}") from None
    else:
        fail = failure(rng, world.made[target])
        what = f"a pull to {target}: {fail}"
        try:
            beside = world.start(MODEL, rng.choice(TARGETS), "") if rng.random() < 0.25 else None
            pull = world.start(MODEL, target, fail)
            code = world.finish(pull)
            if beside is not None:
                check(world.finish(beside) == errors.EXIT_OK, f"beside it: {beside.stderr}")
            world.source_is_as_before()
            if code != errors.EXIT_OK and rng.random() < 0.5:
                again = world.start(MODEL, rng.choice(TARGETS), "", pull.out)
                check(world.finish(again) == errors.EXIT_OK, f"the next one fails: {again.stderr}")
                tally["resumed"] += 1
        except Broken as error:
            raise Broken(f"{what}: {error}") from None
    tally["whole" if code == errors.EXIT_OK else f"exit {code}"] += 1
    return f"{what}: {code}"


def source_round(world: World, model: str, target: str, fail: str, tally: Counter[str]) -> int:
    """Serve with a failure, pull, and end the source; return the pull's code, or the source's."""
    command = [sys.executable, "-m", "mx", "serve", str(world.checkpoint), "--model", model]
    command += ["--device", "cuda:0", "--coordinator", world.cluster.coordinator, "--json"]
    source = subprocess.Popen(
        command,
        env=world.environment(fail, "source"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code: int | None = None
    assert source.stdout is not None
    try:
        if "error" not in json.loads(source.stdout.readline() or '{"error": ""}'):
            code = world.pull(model, target, "")
            source.terminate()
        _, text = source.communicate(timeout=_HANG_S)
    except subprocess.TimeoutExpired:
        raise Broken("the source hangs") from None
    finally:
        source.kill()
        source.communicate()
    check(source.returncode in TYPED, f"the source ends with {source.returncode}:\n{text}")
    check("Traceback" not in text, f"a traceback:\n{text}")
    if code is not None:
        return code
    check(source.returncode != errors.EXIT_OK and "error" in text, f"no source, no error:\n{text}")
    tally["sources that did not start"] += 1
    return source.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds. Returns 1 if one of them breaks a rule; all are played."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential.gpu")
    parser.add_argument("--rounds", type=int, default=100, help="how many rounds to play")
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    parser.add_argument("--major", type=int, default=13, choices=(12, 13))
    given = parser.parse_args(arguments)
    if reason := why_not(given.major):
        print(f"the stand-in driver can't be used: {reason}", file=sys.stderr)
        return 2
    tally: Counter[str] = Counter()
    broken = 0
    with tempfile.TemporaryDirectory(prefix="mx-differential-gpu-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        world = World(Path(folder), given.major)
        try:
            for seed in range(given.seed, given.seed + given.rounds):
                try:
                    print(f"seed {seed}: {play(world, seed, tally)}", flush=True)
                except Broken as error:
                    broken += 1
                    print(f"seed {seed} is broken: {error}", file=sys.stderr, flush=True)
        finally:
            world.close()
    print(f"{given.rounds} rounds: {broken} broken; {dict(tally)}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
