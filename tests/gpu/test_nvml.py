"""GPUs as NVML reports them: what a whole host looks like, and what is missing when NVML fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx.core.topology import Gpu, GpuPeer
from mx.cuda.bindings import Driver
from mx.hardware.gpus import GpusFound, read_gpus
from tests.gpu.rig import Spy

pynvml: Any = pytest.importorskip("pynvml")


def test_the_gpus_are_those_of_cuda(driver: Driver, tmp_path: Path) -> None:
    root = Path("/")
    if driver.device_name(0).startswith("Stand-in"):
        root = tmp_path
        (root / "proc/driver/nvidia").mkdir(parents=True)
    found = {gpu.uuid for gpu in read_gpus(root=root).gpus}
    assert {driver.device_uuid(ordinal) for ordinal in range(driver.device_count())} <= found


Answers = dict[str, Callable[..., Any]]
Host = Callable[..., GpusFound]


@pytest.fixture
def host(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Give what reads a host of some GPUs of the stand-in, some of whose calls answer otherwise."""
    if not driver.device_name(0).startswith("Stand-in"):
        pytest.skip("of hosts that only the stand-in has")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    for card, node in ((0x19, 0), (0x1A, 1)):
        device = tmp_path / f"sys/bus/pci/devices/0000:{card:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")

    def read(answers: Answers | None = None, **settings: object) -> GpusFound:
        for name, value in {"ROOT": tmp_path, **settings}.items():
            monkeypatch.setenv(f"MX_STANDIN_{name}", str(value))
        nvml = Spy(pynvml)
        for name, answer in (answers or {}).items():
            nvml.replace(f"nvml{name}", answer)
        found = read_gpus(lambda: nvml, tmp_path)
        with pytest.raises(pynvml.NVMLError):  # it was shut down
            pynvml.nvmlDeviceGetCount()
        return found

    return read


def index(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetPciInfo(handle).bus) - 0x19


def fails(code: int, gpu: int = 0) -> Callable[..., Any]:
    """Return a call that fails for one GPU, by its number or its handle."""

    def call(real: Callable[..., Any], which: Any, *arguments: Any) -> Any:
        if (which if isinstance(which, int) else index(which)) == gpu:
            raise pynvml.NVMLError(code)
        return real(which, *arguments)

    return call


