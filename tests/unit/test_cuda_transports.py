"""Between which places the GPU transports see a path, and what they say where there is no CUDA."""

import os
from dataclasses import replace

import pytest

from mx.core.paths import Medium
from mx.core.topology import Gpu, GpuPeer, Place
from mx_transports import pcie_p2p
from mx_transports.cuda_ipc import CudaIpcTransport
from mx_transports.pcie_p2p import PciePeerTransport


def gpu_place(device: str, *gpus: Gpu, uid: int = 0, ipc: int = 1) -> Place:
    return Place("boot", "a", uid, device=device, gpus=gpus, ipc_namespace=ipc)


def pair(nvlinks: int, p2p: bool = True, lane: float = 25.0) -> tuple[Gpu, Gpu]:
    return tuple(  # type: ignore[return-value]
        Gpu(
            uuid,
            pcie_generation=generation,
            pcie_width=16,
            nvlink_gb_per_s=lane,
            peers=(GpuPeer(other, nvlinks, p2p, p2p),),
        )
        for uuid, other, generation in (("A", "B", 5), ("B", "A", 4))
    )


def test_reach_within_a_gpu_attaches() -> None:
    gpus = pair(0)
    path = CudaIpcTransport().reach(gpu_place("cuda:A", *gpus), gpu_place("cuda:A", *gpus))
    assert path is not None and path.attach and path.medium is Medium.DEVICE
    assert PciePeerTransport().reach(gpu_place("cuda:A"), gpu_place("cuda:A")) is None


def test_reach_over_nvlink_is_by_lanes() -> None:
    gpus = pair(18)
    here, there = gpu_place("cuda:A", *gpus), gpu_place("cuda:B", *gpus)
    path = CudaIpcTransport().reach(here, there)
    assert path is not None and path.medium is Medium.NVLINK and not path.attach
    assert path.gb_per_s == 382.5  # 18 x 25 x 0.85
    # One end may know nothing of the other, as in a container with one GPU; none may deny it.
    for one, other in ((here, gpu_place("cuda:B")), (gpu_place("cuda:A"), there)):
        assert CudaIpcTransport().reach(one, other) == path
    assert CudaIpcTransport().reach(gpu_place("cuda:A"), gpu_place("cuda:B")) is None
    assert CudaIpcTransport().reach(here, gpu_place("cuda:B", *pair(18, p2p=False))) is None
    beside = PciePeerTransport().reach(here, there)
    assert beside is not None and beside.medium is Medium.PCIE
    assert beside.detail.startswith("staged through host memory") and beside.not_beside


def test_reach_over_pcie_is_by_the_narrower_slot() -> None:
    gpus = pair(0)
    transport = PciePeerTransport()
    here, there = gpu_place("cuda:A", *gpus), gpu_place("cuda:B", *gpus)
    assert CudaIpcTransport().reach(here, there) is None
    path = transport.reach(here, there)
    assert path is not None and path.detail == "peer to peer"
    assert path.gb_per_s == round(1.969 * 16 * 0.8, 1)
    to_host = transport.reach(gpu_place("cpu"), here)
    assert to_host is not None and to_host.gb_per_s == round(3.938 * 16 * 0.8, 1)
    refused = pair(0, p2p=False)
    staged = transport.reach(gpu_place("cuda:A", *refused), gpu_place("cuda:B", *refused))
    assert staged is not None and staged.detail.startswith("staged through host memory")
    unknown = transport.reach(gpu_place("cpu"), gpu_place("cuda:C"))
    assert unknown is not None and unknown.gb_per_s == pcie_p2p.UNKNOWN_GB_PER_S


def test_reach_is_for_one_user_of_one_host_and_for_gpus() -> None:
    gpus = pair(18)
    here = gpu_place("cuda:A", *gpus)
    for other in (
        gpu_place("cuda:A", *gpus, uid=1),
        gpu_place("cuda:A", *gpus, ipc=2),
        replace(here, boot_id="elsewhere"),
    ):
        for transport in (CudaIpcTransport(), PciePeerTransport()):
            assert transport.reach(here, other) is None
            assert transport.reach(replace(here, device="cpu"), other) is None
    assert PciePeerTransport().reach(gpu_place("cpu"), gpu_place("cpu")) is None
    assert CudaIpcTransport().reach(gpu_place("cpu"), here) is None


def test_the_transports_say_why_there_is_no_cuda() -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is")
    for transport in (CudaIpcTransport(), PciePeerTransport()):
        assert "cuda" in str(transport.probe()).lower()
