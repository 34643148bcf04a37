"""Machines as topology sees them, for tests: hosts of GPUs, interfaces and NUMA nodes."""

from __future__ import annotations

from mx.core.topology import Gpu, GpuPeer, Nic, NumaNode, Place


def uuid(index: int, host: int = 0) -> str:
    return f"GPU-{host:08x}-1234-5678-9abc-{index:012x}"


def nvlink_host(gpus: int = 8, nics: int = 8, host: int = 0, addresses: int = 2) -> Place:
    """Return a host with all GPUs behind NVLink switches, `nics` RDMA interfaces and two NUMA
    nodes."""
    return Place(
        boot_id=f"{host:08x}-5f8b-48d4-aa99-42badce7bd6b",
        hostname=f"gpu-node-{host}.cluster.example.com",
        uid=1000,
        pid=4_000_000,
        pid_start_ticks=123_456_789_012,
        pid_namespace=4026531836,
        net_namespace=4026531833,
        user_namespace=4026531837,
        ipc_namespace=4026531839,
        addresses=tuple(f"10.{index}.{host}.1" for index in range(nics)),
        driver="580.95.05",
        nics=tuple(_nic(index, host, addresses) for index in range(nics)),
        gpus=tuple(_gpu(index, gpus, host) for index in range(gpus)),
        numa_nodes=tuple(
            NumaNode(i, f"{48 * i}-{48 * i + 47},{96 + 48 * i}-{143 + 48 * i}", 1 << 40, (10, 21))
            for i in range(2)
        ),
    )


def _nic(index: int, host: int, addresses: int) -> Nic:
    found = [f"10.{index}.{host}.1/24"]
    found += [f"2001:db8:1234:{host:x}:abcd:{i:x}:ef01:{index:x}/64" for i in range(1, addresses)]
    return Nic(
        f"enp{index}s0f0np0",
        "up",
        tuple(found),
        400_000,
        9000,
        index % 2,
        f"0000:{index:02x}:00.0",
        f"mlx5_{index}",
        1,
        "InfiniBand",
    )


def _gpu(index: int, gpus: int, host: int) -> Gpu:
    return Gpu(
        uuid(index, host),
        index,
        "NVIDIA H100 80GB HBM3",
        "9.0",
        85_520_809_984,
        f"0000:{index + 0x19:02x}:00.0",
        index % 2,
        5,
        16,
        18,
        25.0,
        tuple(
            GpuPeer(uuid(other, host), 18, True, True, "nvlink")
            for other in range(gpus)
            if other != index
        ),
    )
