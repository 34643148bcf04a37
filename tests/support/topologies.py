"""Clusters as the planner sees them: hosts by what joins their GPUs, racks by their networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mx.core.topology import Gpu, GpuPeer, Nic, Place
from mx.core.types import AddressTable, ManifestRef, ModelKey, SourceRecord

REF = ManifestRef(b"i" * 32, b"l" * 32, b"p" * 32, (1, 1, 1))
CPU = "cpu"


@dataclass(frozen=True)
class Host:
    """A machine with all its GPUs; places in it name one of them at most."""

    base: Place
    gpus: tuple[Gpu, ...] = ()

    @property
    def name(self) -> str:
        return self.base.hostname

    def place(self, gpu: int | None = None, pid: int = 1) -> Place:
        """Return a process there, as it registers itself: with the GPU that it uses, if any."""
        if gpu is None:
            return replace(self.base, pid=pid)
        chosen = self.gpus[gpu]
        return replace(self.base, pid=pid, device=f"cuda:{chosen.uuid}", gpus=(chosen,))

    def places(self) -> list[Place]:
        """Return a place in the host's memory, and one on each GPU."""
        return [self.place(pid=10), *(self.place(i, pid=11 + i) for i in range(len(self.gpus)))]


def host(name: str, nics: Sequence[Nic] = (), gpus: Sequence[Gpu] = ()) -> Host:
    base = Place(
        boot_id=f"boot-{name}",
        hostname=name,
        uid=1000,
        pid=1,
        pid_start_ticks=1,
        pid_namespace=1,
        net_namespace=1,
        user_namespace=1,
        ipc_namespace=1,
        addresses=tuple(a.partition("/")[0] for nic in nics for a in nic.addresses),
        driver="580.95.05" if gpus else "",
        nics=tuple(nics),
    )
    return Host(base, tuple(gpus))


def nvlink_gpus(name: str, count: int = 8) -> list[Gpu]:
    """Return GPUs behind NVLink switches: 18 lanes from each to each, of 25 GB/s; PCIe 5 x16."""
    uuids = [f"GPU-{name}-{i}" for i in range(count)]
    return [
        _gpu(i, uuid, 5, [GpuPeer(u, 18, True, True, "nvlink") for u in uuids if u != uuid], 18)
        for i, uuid in enumerate(uuids)
    ]


def pcie_gpus(name: str, switches: int = 2, each: int = 4) -> list[Gpu]:
    """Return GPUs with PCIe 4 x16 behind switches, and peer access within one switch only."""
    uuids = [f"GPU-{name}-{i}" for i in range(switches * each)]

    def peer(mine: int, other: int) -> GpuPeer:
        near = mine // each == other // each
        return GpuPeer(uuids[other], 0, near, near, "switch" if near else "system")

    return [
        _gpu(i, uuid, 4, [peer(i, j) for j in range(len(uuids)) if j != i])
        for i, uuid in enumerate(uuids)
    ]


def _gpu(index: int, uuid: str, generation: int, peers: Sequence[GpuPeer], nvlinks: int = 0) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=index,
        name="NVIDIA GPU",
        compute_capability="9.0",
        memory_nbytes=80 << 30,
        pci_address=f"0000:{index + 1:02x}:00.0",
        numa_node=index // 4,
        pcie_generation=generation,
        pcie_width=16,
        nvlinks=nvlinks,
        nvlink_gb_per_s=25.0 if nvlinks else 0.0,
        peers=tuple(peers),
    )


def rail_nics(
    index: int, count: int, *, flat: bool = False, gbit: int = 400, layer: str = "InfiniBand"
) -> list[Nic]:
    """Return the `count` interfaces of host number `index`: each in the subnet of its rail, or
    all in one (`flat`). With an RDMA port each, if `layer` is not ""."""
    found = []
    for rail in range(count):
        address = f"10.99.{rail}.{index + 1}/16" if flat else f"10.{rail}.0.{index + 1}/16"
        nic = Nic(f"eth{rail}", "up", (address,), gbit * 1000, 9000, rail % 2)
        if layer:
            nic = replace(nic, rdma_device=f"mlx5_{rail}", rdma_port=1, link_layer=layer)
        found.append(nic)
    return found


def cluster(*, flat: bool = False, layer: str = "InfiniBand") -> list[Host]:
    """Return an NVLink host and a PCIe host; a rack of hosts of 4 interfaces and one of 8."""
    four = [rail_nics(i, 4, flat=flat, gbit=200, layer=layer) for i in range(3)]
    eight = [rail_nics(10 + i, 8, flat=flat, layer=layer) for i in range(3)]
    return [
        host("nvlink", eight[0], nvlink_gpus("nvlink")),
        host("pcie", four[0], pcie_gpus("pcie")),
        host("rack4-a", four[1]),
        host("rack4-b", four[2]),
        host("rack8-a", eight[1]),
        host("rack8-b", eight[2]),
    ]


def source(place: Place) -> SourceRecord:
    """Return a source there, which offers each transport that can serve such memory."""
    offers = ("shm", "tcp", "ucx", "pcie_p2p") if place.device == CPU else ("cuda_ipc", "pcie_p2p")
    name = f"{place.hostname}/{place.device}/{place.pid}"
    return SourceRecord(
        source_id=name,
        model=ModelKey("m"),
        ref=REF,
        endpoint=name,
        place=place,
        generation=1,
        table=AddressTable(REF.layout, ()),
        transports=offers,
    )
