"""Takes a captured graph apart, once in each of two processes; `mx.graphs.merge` joins both."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import DeviceAttribute, format_version
from mx.graphs.addresses import GraphRefusedError, halves, outside_addresses
from mx.graphs.bounds import ATTRIBUTES, check
from mx.graphs.calls import GraphCalls, Launch
from mx.graphs.eager import EagerCall
from mx.graphs.message import Capture
from mx.graphs.package import (
    Edge,
    EmptyNode,
    Graph,
    GraphOutput,
    GraphPlace,
    Input,
    Kernel,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
)
from mx.graphs.region import Region, clear_others, outside, place_in
from mx.graphs.sources import Sources

#: Attributes that hold an address or a handle, and the bytes that say so: an access policy's
#: length, and whether a device may update the node.
_BOUND = {1: ("an access policy window", slice(8, 16)), 13: ("updates by the device", slice(0, 4))}


def device_fields(device: Device) -> dict[str, str]:
    """Return what a graph is bound to of a GPU, as named fields."""
    driver, ordinal = device.driver, device.ordinal
    major = driver.device_attribute(ordinal, DeviceAttribute.COMPUTE_CAPABILITY_MAJOR)
    minor = driver.device_attribute(ordinal, DeviceAttribute.COMPUTE_CAPABILITY_MINOR)
    return {
        "cuda_driver": format_version(driver.version()),
        "gpu": driver.device_name(ordinal),
        "sm": f"sm_{major}{minor}",
        "sm_count": str(driver.device_attribute(ordinal, DeviceAttribute.SM_COUNT)),
    }


def export(
    graph: object,
    region: Region | Sequence[Region],
    *,
    outputs: Mapping[str, object],
    inputs: Mapping[str, object] | None = None,
    weights: Mapping[str, object] | None = None,
    work: Mapping[str, object] | None = None,
    images: Mapping[int, bytes] | None = None,
    libraries: Sequence[Path] = (),
    calls: Sequence[EagerCall] = (),
    environment: Mapping[str, str] | None = None,
    pin: str = "",
    name: str = "",
) -> Capture:
    """Return what this process captured, for `combine` with another process's.

    The graph is replayed twice, with the inputs' present bytes; before the second time all memory
    of the regions but the weights' and the inputs' is set to zero, as it is where the graph is
    restored, and stays so.

    Args:
        graph: The raw graph: what `torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()` returns,
            or a CUgraph. It stays the caller's.
        region: The memory that the graph uses, all of it.
        outputs: The tensors that a replay writes, by name.
        inputs: Those that it reads and that are not weights; their bytes now are the golden ones.
            What a replay changes for the next one, such as a cache of keys, is an input too.
        weights: Those that a target pulls, by their names in the checkpoint.
        work: Memory that begins as zeros and that a target asks for by name, such as all keys and
            values. Other memory of the regions is work memory, too.
        images: The image of each kernel that travels, by its CUfunction as an int: of a kernel of
            Triton `kernel.function`, `kernel.asm["cubin"]`.
        libraries: The installed libraries of kernels that don't: their files.
        calls: What loads kernels that are in no library's file.
        environment: More fields that have to agree.
        pin: That of the weights.
        name: What tells it from other graphs of its package, such as "decode.8".

    Raises:
        GraphRefusedError: The graph can't travel; the message names the node and why.
        ConfigError: A tensor is not in the region, or a library has no build id.
        GraphError: The graph is larger than mx allows.
        CudaError: The driver fails.
    """
    regions = [region] if isinstance(region, Region) else list(region)
    device = regions[0].device
    driver = GraphCalls()
    raw = int(graph)  # type: ignore[call-overload]
    probes = outside(device)
    with device.current():
        sources = Sources(driver, device, images or {}, libraries, calls)
        pages = {(each >> 32) + n for each in probes for n in (-1, 0, 1)}
        reader = _NodeReader(driver, regions, sources, pages)
        nodes = driver.nodes(raw)
        read = tuple(reader.node(at, node) for at, node in enumerate(nodes))
        places = {int(node): at for at, node in enumerate(nodes)}
        edges = sorted(
            (places[first], places[second], *ports) for first, second, *ports in driver.edges(raw)
        )
        places_of = [
            tuple(place_in(regions, name, each) for name, each in (tensors or {}).items())
            for tensors in (weights, inputs, outputs, work)
        ]
        golden, results = _replayed(driver, raw, regions, places_of[:3])
    fields = {**(environment or {}), **device_fields(device)}
    made = Graph(
        tuple(sorted(fields.items())),
        pin,
        tuple(each.spec for each in regions),
        places_of[0],
        golden,
        results,
        *sources.found(),
        read,
        tuple(Edge(*edge) for edge in edges),
        sources.fatbins(),
        name=name,
        work=places_of[3],
    )
    check(made)
    return Capture(made, tuple(sources.images.values()), probes, tuple(sorted(reader.halves)))


class _NodeReader:
    """Reads nodes, whose kernels `sources` collects. `pages` are the upper halves of addresses
    outside the regions; `halves` has words that may be lower halves of such."""

    def __init__(
        self, driver: GraphCalls, regions: Sequence[Region], sources: Sources, pages: set[int]
    ) -> None:
        self.halves: set[int] = set()
        self._driver, self._sources, self._pages = driver, sources, pages
        self._context = regions[0].device.context
        self._specs = [each.spec for each in regions]
        self._known: dict[int, bool] = {}

    def node(self, at: int, node: object) -> Node:
        kind = self._driver.node_kind(node)
        if kind == "KERNEL":
            return self._launch(at, node)
        if kind == "MEMSET":
            values = self._driver.memset_of(node)
            # A row of its own has no pitch; what it says may be anything.
            made = MemsetNode(*values) if values[5] > 1 else MemsetNode(values[0], 0, *values[2:])
            self._require_inside(at, "sets", made.address, made.nbytes)
            return made
        if kind == "MEMCPY":
            copy = self._driver.memcpy_of(node)
            if not copy.plain:
                raise GraphRefusedError(
                    f"node {at} copies between other than rows of device memory",
                    hint="copy from and to the host outside the graph",
                )
            for address in (copy.target, copy.source):
                self._require_inside(at, "copies", address, copy.nbytes)
            return MemcpyNode(copy.target, copy.source, copy.nbytes)
        if kind == "EMPTY":
            return EmptyNode()
        raise GraphRefusedError(f"node {at} is a {kind} node, and those don't travel")

    def _require_inside(self, at: int, verb: str, address: int, nbytes: int) -> None:
        if not any(s.base <= address <= s.base + s.nbytes - nbytes for s in self._specs):
            raise GraphRefusedError(
                f"node {at} {verb} memory at {address:#x}, outside the region",
                hint="allocate everything that the graph uses in the region",
            )

    def _launch(self, at: int, node: object) -> KernelNode:
        driver = self._driver
        launch = driver.launch_of(node)
        index, kernel = self._sources.kernel(at, launch.function)
        what = f"node {at}, kernel {kernel.name}"
        if launch.context not in (0, self._context):
            raise GraphRefusedError(f"{what}: it runs in another context than the region's")
        for attribute, (name, part) in _BOUND.items():
            if any(driver.attribute(node, attribute)[part]):
                raise GraphRefusedError(f"{what}: it has {name}, which does not travel")
        attributes = []
        for attribute, nbytes in ATTRIBUTES.items():
            value = driver.attribute(node, attribute)[:nbytes]
            if any(value):
                attributes.append((attribute, value))
        return KernelNode(
            index,
            launch.grid,
            launch.block,
            launch.shared_bytes,
            tuple(attributes),
            self._values(what, kernel, launch),
        )

    def _values(self, what: str, kernel: Kernel, launch: Launch) -> bytes:
        count = len(kernel.parameters)
        values = bytearray(kernel.nbytes)
        if not launch.parameters and len(launch.packed) < kernel.nbytes:
            raise GraphRefusedError(f"{what}: its parameters can't be read")
        places = (
            (ctypes.c_void_p * count).from_address(launch.parameters) if launch.parameters else ()
        )
        for number, (offset, size) in enumerate(kernel.parameters):
            if places:
                value = ctypes.string_at(places[number] or 0, size)
            else:
                value = launch.packed[offset : offset + size]
            values[offset : offset + size] = value
        found = bytes(values)
        for at in outside_addresses(found, self._specs, self._knows, self._pages):
            number = bisect_right(kernel.parameters, (at, kernel.nbytes)) - 1
            address = int.from_bytes(found[at : at + 8], "little")
            raise GraphRefusedError(
                f"{what}: parameter {number} has the address {address:#x} at byte "
                f"{at - kernel.parameters[number][0]}, of memory outside the region",
                hint="allocate everything that the graph uses in the region",
            )
        self.halves |= halves(found, self._specs, self._knows, self._pages)
        return found

    def _knows(self, address: int) -> bool:
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self._driver.knows(address)
        return known


def _replayed(
    driver: GraphCalls,
    graph: int,
    regions: Sequence[Region],
    places: Sequence[Sequence[GraphPlace]],
) -> tuple[tuple[Input, ...], tuple[GraphOutput, ...]]:
    """Replay a graph and return its golden inputs and outputs."""
    weights, inputs, outputs = places
    regions[0].device.driver.context_synchronize()  # whatever stream has written them
    golden = tuple(Input(place, regions[place.region].read(place)) for place in inputs)
    executable = driver.instantiate(graph)
    try:
        with CudaStream(regions[0].device) as stream:
            found = replayed(driver, executable, stream, regions, golden, outputs)
            clear_others(regions, [*weights, *inputs])
            again = replayed(driver, executable, stream, regions, golden, outputs)
    finally:
        driver.executable_destroy(executable)
    for one, other, place in zip(found, again, outputs, strict=True):
        if one != other:
            raise GraphRefusedError(
                f"the output {place.name} changes when memory that is neither a weight nor an "
                "input is zero at first, or from replay to replay",
                hint="name everything that the graph reads as a weight or an input",
            )
    clear_others(regions, weights)
    for read in golden:
        regions[read.place.region].write(read.place, read.value)
    return golden, tuple(
        GraphOutput(place, blake3(value).digest())
        for place, value in zip(outputs, found, strict=True)
    )


def replayed(
    driver: GraphCalls,
    executable: int,
    stream: CudaStream,
    regions: Sequence[Region],
    inputs: Sequence[Input],
    outputs: Sequence[GraphPlace],
) -> list[bytes]:
    """Write inputs, replay, and return the outputs' bytes. Raises CudaError."""
    for read in inputs:
        regions[read.place.region].write(read.place, read.value)
    driver.replay(executable, stream.handle)
    stream.synchronize()
    return [regions[place.region].read(place) for place in outputs]
