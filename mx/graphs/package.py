"""CUDA graphs as plain values. `mx.graphs.bounds` checks them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mx.errors import IntegrityError


class GraphError(IntegrityError):
    """A graph is not what a well-behaved publisher makes; nothing of it was loaded."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """`nbytes` of device memory at the address `base`."""

    base: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """A row-major tensor at an offset of a region."""

    name: str
    region: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a replay reads, and its golden bytes."""

    place: GraphPlace
    value: bytes


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """A tensor that a replay writes, and the blake3 of its bytes after the golden inputs."""

    place: GraphPlace
    digest: bytes


@dataclass(frozen=True, slots=True)
class Image:
    """A kernel image that travels with the graph, by the blake3 of its bytes."""

    digest: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """An installed library, which never travels.

    `fatbin` is the blake3 of its section .nv_fatbin, `version` that of torch where it is torch's.
    """

    name: str
    build_id: str
    fatbin: bytes
    version: str = ""


@dataclass(frozen=True, slots=True)
class Fatbin:
    """`nbytes` of a library's section .nv_fatbin, at an offset of it: images of some kernels."""

    library: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """Eager work, by a name that both sides know, which loads kernels of a library."""

    name: str
    library: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by its mangled name: of an image, of a fatbin, or loaded by a call (the other two
    are None).

    `parameters` has the offset and the size of each, in bytes; `attributes` the numbers of
    CUfunction_attributes and their values, of one of a fatbin.
    """

    name: str
    image: int | None
    call: int | None
    parameters: tuple[tuple[int, int], ...]
    fatbin: int | None = None
    attributes: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes up to the end of the last parameter."""
        return sum(self.parameters[-1]) if self.parameters else 0


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A launch. `values` has the parameters at their offsets."""

    kernel: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: tuple[tuple[int, bytes], ...]
    values: bytes


@dataclass(frozen=True, slots=True)
class MemsetNode:
    """`height` rows of `width` elements of `element_bytes` each, `pitch` bytes apart."""

    address: int
    pitch: int
    value: int
    element_bytes: int
    width: int
    height: int

    @property
    def nbytes(self) -> int:
        """The bytes from the first to the last one that is set."""
        return (self.height - 1) * self.pitch + self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class MemcpyNode:
    """A copy of `nbytes` within the regions."""

    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EmptyNode:
    """A node that only joins edges."""


Node = KernelNode | MemsetNode | MemcpyNode | EmptyNode


@dataclass(frozen=True, slots=True)
class Edge:
    """The node `second` waits for `first`; ports and type are CUgraphEdgeData's."""

    first: int
    second: int
    from_port: int = 0
    to_port: int = 0
    type: int = 0


@dataclass(frozen=True, slots=True)
class TriedBytes:
    """Bytes of a node's parameters that are zero because a trial has shown no difference."""

    node: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole graph. Indices refer to the tuples here.

    Several graphs of a package have the same tuples of `SHARED`; `work` are named places of memory
    that begins as zeros. Those of one `topology`, the number of the first such graph, differ in
    parameters alone, and have the same objects as nodes where these are the same.
    """

    environment: tuple[tuple[str, str], ...]
    pin: str
    regions: tuple[RegionSpec, ...]
    weights: tuple[GraphPlace, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[GraphOutput, ...]
    images: tuple[Image, ...]
    libraries: tuple[Library, ...]
    calls: tuple[LibraryCall, ...]
    kernels: tuple[Kernel, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    fatbins: tuple[Fatbin, ...] = ()
    tried: tuple[TriedBytes, ...] = ()
    name: str = ""
    work: tuple[GraphPlace, ...] = ()
    topology: int = field(default=0, compare=False)


#: What all graphs of a package have in common.
SHARED = (
    *("environment", "pin", "weights", "work", "images", "libraries", "calls", "kernels"),
    "fatbins",
)
