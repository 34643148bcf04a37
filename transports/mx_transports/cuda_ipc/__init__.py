"""The `cuda_ipc` transport: from GPU memory of one process to GPU memory of another of its uid.

On the same GPU memory is attached, without a copy, or copied within the GPU; from another GPU it
is copied over NVLink by the copy engines of the reading one. What is exported is whole allocations:
legacy IPC handles of cuMemAlloc's (torch's default), descriptors of virtual memory management's
(torch's expandable segments, mx's own arenas). The source keeps the memory until its last reader
has closed its connection, on purpose or by dying.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.core.paths import Medium
from mx.core.topology import Place
from mx.cuda.device import Device
from mx.errors import PathError, UnsuitedError
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
from mx.views import device_of
from mx_transports.toolkit.cuda.copier import DIRECT_STEP_BYTES
from mx_transports.toolkit.cuda.exposure import GpuExposure
from mx_transports.toolkit.cuda.opening import CPU, Devices, links, may_share, open_session, probe

MAGIC = b"mxcuda\0\3"
#: A copy within one GPU, until it is measured: half of the memory bandwidth of an A100 (1.6 TB/s),
#: the slowest of those that engines usually run on.
SAME_GPU_GB_PER_S = 700.0
#: What of a link's raw rate a copy gets at best (NVIDIA's p2pBandwidthLatencyTest: 0.8 to 0.9).
NVLINK_EFFICIENCY = 0.85


class CudaIpcTransport:
    """See `mx.transport.Transport`. Paths within one GPU can be attached to."""

    name = "cuda_ipc"

    def __init__(self, step_nbytes: int = DIRECT_STEP_BYTES) -> None:
        self._step_nbytes = step_nbytes

    def probe(self) -> Viable | Unavailable:
        return probe()

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return a path within one GPU, or between two of one host that may use NVLink."""
        if CPU in (here.device, there.device) or not may_share(here, there):
            return None
        if here.device == there.device:
            return Path(
                self.name, SAME_GPU_GB_PER_S, attach=True, detail="same GPU", medium=Medium.DEVICE
            )
        lanes, gb_per_s = nvlink(here, there)
        if not lanes:
            return None
        return Path(self.name, gb_per_s, detail=f"NVLink x{lanes}", medium=Medium.NVLINK)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable.

        Raises:
            UnsuitedError: Memory is not on a GPU.
            LocalError: It can't be exported.
        """
        if any(device_of(region.view) == CPU for region in regions):
            raise UnsuitedError("cuda_ipc serves GPU memory, and this is in the host")
        return GpuExposure(self.name, MAGIC, regions, options)

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure, and map its memory.

        Raises:
            SourceError: The source can't be reached, its memory can't be mapped, or it serves other
                weights.
        """
        if grant.place.device == CPU:
            raise PathError(f"{grant.peer}: cuda_ipc reads into GPU memory only", peer=grant.peer)
        return open_session(self.name, MAGIC, grant, _choose, lambda _: self._step_nbytes)


def _choose(devices: Devices, target: Device | None, uuid: str) -> Device:
    """Return the target, which maps the source's memory, whichever GPU that is on.

    Raises:
        PathError: The driver knows no path to that GPU.
    """
    assert target is not None
    if devices.may_access(target, uuid) is False:
        raise PathError(
            f"{devices.peer} by cuda_ipc: {target.uuid} may not read the memory of {uuid}",
            peer=devices.peer,
            hint="nvidia-smi topo -p2p r shows what the driver allows",
        )
    return target


def nvlink(here: Place, there: Place) -> tuple[int, float]:
    """Return (lanes, GB/s one way) between the GPUs of two places, (0, 0.0) for none."""
    ends = links(here, there)
    lanes = min((peer.nvlinks if peer.p2p_read else 0 for _, peer in ends), default=0)
    lane_gb_per_s = min((gpu.nvlink_gb_per_s for gpu, _ in ends), default=0.0)
    return lanes, round(lanes * lane_gb_per_s * NVLINK_EFFICIENCY, 1)
