"""Measures the export and the import of a CUDA graph beside the driver's calls for them alone.

    python -m benchmarks.graphs [--rounds 3] [--nodes 1000] [--sizes 64] [--stand-in 13]

What is compared is CPU time of the calling thread: the driver's calls alone are those that a graph
of so many nodes takes, with nothing kept, checked, hashed or written. Exporting includes two
replays, importing excludes the region's memory, on both sides. The sizes are graphs of one package
and one topology, in which every node has other parameters: the calls alone set all nodes of one raw
graph for each, and instantiate it. `--stand-in` runs it over a clone's
stand-in for the driver, of one major of CUDA: nothing of a GPU is measured then. Needs
cuda-bindings and Triton.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import harness

if TYPE_CHECKING:
    from mx.graphs import Package

_BASE_BYTES = 4 << 20
_ATTRIBUTES = (1, 13, 2, 4, 5, 8, 9, 10, 11, 14)
BAR, BAR_OF_SIZES = 10, 3


class Rig:
    """A captured chain of launches, memsets and copies in a region."""

    def __init__(self, nodes: int, *, decoys: bool = False) -> None:
        import contextlib
        import importlib

        import mx.graphs
        from mx.cuda import blake3
        from mx.cuda.device import CudaStream, Device
        from mx.cuda.driver import DeviceAttribute, load
        from mx.graphs.package import GraphPlace

        self.d: Any = importlib.import_module("cuda.bindings.driver")
        self.ends = contextlib.ExitStack()
        driver = load()
        device = self.ends.enter_context(Device(driver, 0))
        self.ends.enter_context(device.current())
        names = (
            DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (driver.device_attribute(0, name) for name in names)
        kernel = blake3.compiled(10 * major + minor)
        self.image, self.name, self.count = kernel.cubin, kernel.name, kernel.parameters
        module = driver.module_load(kernel.cubin)
        self.function = driver.module_function(module, kernel.name)
        self.device, self.stream = device, self.ends.enter_context(CudaStream(device))
        self.region = self.ends.enter_context(mx.graphs.region(_BASE_BYTES, decoys=decoys))
        self.output = self.region.tensor(GraphPlace("out", 0, 0, 64, "U8", (64,)))
        self.graph = self._captured(nodes, kernel.threads, kernel.shared_nbytes)

    def _captured(self, nodes: int, threads: int, shared_nbytes: int) -> Any:
        driver, stream, base = self.device.driver, self.stream.handle, self.region.base
        mode = self.d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call("cuStreamBeginCapture", stream, mode)
        for number in range(nodes):
            at = base + 4096 + 64 * number
            if number % 10 == 8:
                driver.memset(at, 0, 64, stream)
            elif number % 10 == 9:
                driver.copy_dtod(base, at, 64, stream)
            else:  # of inputs of no bytes
                inputs, lengths = base + (1 << 20), base + (2 << 20)
                given = [inputs, lengths, at, at, inputs, at] + [0] * (self.count - 6)
                driver.launch(self.function, (1, 1), threads, shared_nbytes, stream, given)
        return self.call("cuStreamEndCapture", stream)

    def call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self.d, name)(*arguments)
        if int(error):
            raise RuntimeError(f"{name}: {error!r}")
        return values[0] if len(values) == 1 else values

    def versioned(self, name: str) -> str:
        return f"{name}_v2" if hasattr(self.d, f"{name}_v2") else name

    def export(self) -> Any:
        """Export the graph with mx."""
        import mx.graphs

        return mx.graphs.export(
            self.graph,
            self.region,
            outputs={"out": self.output},
            images={self.function: self.image},
        )

    def export_alone(self) -> list[Any]:
        """Make the driver's calls of an export, and return what `import_alone` needs of them."""
        d, call = self.d, self.call
        _, count = call("cuGraphGetNodes", self.graph)
        nodes = call("cuGraphGetNodes", self.graph, count)[0]
        edges = self.versioned("cuGraphGetEdges")
        count = call(edges, self.graph)[-1]
        found: list[Any] = [call(edges, self.graph, count)[:3], nodes]
        attributes = [d.CUkernelNodeAttrID(each) for each in _ATTRIBUTES]
        call("cuFuncGetName", d.CUfunction(self.function))
        for index in range(self.count):
            call("cuFuncGetParamInfo", d.CUfunction(self.function), index)
        kinds = d.CUgraphNodeType
        for node in nodes:
            kind = call("cuGraphNodeGetType", node)
            if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
                found.append(call("cuGraphKernelNodeGetParams", node))
                for attribute in attributes:
                    d.cuGraphKernelNodeGetAttribute(node, attribute)  # not all are there
            elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
                found.append(call("cuGraphMemsetNodeGetParams", node))
            else:
                found.append(call("cuGraphMemcpyNodeGetParams", node))
        executable = call("cuGraphInstantiate", self.graph, 0)
        for _ in range(2):
            call("cuGraphLaunch", executable, self.stream.handle)
            call("cuStreamSynchronize", self.stream.handle)
        call("cuGraphExecDestroy", executable)
        return found

    def import_alone(self, found: Sequence[Any], sizes: int = 1) -> None:
        """Make the driver's calls of an import of so many sizes."""
        d, call = self.d, self.call
        (first, second, data), nodes, *values = found
        module = call("cuModuleLoadData", self.image)
        function = call("cuModuleGetFunction", module, self.name.encode())
        for index in range(self.count):
            call("cuFuncGetParamInfo", function, index)
        graph = call("cuGraphCreate", 0)
        context = d.CUcontext(self.device.context)
        made = {}
        for node, value in zip(nodes, values, strict=True):
            if isinstance(value, d.CUDA_KERNEL_NODE_PARAMS):
                added = call("cuGraphAddKernelNode", graph, None, 0, value)
            elif isinstance(value, d.CUDA_MEMSET_NODE_PARAMS):
                added = call("cuGraphAddMemsetNode", graph, None, 0, value, context)
            else:
                added = call("cuGraphAddMemcpyNode", graph, None, 0, value, context)
            made[int(node)] = added
        ends = ([made[int(node)] for node in end] for end in (first, second))
        call(self.versioned("cuGraphAddDependencies"), graph, *ends, data, len(data))
        executables = [call("cuGraphInstantiate", graph, 0)]
        for _ in range(sizes - 1):
            for node, value in zip(nodes, values, strict=True):
                if isinstance(value, d.CUDA_KERNEL_NODE_PARAMS):
                    call("cuGraphKernelNodeSetParams", made[int(node)], value)
                elif isinstance(value, d.CUDA_MEMSET_NODE_PARAMS):
                    call("cuGraphMemsetNodeSetParams", made[int(node)], value)
                else:
                    call("cuGraphMemcpyNodeSetParams", made[int(node)], value)
            executables.append(call("cuGraphInstantiate", graph, 0))
        for executable in executables:
            call("cuGraphExecDestroy", executable)
        call("cuGraphDestroy", graph)
        call("cuModuleUnload", module)


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    return run


