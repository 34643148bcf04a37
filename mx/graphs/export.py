"""Takes a captured graph apart: once in each of two processes, and then both together."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import DeviceAttribute, format_version
from mx.cuda.graphs import GraphCalls, Launch
from mx.graphs.bounds import ATTRIBUTES, check
from mx.graphs.eager import EagerCall, identified, loaded_by
from mx.graphs.message import Capture, encode
from mx.graphs.package import (
    Edge,
    EmptyNode,
    Graph,
    GraphOutput,
    GraphPlace,
    Image,
    Input,
    Kernel,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
)
from mx.graphs.pointers import GraphRefusedError, Move, known_addresses, moves, pointers
from mx.graphs.region import Region, clear_others, place_in

#: Kernels that talk to other processes, whose state is in no region.
_COMMUNICATES = re.compile("nccl|nvshmem", re.IGNORECASE)
#: Attributes that hold an address or a handle, and the bytes that say so: an access policy's
#: length, and whether a device may update the node.
_BOUND = {1: ("an access policy window", slice(8, 16)), 13: ("updates by the device", slice(0, 4))}


@dataclass(frozen=True, slots=True)
class Package:
    """What a publisher signs. `images` are by their blake3 in hexadecimal; `environment` is that
    of the graph, by the names of fields."""

    graph: bytes
    images: dict[str, bytes]
    environment: dict[str, str]
    pin: str


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
    images: Mapping[int, bytes] | None = None,
    calls: Sequence[EagerCall] = (),
    environment: Mapping[str, str] | None = None,
    pin: str = "",
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
        images: The image of each kernel that travels, by its CUfunction as an int: of a kernel of
            Triton `kernel.function`, `kernel.asm["cubin"]`.
        calls: What loads the kernels that don't.
        environment: More fields that have to agree.
        pin: That of the weights.

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
    libraries, named = identified(calls)
    with device.current():
        reader = _NodeReader(driver, regions, images or {})
        for index, call in enumerate(calls):
            reader.loaded |= {each.function: index for each in loaded_by(driver, device, call)}
        nodes = driver.nodes(raw)
        read = tuple(reader.node(at, node) for at, node in enumerate(nodes))
        places = {int(node): at for at, node in enumerate(nodes)}
        edges = sorted(
            (places[first], places[second], *ports) for first, second, *ports in driver.edges(raw)
        )
        places_of = [
            tuple(place_in(regions, name, each) for name, each in (tensors or {}).items())
            for tensors in (weights, inputs, outputs)
        ]
        golden, results = _replayed(driver, raw, regions, places_of)
    fields = {**(environment or {}), **device_fields(device)}
    made = Graph(
        tuple(sorted(fields.items())),
        pin,
        tuple(each.spec for each in regions),
        places_of[0],
        golden,
        results,
        tuple(Image(digest, len(image)) for digest, image in reader.images.items()),
        tuple(libraries),
        tuple(named),
        tuple(reader.kernels),
        read,
        tuple(Edge(*edge) for edge in edges),
    )
    check(made)
    return Capture(made, tuple(reader.images.values()))


class _NodeReader:
    """Reads nodes, and collects their kernels and images."""

    def __init__(
        self, driver: GraphCalls, regions: Sequence[Region], images: Mapping[int, bytes]
    ) -> None:
        self.kernels: list[Kernel] = []
        self.images: dict[bytes, bytes] = {}
        self.loaded: dict[int, int] = {}  # the index of the call, by function
        self._driver, self._given = driver, images
        self._context = regions[0].device.context
        self._specs = [each.spec for each in regions]
        self._functions: dict[int, int] = {}  # the index of the kernel
        self._digests: dict[int, int] = {}
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
        index = self._functions.get(launch.function)
        if index is None:
            index = self._functions[launch.function] = self._kernel(at, launch.function)
        kernel = self.kernels[index]
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
            for found in known_addresses(value, self._specs, self._knows):
                number_there = int.from_bytes(value[found : found + 8], "little")
                raise GraphRefusedError(
                    f"{what}: parameter {number} has the address {number_there:#x} at byte "
                    f"{found}, of memory outside the region",
                    hint="allocate everything that the graph uses in the region",
                )
            values[offset : offset + size] = value
        return bytes(values)

    def _knows(self, address: int) -> bool:
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self._driver.knows(address)
        return known

    def _kernel(self, at: int, function: int) -> int:
        """Add a function to the kernels, and return its index."""
        driver = self._driver
        name = driver.function_name(function)
        if _COMMUNICATES.search(name):
            raise GraphRefusedError(
                f"node {at}, kernel {name}: it talks to other processes, and does not travel",
                hint="capture a graph between the collectives",
            )
        image, call = self._given.get(function), self.loaded.get(function)
        if image is None and call is None:
            raise GraphRefusedError(
                f"node {at}, kernel {name}: its image is not at hand, and no call loads it",
                hint="give its image, or the eager call of a library that loads it",
            )
        index = None
        if image is not None:
            call = None
            digest = blake3(image).digest()
            self.images.setdefault(digest, bytes(image))
            index = list(self.images).index(digest)
        self.kernels.append(Kernel(name, index, call, driver.parameters(function)))
        return len(self.kernels) - 1


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


def combine(first: Capture, second: Capture) -> Package:
    """Return the package of a graph that two processes captured at different addresses.

    Args:
        first: One capture. The package has its addresses.
        second: The other one, in a region with `shifted=True`.

    Raises:
        GraphRefusedError: The captures differ, but for addresses of the regions; the message names
            the node, the kernel and the parameter.
    """
    one, other = first.graph, second.graph
    moved = moves(one.regions, other.regions)
    for what in ("environment", "pin", "weights", "inputs", "outputs", "images", "libraries"):
        if getattr(one, what) != getattr(other, what):
            raise GraphRefusedError(f"the two captures differ in their {what}")
    for what in ("calls", "kernels", "edges"):
        if getattr(one, what) != getattr(other, what):
            raise GraphRefusedError(f"the two captures differ in their {what}")
    if len(one.nodes) != len(other.nodes):
        raise GraphRefusedError(
            f"one capture has {len(one.nodes)} nodes, the other one {len(other.nodes)}"
        )
    nodes = tuple(
        _joined(one, at, *pair, moved)
        for at, pair in enumerate(zip(one.nodes, other.nodes, strict=True))
    )
    graph = replace(one, nodes=nodes)
    images = {
        image.digest.hex(): data for image, data in zip(one.images, first.images, strict=True)
    }
    return Package(encode(graph), images, dict(one.environment), one.pin)


def _joined(graph: Graph, at: int, one: Node, other: Node, moved: Sequence[Move]) -> Node:
    if isinstance(one, KernelNode) and isinstance(other, KernelNode):
        kernel = graph.kernels[one.kernel]
        what = f"node {at}, kernel {kernel.name}"
        if replace(one, values=other.values) != other:
            raise GraphRefusedError(f"{what}: the two captures launch it differently")
        found: list[int] = []
        for number, (offset, size) in enumerate(kernel.parameters):
            values = (one.values[offset : offset + size], other.values[offset : offset + size])
            try:
                found += [offset + place for place in pointers(*values, moved)]
            except ValueError as error:
                raise GraphRefusedError(f"{what}: parameter {number} {error}") from None
        return replace(one, pointers=tuple(found))
    if isinstance(one, MemsetNode) and isinstance(other, MemsetNode):
        same = replace(one, address=other.address) == other
        addresses = [(one.address, other.address)]
    elif isinstance(one, MemcpyNode) and isinstance(other, MemcpyNode):
        same = one.nbytes == other.nbytes
        addresses = [(one.target, other.target), (one.source, other.source)]
    else:
        same, addresses = type(one) is type(other), []
    for here, there in addresses:
        same = same and any(
            here - move.first == there - move.second and 0 <= here - move.first < move.nbytes
            for move in moved
        )
    if not same:
        raise GraphRefusedError(f"node {at}: the two captures differ in it")
    return one
