"""A small layer in a region of device memory, computed by real kernels over the stand-in.

    hidden = norm(x);  out = x + 0.5 * (gate @ hidden + up @ hidden)

The two products run on two streams. Programs over the stand-in use this, and `numpy_layer` says
what is right.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.graphs.eager import EagerCall
from mx.graphs.functions import mapped_libraries
from mx.graphs.package import GraphPlace
from mx.graphs.region import Region
from mx.graphs.tensors import RegionTensor
from tests.support.driver import calling
from tests.support.driver.layer_programs import IMAGES

N, BLOCK = 96, 128
SHAPES = {"norm.weight": (N,), "gate.weight": (N, N), "up.weight": (N, N)}
#: Of what is in the region beside the weights.
_VECTORS = ("x", "hidden", "gate", "up", "sum", "out", "copy")
REGION_BYTES = 4 << 20
#: Where an engine has a region of its own, beside that of a graph.
OWN_BASE = 0x6B00_0000_0000
#: What the threads of a block tell each other.
_SHARED_BYTES = {"norm": 1024}

Values = Mapping[str, np.ndarray[Any, Any]]


def values(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return random weights, by name."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def vector(seed: int) -> bytes:
    """Return the bytes of a random input."""
    return np.random.default_rng(seed).standard_normal(N, np.float32).tobytes()


def numpy_layer(weights: Values, x: bytes) -> np.ndarray[Any, Any]:
    """Return what the layer gives, to rounding."""
    row = np.frombuffer(x, np.float32).astype(np.float64)
    hidden = row / np.sqrt((row * row).mean() + 1e-5) * weights["norm.weight"]
    both = weights["gate.weight"] @ hidden + weights["up.weight"] @ hidden
    return np.asarray(row + 0.5 * both)


def is_right(weights: Values, x: bytes, out: bytes) -> bool:
    """Return True if the layer's output is right, to rounding."""
    found = np.frombuffer(out, np.float32)
    return bool(np.allclose(found, numpy_layer(weights, x), rtol=1e-3, atol=1e-3))


class Kernels:
    """The layer's kernels, loaded: `functions` and `images` by name. `more` names another folder
    of kernels."""

    def __init__(self, more: str = "") -> None:
        folder = Path(os.environ[IMAGES], more)
        self.images = {path.stem: path.read_bytes() for path in folder.glob("*.cubin")}
        self.functions = {
            name: calling.call(
                "cuModuleGetFunction", calling.call("cuModuleLoadData", image), name.encode()
            )
            for name, image in self.images.items()
        }

    def given(self, *names: str) -> dict[int, bytes]:
        """Return the images by function, of these kernels or of all."""
        return {int(self.functions[name]): self.images[name] for name in names or self.functions}

    def launch(self, stream: Any, name: str, *parameters: int | float | bytes) -> None:
        """Queue a kernel of one block; a float is one of 32 bits, small ints too, and a structure
        is its bytes."""

        def packed(each: int | float | bytes) -> bytes:
            if isinstance(each, bytes):
                return each
            if isinstance(each, float):
                return struct.pack("<f", each)
            return struct.pack("<i" if each < 1 << 31 else "<Q", each)

        values = [packed(each) for each in [*parameters, 0, 0]]
        kept = [ctypes.create_string_buffer(each, max(8, len(each))) for each in values]
        places = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        grid, block = (1, 1, 1), (BLOCK, 1, 1)
        of, shared = self.functions[name], _SHARED_BYTES.get(name, 0)
        where = ctypes.addressof(places)
        calling.call("cuLaunchKernel", of, *grid, *block, shared, stream, where, 0)


class Layer:
    """The layer in a region, all of which it allocates.

    `tensors` are its weights and vectors by name. Other kernels may be run between, by `extra`.
    """

    def __init__(self, region: Region, kernels: Kernels | None = None) -> None:
        self.region, self.kernels = region, kernels or Kernels()
        shapes = SHAPES | dict.fromkeys(_VECTORS, (N,))
        self.tensors: dict[str, RegionTensor] = {}
        for name, shape in shapes.items():
            nbytes = 4 * int(np.prod(shape))
            offset = region.allocate(nbytes) - region.base
            self.tensors[name] = region.tensor(GraphPlace(name, 0, offset, nbytes, "F32", shape))
        self.address = {name: each.address for name, each in self.tensors.items()}
        self._streams = [calling.stream(), calling.stream()]
        self._events = [calling.call("cuEventCreate", 2) for _ in range(2)]

    def at(self, name: str) -> GraphPlace:
        """Return a tensor's place."""
        tensor = self.tensors[name]
        offset = tensor.address - self.region.base
        return GraphPlace(name, 0, offset, tensor.nbytes, "F32", tensor.shape)

    def fill(self, weights: Values, x: bytes) -> None:
        """Write weights and an input."""
        for name, value in weights.items():
            self.region.write(self.at(name), value.tobytes())
        self.region.write(self.at("x"), x)

    def read(self, name: str) -> bytes:
        return self.region.read(self.at(name))

    def run(self, stream: Any) -> None:
        """Queue the layer."""
        at, launch = self.address, self.kernels.launch
        other, (forked, joined) = self._streams[1], self._events
        calling.call("cuMemsetD8Async", at["copy"], 0, 4 * N, stream)
        launch(stream, "norm", at["x"], at["norm.weight"], at["hidden"], N)
        calling.call("cuEventRecord", forked, stream)
        calling.call("cuStreamWaitEvent", other, forked, 0)
        launch(other, "matvec", at["hidden"], at["up.weight"], at["up"], N, N)
        calling.call("cuEventRecord", joined, other)
        launch(stream, "matvec", at["hidden"], at["gate.weight"], at["gate"], N, N)
        calling.call("cuStreamWaitEvent", stream, joined, 0)
        launch(stream, "add", at["gate"], at["up"], at["sum"], 1.0, N)
        launch(stream, "add", at["x"], at["sum"], at["out"], 0.5, N)
        calling.call("cuMemcpyDtoDAsync", at["copy"], at["out"], 4 * N, stream)

    def eager(self, x: bytes) -> bytes:
        """Return the layer's output for an input, computed without a graph."""
        self.region.write(self.at("x"), x)
        self.run(self._streams[0])
        calling.call("cuStreamSynchronize", self._streams[0])
        return self.read("out")

    def capture(self, *more: Any) -> Any:
        """Return a raw graph of the layer and of more work, functions of a stream."""
        stream = self._streams[0]
        mode = calling.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        calling.call("cuStreamBeginCapture", stream, mode)
        self.run(stream)
        for work in more:
            work(stream)
        return calling.call("cuStreamEndCapture", stream)

    def weights(self) -> dict[str, RegionTensor]:
        """Return the weights' tensors."""
        return {name: self.tensors[name] for name in SHAPES}


def tail_calls(tails: Kernels | None = None) -> list[EagerCall]:
    """Return a call that loads `tail_skipped`, as if it were a kernel of a library."""
    loaded, at = tails or Kernels("tails"), calling.alloc(4096)
    (libc,) = (path for path in mapped_libraries() if path.name.startswith("libc.so"))

    def run(stream: int) -> None:
        loaded.launch(stream, "tail_skipped", at, at, at, 8, 0)

    return [EagerCall("tail", libc, run)]


def use() -> Device:
    """Make the first GPU's context this thread's, and return the GPU."""
    calling.use()
    return Device(load(), 0)
