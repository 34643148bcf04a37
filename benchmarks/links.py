"""Measures how much more k links carry than one, as rows of the table.

The links join network namespaces and are limited to 1 Gbit/s, so that the machine's own speed does
not count.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .hosts import Hosts, Link, unavailable

MBIT_PER_S = 1000
BAR = 0.95
COUNTS = (1, 2, 4)
START_TIMEOUT_S = 60.0
NEAR, FAR = "near", "far"
MX = (sys.executable, "-m", "mx")
#: Pulls once for each line of interfaces that it reads; the first pull loads the code.
TARGET = """
import json, sys
from mx import api, config
for line in sys.stdin:
    flags = {"coordinator": sys.argv[1], "insecure": True, "nics": line.strip()}
    with api.pull("m", transport="tcp", settings=config.load(flags)) as pull:
        print(json.dumps(pull.wait(120).to_json()), flush=True)
"""
COORDINATOR = (sys.executable, "-c", "from mx.cli import coordinator_main; coordinator_main()")


class _Rig:
    """A source on one host, links to another host, and a process that pulls there."""

    def __init__(self, hosts: Hosts, checkpoint: Path) -> None:
        self._hosts = hosts
        control = hosts.link(NEAR, FAR)
        self._links = [hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S) for _ in range(max(COUNTS))]
        at = control.address(NEAR)
        self._options = ("--coordinator", f"{at}:7600", "--insecure", "--json")
        self._start(NEAR, [*COORDINATOR, "--listen", f"{at}:7600", "--insecure"])
        self._answer(NEAR, [*MX, "models", *self._options], START_TIMEOUT_S, retry=True)
        nics = self._nics(NEAR, self._links)
        serving = [*MX, "serve", str(checkpoint), "--model", "m", "--listen", f"{at}:0", *nics]
        self._start(NEAR, [*serving, *self._options])
        sources = [*MX, "sources", "m", *self._options]
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answer(NEAR, sources, START_TIMEOUT_S, retry=True).get("sources"):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the source did not register")

        command = [*hosts.prefix(FAR), sys.executable, "-c", TARGET, f"{at}:7600"]
        self._target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def pull(self, connector: int) -> float:
        """Return the report's seconds: from the call in a running process to the last layer."""
        to, back = self._target.stdin, self._target.stdout
        assert to is not None
        assert back is not None
        nics = ",".join(link.device(FAR) for link in self._links[:connector])
        to.write(f"{nics}\n".encode())
        to.flush()
        line = back.readline()
        if not line:
            raise RuntimeError("the pull failed: see above")
        report = json.loads(line)
        if len(report["paths"]) != connector:
            raise RuntimeError(f"{len(report['paths'])} of {connector} links were used")
        return float(report["seconds"])

    def close(self) -> None:
        """End the process that pulls; the hosts end all others."""
        self._target.kill()
        self._target.communicate()

    def _nics(self, host: str, connector: Sequence[Link]) -> tuple[str, str]:
        return ("--nics", ",".join(link.device(host) for link in connector))

    def _start(self, host: str, command: Sequence[str]) -> None:
        self._hosts.start(host, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _answer(
        self, host: str, command: Sequence[str], timeout_s: float, *, retry: bool = False
    ) -> dict[str, Any]:
        """Return the JSON that a command prints; `retry` repeats it until `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            done = subprocess.run(
                [*self._hosts.prefix(host), *command],
                check=False,
                capture_output=True,
                timeout=timeout_s,
            )
            if not done.returncode:
                found: dict[str, Any] = json.loads(done.stdout)
                return found
            if not retry or time.monotonic() > deadline_s:
                text = (done.stdout + done.stderr).decode(errors="replace")
                raise RuntimeError(f"{' '.join(command)}: {text.strip()}")
            time.sleep(0.2)


def rows(folder: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return a row for each k but 1; none, with the reason to `say`, if hosts can't be made."""
    reason = unavailable()
    if reason is not None:
        say(f"links: skipped, {reason}")
        return []
    checkpoint = folder / "links-1gb.safetensors"
    if not checkpoint.exists():
        unfinished = checkpoint.with_suffix(".part")
        nbytes = write_checkpoint(unfinished, llama_shapes(14, 1536, 4096, 32000))
        unfinished.rename(checkpoint)
    nbytes = checkpoint.stat().st_size
    with contextlib.ExitStack() as stack:
        rig = _Rig(stack.enter_context(Hosts()), checkpoint)
        stack.callback(rig.close)
        contestants: dict[str, Callable[[], float]] = {
            _name(count): lambda count=count: rig.pull(count)  # type: ignore[misc]
            for count in COUNTS
        }
        samples = harness.interleave(contestants, rounds)
    return [_row(count, samples, nbytes) for count in COUNTS if count > 1]


def _name(count: int) -> str:
    return "1 link" if count == 1 else f"{count} links"


def _row(count: int, samples: dict[str, list[float]], nbytes: int) -> harness.Row:
    one_s, all_s = (harness.median(samples, _name(n)) for n in (1, count))
    value = one_s / all_s / count
    wire = MBIT_PER_S / 8000
    detail = (
        f"{nbytes / all_s / 1e9:.3f} GB/s against {nbytes / one_s / 1e9:.3f} over one, "
        f"links of {wire:g} GB/s with headers"
    )
    return harness.Row(
        f"{count} links of 1 Gbit/s, tcp / {count} x one",
        round(value, 3),
        "x",
        f">= {BAR:g} x",
        value >= BAR,
        detail,
        {name: samples[name] for name in (_name(1), _name(count))},
    )
