"""The processes that the demo runs the other commands in. None of them outlives the demo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mx import errors
from mx.errors import LocalError

STOP_GRACE_S = 15.0


class Child:
    """One of the commands in a process of its own, with `--json`; its object is the answer.

    Use it as a context manager: leaving it terminates the process, and kills it if it has not
    ended after `STOP_GRACE_S`.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path | None) -> None:
        """Start the process.

        Args:
            name: What errors call the process.
            module: The module that Python runs.
            arguments: What follows the module on its command line.
            log: The file that its standard error is written to; None leaves it this process's.
        """
        self.name = name
        self._log = log
        command = [sys.executable, "-m", module, *arguments, "--json", "--log-format", "text"]
        error = open(log, "wb") if log is not None else None  # noqa: SIM115
        try:
            # A session of its own, so that Ctrl-C reaches this process alone, which ends the child.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
                start_new_session=True,
            )
        finally:
            if error is not None:
                error.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the object that the command prints on standard output.

        Args:
            timeout_s: How long to wait.

        Returns:
            The object.

        Raises:
            MxError: The command printed an error: that one, with the command's name before it.
            LocalError: The command printed no object, or nothing in time.
        """
        lines: list[str] = []
        out = self._process.stdout
        assert out is not None

        def read() -> None:
            with contextlib.suppress(ValueError):  # it was closed, as this process is interrupted
                lines.append(out.readline())

        reader = threading.Thread(target=read, name=f"{self.name}-answer", daemon=True)
        reader.start()
        reader.join(timeout_s)
        if not lines:
            self.stop()
            reader.join()
            raise LocalError(f"the {self.name} did not answer within {timeout_s:g} s{self._tail()}")
        try:
            answer = json.loads(lines[0])
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            said = lines[0].strip() or "it printed nothing"
            raise LocalError(f"the {self.name} failed: {said}{self._tail()}")
        if "error" in answer:
            error = answer["error"]
            kind = getattr(errors, error["type"], LocalError)
            raise kind(f"{self.name}: {error['message']}", hint=error["hint"])
        return answer

    def wait(self, timeout_s: float) -> int:
        """Wait until the process has ended.

        Args:
            timeout_s: How long to wait.

        Returns:
            Its exit code.

        Raises:
            LocalError: It still runs then.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LocalError(f"the {self.name} did not end within {timeout_s:g} s") from None

    def stop(self) -> None:
        """Terminate the process, and kill it if that takes too long. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _tail(self) -> str:
        """Return the last lines of the log, each on a line of its own."""
        if self._log is None:
            return ""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return "".join(f"\n    {line}" for line in lines[-8:])

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
