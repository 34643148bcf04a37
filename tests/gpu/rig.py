"""Real processes on a real GPU: sources that torch filled, and readers to kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mx.cuda import driver as cuda
from mx.testing.bench import Bench
from mx.testing.conformance import Kind
from mx.testing.harness import Harness
from tests.support.gpu_rig import place

CUDA_IPC = "mx_transports.cuda_ipc:CudaIpcTransport"
PCIE_P2P = "mx_transports.pcie_p2p:PciePeerTransport"


def bench(target: str, kind: Kind, there: str = "0", here: str = "0") -> Bench:
    driver = cuda.load()
    return Bench(Harness(target, kind=kind, here=place(driver, here), there=place(driver, there)))


class Spy:
    """Stands for cuda-bindings before mx: counts calls, and makes some fail or do something else.

    `calls` has the number of calls by name, "cuMemAlloc".
    """

    def __init__(self, module: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._module = module
        self._instead: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not re.match("cu[A-Z]", name):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            instead = self._instead.get(name)
            return found(*arguments) if instead is None else instead(found, *arguments)

        return call

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        """Call `function` with the real call and its arguments in place of the call."""
        self._instead[name] = function

    def fail(self, name: str, code: str, *, after: int = 0) -> None:
        """Make a call fail once with CUDA's `code`, after `after` more that do not."""
        left = after

        def failing(real: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return real(*arguments)
            del self._instead[name]
            return (getattr(self._module.CUresult, code),)

        self._instead[name] = failing


class Child:
    """A Python process that runs `code` with sys.argv[1:] = arguments.

    `send_line` writes to its input, `receive_line` returns a line of its output. The end of the
    `with` block kills it.
    """

    def __init__(self, code: str, *arguments: str, environment: Mapping[str, str] = {}) -> None:
        boot = "import json, sys; sys.path[:] = json.loads(sys.argv.pop())\n"
        command = [sys.executable, "-c", boot + code, *arguments, json.dumps(sys.path)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def receive_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the child died; see its stderr")
        return line.strip()

    def send_line(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


#: Exposes torch's own tensors, a region each; prints the ticket, then each tensor's digest.
TORCH_SOURCE = """
import torch, xxhash
from mx.cuda import driver as cuda
from mx.cuda.device import device_key
from mx.transport import DeviceView, ExposedRegion, ExposeOptions
from mx_transports.cuda_ipc import CudaIpcTransport
key = device_key(cuda.load().device_uuid(0))
torch.manual_seed(7)
sizes = [int(size) for size in sys.argv[1:]]
tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda:0") for size in sizes]
regions = [
    ExposedRegion(i, DeviceView(key, t.data_ptr(), t.numel(), t), t.data_ptr(), key)
    for i, t in enumerate(tensors)
]
exposure = CudaIpcTransport().expose(regions, ExposeOptions())
exposure.set_generation(1)
print(exposure.grant("g").hex(), flush=True)
for tensor in tensors:
    print(xxhash.xxh3_128_hexdigest(tensor.cpu().numpy().data), flush=True)
for line in sys.stdin:
    exposure.close()
    print(exposure.join(float(line)), flush=True)
"""

#: Attaches region 0 of the ticket in argv[1]; prints its digest at once, and for each line read.
IMPORTER = """
import xxhash
from mx.cuda import driver as cuda
from mx.testing import spans
from mx.transport import Grant
from mx_transports.cuda_ipc import CudaIpcTransport
from tests.support.gpu_rig import place
ticket, nbytes = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
session = CudaIpcTransport().open(
    Grant("g", ticket, 1, (nbytes,), "exporter", place=place(cuda.load(), "0"))
)
view = session.attach(0)
session.close()
session.join()
print(xxhash.xxh3_128_hexdigest(spans.peek(view)), flush=True)
for line in sys.stdin:
    print(xxhash.xxh3_128_hexdigest(spans.peek(view)), flush=True)
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
