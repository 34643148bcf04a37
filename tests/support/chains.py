"""A pull from "auto" in a process of its own, whose source can be ended in the middle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import forkserver

#: Pulls, says "going" once two layers are ready, and in the end prints its report (or the error's
#: type) and the digest of each tensor.
_PULL = """
import hashlib, json, sys
import torch
from mx import api, config
from mx.errors import MxError
coordinator, settings, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
pull = api.pull("m", coordinator=coordinator, source="auto", attach=False, transport="tcp",
                settings=config.load(settings), **arguments)
try:
    for layer in pull.layers():
        if layer.index == 1:
            print("going", flush=True)
    said = {"report": pull.wait().to_json(), "tensors": {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in pull.state_dict().items()
    }}
except MxError as error:
    said = {"error": type(error).__name__, "message": str(error), "code": error.exit_code}
print(json.dumps(said), flush=True)
pull.close()
"""


class Pulling:
    """The process."""

    def __init__(self, process: forkserver.Forked | subprocess.Popen[str]) -> None:
        self.process = process

    def going(self) -> None:
        """Wait until two layers are ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "going\n", line

    def ended(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """Wait for the end, and return what it says."""
        out, err = self.process.communicate(timeout=timeout_s)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert self.process.returncode == 0 and lines, err
        found = json.loads(lines[-1])
        assert isinstance(found, dict)
        return found


@contextmanager
def pulling(
    coordinator: str, env: dict[str, str], settings: dict[str, object], **arguments: object
) -> Iterator[Pulling]:
    """Pull "m" from "auto" with these settings and arguments of `pull`."""
    given = (coordinator, json.dumps(settings), json.dumps(arguments))
    process = forkserver.python(_PULL, *given, env=env, imported="torch", errors=True)
    with process:
        try:
            yield Pulling(process)
        finally:
            process.kill()


def steps(report: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of each step."""
    return {each["step"]: each["outcome"] for each in report["steps"]}


def bytes_from(report: dict[str, Any]) -> dict[str, int]:
    """Return what came by each transport."""
    found: dict[str, int] = {}
    for path in report["paths"]:
        found[path["transport"]] = found.get(path["transport"], 0) + path["bytes"]
    return found


def flip(path: Path, position: int) -> None:
    """Change one byte of a file; a negative position counts from its end."""
    with path.open("r+b") as file:
        file.seek(position, 0 if position >= 0 else 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))
