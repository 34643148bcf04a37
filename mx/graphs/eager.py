"""Kernels that a library makes as it runs, in no fatbin of it (nvjet): found by doing the work
that loads them, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mx.cuda.device import CudaStream, Device
from mx.graphs.calls import GraphCalls


@dataclass(frozen=True, slots=True)
class EagerCall:
    """Work that makes a library load kernels, such as a matrix product of certain shapes.

    `name` is the same in all processes. `run` is given a stream, a CUstream as an int, and queues
    the work there; it is called twice, the second time while the stream is captured. `library` is
    the file whose kernels they are.
    """

    name: str
    library: Path
    run: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LaunchedFunction:
    """A function that a call launched."""

    call: str
    function: int
    name: str


def loaded_by(driver: GraphCalls, device: Device, call: EagerCall) -> list[LaunchedFunction]:
    """Make a call and return the functions that it launches.

    Raises:
        CudaError: The driver fails.
        Exception: What the call raises.
    """
    with device.current(), CudaStream(device) as stream:
        call.run(stream.handle)
        stream.synchronize()
        driver.capture_begin(stream.handle)
        try:
            call.run(stream.handle)
        finally:
            graph = driver.capture_end(stream.handle)
        try:
            launched = [
                driver.launch_of(node).function
                for node in driver.nodes(graph)
                if driver.node_kind(node) == "KERNEL"
            ]
            return [
                LaunchedFunction(call.name, function, driver.function_name(function))
                for function in dict.fromkeys(launched)
            ]
        finally:
            driver.graph_destroy(graph)
