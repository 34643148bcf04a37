from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelKey(_message.Message):
    __slots__ = ("name", "revision", "variant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    variant: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., variant: _Optional[str] = ...) -> None: ...

class ManifestRef(_message.Message):
    __slots__ = ("identity", "layout", "packaging", "layout_version")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PACKAGING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    identity: DocumentRef
    layout: DocumentRef
    packaging: DocumentRef
    layout_version: int
    def __init__(self, identity: _Optional[_Union[DocumentRef, _Mapping]] = ..., layout: _Optional[_Union[DocumentRef, _Mapping]] = ..., packaging: _Optional[_Union[DocumentRef, _Mapping]] = ..., layout_version: _Optional[int] = ...) -> None: ...

class DocumentRef(_message.Message):
    __slots__ = ("digest", "nbytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    nbytes: int
    def __init__(self, digest: _Optional[bytes] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ("digest", "offset", "nbytes", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    nbytes: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AddressTable(_message.Message):
    __slots__ = ("layout_digest", "regions", "held", "rows", "layers", "payload_bytes", "rows_digest", "frozen")
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    layout_digest: bytes
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    held: _containers.RepeatedCompositeFieldContainer[Range]
    rows: int
    layers: int
    payload_bytes: int
    rows_digest: bytes
    frozen: bool
    def __init__(self, layout_digest: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., rows: _Optional[int] = ..., layers: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., rows_digest: _Optional[bytes] = ..., frozen: bool = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("index", "device", "base", "nbytes", "layers")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    index: int
    device: str
    base: int
    nbytes: int
    layers: Range
    def __init__(self, index: _Optional[int] = ..., device: _Optional[str] = ..., base: _Optional[int] = ..., nbytes: _Optional[int] = ..., layers: _Optional[_Union[Range, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("boot_id", "hostname", "uid", "pid", "pid_start_ticks", "pid_namespace", "net_namespace", "user_namespace", "ipc_namespace", "device", "addresses", "driver", "nics", "gpus", "numa_nodes", "facts")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NET_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IPC_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    hostname: str
    uid: int
    pid: int
    pid_start_ticks: int
    pid_namespace: int
    net_namespace: int
    user_namespace: int
    ipc_namespace: int
    device: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    driver: str
    nics: _containers.RepeatedCompositeFieldContainer[Nic]
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    numa_nodes: _containers.RepeatedCompositeFieldContainer[NumaNode]
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, boot_id: _Optional[str] = ..., hostname: _Optional[str] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., pid_start_ticks: _Optional[int] = ..., pid_namespace: _Optional[int] = ..., net_namespace: _Optional[int] = ..., user_namespace: _Optional[int] = ..., ipc_namespace: _Optional[int] = ..., device: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., driver: _Optional[str] = ..., nics: _Optional[_Iterable[_Union[Nic, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., numa_nodes: _Optional[_Iterable[_Union[NumaNode, _Mapping]]] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("transport", "data")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    transport: str
    data: str
    def __init__(self, transport: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...

class Nic(_message.Message):
    __slots__ = ("name", "state", "addresses", "speed_mbit_per_s", "mtu", "numa_node", "pci_address", "rdma_device", "rdma_port", "link_layer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SPEED_MBIT_PER_S_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    PCI_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICE_FIELD_NUMBER: _ClassVar[int]
    RDMA_PORT_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    speed_mbit_per_s: int
    mtu: int
    numa_node: int
    pci_address: str
    rdma_device: str
    rdma_port: int
    link_layer: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., speed_mbit_per_s: _Optional[int] = ..., mtu: _Optional[int] = ..., numa_node: _Optional[int] = ..., pci_address: _Optional[str] = ..., rdma_device: _Optional[str] = ..., rdma_port: _Optional[int] = ..., link_layer: _Optional[str] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("uuid", "index", "name", "compute_capability", "memory_nbytes", "pci_address", "numa_node", "pcie_generation", "pcie_width", "nvlinks", "nvlink_gb_per_s", "peers")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PCI_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    PCIE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PCIE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    index: int
    name: str
    compute_capability: str
    memory_nbytes: int
    pci_address: str
    numa_node: int
    pcie_generation: int
    pcie_width: int
    nvlinks: int
    nvlink_gb_per_s: float
    peers: _containers.RepeatedCompositeFieldContainer[GpuPeer]
    def __init__(self, uuid: _Optional[str] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., compute_capability: _Optional[str] = ..., memory_nbytes: _Optional[int] = ..., pci_address: _Optional[str] = ..., numa_node: _Optional[int] = ..., pcie_generation: _Optional[int] = ..., pcie_width: _Optional[int] = ..., nvlinks: _Optional[int] = ..., nvlink_gb_per_s: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[GpuPeer, _Mapping]]] = ...) -> None: ...

class GpuPeer(_message.Message):
    __slots__ = ("uuid", "nvlinks", "p2p_read", "p2p_write", "relation")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    P2P_READ_FIELD_NUMBER: _ClassVar[int]
    P2P_WRITE_FIELD_NUMBER: _ClassVar[int]
    RELATION_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    nvlinks: int
    p2p_read: bool
    p2p_write: bool
    relation: str
    def __init__(self, uuid: _Optional[str] = ..., nvlinks: _Optional[int] = ..., p2p_read: bool = ..., p2p_write: bool = ..., relation: _Optional[str] = ...) -> None: ...

class NumaNode(_message.Message):
    __slots__ = ("index", "cpus", "memory_nbytes", "distances")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    index: int
    cpus: str
    memory_nbytes: int
    distances: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., cpus: _Optional[str] = ..., memory_nbytes: _Optional[int] = ..., distances: _Optional[_Iterable[int]] = ...) -> None: ...
