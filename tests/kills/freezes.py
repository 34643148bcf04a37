"""Freezes are killed (SIGKILL) at random moments: what is left never loads in part.

    python -m tests.kills.freezes [KILLS] [SEED]

Two ranks are frozen again and again. After each kill the folder is a whole snapshot of the right
bytes, or none; the next run goes on from what is there.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import mx
from mx import config
from mx.errors import ConfigError, MxError
from mx.snapshots.container import SNAPSHOT, WEIGHTS
from tests.kills.run import Counts
from tests.support.commands import environment
from tests.support.daemon import daemon
from tests.support.tensors import same

KEYS = [mx.ProcessingKey(engine="vllm", tp=(number, 2)) for number in range(2)]
#: What is there from some moment of a freeze on.
MOMENTS = ("*", ".rank0.mx-partial/files/*", ".rank*/journal", "rank0", "rank1", f".{SNAPSHOT}*")
#: Says when it begins, and freezes.
FREEZE = """
import sys, mx
from mx import config
folder, coordinator, key = sys.argv[1:]
settings = config.load({"name_key": key})
print("begins", flush=True)
report = mx.freeze("m", folder, variant="engine=vllm,tp=*/2", coordinator=coordinator,
                   settings=settings)
print("kept", report.kept, flush=True)
"""


class Site:
    """Two ranks that this process serves, and the folder that they are frozen to."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.out, self._key, self.coordinator = folder / "snapshot", folder / "key", coordinator
        self.settings = config.load({"name_key": str(self._key)}, environ={"HOME": str(folder)})
        torch.manual_seed(7)
        self.states = [
            {f"model.layers.{n}.w": torch.randn(1024, 1024 + 4 * rank).t() for n in range(6)}
            for rank in range(2)
        ]
        self.sources = ExitStack()
        for key, state in zip(KEYS, self.states, strict=True):
            source = mx.serve(
                state, model="m", variant=key, coordinator=coordinator, settings=self.settings
            )
            self.sources.enter_context(source)

    def begun(self) -> subprocess.Popen[str]:
        """Return a process that has begun to freeze."""
        process = subprocess.Popen(
            [sys.executable, "-c", FREEZE, str(self.out), self.coordinator, str(self._key)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        return process

    def wrong(self) -> str:
        """Return what is wrong with what is in the folder; "" if it is right, or no snapshot."""
        try:
            with mx.thaw(self.out, settings=self.settings) as thawed:
                if thawed.vouched_by != "signature" or len(thawed.pulls) != 2:
                    return f"{thawed.vouched_by} {len(thawed.pulls)}"
                for key, state in zip(KEYS, self.states, strict=True):
                    if not same(thawed.pulls[str(key)].state_dict(), state):
                        return f"{key} has other bytes"
        except ConfigError as error:
            return str(error) if (self.out / SNAPSHOT).exists() else ""
        except MxError as error:
            return str(error)
        return ""

    def loads_in_part(self) -> bool:
        """Return True if a rank can be read of what is no snapshot."""
        for rank in self.out.glob("rank*"):
            try:
                with mx.pull("m", path=rank, settings=self.settings) as pull:
                    pull.wait(60)
                return True
            except MxError:
                continue
        return False


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Yield a site with a coordinator of its own."""
    with daemon(lease_s=5.0) as (_, address):
        found = Site(folder, address)
        with found.sources:
            yield found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process, and return its exit code and what it wrote."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def _wait_for(folder: Path, pattern: str, most_s: float) -> None:
    """Wait until there is a file of this pattern, but not for ever: it may be gone again."""
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s and not any(folder.glob(pattern)):
        time.sleep(0.0005)


def play(kills: int, folder: Path) -> Counts:
    """Kill so many freezes, and check what each has left."""
    counts = Counts()
    with site(folder) as here:
        process = here.begun()
        began_s = time.monotonic()
        code, said = ended(process)
        if code or here.wrong():
            counts.wrong.append(said + here.wrong())
        takes_s = time.monotonic() - began_s
        shutil.rmtree(here.out)
        while counts.kills < kills:
            process = here.begun()
            _wait_for(here.out, random.choice(MOMENTS), takes_s)
            time.sleep(random.uniform(0, random.choice([0.003, 0.03, takes_s])))
            process.kill()
            ended(process)
            counts.kills += 1
            if wrong := here.wrong():
                counts.wrong.append(wrong)
            if (here.out / SNAPSHOT).exists():
                counts.did["whole"] += 1
                shutil.rmtree(here.out)
            elif here.out.exists():
                counts.did["begun"] += 1
                counts.did["ranks written"] += len([*here.out.glob(f"rank*/{WEIGHTS}")])
                if here.loads_in_part():
                    counts.wrong.append("a rank of no snapshot loads")
        code, said = ended(here.begun())  # the last one is left to its end
        if code or here.wrong() or not (here.out / SNAPSHOT).exists():
            counts.wrong.append(f"it does not go on: {said} {here.wrong()}")
        left = sorted(each.name for each in here.out.iterdir())
        if left != ["rank0", "rank1", SNAPSHOT]:
            counts.wrong.append(f"left over: {left}")
    return counts


def main() -> int:
    kills, seed = [*map(int, sys.argv[1:]), *(100, 0)[len(sys.argv) - 1 :]]
    seeded = seed or random.randrange(1, 1 << 30)
    random.seed(seeded)
    print(f"freezes: seed {seeded}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = play(kills, Path(folder))
    print(f"freezes: {counts}")
    for each in counts.wrong[:20]:
        print(f"  {each}")
    return int(bool(counts.wrong))


if __name__ == "__main__":
    sys.exit(main())