def says(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


def test_a_host_behind_nvlink_switches(host: Host) -> None:
    found = host(DEVICES=8)
    assert (len(found.gpus), found.driver, found.reason) == (8, "580.95.05", "")
    first, second, last = found.gpus[0], found.gpus[1], found.gpus[7]
    assert (first.name, first.compute_capability) == ("Stand-in GPU", "9.0")
    assert (first.memory_nbytes, first.index, last.index) == (8 << 30, 0, 7)
    assert (first.pci_address, first.numa_node, second.numa_node) == ("0000:19:00.0", 0, 1)
    assert last.numa_node == -1  # sysfs has no such device
    assert (first.pcie_generation, first.pcie_width) == (5, 16)
    assert (first.nvlinks, first.nvlink_gb_per_s) == (18, 25.0)
    assert first.peers == tuple(
        GpuPeer(gpu.uuid, 18, True, True, "nvlink") for gpu in found.gpus[1:]
    )


def test_switches_reach_no_gpu_before_the_fabric_is_set_up(host: Host) -> None:
    found = host({"DeviceGetP2PStatus": says(1)}).gpus
    assert found[0].peers == (GpuPeer(found[1].uuid, 0, False, False, "host"),)


def test_direct_lanes_are_counted_by_their_other_end(host: Host) -> None:
    def active(real: Callable[..., Any], handle: Any, lane: int) -> Any:
        return 0 if lane == 5 and index(handle) == 0 else real(handle, lane)

    def level(real: Callable[..., Any], near: Any, far: Any) -> int:
        return {0: 20, 1: 50, 2: 10}[index(near)]

    answers = {"DeviceGetNvLinkState": active, "DeviceGetTopologyCommonAncestor": level}
    found = host(answers, DEVICES=3, NVLINK="0-1,0-2", PEERS="0-1").gpus
    assert found[0].nvlinks == 7
    assert found[0].peers == (
        GpuPeer(found[1].uuid, 4, True, True, "nvlink"),
        GpuPeer(found[2].uuid, 3, False, False, "nvlink"),
    )
    # Without lanes the nearest thing in common is named.
    assert found[1].peers[1] == GpuPeer(found[2].uuid, 0, False, False, "system")
    assert found[2].peers[1].relation == "switch"


@pytest.mark.parametrize(
    ("version", "capability", "gb_per_s"),
    [(1, 60, 20.0), (2, 70, 25.0), (5, 80, 25.0), (6, 90, 25.0), (7, 100, 50.0), (7, 90, 25.0),
     (99, 120, 0.0)],
)  # fmt: skip
def test_the_speed_of_a_lane(host: Host, version: int, capability: int, gb_per_s: float) -> None:
    found = host({"DeviceGetNvLinkVersion": says(version)}, COMPUTE_CAPABILITY=capability)
    assert found.gpus[0].nvlink_gb_per_s == gb_per_s


#: What each call would have returned, and what stands for that in the record.
UNKNOWN: dict[str, dict[str, object]] = {
    "Name": {"name": ""},
    "CudaComputeCapability": {"compute_capability": ""},
    "MemoryInfo": {"memory_nbytes": 0},
    "MaxPcieLinkGeneration": {"pcie_generation": 0},
    "MaxPcieLinkWidth": {"pcie_width": 0},
    "NvLinkState": {"nvlinks": 0, "nvlink_gb_per_s": 0.0},
    "NvLinkVersion": {"nvlinks": 18, "nvlink_gb_per_s": 0.0},
}


@pytest.mark.parametrize(
    "code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "UNKNOWN"]
)
@pytest.mark.parametrize("call", UNKNOWN)
def test_a_call_that_fails_leaves_its_fields_unknown(host: Host, call: str, code: str) -> None:
    whole = host().gpus[0]
    found = host({f"DeviceGet{call}": fails(getattr(pynvml, f"NVML_ERROR_{code}"))})
    assert (len(found.gpus), found.reason) == (2, "")
    expected = UNKNOWN[call]
    for name, value in expected.items():
        assert getattr(found.gpus[0], name) == value
    for name in {"uuid", "name", "memory_nbytes", "pcie_width", "compute_capability"} - {*expected}:
        assert getattr(found.gpus[0], name) == getattr(whole, name)


def test_an_address_that_is_not_told_is_unknown(host: Host) -> None:
    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    gpu: Gpu = host({"DeviceGetPciInfo": refuse}).gpus[0]
    assert (gpu.pci_address, gpu.numa_node) == ("", -1)


@pytest.mark.parametrize("call", ["P2PStatus", "TopologyCommonAncestor"])
def test_relations_that_can_not_be_asked_for_are_unknown(host: Host, call: str) -> None:
    not_supported = fails(pynvml.NVML_ERROR_NOT_SUPPORTED)
    peer = host({f"DeviceGet{call}": not_supported}, NVLINK="none").gpus[0].peers[0]
    if call == "P2PStatus":
        assert (peer.p2p_read, peer.p2p_write, peer.relation) == (False, False, "host")
    else:
        assert (peer.p2p_read, peer.p2p_write, peer.relation) == (True, True, "")


def test_a_lost_gpu_is_named_and_the_others_are_there(host: Host) -> None:
    lost = fails(pynvml.NVML_ERROR_GPU_IS_LOST, 1)
    found = host({"DeviceGetHandleByIndex": lost}, DEVICES=3)
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert [peer.uuid for peer in found.gpus[0].peers] == [found.gpus[1].uuid]
    assert found.reason.startswith("GPU 1: ")
    assert "lost" in found.reason


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("LIB_RM_VERSION_MISMATCH", "reboot"),
        ("LIBRARY_NOT_FOUND", "container"),
        ("NO_PERMISSION", "/dev/nvidiactl"),
        ("DRIVER_NOT_LOADED", "NVML does not start"),
    ],
)
def test_nvml_that_does_not_start_is_a_reason(host: Host, code: str, hint: str) -> None:
    def refuse(_: Any) -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))

    found = host({"Init": refuse})
    assert found.gpus == ()
    assert hint in found.reason


def test_a_driver_without_a_gpu(host: Host) -> None:
    found = host(DEVICES=0)
    assert (found.gpus, found.driver) == ((), "580.95.05")
    assert "no GPU" in found.reason
