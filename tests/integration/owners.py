"""A process that does what it is told, line by line: a user, with a state folder of its own. Its
tensors are numpy's, which takes less time to import than torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import forkserver
from tests.support.commands import environment

_MAIN = """
import sys, json, traceback
import numpy as np
import mx

def tensors(seed, count=3):
    made = np.random.default_rng(seed)
    return {f"model.layers.{i}.w": made.random(1 << 16, np.float32) for i in range(count)}

def write(lent, seed):
    for name, tensor in tensors(seed).items():
        lent[name][:] = tensor

names = {"mx": mx, "tensors": tensors, "write": write}
for line in sys.stdin:
    try:
        code = json.loads(line)
        try:
            said = repr(eval(code, names))
        except SyntaxError:
            exec(code, names)
            said = "done"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    print(json.dumps(said), flush=True)
"""


class User:
    """A process of one user."""

    def __init__(self, coordinator: str, state: Path) -> None:
        env = environment(MX_PEER_COORDINATOR=coordinator, XDG_STATE_HOME=str(state))
        self._process = forkserver.python(_MAIN, env=env)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, code: str) -> None:
        """Have it run a statement, or evaluate an expression; `said` is its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def said(self) -> str:
        """Return the value as text, "done", or the error's type and message."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process ended"
        return str(json.loads(line))

    def does(self, code: str) -> str:
        """Run a statement, or evaluate an expression, and return what it says."""
        self.start(code)
        return self.said()

    def must(self, code: str) -> None:
        """Run a statement, which succeeds."""
        assert self.does(code) in ("done", "None")

    def kill(self) -> None:
        self._process.kill()
        with self._process:
            pass


@contextmanager
def user(coordinator: str, state: Path) -> Iterator[User]:
    """A process of the user whose state folder this is."""
    process = User(coordinator, state)
    try:
        yield process
    finally:
        process.kill()
