"""Processes that run vLLM, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mx
from tests.support.daemon import ROOT

#: A source that gives a checkpoint so slowly that it can be killed meanwhile.
SLOW_SOURCE = """
import sys, mx
source = mx.serve(sys.argv[1], model=sys.argv[2], coordinator=sys.argv[3], max_bandwidth="1MB/s")
source.wait()
"""

#: Lends the tensors of a model that it pulled, slowly.
SLOW_REPLICA = """
import sys, mx
name, variant, coordinator = sys.argv[1:]
pull = mx.pull(name, variant=variant, coordinator=coordinator)
tensors = {key: tensor.clone() for key, tensor in pull.state_dict().items()}
source = mx.serve(tensors, model=name + "-slow", variant=variant, coordinator=coordinator,
                  max_bandwidth="1MB/s")
source.wait()
"""


class EngineError(Exception):
    """The host raised."""


class Host:
    """A process that runs `tests/vllm/host.py`."""

    def __init__(self, coordinator: str, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "vllm" / "host.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "MX_PEER_COORDINATOR": coordinator,
                    "PYTHONUNBUFFERED": "1",
                    "XDG_STATE_HOME": str(log.parent / "state"),
                    "MX_PEER_NAME_KEY": mx.config.load().name_key,  # the test's own user's
                    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # answers are on the other one
                    **environment,
                },
            )
        self._ready = False

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                found = json.loads(line.removeprefix("ANSWER "))
                if "error" in found:
                    raise EngineError(found["error"])
                return found.get("answer")
        raise EngineError(f"the host ended: {self.said()[-3000:]}")

    def do(self, do: str, *arguments: Any, **options: Any) -> Any:
        """Have the process do something, and return its answer."""
        self.begin(do, *arguments, **options)
        return self._answer()

    def begin(self, do: str, *arguments: Any, **options: Any) -> None:
        """Have the process begin to do something; `end` returns its answer."""
        if not self._ready:
            self._answer()
            self._ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"do": do, "args": arguments, "options": options}) + "\n"
        )
        self.process.stdin.flush()

    def end(self) -> Any:
        """Return the answer to what was begun."""
        return self._answer()

    def status(self) -> dict[str, Any]:
        """Return what the engine's first worker loaded and lends."""
        found: dict[str, Any] = self.do("call", "mx_peer_status")[0]
        return found

    def said(self) -> str:
        """Return what the process wrote to standard error."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Let the process end, and wait for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def host(coordinator: str, log: Path, **environment: str) -> Iterator[Host]:
    """Yield a process that runs engines."""
    found = Host(coordinator, log, **environment)
    try:
        yield found
    finally:
        found.close()


def start(where: Host, model: Path | str, name: str, **options: Any) -> dict[str, Any]:
    """Start an engine that loads by mx."""
    extra = {"model": name, **options.pop("extra", {})}
    found: dict[str, Any] = where.do(
        "start", str(model), model_loader_extra_config=extra, **options
    )
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two engines had the same tensors before processing, and generate the same."""
    return bool(one["before"] == other["before"] and one["generated"] == other["generated"])


def lending(where: Host) -> dict[str, Any]:
    """Wait until an engine lends, and return its status."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        status = where.status()
        if status["lending"] != "starting":
            return status
        time.sleep(0.1)
    raise AssertionError(f"it does not lend: {status}")


def wait_for(true: Any) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def killed_in_mid_load(
    where: Host,
    source: subprocess.Popen[str],
    model: Path,
    name: str,
    coordinator: str,
    **options: Any,
) -> dict[str, Any]:
    """Start an engine, kill its source once it reads from it, and return what it loaded then."""
    wait_for(lambda: mx.list_sources(name, coordinator=coordinator))
    extra = {"model": name, "transport": "tcp", **options.pop("extra", {})}
    where.begin("start", str(model), model_loader_extra_config=extra, **options)
    wait_for(lambda: any(s.readers for s in mx.list_sources(name, coordinator=coordinator)))
    source.kill()
    found: dict[str, Any] = where.end()
    return found