def _sizes(package: Package, count: int) -> Package:
    """Return a package of so many sizes, in which every node of a graph has other parameters."""
    import mx.graphs
    from mx.graphs.message import decode, encode
    from mx.graphs.package import KernelNode, MemsetNode

    def changed(node: Any, size: int) -> Any:
        if isinstance(node, KernelNode):
            number = size.to_bytes(4, "little")
            return replace(node, grid=(size, 1, 1), values=node.values[:-4] + number)
        return replace(node, **{"value" if isinstance(node, MemsetNode) else "nbytes": size})

    def sized(graph: Any, size: int) -> Package:
        nodes = tuple(changed(node, size) for node in graph.nodes)
        message = encode(replace(graph, name=f"decode.{size}", nodes=nodes))
        return replace(package, graph=message)

    (graph,) = decode(package.graph)
    return mx.graphs.join(sized(graph, size) for size in range(1, count + 1))


def measure(nodes: int, sizes: int, rounds: int) -> list[harness.Row]:
    """Return the rows: exporting, joining two captures, importing a graph, and many."""
    import mx.graphs

    second = Rig(nodes)
    captures = [second.export()]
    second.ends.close()
    first = Rig(nodes, decoys=True)
    captures.append(first.export())
    package = mx.graphs.combine(*captures)
    found = first.export_alone()

    several = _sizes(package, sizes)

    def restore(given: Package, count: int) -> None:
        images, regions = given.images.__getitem__, [first.region]
        with mx.graphs.restore_all(given.graph, images, regions=regions) as made:
            states = [graph.state for graph in made.values()]
            assert states == [mx.graphs.State.RESTORED] * count

    samples = harness.interleave(
        {
            "export": _timed(first.export),
            "export's calls": _timed(first.export_alone),
            "combine": _timed(lambda: mx.graphs.combine(*captures)),
            "import": _timed(lambda: restore(package, 1)),
            "import's calls": _timed(lambda: first.import_alone(found)),
            "sizes": _timed(lambda: restore(several, sizes)),
            "sizes's calls": _timed(lambda: first.import_alone(found, sizes)),
        },
        rounds,
    )
    rows = []
    for name, what, bar in (
        ("export", f"export of {nodes} nodes", BAR),
        ("import", f"import of {nodes} nodes", BAR),
        ("sizes", f"import of {sizes} x {nodes} nodes", BAR_OF_SIZES),
    ):
        own, alone = (harness.median(samples, each) for each in (name, f"{name}'s calls"))
        detail = f"{1e3 * own:.1f} ms of CPU against {1e3 * alone:.1f} for the calls alone"
        rows.append(harness.at_most(what, own / alone, "x", bar, detail, samples))
    joined = 1e3 * harness.median(samples, "combine")
    detail = f"{len(package.graph)} bytes; {sizes} sizes {len(several.graph)}"
    rows.append(harness.shown("joining two captures", joined, "ms", detail, samples))
    first.ends.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a bar is missed."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--nodes", type=int, default=1000, help="nodes of the graph")
    parser.add_argument("--stand-in", type=int, metavar="MAJOR", help="run over the stand-in")
    parser.add_argument("--sizes", type=int, default=64, help="graphs of a package, up to 64")
    options = parser.parse_args(arguments)
    if options.stand_in is not None:
        from tests.support.driver.build import environment

        settings = {"KERNELS": True, "REUSE_ADDRESSES": True}  # two captures, one after the other
        command = [sys.executable, "-m", "benchmarks.graphs", f"--rounds={options.rounds}"]
        command += [
            f"--nodes={options.nodes}",
            f"--sizes={options.sizes}",
            *(["--json"] if options.json else []),
        ]
        os.execve(sys.executable, command, environment(options.stand_in, settings))
    rows = measure(options.nodes, options.sizes, options.rounds)
    harness.show(rows, as_json=options.json)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
