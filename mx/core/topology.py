"""The place of a process and its memory: what decides which paths reach it, and how fast.

A `Place` is registered with every source and sent with every request for a grant. Transports'
`reach` compares two places without any IO. Places come from other machines too: `mx.wire.place`
checks every field.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The longest fact of one transport, and the most bytes of all facts of a place with the names.
MAX_FACT_BYTES, MAX_FACTS_BYTES = 256, 1024


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface.

    `addresses` are in CIDR form ("10.0.0.1/24"), without link-local ones. Unknown values are 0,
    -1 or "".
    """

    name: str = ""
    state: str = ""  # "up", "down", as the kernel's operstate says
    addresses: tuple[str, ...] = ()
    speed_mbit_per_s: int = 0
    mtu: int = 0
    numa_node: int = -1
    pci_address: str = ""
    rdma_device: str = ""  # "mlx5_0"
    rdma_port: int = 0
    link_layer: str = ""  # of the RDMA port: "InfiniBand", or "Ethernet" for RoCE


@dataclass(frozen=True, slots=True)
class GpuPeer:
    """The relation of one GPU to another one of the same host.

    `relation` is the nearest device that connects both: "nvlink", "switch" (one PCIe switch),
    "bridge" (several), "host" (one host bridge), "node" (one NUMA node), "system".
    """

    uuid: str = ""
    nvlinks: int = 0
    p2p_read: bool = False
    p2p_write: bool = False
    relation: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML and the driver describe it.

    `compute_capability` is of the form "9.0"; `uuid` is NVML's ("GPU-..."). PCIe generation and
    width are the link's maximum (idle links train down).
    """

    uuid: str = ""
    index: int = 0
    name: str = ""
    compute_capability: str = ""
    memory_nbytes: int = 0
    pci_address: str = ""
    numa_node: int = -1
    pcie_generation: int = 0
    pcie_width: int = 0
    nvlinks: int = 0
    nvlink_gb_per_s: float = 0.0  # of one lane, one way
    peers: tuple[GpuPeer, ...] = ()


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node. `cpus` is the kernel's list ("0-15,32-47"); `distances` are to all nodes in
    order."""

    index: int = 0
    cpus: str = ""
    memory_nbytes: int = 0
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """What a transport of another distribution says of a process or its host, such as the id of a
    fabric. `data` is in hexadecimal digits (0 to f): only that transport reads it, by
    `Place.fact`."""

    transport: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one process, which transports' `reach` compares with another.

    `boot_id` identifies the running kernel; namespaces are inode numbers; `pid` and
    `pid_start_ticks` (field 22 of /proc/PID/stat) identify the process even if its pid is reused.
    `addresses` are the IP addresses that its data endpoints listen on. `device` is "cpu" or
    "cuda:UUID". `driver` is the NVIDIA driver's version, "" without one. `facts` are those of
    transports, at most one each.

    Raises:
        ValueError: A transport has two facts, or one of more than MAX_FACT_BYTES, or with anything
            but digits; or all facts and their names have more than MAX_FACTS_BYTES.
    """

    boot_id: str = ""
    hostname: str = ""
    uid: int = -1
    pid: int = 0
    pid_start_ticks: int = 0
    pid_namespace: int = 0
    net_namespace: int = 0
    user_namespace: int = 0
    ipc_namespace: int = 0
    device: str = "cpu"
    addresses: tuple[str, ...] = ()
    driver: str = ""
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    facts: tuple[Fact, ...] = ()

    def __post_init__(self) -> None:
        if self.facts:  # few places have any
            spelt = [each for each in self.facts if bytes.fromhex(each.data).hex() == each.data]
            sizes = {each.transport: len(each.data) // 2 for each in spelt}
            wrong = len(sizes) < len(self.facts) or max(sizes.values()) > MAX_FACT_BYTES
            if wrong or sum(sizes.values()) + sum(map(len, sizes)) > MAX_FACTS_BYTES:
                most = f"{MAX_FACT_BYTES} bytes at most, with names {MAX_FACTS_BYTES} in all"
                raise ValueError(f"a transport has one fact, in hexadecimal digits, of {most}")

    def fact(self, transport: str) -> bytes:
        """Return what the transport of this name says of this place; b"" if it says nothing, or is
        not installed there. Another machine sent it: it may be anything."""
        return next((bytes.fromhex(e.data) for e in self.facts if e.transport == transport), b"")

    @property
    def same_host_key(self) -> tuple[str, int, int]:
        """A key that is equal for two processes with the same kernel, network and pid namespace."""
        return (self.boot_id, self.net_namespace, self.pid_namespace)

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that `device` names, or None if it is not one of `gpus`."""
        uuid = self.device.removeprefix("cuda:")
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)
