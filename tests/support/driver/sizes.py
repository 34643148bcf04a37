"""Graphs of several sizes over a `layer`'s tensors: programs over the stand-in use them.

    hidden = norm(x[:n]);  out[:n] = x[:n] + 0.5 * hidden;  copy[:n] = out[:n]

A size may do more at its end, which gives it another topology, and kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mx.graphs
from mx.graphs.package import GraphPlace
from mx.graphs.region import Region
from mx.graphs.tensors import RegionTensor
from tests.support.driver import calling
from tests.support.driver.layer import Layer, N, values, vector

More = Callable[["Sizes", Any], None]
KV_BYTES = 64 << 10


def multiplies(sizes: Sizes, stream: Any) -> None:
    """More work of a size, by a kernel that the others don't have."""
    at = sizes.layer.address
    sizes.layer.kernels.launch(stream, "matvec", at["x"], at["gate.weight"], at["gate"], N, N)


class Sizes:
    """The layer's tensors in a region, and memory for keys and values."""

    def __init__(self, region: Region) -> None:
        self.region, self.layer = region, Layer(region)
        self.kv = self._tensor("kv", region.allocate(KV_BYTES), KV_BYTES // 4)
        self._stream = calling.stream()
        self.layer.fill(values(1), vector(7))

    def _tensor(self, name: str, address: int, n: int) -> RegionTensor:
        place = GraphPlace(name, 0, address - self.region.base, 4 * n, "F32", (n,))
        return self.region.tensor(place)

    def view(self, name: str, n: int) -> RegionTensor:
        """Return the first `n` numbers of a tensor."""
        return self._tensor(name, self.layer.address[name], n)

    def run(self, stream: Any, n: int, more: More | None = None) -> None:
        """Queue the work of a size."""
        at, launch = self.layer.address, self.layer.kernels.launch
        calling.call("cuMemsetD8Async", at["copy"], 0, 4 * n, stream)
        launch(stream, "norm", at["x"], at["norm.weight"], at["hidden"], n)
        launch(stream, "add", at["x"], at["hidden"], at["out"], 0.5, n)
        calling.call("cuMemcpyDtoDAsync", at["copy"], at["out"], 4 * n, stream)
        if more:
            more(self, stream)

    def eager(self, n: int, x: bytes) -> bytes:
        """Return the output of a size, computed without a graph."""
        self.region.write(self.layer.at("x"), x)
        self.run(self._stream, n)
        calling.call("cuStreamSynchronize", self._stream)
        return self.layer.read("out")[: 4 * n]

    def export(self, n: int, more: More | None = None) -> mx.graphs.Capture:
        """Capture a size, and export it as "decode.n"."""
        self.layer.fill(values(1), vector(7))
        mode = calling.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        calling.call("cuStreamBeginCapture", self._stream, mode)
        self.run(self._stream, n, more)
        graph = calling.call("cuStreamEndCapture", self._stream)
        return mx.graphs.export(
            graph,
            self.region,
            weights=self.layer.weights(),
            inputs={"x": self.view("x", n)},
            outputs={"out": self.view("out", n), "copy": self.view("copy", n)},
            work={"kv": self.kv},
            images=self.layer.kernels.given(),
            pin="pin-1",
            name=f"decode.{n}",
        )


def fill_weights(graphs: Iterable[mx.graphs.RestoredGraph]) -> None:
    """Write the weights that `Sizes` has, as a pull does."""
    weights = values(1)
    for graph in graphs:
        for name, tensor in graph.tensors().items():
            given = weights[name].tobytes()
            calling.call("cuMemcpyHtoD", tensor.address, given, tensor.nbytes)
        return
