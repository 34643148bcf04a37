"""Processes that run vLLM, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


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
