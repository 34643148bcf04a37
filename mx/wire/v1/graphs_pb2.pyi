from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CudaGraph(_message.Message):
    __slots__ = ("format", "environment", "pin", "regions", "weights", "inputs", "outputs", "images", "libraries", "calls", "kernels", "nodes", "edges", "fatbins", "tried", "name", "work", "sizes")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    FATBINS_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    format: int
    environment: _containers.RepeatedCompositeFieldContainer[GraphField]
    pin: str
    regions: _containers.RepeatedCompositeFieldContainer[GraphRegion]
    weights: _containers.RepeatedCompositeFieldContainer[GraphPlace]
    inputs: _containers.RepeatedCompositeFieldContainer[GraphInput]
    outputs: _containers.RepeatedCompositeFieldContainer[GraphOutput]
    images: _containers.RepeatedCompositeFieldContainer[GraphImage]
    libraries: _containers.RepeatedCompositeFieldContainer[GraphLibrary]
    calls: _containers.RepeatedCompositeFieldContainer[GraphCall]
    kernels: _containers.RepeatedCompositeFieldContainer[GraphKernel]
    nodes: _containers.RepeatedCompositeFieldContainer[GraphNode]
    edges: _containers.RepeatedCompositeFieldContainer[GraphEdge]
    fatbins: _containers.RepeatedCompositeFieldContainer[GraphFatbin]
    tried: _containers.RepeatedCompositeFieldContainer[GraphTriedBytes]
    name: str
    work: _containers.RepeatedCompositeFieldContainer[GraphPlace]
    sizes: _containers.RepeatedCompositeFieldContainer[GraphSize]
    def __init__(self, format: _Optional[int] = ..., environment: _Optional[_Iterable[_Union[GraphField, _Mapping]]] = ..., pin: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[GraphRegion, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[GraphPlace, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[GraphInput, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[GraphOutput, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[GraphImage, _Mapping]]] = ..., libraries: _Optional[_Iterable[_Union[GraphLibrary, _Mapping]]] = ..., calls: _Optional[_Iterable[_Union[GraphCall, _Mapping]]] = ..., kernels: _Optional[_Iterable[_Union[GraphKernel, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[GraphNode, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[GraphEdge, _Mapping]]] = ..., fatbins: _Optional[_Iterable[_Union[GraphFatbin, _Mapping]]] = ..., tried: _Optional[_Iterable[_Union[GraphTriedBytes, _Mapping]]] = ..., name: _Optional[str] = ..., work: _Optional[_Iterable[_Union[GraphPlace, _Mapping]]] = ..., sizes: _Optional[_Iterable[_Union[GraphSize, _Mapping]]] = ...) -> None: ...

class GraphSize(_message.Message):
    __slots__ = ("name", "of", "regions", "inputs", "outputs", "tried", "nodes", "edges", "at", "launches", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    of: int
    regions: _containers.RepeatedCompositeFieldContainer[GraphRegion]
    inputs: _containers.RepeatedCompositeFieldContainer[GraphInput]
    outputs: _containers.RepeatedCompositeFieldContainer[GraphOutput]
    tried: _containers.RepeatedCompositeFieldContainer[GraphTriedBytes]
    nodes: _containers.RepeatedCompositeFieldContainer[GraphNode]
    edges: _containers.RepeatedCompositeFieldContainer[GraphEdge]
    at: _containers.RepeatedScalarFieldContainer[int]
    launches: _containers.RepeatedScalarFieldContainer[int]
    parameters: bytes
    def __init__(self, name: _Optional[str] = ..., of: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[GraphRegion, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[GraphInput, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[GraphOutput, _Mapping]]] = ..., tried: _Optional[_Iterable[_Union[GraphTriedBytes, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[GraphNode, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[GraphEdge, _Mapping]]] = ..., at: _Optional[_Iterable[int]] = ..., launches: _Optional[_Iterable[int]] = ..., parameters: _Optional[bytes] = ...) -> None: ...

class GraphField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class GraphRegion(_message.Message):
    __slots__ = ("base", "nbytes")
    BASE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    base: int
    nbytes: int
    def __init__(self, base: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GraphPlace(_message.Message):
    __slots__ = ("name", "region", "offset", "nbytes", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    region: int
    offset: int
    nbytes: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., region: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class GraphInput(_message.Message):
    __slots__ = ("place", "value")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    place: GraphPlace
    value: bytes
    def __init__(self, place: _Optional[_Union[GraphPlace, _Mapping]] = ..., value: _Optional[bytes] = ...) -> None: ...

class GraphOutput(_message.Message):
    __slots__ = ("place", "blake3")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    place: GraphPlace
    blake3: bytes
    def __init__(self, place: _Optional[_Union[GraphPlace, _Mapping]] = ..., blake3: _Optional[bytes] = ...) -> None: ...

class GraphImage(_message.Message):
    __slots__ = ("blake3", "nbytes")
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    blake3: bytes
    nbytes: int
    def __init__(self, blake3: _Optional[bytes] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GraphLibrary(_message.Message):
    __slots__ = ("name", "build_id", "fatbin", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUILD_ID_FIELD_NUMBER: _ClassVar[int]
    FATBIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    build_id: str
    fatbin: bytes
    version: str
    def __init__(self, name: _Optional[str] = ..., build_id: _Optional[str] = ..., fatbin: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class GraphFatbin(_message.Message):
    __slots__ = ("library", "offset", "nbytes")
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    library: int
    offset: int
    nbytes: int
    def __init__(self, library: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GraphCall(_message.Message):
    __slots__ = ("name", "library")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    library: int
    def __init__(self, name: _Optional[str] = ..., library: _Optional[int] = ...) -> None: ...

class GraphKernel(_message.Message):
    __slots__ = ("name", "image", "call", "fatbin", "offsets", "sizes", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    FATBIN_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    image: int
    call: int
    fatbin: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    attributes: _containers.RepeatedCompositeFieldContainer[GraphFunctionAttribute]
    def __init__(self, name: _Optional[str] = ..., image: _Optional[int] = ..., call: _Optional[int] = ..., fatbin: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., attributes: _Optional[_Iterable[_Union[GraphFunctionAttribute, _Mapping]]] = ...) -> None: ...

class GraphFunctionAttribute(_message.Message):
    __slots__ = ("id", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: int
    value: int
    def __init__(self, id: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class GraphNode(_message.Message):
    __slots__ = ("kernel", "memset", "memcpy", "empty")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    MEMSET_FIELD_NUMBER: _ClassVar[int]
    MEMCPY_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    kernel: GraphKernelNode
    memset: GraphMemsetNode
    memcpy: GraphMemcpyNode
    empty: GraphEmptyNode
    def __init__(self, kernel: _Optional[_Union[GraphKernelNode, _Mapping]] = ..., memset: _Optional[_Union[GraphMemsetNode, _Mapping]] = ..., memcpy: _Optional[_Union[GraphMemcpyNode, _Mapping]] = ..., empty: _Optional[_Union[GraphEmptyNode, _Mapping]] = ...) -> None: ...

class GraphKernelNode(_message.Message):
    __slots__ = ("kernel", "grid", "block", "shared_bytes", "attributes", "parameters")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    kernel: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    block: _containers.RepeatedScalarFieldContainer[int]
    shared_bytes: int
    attributes: _containers.RepeatedCompositeFieldContainer[GraphAttribute]
    parameters: bytes
    def __init__(self, kernel: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., block: _Optional[_Iterable[int]] = ..., shared_bytes: _Optional[int] = ..., attributes: _Optional[_Iterable[_Union[GraphAttribute, _Mapping]]] = ..., parameters: _Optional[bytes] = ...) -> None: ...

class GraphAttribute(_message.Message):
    __slots__ = ("id", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: int
    value: bytes
    def __init__(self, id: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class GraphMemsetNode(_message.Message):
    __slots__ = ("address", "pitch", "value", "element_bytes", "width", "height")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PITCH_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    address: int
    pitch: int
    value: int
    element_bytes: int
    width: int
    height: int
    def __init__(self, address: _Optional[int] = ..., pitch: _Optional[int] = ..., value: _Optional[int] = ..., element_bytes: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class GraphMemcpyNode(_message.Message):
    __slots__ = ("target", "source", "nbytes")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    target: int
    source: int
    nbytes: int
    def __init__(self, target: _Optional[int] = ..., source: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GraphEmptyNode(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GraphEdge(_message.Message):
    __slots__ = ("first", "second", "from_port", "to_port", "type")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    FROM_PORT_FIELD_NUMBER: _ClassVar[int]
    TO_PORT_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    first: int
    second: int
    from_port: int
    to_port: int
    type: int
    def __init__(self, first: _Optional[int] = ..., second: _Optional[int] = ..., from_port: _Optional[int] = ..., to_port: _Optional[int] = ..., type: _Optional[int] = ...) -> None: ...

class GraphTriedBytes(_message.Message):
    __slots__ = ("node", "offset", "nbytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    node: int
    offset: int
    nbytes: int
    def __init__(self, node: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GraphCapture(_message.Message):
    __slots__ = ("graph", "images", "outside", "halves")
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    HALVES_FIELD_NUMBER: _ClassVar[int]
    graph: CudaGraph
    images: _containers.RepeatedScalarFieldContainer[bytes]
    outside: _containers.RepeatedScalarFieldContainer[int]
    halves: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, graph: _Optional[_Union[CudaGraph, _Mapping]] = ..., images: _Optional[_Iterable[bytes]] = ..., outside: _Optional[_Iterable[int]] = ..., halves: _Optional[_Iterable[int]] = ...) -> None: ...
