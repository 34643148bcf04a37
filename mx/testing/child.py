"""A source in a process of its own, which a test can kill and stop.

The child speaks one JSON object a line: at the start {"ticket": hex}, then an answer to each
command. It ends when its stdin does, so that it never outlives the test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mx.config import Settings
from mx.testing.memory import Kind, Memory
from mx.transport import ExposeOptions, Transport

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mx.testing import child; child.main()"
)
GRANT_ID = "the-grant"


def load_transport(target: str) -> Transport:
    """Return the transport that "module:callable" makes.

    Raises:
        TypeError: It makes something else.
    """
    module, _, attribute = target.partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Transport):
        raise TypeError(f"{target} does not make an mx.transport.Transport")
    return made


class ChildSource:
    """The parent's side. `ticket` is for a grant called GRANT_ID at `generation`."""

    def __init__(
        self,
        target: str,
        sizes: Sequence[int],
        *,
        seed: int,
        kind: Kind = Kind.SEALED,
        generation: int = 1,
        stall_timeout_s: float = 5.0,
        device: str = "cpu",
        content: bytes = b"",
        block_digests: bytes = b"",
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        arguments = {
            "target": target,
            "sizes": list(sizes),
            "seed": seed,
            "kind": kind.value,
            "generation": generation,
            "stall_timeout_s": stall_timeout_s,
            "device": device,
            "content": content.hex(),
            "block_digests": block_digests.hex(),
            "settings": dict(settings),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        self.ticket = bytes.fromhex(self._listen()["ticket"])

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, whatever state it is in. Idempotent."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _listen(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the child source died while it started; see its stderr")
        answer: dict[str, str] = json.loads(line)
        return answer


def main() -> None:
    """Run the child's side: serve until standard input ends."""
    arguments = json.loads(sys.argv[2])
    transport = load_transport(arguments["target"])
    memories = [
        Memory(nbytes, arguments["seed"] + index, Kind(arguments["kind"]), arguments["device"])
        for index, nbytes in enumerate(arguments["sizes"])
    ]
    exposure = transport.expose(
        [memory.region(index) for index, memory in enumerate(memories)],
        ExposeOptions(
            stall_timeout_s=arguments["stall_timeout_s"],
            content=bytes.fromhex(arguments["content"]),
            block_digests=bytes.fromhex(arguments["block_digests"]),
            setting=Settings(added=arguments["settings"]).value,
        ),
    )
    exposure.set_generation(arguments["generation"])
    print(json.dumps({"ticket": exposure.grant(GRANT_ID).hex()}), flush=True)
    sys.stdin.buffer.read()
    exposure.close()
    exposure.join()
