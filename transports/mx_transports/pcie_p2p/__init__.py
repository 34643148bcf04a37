"""The `pcie_p2p` transport: between a GPU and anything else of the same host and uid, over PCIe.

From GPU to GPU directly where the driver lets them access each other. From a sealed memory file
into a GPU, and from a GPU into host memory, the copy engines reach the host's memory in place: it
is registered in windows ahead of them. All else goes through pinned memory, which is small and in
several slots, so that one is filled while another is copied and a third emptied.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.core.paths import Medium
from mx.core.topology import Gpu, Place
from mx.cuda.device import Device
from mx.errors import PathError
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Session,
    Unavailable,
    Viable,
)
from mx_transports.toolkit.cuda.copier import DIRECT_STEP_BYTES, STAGED_STEP_BYTES
from mx_transports.toolkit.cuda.exposure import GpuExposure
from mx_transports.toolkit.cuda.hosts import DEFAULT_OPTIONS, HostOptions
from mx_transports.toolkit.cuda.opening import (
    CPU,
    Choose,
    Devices,
    links,
    may_share,
    open_session,
    probe,
)

MAGIC = b"mxpcie\0\3"
#: GB/s of one lane, one way, by generation, encoding taken off (PCI Express base specification).
LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
#: What of it copies of many MiB get: packet headers and flow control take the rest.
PCIE_EFFICIENCY = 0.8
#: For a GPU that does not report its link: PCIe 3 x16.
UNKNOWN_GB_PER_S = round(LANE_GB_PER_S[3] * 16 * PCIE_EFFICIENCY, 1)


class PciePeerTransport:
    """See `mx.transport.Transport`."""

    name = "pcie_p2p"

    def __init__(
        self,
        direct_step_nbytes: int = DIRECT_STEP_BYTES,
        staged_step_nbytes: int = STAGED_STEP_BYTES,
        host_options: HostOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._direct_step_nbytes = direct_step_nbytes
        self._staged_step_nbytes = staged_step_nbytes
        self._host_options = host_options

    def probe(self) -> Viable | Unavailable:
        return probe()

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return a path between two devices of one host, at least one of them a GPU."""
        if here.device == there.device or not may_share(here, there):
            return None
        speeds = [pcie_gb_per_s(one.gpu) for one in (here, there) if one.device != CPU]
        ends = [peer for _, peer in links(here, there)]
        detail, not_beside = "host memory and GPU", ""
        if len(speeds) == 2:
            detail = "peer to peer" if ends else "peer to peer, if the driver allows it"
            if not all(peer.p2p_read and not peer.nvlinks for peer in ends):
                not_beside = "it takes a context, some hundred MB, on the source's GPU"
                detail = f"staged through host memory: {not_beside}"
        return Path(
            self.name, min(speeds), detail=detail, medium=Medium.PCIE, not_beside=not_beside
        )

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable.

        Raises:
            LocalError: GPU memory can't be exported.
            CudaError: CUDA fails.
        """
        return GpuExposure(self.name, MAGIC, regions, options)

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure, and map its memory.

        Raises:
            SourceError: The source can't be reached, or its memory can't be mapped.
        """
        gpu = grant.place.gpu
        # Over NVLink `cuda_ipc` reads; here those bytes take the path beside it.
        beside = {peer.uuid for peer in gpu.peers if peer.nvlinks} if gpu is not None else set()
        direct: set[str] = set()
        staged = True

        def choose(devices: Devices, target: Device | None, uuid: str) -> Device:
            nonlocal staged
            mapper = _choose(devices, target, uuid, beside)
            if target is mapper and target.uuid != uuid:
                direct.add(uuid)
                staged = staged and devices.sees(uuid)
            return mapper

        try:
            return self._open(grant, choose)
        except PathError:
            if not direct or not staged:
                raise
        # The driver reported peer access, and then it failed, as behind some IOMMUs.
        beside |= direct
        return self._open(grant, choose)

    def _open(self, grant: Grant, choose: Choose) -> Session:
        def step_nbytes(direct: bool) -> int:
            return self._direct_step_nbytes if direct else self._staged_step_nbytes

        return open_session(self.name, MAGIC, grant, choose, step_nbytes, self._host_options)


def _choose(devices: Devices, target: Device | None, uuid: str, beside: set[str]) -> Device:
    """Return the target for its own memory and that of GPUs which it may access, or may try to;
    else the GPU that the memory is on, which copies it into the host. Raises PathError."""
    if target is None:
        return devices.open(uuid)
    allowed = devices.may_access(target, uuid)
    # Through the host it would be copied by its own GPU, if that is not hidden.
    direct = allowed is None or (allowed and uuid not in beside)
    return target if direct else devices.open(uuid)


def pcie_gb_per_s(gpu: Gpu | None) -> float:
    """Return what a GPU's slot gives in GB/s, one way."""
    lane = LANE_GB_PER_S.get(gpu.pcie_generation, 0.0) if gpu is not None else 0.0
    if gpu is None or lane <= 0 or gpu.pcie_width <= 0:
        return UNKNOWN_GB_PER_S
    return round(lane * gpu.pcie_width * PCIE_EFFICIENCY, 1)
