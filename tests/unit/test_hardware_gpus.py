"""GPUs as NVML reports them: what a whole host looks like, and what is missing when NVML fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from mx.core.topology import GpuPeer
from mx.hardware import gpus
from mx.hardware.gpus import GpusFound, read_gpus
from tests.support.fake_nvml import Card, FakeNvml, nvswitch_host


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with NVIDIA's driver."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    for card, node in ((0x19, 0), (0x1A, 1)):
        device = tmp_path / f"sys/bus/pci/devices/0000:{card:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


def read(root: Path, nvml: FakeNvml) -> GpusFound:
    found = read_gpus(lambda: nvml, root)
    assert nvml.users == 0, "NVML was not shut down"
    return found


def test_a_host_behind_nvlink_switches(root: Path) -> None:
    found = read(root, FakeNvml(nvswitch_host()))
    assert (len(found.gpus), found.driver, found.reason) == (8, "580.95.05", "")
    first, second, last = found.gpus[0], found.gpus[1], found.gpus[7]
    assert (first.name, first.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert (first.memory_nbytes, first.index, last.index) == (85_520_809_984, 0, 7)
    assert (first.pci_address, first.numa_node, second.numa_node) == ("0000:19:00.0", 0, 1)
    assert last.numa_node == -1  # sysfs has no such device
    assert (first.pcie_generation, first.pcie_width) == (5, 16)
    assert (first.nvlinks, first.nvlink_gb_per_s) == (18, 25.0)
    assert [peer.uuid for peer in first.peers] == [gpu.uuid for gpu in found.gpus[1:]]
    assert set(first.peers[1:]) == {
        GpuPeer(gpu.uuid, 18, True, True, "nvlink") for gpu in found.gpus[2:]
    }


def test_switches_reach_no_gpu_before_the_fabric_is_set_up(root: Path) -> None:
    cards = nvswitch_host(2)
    for card in cards:
        card.p2p.clear()
    peer = read(root, FakeNvml(cards)).gpus[0].peers[0]
    assert peer == GpuPeer(cards[1].uuid, 0, False, False, "host")


def test_direct_lanes_are_counted_by_their_other_end(root: Path) -> None:
    lanes: dict[int, tuple[bool, int, str | int]]
    lanes = {0: (True, 4, 1), 1: (True, 4, 1), 2: (True, 4, 2), 3: (False, 4, 2)}
    cards = [
        Card(
            "GPU-a", "00000000:19:00.0", links=lanes, p2p={1: "rwn", 2: "r"}, level={1: 20, 2: 10}
        ),
        Card("GPU-b", "00000000:1A:00.0", p2p={0: "w"}, level={0: 20, 2: 50}),
        Card("GPU-c", "00000000:1B:00.0", level={0: 10, 1: 50}),
    ]
    found = read(root, FakeNvml(cards)).gpus
    assert found[0].nvlinks == 3
    assert found[0].peers == (
        GpuPeer("GPU-b", 2, True, True, "nvlink"),
        GpuPeer("GPU-c", 1, True, False, "nvlink"),
    )
    # Each direction is queried by itself, and the nearest thing in common is named.
    assert found[1].peers == (
        GpuPeer("GPU-a", 0, False, True, "bridge"),
        GpuPeer("GPU-c", 0, False, False, "system"),
    )
    assert found[2].peers[0].relation == "switch"


@pytest.mark.parametrize(
    ("version", "capability", "gb_per_s"),
    [(1, (6, 0), 20.0), (2, (7, 0), 25.0), (5, (8, 0), 25.0), (6, (9, 0), 25.0),
     (7, (10, 0), 50.0), (7, (9, 0), 25.0), (99, (12, 0), 0.0)],
)  # fmt: skip
def test_the_speed_of_a_lane(
    root: Path, version: int, capability: tuple[int, int], gb_per_s: float
) -> None:
    card = Card("GPU-a", "00000000:19:00.0", capability=capability,
                links={0: (True, version, "switch")})  # fmt: skip
    assert read(root, FakeNvml([card])).gpus[0].nvlink_gb_per_s == gb_per_s


#: What each call would have returned, and what stands for that in the record.
UNKNOWN: dict[str, dict[str, object]] = {
    "Name": {"name": ""},
    "CudaComputeCapability": {"compute_capability": ""},
    "MemoryInfo": {"memory_nbytes": 0},
    "PciInfo": {"pci_address": "", "numa_node": -1},
    "MaxPcieLinkGeneration": {"pcie_generation": 0},
    "MaxPcieLinkWidth": {"pcie_width": 0},
    "NvLinkState": {"nvlinks": 0, "nvlink_gb_per_s": 0.0},
    "NvLinkVersion": {"nvlinks": 18, "nvlink_gb_per_s": 0.0},
}


@pytest.mark.parametrize("call", UNKNOWN)
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION,
             pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_UNKNOWN],
)  # fmt: skip
def test_a_call_that_fails_leaves_its_fields_unknown(root: Path, call: str, code: int) -> None:
    cards = nvswitch_host(2)
    whole = read(root, FakeNvml(cards)).gpus[0]
    cards[0].fails[call] = code
    found = read(root, FakeNvml(cards))
    assert (len(found.gpus), found.reason) == (2, "")
    expected = UNKNOWN[call]
    for name, value in expected.items():
        assert getattr(found.gpus[0], name) == value
    for name in {"uuid", "name", "memory_nbytes", "pcie_width", "compute_capability"} - {*expected}:
        assert getattr(found.gpus[0], name) == getattr(whole, name)


@pytest.mark.parametrize("call", ["P2PStatus", "TopologyCommonAncestor"])
def test_relations_that_can_not_be_asked_for_are_unknown(root: Path, call: str) -> None:
    cards = nvswitch_host(2)
    for card in cards:
        card.links.clear()
        card.fails[call] = pynvml.NVML_ERROR_NOT_SUPPORTED
    peer = read(root, FakeNvml(cards)).gpus[0].peers[0]
    if call == "P2PStatus":
        assert (peer.p2p_read, peer.p2p_write, peer.relation) == (False, False, "host")
    else:
        assert (peer.p2p_read, peer.p2p_write, peer.relation) == (True, True, "")


def test_a_lost_gpu_is_named_and_the_others_are_there(root: Path) -> None:
    cards = nvswitch_host(3)
    cards[1].fails["HandleByIndex"] = pynvml.NVML_ERROR_GPU_IS_LOST
    found = read(root, FakeNvml(cards))
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert [peer.uuid for peer in found.gpus[0].peers] == [cards[2].uuid]
    assert found.reason.startswith("GPU 1: ")
    assert "lost" in found.reason


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "container"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidiactl"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML does not start"),
    ],
)
def test_nvml_that_does_not_start_is_a_reason(root: Path, code: int, hint: str) -> None:
    nvml = FakeNvml(nvswitch_host(1), init_fails=code)
    found = read(root, nvml)
    assert found.gpus == ()
    assert hint in found.reason


def test_a_driver_without_a_gpu(root: Path) -> None:
    found = read(root, FakeNvml([]))
    assert (found.gpus, found.driver) == ((), "580.95.05")
    assert "no GPU" in found.reason


def test_without_a_driver_the_reason_is_that(tmp_path: Path) -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    nvml = FakeNvml(nvswitch_host(1), init_fails=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    for found in (read_gpus(load, tmp_path), read_gpus(lambda: nvml, tmp_path)):
        assert found == GpusFound(reason="there is no NVIDIA driver on this machine")


def test_a_driver_is_asked_wherever_its_files_are(tmp_path: Path) -> None:
    assert len(read(tmp_path, FakeNvml(nvswitch_host(2))).gpus) == 2


def test_without_the_package_the_reason_says_what_to_install(root: Path) -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    assert "pip install '.[cuda13]'" in read_gpus(load, root).reason


def test_the_real_nvml_of_a_machine_without_its_library(root: Path) -> None:
    if any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/proc/driver/nvidia")):
        pytest.skip("this machine has NVIDIA's driver")
    assert read_gpus(root=root).reason.startswith("NVML does not start: ")


def test_what_is_used_of_nvml_is_there() -> None:
    """The names, which a fake can't vouch for, in the installed nvidia-ml-py."""
    source = Path(gpus.__file__).read_text()
    used = {part.split("(")[0].split(",")[0].split(")")[0].split()[0]
            for part in source.split("nvml.")[1:]}  # fmt: skip
    used = {name.rstrip(":") for name in used if name.startswith(("nvml", "NVML"))}
    assert len(used) > 15
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []
