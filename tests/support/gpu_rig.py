"""GPUs for the transports' contract tests.

The transports below are made in this process and, by name, in the children that are sources.
"""

from __future__ import annotations

from mx.core.topology import Gpu, GpuPeer, Place
from mx.cuda.bindings import Driver
from mx.testing.conformance import Harness, Kind
from mx.units import MIB
from mx_transports.cuda_ipc import CudaIpcTransport
from mx_transports.pcie_p2p import PciePeerTransport
from mx_transports.toolkit.cuda.hosts import HostOptions

HERE = "tests.support.gpu_rig"
#: Small, so that what is read takes many.
STEP_BYTES = MIB


def cuda_ipc() -> CudaIpcTransport:
    return CudaIpcTransport(STEP_BYTES)


def pcie_p2p() -> PciePeerTransport:
    host = HostOptions(STEP_BYTES, 4 * STEP_BYTES, kept_s=0.0)
    return PciePeerTransport(STEP_BYTES, STEP_BYTES, host)


def place(driver: Driver, device: str, *, nvlinks: int = 0, p2p: bool = True) -> Place:
    """A process's place on "cpu" or on GPU "0", "1", as its topology would report it."""
    uuids = [driver.device_uuid(ordinal) for ordinal in range(driver.device_count())]
    found = tuple(
        Gpu(
            uuid,
            index,
            pcie_generation=5,
            pcie_width=16,
            nvlinks=nvlinks,
            nvlink_gb_per_s=25.0,
            peers=tuple(GpuPeer(other, nvlinks, p2p, p2p) for other in uuids if other != uuid),
        )
        for index, uuid in enumerate(uuids)
    )
    name = device if device == "cpu" else f"cuda:{uuids[int(device)]}"
    return Place("boot-1", "a", 1000, 100, device=name, driver="580", gpus=found)


def harness(
    name: str, kind: Kind, driver: Driver, there: str, here: str, *, nvlinks: int = 0
) -> Harness:
    """Return a harness of the transport `name`: memory of `kind` on `there`, read from `here`."""
    return Harness(
        f"{HERE}:{name}",
        kind=kind,
        big_nbytes=12 * MIB,
        stall_timeout_s=1.0,
        deadline_s=60.0,  # thousands of copies may each be late by a turn of other processes
        here=place(driver, here, nvlinks=nvlinks),
        there=place(driver, there, nvlinks=nvlinks),
    )
